"""How the dimensions of text vary over languages, vocabularies and amounts of text.

The saturation paper (Godey et al. 2024, 2404.07647) estimates them for English and leaves other languages and
domains open. Here the same documents in several languages (`help_pages.py`) stand beside Python's own source
code, each at several sizes of a BPE vocabulary trained on the text itself, and at bytes, where a table of 256
columns has no room for many dimensions. All corpora are cut to one number of tokens, the largest that all
have, because the dimensions of such a table grow with the text; how much, the first language shows at halves
of that number.
"""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fullrank.corpus.dimension import Measure, dimension
from fullrank.corpus.prepare import Settings, prepare
from fullrank.errors import FullrankError
from fullrank.results import Corpora, Corpus
from fullrank.studies import help_pages

Progress = Callable[[str, float], None]

LEADING = 256
"""Singular values that are kept."""
CODE = "Python code"
NO_CODE = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    vocabularies: tuple[int, ...] = (1024, 4096, 16384)
    """Sizes of BPE."""
    halvings: int = 3
    """How often the text of the first language is halved."""
    tokens: int | None = None
    """Of every corpus; the most that all have by default."""

    def __post_init__(self) -> None:
        if not self.vocabularies or min(self.vocabularies) < 257 or self.halvings < 0:
            raise FullrankError(
                f"vocabularies of {', '.join(map(str, self.vocabularies)) or 'no size'} and {self.halvings} "
                "halvings are impossible: expected sizes of 257 or more, and 0 halvings or more"
            )


def texts(pages: Mapping[str, Path], folder: Path, progress: Progress) -> dict[str, Path]:
    """Parallel text of languages, and Python's library, one folder a corpus and one file a document."""
    read = {}
    for number, (name, unpacked) in enumerate(pages.items()):
        progress(f"reading {name}", number / len(pages))
        read[name] = help_pages.read(unpacked)
    found = {}
    for name, documents in help_pages.parallel(read).items():
        found[name] = folder / name
        for _ in help_pages.write(documents, found[name]):
            pass
    found[CODE] = folder / "code"
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        place = file.relative_to(library)
        if not any(part in NO_CODE for part in place.parts):
            copy = found[CODE] / "_".join(place.parts)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return found


def run(
    corpora: Mapping[str, Path],
    config: Config,
    settings: Settings,
    measure: Measure,
    *,
    progress: Progress = lambda stage, share: None,
    warn: Callable[[str], None] = lambda message: None,
) -> Corpora:
    """`corpora` are texts by name, the first of them the one that is halved."""
    tokenizers = [*(f"bpe:{size}" for size in config.vocabularies), "bytes"]
    tokens = config.tokens or _shared(corpora, tokenizers, settings, progress, warn)
    first = next(iter(corpora))
    jobs = [(name, tokenizer, tokens) for tokenizer in tokenizers for name in corpora]
    middle = tokenizers[len(config.vocabularies) // 2]
    jobs += [(first, middle, tokens >> halving) for halving in range(1, config.halvings + 1)]
    found = []
    for number, (name, tokenizer, count) in enumerate(jobs):
        title = f"{name}, {tokenizer}" + (f", {count:,} tokens" if count != tokens else "")

        def share(stage: str, part: float, title: str = title, number: int = number) -> None:
            progress(f"{title}: {stage}", (number + part) / len(jobs))

        one = dimension(
            [corpora[name]],
            dataclasses.replace(settings, tokenizer=tokenizer, tokens=count),
            measure,
            name=title,
            progress=share,
            warn=warn,
        )
        found.append(_short(one))
    return Corpora(title="Dimensions of languages", corpora=tuple(found), notes=_notes(corpora, tokens))


def _shared(
    corpora: Mapping[str, Path],
    tokenizers: Sequence[str],
    settings: Settings,
    progress: Progress,
    warn: Callable[[str], None],
) -> int:
    """Tokens of the shortest corpus under the tokeniser that makes the fewest of it."""
    counts = []
    jobs = [(name, tokenizer) for tokenizer in tokenizers for name in corpora]
    for number, (name, tokenizer) in enumerate(jobs):
        progress(f"counting {name}, {tokenizer}", number / len(jobs))
        prepared = prepare([corpora[name]], dataclasses.replace(settings, tokenizer=tokenizer), warn=warn)
        counts.append(int(prepared.facts["tokens"]))
    return min(counts)


def _short(record: Corpus) -> Corpus:
    curves = tuple(
        dataclasses.replace(curve, singular_values=curve.singular_values[:LEADING]) for curve in record.curves
    )
    return dataclasses.replace(record, curves=curves)


def _notes(corpora: Mapping[str, Path], tokens: int) -> tuple[str, ...]:
    return (
        f"Every corpus is cut to its first {tokens:,} tokens, so that the same number of tokens is more text "
        "the larger the vocabulary.",
        f"{', '.join(name for name in corpora if name != CODE)}: the paragraphs of LibreOffice's help that "
        "are translated in all of them, the same ones in the same order.",
        f"{CODE}: the standard library of the Python that ran this, without its tests.",
    )
