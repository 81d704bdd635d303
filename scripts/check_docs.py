"""Check README.md, CONTRIBUTING.md, CHANGELOG.md and docs/, notebooks too: links, commands, files, figures.

    .venv/bin/python scripts/check_docs.py     what `make docs` runs before it builds the site

A relative link must lead to a file, and its anchor to a heading, by the names that GitHub gives headings.
A command line of `fullrank` must parse, by the parser of the command line itself; nothing is run. A results
file that is named must exist, and so must files of code, tests and benchmarks. Figures are a list to look at
and no failure: some are ratios, sums or exponentials of what the file holds.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
CODE = ("src", "tests", "benchmarks", "scripts")
RESULTS = re.compile(r"results/\w+\.(?:json|txt)\b")
NAMED = re.compile(rf"({RESULTS.pattern})|`([\w./]+\.py)`|`(test_\w+)`|-m benchmarks\.(\w+)")
FENCE = re.compile(r"^( *)(```+|~~~+) *(\w*)[^\n]*\n(.*?)^ *\2`* *$", re.MULTILINE | re.DOTALL)
# Blocks in other languages hold no command lines.
SHELLS = ("", "sh", "bash", "shell", "console")
# What a shell puts between two commands.
BETWEEN = {";", "&&", "||", "|", "&", "|&"}


class Place(NamedTuple):
    """Something said on a page, with the line that it begins on."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.as_posix()}:{self.line}: {self.text}"


def pages(root: Path) -> list[Path]:
    return [
        root / "README.md",
        root / "CONTRIBUTING.md",
        root / "CHANGELOG.md",
        *sorted(root.glob("docs/**/*.md")),
        *sorted(root.glob("docs/**/*.ipynb")),
    ]


def text_of(page: Path) -> str:
    """What a page says; of a notebook its prose, and lines are counted in that."""
    text = page.read_text(encoding="utf8")
    if page.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells) + "\n"


def prose(text: str) -> str:
    """The text with everything in blocks of code blank, and lines where they were."""
    without = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    return re.sub(
        r"(?<=\n\n)(?:(?: {4}|\t)[^\n]*\n)+", lambda block: re.sub(r"[^\n]", " ", block[0]), without
    )


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


# Links


def anchors(text: str) -> set[str]:
    """What can follow `#`: headings in lower case, without marks, hyphens for spaces; a second one has -1."""
    found: dict[str, int] = {}
    names = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        times = found[slug] = found.get(slug, -1) + 1
        names.add(f"{slug}-{times}" if times else slug)
    return names


def links(text: str) -> Iterator[tuple[int, str]]:
    """Line and target of every link and picture outside code."""
    shown = re.sub(r"`[^`]*`", lambda code: re.sub(r"[^\n]", " ", code[0]), prose(text))
    for link in re.finditer(r"\]\(([^()\s]+)\)", shown):
        yield line_of(shown, link.start(1)), link[1]


