"""What a page says first, for every outcome of the two questions, compared whole with golden/answers.txt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from fullrank.report.page import Answer
from fullrank.report.pages import reference_section
from fullrank.report.pages.answer import answer, shared_caution
from fullrank.report.pages.reference_section import known
from fullrank.report.subject import subjects_of
from fullrank.results import Diagnosis, Estimate
from fullrank.results.diagnosis import Verdict
from tests.report import records


def with_gain(value: float, low: float, high: float, **changes: Any) -> Diagnosis:
    better = records.DIAGNOSIS.better_head
    assert better is not None
    gain = Estimate(value=value, low=low, high=high)
    better = dataclasses.replace(better, best_gain=gain, **changes)
    return dataclasses.replace(records.DIAGNOSIS, better_head=better)


def with_rank(**changes: Any) -> Diagnosis:
    needed = records.DIAGNOSIS.rank_needed
    assert needed is not None
    return dataclasses.replace(records.DIAGNOSIS, rank_needed=dataclasses.replace(needed, **changes))


def judged(record: Diagnosis, outcome: str, gain: Estimate, smallest: float) -> Diagnosis:
    lines = (f"{outcome}: <b>so</b>.", "By how much.", "Next: go on.")
    verdict = Verdict(outcome=outcome, gain=gain, smallest=smallest, lines=lines, next="go on")
    return dataclasses.replace(record, verdict=verdict)


def no_step_helped() -> Diagnosis:
    better = records.DIAGNOSIS.better_head
    assert better is not None
    return with_gain(1e-9, -4e-9, 3e-9, fits=tuple(dataclasses.replace(fit, steps=0) for fit in better.fits))


GAIN = records.near(0.014, 0.008)
CASES: dict[str, Diagnosis] = {
    "a rank and a gain": records.DIAGNOSIS,
    "a verdict": judged(records.DIAGNOSIS, "held back", GAIN, 0.0042),
    "a verdict and a bound": judged(with_rank(bound="at most"), "not held back", GAIN, 0.0123),
    "a verdict without a detection limit": judged(records.DIAGNOSIS, "held back", GAIN, math.inf),
    "a gain that could have been missed": judged(
        with_gain(-0.07, -0.13, -0.01), "undecided", Estimate(value=-0.07, low=-0.13, high=0.09), 0.09
    ),
    "at least a rank": with_rank(bound="at least"),
    "a loss that still falls with rank": with_rank(still_falling=True),
    "no step of training helped": no_step_helped(),
    "an interval around zero": with_gain(0.003, -0.001, 0.007),
    "an interval from zero up": with_gain(0.01, 0.0, 0.02),
    "an interval up to zero": with_gain(-0.01, -0.02, 0.0),
    "a loss": with_gain(-0.02, -0.03, -0.01),
    "a gain without interval": with_gain(0.02, math.nan, math.nan),
    "neither was measured": records.PARTIAL,
    "only the gain": dataclasses.replace(records.DIAGNOSIS, rank_needed=None),
    "no number is a number": records.changed(
        records.DIAGNOSIS, lambda value: math.nan if isinstance(value, float) else value
    ),
}  # fmt: skip


def written(said: Answer) -> list[str]:
    lines = [said.lead or "(no lead)", *said.sentences]
    lines += [f"[{tile.question} {tile.value} {tile.unit}] {'; '.join(tile.remarks)}" for tile in said.tiles]
    return [f"  {line}" for line in lines]


def test_answers_are_as_stored(same_as_golden: Callable[[str, str], None]) -> None:
    lines: list[str] = []
    for name, record in CASES.items():
        (subject,) = subjects_of([record])
        lines += ["", name, *written(answer(subject, alone=True))]
    several = subjects_of([records.DIAGNOSIS, records.wider(), records.PARTIAL])
    lines += ["", "side by side"]
    for subject in several:
        lines += written(answer(subject, alone=False))
    # The caution stands once, and nowhere where there is no figure.
    lines.append(shared_caution(several))
    assert shared_caution(several[2:]) == ""
    same_as_golden("answers.txt", "\n".join(lines[1:]) + "\n")


def test_the_models_that_ship_can_be_read() -> None:
    models = reference_section.reference()
    assert "SmolLM2-135M-Instruct" in {model.name for model in models}
    for model in models:
        assert model.about
        assert 0 < (model.effective_rank or 0) <= model.width
        assert model.outcome in ("held back", "not held back", "undecided")


def test_a_model_is_not_placed_beside_itself(monkeypatch: Any) -> None:
    monkeypatch.setattr(reference_section, "reference", lambda: (known(records.DIAGNOSIS, "itself"),))
    assert reference_section.reference_section(subjects_of([records.DIAGNOSIS])) == ()


def test_the_row_of_a_diagnosis_among_the_models_that_ship() -> None:
    row = known(
        judged(records.DIAGNOSIS, "held back", Estimate(value=0.1, low=0.05, high=math.inf), 0.01), "x"
    )
    assert (row.gain, row.low, row.high, row.outcome, row.about) == (0.1, 0.05, None, "held back", "x")
    assert row.rank_needed == "about 301"
    bare = dataclasses.replace(records.PARTIAL, anisotropy=None)
    empty = known(bare)
    assert (empty.effective_rank, empty.cosine, empty.rank_needed) == (None, None, "")
    assert (empty.gain, empty.outcome) == (None, "")
