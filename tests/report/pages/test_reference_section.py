"""Models of a page among the models that ship with the package."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fullrank.report.pages import reference_section as module
from fullrank.report.pages.diagnosis_page import comparison_page, diagnosis_page
from fullrank.report.pages.reference_section import Known, known, reference, reference_section
from fullrank.report.subject import subjects_of
from fullrank.results import Diagnosis, Estimate
from fullrank.results.diagnosis import Verdict


def model(name: str, width: int, effective_rank: float) -> Known:
    return Known(
        name=name, about=f"what {name} is", parameters=10 * width, width=width, tokens=1000,
        effective_rank=effective_rank, random_effective_rank=0.99 * width, cosine=0.5,
        rank_needed="about 3", gain=0.01, low=-0.01, high=None, outcome="undecided",
    )  # fmt: skip


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow model that uses half of its width, and a wide one that uses all."""
    models = (model("narrow", 8, 4.0), model("wide", 4096, 4096.0))
    monkeypatch.setattr(module, "reference", lambda: models)


def test_what_ships_can_be_read_and_has_a_model_that_anybody_can_get() -> None:
    names = {one.name for one in reference()}
    assert "SmolLM2-135M-Instruct" in names
    for one in reference():
        assert one.about
        assert 0 < (one.effective_rank or 0) <= one.width
        assert one.outcome in ("held back", "not held back", "undecided")


@pytest.mark.usefixtures("two")
def test_a_model_stands_at_its_place(diagnosis: Diagnosis) -> None:
    (section,) = reference_section(subjects_of([diagnosis]))
    assert section.table is not None
    names = [row[0] for row in section.table.rows]
    # By width: 8, 576, 4096.
    assert names == ["narrow", f"▸ {diagnosis.model.name}", "wide"]
    assert diagnosis.spectrum is not None
    share = diagnosis.spectrum.effective_rank / diagnosis.model.width
    assert 0.5 < share < 1
    assert "1 of 2 other models use less" in section.text[0]
    assert section.items == ("narrow: what narrow is", "wide: what wide is")
    # No upper end.
    assert section.table.rows[0][7] == "0.01 (-0.01 or more)"


@pytest.mark.usefixtures("two")
def test_it_is_on_the_page_of_one_and_of_several(diagnosis: Diagnosis) -> None:
    other = dataclasses.replace(diagnosis, model=dataclasses.replace(diagnosis.model, name="other"))
    for page, count in ((diagnosis_page(diagnosis), 1), (comparison_page([diagnosis, other]), 2)):
        (section,) = [one for one in page.sections if one.identity == "reference"]
        assert section.table is not None
        assert len(section.table.rows) == 2 + count
        assert sum(str(row[0]).startswith("▸") for row in section.table.rows) == count


def test_a_model_is_not_placed_beside_itself(diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "reference", lambda: (known(diagnosis, "itself"),))
    assert reference_section(subjects_of([diagnosis])) == ()


def test_the_row_of_a_diagnosis(diagnosis: Diagnosis) -> None:
    gain = Estimate(value=0.1, low=0.05, high=math.inf)
    verdict = Verdict(outcome="held back", gain=gain, smallest=0.01, lines=("", "", ""), next="")
    row = known(dataclasses.replace(diagnosis, verdict=verdict), "a line")
    assert (row.gain, row.low, row.high, row.outcome, row.about) == (0.1, 0.05, None, "held back", "a line")
    assert row.rank_needed == "about 301"
    empty = known(
        dataclasses.replace(diagnosis, spectrum=None, anisotropy=None, rank_needed=None, verdict=None)
    )
    assert (empty.effective_rank, empty.cosine, empty.rank_needed) == (None, None, "")
    assert (empty.gain, empty.outcome) == (None, "")