def broken_links(root: Path) -> list[Place]:
    found = []
    for page in pages(root):
        for line, target in links(text_of(page)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            to = (page.parent / name).resolve() if name else page
            here = page.relative_to(root)
            if not to.exists() and not _drawn(root, to):
                found.append(Place(here, line, f"{target} leads nowhere"))
            elif anchor and anchor not in anchors(text_of(to)):
                found.append(Place(here, line, f"{target}: no heading has that name"))
    return found


def _drawn(root: Path, to: Path) -> bool:
    """Whether `make docs` draws this page of the gallery from a results file of the same name."""
    return to.parent == root / "docs" / "gallery" and (root / "results" / f"{to.stem}.json").is_file()


# Commands


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Line and words of every command line of fullrank, in blocks of code and between backticks."""
    for line, block in _blocks(text):
        yield from ((line + offset, words) for offset, words in _in_block(block))
    outside = prose(text)
    for code in re.finditer(r"`(fullrank [^`]+)`", outside):
        # A name such as `fullrank eval` or `fullrank corpus dimension` is no command line.
        if re.search(r" [^a-z ]", code[1]):
            yield line_of(outside, code.start()), shlex.split(code[1])[1:]


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    for fence in FENCE.finditer(text):
        if fence[3] in SHELLS:
            yield line_of(text, fence.start(4)), fence[4]
    rest = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    for indented in re.finditer(r"(?<=\n\n)(?:(?: {4}|\t)[^\n]*\n)+", rest):
        yield line_of(rest, indented.start()), indented[0]


def _in_block(block: str) -> Iterator[tuple[int, list[str]]]:
    lines = [line.strip() for line in block.replace("\\\n", "  ").splitlines()]
    # Where there are prompts, the rest is what a command prints.
    prompts = any(line.startswith("$ ") for line in lines)
    names: dict[str, str] = {}
    for offset, line in enumerate(lines):
        if prompts and not line.startswith("$ "):
            continue
        line = re.sub(r"(^|\s)#( .*)?$", "", line.removeprefix("$ "))
        line = re.sub(r"\$(\w+)", lambda name: names.get(name[1], name[0]), line)
        if name := re.fullmatch(r"(\w+)=(['\"])(.*)\2", line):
            names[name[1]] = name[3]
        elif "fullrank" in line:
            yield from ((offset, words) for words in _in_line(line))


def _in_line(line: str) -> Iterator[list[str]]:
    try:
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split, reader.commenters = True, ""
        words = list(reader)
    except ValueError:
        return
    while words:
        end = next((at for at, word in enumerate(words) if word in BETWEEN), len(words))
        command, words = words[:end], words[end + 1 :]
        if command[:1] == ["fullrank"]:
            yield command[1:]
        elif "fullrank.cli.main" in command:
            yield command[command.index("fullrank.cli.main") + 1 :]


def complaint(words: list[str]) -> str | None:
    """What the command line says of these arguments, or None. Where words are left out, `...`, also None."""
    from fullrank.cli.main import parse

    if "..." in words[:2] or words == ["--version"]:
        return None
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            parse(words)
    except SystemExit as left:
        if left.code:
            lines = [re.sub(r"^\W+|[^\w.'\"]+$", "", line) for line in printed.getvalue().splitlines()]
            return " ".join(line for line in lines if line and line != "Parsing error")
    return None


def broken_commands(root: Path) -> list[Place]:
    found = []
    for page in pages(root):
        for line, words in commands(text_of(page)):
            if said := complaint(words):
                found.append(Place(page.relative_to(root), line, f"fullrank {shlex.join(words)}: {said}"))
    return found


# Files


def missing_files(root: Path) -> list[Place]:
    """Results, files of code by any end of their path, tests by name and benchmarks that pages speak of."""
    code = [f"/{one.relative_to(root).as_posix()}" for place in CODE for one in root.glob(f"{place}/**/*.py")]
    tests = [one.read_text(encoding="utf8") for one in root.glob("tests/**/*.py")]
    functions = set(re.findall(r"^ *def (test_\w+)", "\n".join(tests), re.MULTILINE))
    found = []
    for page in pages(root):
        text = text_of(page)
        # What the changelog says of an older version may be gone.
        code_too = page.name != "CHANGELOG.md"
        for name in NAMED.finditer(text):
            results, file, test, benchmark = name.groups()
            there = (
                (root / results).is_file()
                if results
                else not code_too
                or (file and any(one.endswith(f"/{file}") for one in code))
                or (test and test in functions)
                or (benchmark and (root / "benchmarks" / f"{benchmark}.py").is_file())
            )
            if not there:
                said = f"{name[0].strip('`')} is not there"
                found.append(Place(page.relative_to(root), line_of(text, name.start()), said))
    return found


def _numbers(record: Any) -> Iterator[float]:
    if isinstance(record, dict):
        record = list(record.values())
    if isinstance(record, list):
        for one in record:
            yield from _numbers(one)
    elif isinstance(record, (int, float)) and not isinstance(record, bool):
        yield float(record)


def doubtful_figures(root: Path) -> list[Place]:
    """Figures with a point in a paragraph that names results, which no number of these rounds to."""
    held: dict[str, list[float]] = {}
    found = []
    for page in pages(root):
        text = text_of(page)
        for paragraph in re.finditer(r"(?:[^\n]+\n)+", text):
            names = [name for name in RESULTS.findall(paragraph[0]) if name.endswith(".json")]
            for name in names:
                if name not in held and (root / name).is_file():
                    held[name] = list(_numbers(json.loads((root / name).read_text(encoding="utf8"))))
            numbers = [number for name in names for number in held.get(name, [])]
            if not numbers:
                continue
            for figure in re.finditer(r"(?<![\w.,])\d+\.(\d+)(?![\w.])", paragraph[0]):
                digits = len(figure[1])
                # As it stands, in percent, in thousands: the same number said otherwise.
                said = {
                    round(abs(one) * scale, digits) for one in numbers for scale in (1, 100, 1e-3, 1e-6, 1e3)
                }
                if float(figure[0]) not in said:
                    line = line_of(text, paragraph.start() + figure.start())
                    found.append(
                        Place(page.relative_to(root), line, f"{figure[0]} is not in {', '.join(names)}")
                    )
    return found


def main() -> None:
    wrong = broken_links(ROOT) + broken_commands(ROOT) + missing_files(ROOT)
    texts = [text_of(page) for page in pages(ROOT)]
    relative = sum(not re.match("[a-z]+:", target) for text in texts for _, target in links(text))
    lines = sum(len(list(commands(text))) for text in texts)
    results = {name for text in texts for name in RESULTS.findall(text)}
    print(f"{len(texts)} pages, {relative} links, {lines} commands, {len(results)} results files")
    print(*(f"to look at: {figure}" for figure in doubtful_figures(ROOT)), sep="\n")
    if wrong:
        sys.exit("\n".join(map(str, wrong)))


if __name__ == "__main__":
    main()
