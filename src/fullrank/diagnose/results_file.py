"""Answers on disk: what an earlier run has left in --out, and what of it the next one may keep.

results.json is written whole after every question, so whatever ends a run costs the question in hand. An
answer is kept, and its question not asked again, where it is of

    the same model       its weights, and the dtype that they ran in
    the same text        the same windows, beginning alike
    the same settings    those that the question reads
    this version         of fullrank

Everything else is asked again. What was found for another model or text, or what this run would drop and does
not ask for, is not written over unless the caller says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullrank import results
from fullrank.diagnose import findings, loss_findings, verdict
from fullrank.errors import FullrankError
from fullrank.results.diagnosis import (
    BY_NAME,
    QUESTIONS,
    Answered,
    Diagnosis,
    Missing,
    ModelFacts,
    TextFacts,
)
from fullrank.results.files import now
from fullrank.version import __version__

FILE = "results.json"
REMEDY = "choose another --out, or --replace what is there"
NOT_ASKED = "not asked for"
INTERRUPTED = "interrupted"

READS = {
    "loss": (),
    "spectrum": (),
    # How many states are sampled depends on the memory.
    "anisotropy": ("seed", "memory"),
    "logprob_rank": ("seed",),
    "unreachable": ("seed", "search_seconds"),
    "gradient": ("gradient_tokens",),
    "attention": ("seed", "memory", "attention_loss_tokens"),
}
"""The settings that an answer depends on. The questions that fit heads read all that no other has for itself.
How many tokens there are, and how long a window is, the text says."""
NOT_OF_FITS = {
    "tokens",
    "body_work",
    "most_tokens",
    "window",
    "memory",
    *(name for names in READS.values() for name in names),
} - {"seed"}


def settings_read(question: str, settings: Any) -> dict[str, str]:
    """The settings that an answer depends on, as words."""
    every = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    names = READS.get(question, [name for name in every if name not in NOT_OF_FITS])
    return {name: _words(every[name]) for name in names}


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


class ResultsFile:
    """The answers so far, and the file that has them after every one."""

    def __init__(
        self,
        out: Path | None,
        model: ModelFacts,
        text: TextFacts,
        settings: Any,
        asked: Sequence[str],
        *,
        earlier: Diagnosis | None,
        device: str,
    ) -> None:
        """`earlier` is of the same model and text; what of it is of the same settings is in `found`."""
        self.out, self.model, self.text, self.settings, self.asked = out, model, text, settings, asked
        self.made = results.provenance(seed=settings.seed, device=device)
        self.found: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.answered: dict[str, Answered] = {}
        self.failed: dict[str, str] = {}
        for name in (*QUESTIONS, *BY_NAME) if earlier is not None else ():
            answer = getattr(earlier, name)
            if earlier is not None and answer is not None and not why_not(earlier, name, settings):
                self.found[name], self.answered[name] = answer, earlier.answered[name]
                self.seconds[name] = earlier.seconds.get(name, math.nan)

    def add(self, name: str, answer: Any, seconds: float) -> None:
        """An answer, on disk when this returns."""
        self.found[name], self.seconds[name] = answer, seconds
        self.answered[name] = Answered(
            made=dataclasses.replace(self.made, time=now()),
            settings=settings_read(name, self.settings),
            text=self.text.sha256,
        )
        self.save()

    def fail(self, name: str, reason: str) -> None:
        """No answer, for that reason."""
        self.failed[name] = reason
        for part in (self.found, self.seconds, self.answered):
            part.pop(name, None)
        self.save()

    def save(self) -> None:
        """Nothing is written as long as nothing is known."""
        if self.out is not None and self.found:
            made = dataclasses.replace(self.made, time=now())
            results.save(self.record(), self.out / FILE, made)

    def record(self) -> Diagnosis:
        known = (*QUESTIONS, *BY_NAME)
        # Nobody misses what is answered by name only.
        missing = [
            name for name in known if name not in self.found and (name in self.asked or name in QUESTIONS)
        ]
        record = Diagnosis(
            model=self.model,
            text=self.text,
            findings=(),
            missing=tuple(Missing(question=name, reason=self._reason(name)) for name in missing),
            seconds={name: self.seconds[name] for name in known if name in self.seconds},
            answered={name: self.answered[name] for name in known if name in self.answered},
            **{name: self.found.get(name) for name in known},
        )
        found = (*loss_findings.findings(record), *findings.findings(record))
        return dataclasses.replace(record, findings=found, verdict=verdict.verdict(record))

    def _reason(self, name: str) -> str:
        return self.failed.get(name, INTERRUPTED if name in self.asked else NOT_ASKED)


def earlier(out: Path | None, *, replace: bool) -> Diagnosis | None:
    """What an earlier run has left in `out`; with `replace`, what is no diagnosis counts as nothing."""
    if out is None or not (out / FILE).exists():
        return None
    try:
        record, _ = results.load(out / FILE)
    except FullrankError as error:
        if replace:
            return None
        raise FullrankError(f"--out holds results that are not ours to lose ({error}): {REMEDY}") from error
    if isinstance(record, Diagnosis):
        return record
    if replace:
        return None
    raise FullrankError(f"{out / FILE} holds a {record.kind!r}, no diagnosis: {REMEDY}")


def difference(record: Diagnosis, model: ModelFacts, text: TextFacts) -> str:
    """What sets a record apart from this model and text, as the end of a sentence; "" if nothing does."""
    if record.model.fingerprint != model.fingerprint:
        return f"is of another model, {record.model.name}"
    if record.model.dtype != model.dtype:
        return f"is of this model in {record.model.dtype}, not in {model.dtype}"
    if _windows(record.text) != _windows(text):
        return f"is of another text, {_described(record.text)} where this is {_described(text)}"
    return ""


def check_nothing_lost(
    record: Diagnosis, model: ModelFacts, text: TextFacts, asked: Sequence[str], settings: Any, out: Path
) -> None:
    """Raise where `record`, which is in `out`, is of another model or text, or has what would be dropped."""
    differs = difference(record, model, text)
    if differs:
        raise FullrankError(f"{out / FILE} {differs}: {REMEDY}")
    for question in (*QUESTIONS, *BY_NAME):
        reason = why_not(record, question, settings)
        if reason and question not in asked:
            raise FullrankError(
                f"{out / FILE} has an answer to {question} {reason}, which this run would drop and does not "
                f"ask for: repeat its settings, or {REMEDY}"
            )


def why_not(record: Diagnosis, question: str, settings: Any) -> str:
    """Why the answer in a record of the same model and text is not that of these settings; "" if it is."""
    if getattr(record, question) is None:
        return ""
    made = record.answered.get(question)
    if made is None or made.made.versions.get("fullrank") != __version__:
        return "of another version"
    wanted = settings_read(question, settings)
    if made.settings == wanted:
        return ""
    names = sorted(name for name in {*made.settings, *wanted} if made.settings.get(name) != wanted.get(name))
    changed = "; ".join(f"{name} {made.settings.get(name)}, now {wanted.get(name)}" for name in names)
    return f"with other settings ({changed})"


def _windows(text: TextFacts) -> tuple[Any, ...]:
    return text.sha256, text.windows, text.window, text.starts_with_bos


def _described(text: TextFacts) -> str:
    more = f" and {len(text.sources) - 1} more" if len(text.sources) > 1 else ""
    begun = " after a begin token" if text.starts_with_bos else ""
    source = text.sources[0] if text.sources else "text"
    return f"{text.windows} windows of {text.window} tokens{begun} from {source}{more}"
