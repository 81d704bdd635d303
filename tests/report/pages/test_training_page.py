"""The page of training runs: every figure, nothing but text, runs in progress, and several side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import fullrank.report
from fullrank.diagnose.series.runs import judged
from fullrank.errors import FullrankError
from fullrank.report.charts import training_charts as charts
from fullrank.report.charts.theme import DARK, MODEL_COLOURS, NARROW, WIDE
from fullrank.report.pages.training_page import trainings_page
from fullrank.report.pages.training_quantities import ATTENTION, GEOMETRY, MIXTURE, PROGRESS, head_width
from fullrank.results import Provenance, Training, Trainings, read_log

Write = Callable[..., Path]


@pytest.fixture
def record(write_run: Write) -> Training:
    return judged(read_log(write_run("planted", turns=True, dead_from=7)))


def titles(page: str) -> list[str]:
    return [part.split("</h2>")[0].rpartition(">")[2] for part in page.split("<h2>")[1:]]


@pytest.mark.usefixtures("blank_pictures")
def test_a_run_has_every_figure_and_its_alarms(record: Training, made: Provenance) -> None:
    page = unescape(fullrank.report.render(record, made))
    best = record.best()
    assert best is not None
    for words in (
        "Training planted", "4,321,000 parameters", f"{best.loss:.4f}", "turned after step 1,200",
        "step 1,400, dead_components: 1 of 4 components", "step 2,200, curve_turned", "2 alarms were raised",
        "head.components", "14 evaluations", "component shares/3", "monitors took", "2602.20433",
    ):  # fmt: skip
        assert words in page, words
    assert titles(page)[:6] == [
        "Loss", "Alarms", "Progress", "The output layer", "The mixture", "Every evaluation",
    ]  # fmt: skip


@pytest.mark.usefixtures("blank_pictures")
def test_a_head_without_components_has_no_section_on_them(write_run: Write, made: Provenance) -> None:
    page = fullrank.report.render(read_log(write_run(head="softmax", components=1)), made)
    assert "The output layer" in titles(page)
    assert "The mixture" not in titles(page)
    assert "Alarms" not in titles(page)


@pytest.mark.usefixtures("blank_pictures")
def test_several_runs_share_pictures_and_say_what_differs(write_run: Write, made: Provenance) -> None:
    runs = tuple(
        read_log(write_run(name, **options))
        for name, options in (
            ("plain", {"head": "softmax", "components": 1}),
            ("first", {"gain": 0.2}),
            ("second", {"seed": 7, "gain": 0.3, "finished": False}),
        )
    )
    page = unescape(fullrank.report.render(Trainings(runs=runs), made))
    assert "by second at step" in page
    assert "Not finished: second." in page
    part = page[page.index("Settings that differ") :]
    assert "head.name" in part
    assert "optimiser.lr" not in part
    assert "not trained on the same tokens" not in page
    other = dataclasses.replace(runs[0], data={"digest": "else"})
    assert "not trained on the same tokens" in str(trainings_page(Trainings(runs=(other, runs[1]))).warnings)


def test_looks_group_the_runs_of_one_head(write_run: Write) -> None:
    one = read_log(write_run())
    runs = [dataclasses.replace(one, head=head) for head in ("softmax", "mos", "softmax", "mos", "mos")]
    drawn = charts.looks(runs)
    assert [look.colour for look in drawn] == [MODEL_COLOURS[place] for place in (0, 1, 0, 1, 1)]
    assert [look.style for look in drawn] == ["line", "line", "dashed", "dashed", "dotted"]
    assert len({look.name for look in drawn}) == 5
    many = charts.looks([one] * 18)
    assert len({(look.colour, look.style) for look in many}) == 18
    with pytest.raises(FullrankError, match="19 runs"):
        charts.looks([one] * 19)


def test_the_loss_and_its_alarms_stand_where_they_belong(record: Training) -> None:
    curves = charts.loss(charts.looks([record]))
    training, validation = curves.traces
    assert [point.value for point in training.points] == [one.loss for one in record.points]
    assert [point.value for point in validation.points] == [one.loss for one in record.validation()]
    at = {one.step: one.loss for one in record.validation()}
    marks = [(point.x, point.value) for trace in curves.marked for point in trace.points]
    assert marks == [(1400, at[1400]), (2200, at[2200])]
    high = curves.y.high
    assert high is not None
    assert max(at[step] for step in at if step >= 600) < high < at[0]
    assert "cut off" in curves.notes[0]


def test_panels_hold_the_monitors_their_bounds_and_the_right_alarms(record: Training) -> None:
    drawn = charts.looks([record])
    found = {panel.title: panel for panel in charts.panels(drawn, (*PROGRESS, *GEOMETRY, *MIXTURE))}
    assert len(found) == len(PROGRESS) + len(GEOMETRY) + len(MIXTURE)
    ranks = found["rank of log-probabilities"].curves
    assert [(line.value, line.style) for line in ranks.horizontal] == [(112.0, "dashed"), (64.0, "dotted")]
    assert head_width(record) == pytest.approx(64)
    marked = {title: [point.x for trace in panel.curves.marked for point in trace.points]
              for title, panel in found.items() if panel.curves.marked}  # fmt: skip
    assert marked == {"perplexity": [2200], "prior entropy": [1400], "dead components": [1400]}
    (shares,) = charts.shares(drawn)
    assert len(shares.curves.traces) == 4
    assert [point.value for point in shares.curves.traces[1].points][7:] == [0.0] * 6


def attending(run: Training, **settings: str) -> Training:
    """The same run with monitors of attention."""
    figures = {"attention_effective_tokens": 40.0, "attention_first": 0.1, "attention_sensitivity": 0.7}
    evaluations = tuple(
        dataclasses.replace(one, monitors={**one.monitors, **figures}) for one in run.evaluations
    )
    return dataclasses.replace(run, evaluations=evaluations, config={**run.config, **settings})


def test_sensitivity_stands_beside_what_no_softmax_exceeds(record: Training) -> None:
    for settings, bounds in (
        ({}, [0.5]),
        ({"body.attention_temperature": "0.25"}, [2.0]),
        ({"body.normaliser": "sigmoid"}, []),
    ):
        (look,) = charts.looks([attending(record, **settings)])
        found = {panel.title: panel for panel in charts.panels([look], ATTENTION)}
        assert list(found) == ["effective tokens", "first position", "sensitivity"]
        assert [line.value for line in found["sensitivity"].curves.horizontal] == bounds


@pytest.mark.usefixtures("blank_pictures")
def test_attention_has_its_section_or_a_reason(record: Training, made: Provenance) -> None:
    page = fullrank.report.render(attending(record), made)
    assert "Attention" in titles(page)
    assert "1 / (2 T)" in unescape(page)
    without = dataclasses.replace(record, unmeasured={"attention": "AwdLstmModel has no attention"})
    page = fullrank.report.render(without, made)
    assert "Attention" in titles(page)
    assert "AwdLstmModel has no attention." in page
    assert "Attention" not in titles(fullrank.report.render(record, made))
    both = fullrank.report.render(Trainings(runs=(attending(record), without)), made)
    assert "AwdLstmModel has no attention." in both


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_colour_has_a_partner_on_dark_pages(record: Training, width: int) -> None:
    drawn = charts.looks([record])
    panels = [*charts.panels(drawn, (*PROGRESS, *GEOMETRY, *MIXTURE)), *charts.shares(drawn)]
    text = str([charts.loss(drawn).specification(width=width), charts.grid(panels, width=width)])
    used = {text[place : place + 7] for place in range(len(text)) if text[place] == "#"}
    assert used <= set(DARK)


@pytest.mark.parametrize("evaluations", [0, 2])
def test_a_run_in_progress_can_be_drawn(evaluations: int, write_run: Write, made: Provenance) -> None:
    record = judged(read_log(write_run(evaluations=evaluations, finished=False)))
    page = unescape(fullrank.report.render(record, made))
    assert f"The run has not ended (step {200 * evaluations:,} of 2,400); no alarm was raised." in page
    assert "was not tested" in page


@pytest.mark.usefixtures("blank_pictures")
def test_a_run_before_its_first_evaluation(
    write_run: Write, run_lines: Callable[..., list[dict[str, Any]]], made: Provenance
) -> None:
    lines = [line for line in run_lines(evaluations=1, finished=False) if line["event"] != "evaluate"]
    record = judged(read_log(write_run(lines=lines)))
    assert record.saturation is None
    assert "there is no evaluation yet" in fullrank.report.render(record, made)


@pytest.mark.parametrize("number", [math.nan, 1e300])
def test_odd_numbers_can_be_drawn(number: float, record: Training, made: Provenance) -> None:
    odd = dataclasses.replace(
        record,
        evaluations=tuple(
            dataclasses.replace(
                one, loss=number, perplexity=number, standard_error=number, bits_per_byte=number,
                monitors=dict.fromkeys(one.monitors, number),
            )
            for one in record.evaluations
        ),
        points=tuple(
            dataclasses.replace(one, loss=number, lr=number, gradient_norm=number, tokens_per_second=number)
            for one in record.points
        ),
        valid=dataclasses.replace(record.valid, value=number, low=number, high=number),  # type: ignore[type-var]
        seconds=number, monitor_share=number,
    )  # fmt: skip
    assert "Training runs" in fullrank.report.render(Trainings(runs=(odd, record)), made)


def test_hostile_text_stays_text(record: Training, made: Provenance, hostile_text: str) -> None:
    odd = dataclasses.replace(
        record, name=hostile_text, head=hostile_text, recipe=hostile_text, device=hostile_text,
        reason=hostile_text, config={hostile_text: hostile_text}, data={hostile_text: hostile_text},
        alarms=tuple(
            dataclasses.replace(one, kind=hostile_text, message=hostile_text) for one in record.alarms
        ),
        evaluations=tuple(
            dataclasses.replace(one, monitors={**one.monitors, hostile_text: 1.0})
            for one in record.evaluations
        ),
    )  # fmt: skip
    young = dataclasses.replace(odd, evaluations=(), points=odd.points[:2])
    for page in (
        fullrank.report.render(odd, made),
        fullrank.report.render(Trainings(runs=(young, young)), made),
    ):
        assert "<script" not in page
        assert "<img" not in page
        assert "\u202e" not in page


def test_nothing_overlaps_or_leaves_its_picture(
    record: Training, made: Provenance, measure: Callable[..., Any], write_run: Write
) -> None:
    other = read_log(write_run("other", head="softmax", components=1))
    page = fullrank.report.render(Trainings(runs=(record, other)), made)
    widths = (360, 1200)
    for width, found in zip(widths, measure(page, *widths), strict=True):
        assert found == {
            "pictures": 4, "outside": [], "overlapping": [], "overflow": 0, "width": width, "foreign": 0,
            "requests": 0,
        }  # fmt: skip
