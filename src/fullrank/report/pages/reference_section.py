"""Beside other models: the figures that carry a diagnosis, next to those of models that the same command has
seen, so that "effective rank 507 of 576" means something.

`reference.json` ships with the package; `python -m benchmarks.reference` makes it from results of diagnoses.
A row says how many tokens it stands on. Losses are left out, because they do not compare between texts and
vocabularies.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path

from fullrank.report.figures import Cell, number, percent
from fullrank.report.page import Column, Section, Table
from fullrank.report.subject import Subject
from fullrank.report.text import shown
from fullrank.results import Diagnosis

FILE = Path(__file__).parents[1] / "reference.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """What a diagnosis says of a model, in one row. None where a question was not answered."""

    name: str
    about: str
    """What the model is and what it read: one line."""
    parameters: int
    width: int
    tokens: int
    """Of text that it was measured on."""
    effective_rank: float | None
    random_effective_rank: float | None
    cosine: float | None
    """Of two states of the last layer, mean."""
    rank_needed: str
    """As it is said: "about 144", "at most 72"."""
    gain: float | None
    """Of a better head, nats per token."""
    low: float | None
    high: float | None
    """None for no upper end."""
    outcome: str


def known(record: Diagnosis, about: str = "") -> Known:
    """The row of a diagnosis."""
    spectrum, anisotropy, rank = record.spectrum, record.anisotropy, record.rank_needed
    verdict = record.verdict
    gain = None if verdict is None else verdict.gain
    needed = ""
    if rank is not None and math.isfinite(rank.knee.value):
        needed = f"{shown(rank.bound) or 'about'} {rank.knee.value:.0f}"
    return Known(
        name=record.model.name,
        about=about,
        parameters=record.model.parameters,
        width=record.model.width,
        tokens=record.text.tokens,
        effective_rank=None if spectrum is None else spectrum.effective_rank,
        random_effective_rank=None if spectrum is None else spectrum.random_effective_rank,
        cosine=None if anisotropy is None or not anisotropy.layers else anisotropy.layers[-1].cosine.value,
        rank_needed=needed,
        gain=None if gain is None else gain.value,
        low=None if gain is None else gain.low,
        high=None if gain is None or not math.isfinite(gain.high) else gain.high,
        outcome="" if verdict is None else verdict.outcome,
    )


@functools.cache
def reference() -> tuple[Known, ...]:
    """The models that ship with the package."""
    document = json.loads(FILE.read_text(encoding="utf8"))
    return tuple(Known(**row) for row in document["data"]["models"])


def reference_section(subjects: Sequence[Subject]) -> tuple[Section, ...]:
    """Models of a page among those of the table, by width."""
    here = [(one.name, known(one.record)) for one in subjects]
    others = [
        (shown(one.name, 48), one)
        for one in reference()
        if all((one.name, one.width) != (mine.name, mine.width) for _, mine in here)
    ]
    if not others:
        return ()
    rows = sorted([*here, *others], key=lambda row: (row[1].width, row[1].parameters))
    names = {name for name, _ in here}
    return (
        Section(
            title="Beside other models",
            identity="reference",
            text=(
                *(_place(name, one, [other for _, other in others]) for name, one in here),
                "The same command, on other models. What a model reads matters as much as what it is: a gain "
                "is one on that text, and a small text hides gains, which the interval then says.",
            ),
            table=Table(
                caption="",
                columns=(
                    Column(name="model"),
                    Column(name="width"),
                    Column(name="tokens read"),
                    Column(name="effective rank, of the width"),
                    Column(name="the same, a random matrix"),
                    Column(name="mean cosine of states"),
                    Column(name="rank needed"),
                    Column(name="gain of a better head", unit="nats per token"),
                    Column(name="held back?"),
                ),
                rows=tuple(_row(f"▸ {name}" if name in names else name, one) for name, one in rows),
            ),
            items=tuple(f"{name}: {shown(one.about, 300)}" for name, one in others if one.about),
        ),
    )


def _place(name: str, one: Known, others: Sequence[Known]) -> str:
    shares = [found for other in others if (found := _share(other)) is not None]
    own = _share(one)
    if own is None:
        return f"{name}: its spectrum was not measured."
    below = sum(share < own for share in shares)
    return (
        f"{name} uses {percent(own)} of its width by effective rank; {below} of {len(shares)} other models "
        "use less."
    )


def _share(one: Known) -> float | None:
    """Of the width; records are read from files, where a width may be anything."""
    found = one.effective_rank
    return None if found is None or not math.isfinite(found) or one.width < 1 else found / one.width


def _row(name: str, one: Known) -> tuple[Cell, ...]:
    share = _share(one)
    random = one.random_effective_rank
    gain: Cell = None
    if one.gain is not None and one.low is not None:
        upper = f"to {number(one.high)}" if one.high is not None else "or more"
        gain = f"{number(one.gain)} ({number(one.low)} {upper})"
    return (
        name,
        one.width,
        one.tokens,
        None if share is None else percent(share),
        None if random is None or share is None else percent(random / one.width),
        one.cosine,
        one.rank_needed or None,
        gain,
        one.outcome or None,
    )
