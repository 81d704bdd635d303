from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from fullrank.report.charts import diagnosis_curves
from fullrank.report.charts.axis import Axis
from fullrank.report.charts.curves import MOST_POINTS, thinned
from fullrank.report.charts.theme import HIGH_RANK_COLOUR, MODEL_COLOURS, NARROW, WIDE
from fullrank.report.pages import diagnosis_rows
from fullrank.report.subject import subjects_of
from fullrank.results import Diagnosis, Estimate
from fullrank.results.diagnosis import RankNeeded


def layers(specification: dict[str, Any], kind: str) -> list[list[dict[str, Any]]]:
    """The data of every layer of a kind of mark."""
    return [layer["data"]["values"] for layer in specification["layer"] if layer["mark"]["type"] == kind]


def needed(record: Diagnosis) -> RankNeeded:
    assert record.rank_needed is not None
    return record.rank_needed


def test_loss_points_stand_in_their_bins(diagnosis: Diagnosis) -> None:
    assert diagnosis.loss is not None
    specification = diagnosis_curves.loss(subjects_of([diagnosis])).specification(width=WIDE)
    (points,) = layers(specification, "point")
    for point, part in zip(points, diagnosis.loss.by_position, strict=True):
        assert part.first + 1 <= point["x"] <= part.last + 1
        assert (point["y"], point["low"], point["high"]) == dataclasses.astuple(part.nats)
    (band,) = layers(specification, "area")
    assert len(band) == len(points)


def test_spectrum_has_its_noise_line(diagnosis: Diagnosis) -> None:
    assert diagnosis.spectrum is not None
    picture = diagnosis_curves.spectrum(subjects_of([diagnosis]))
    (curve,) = layers(picture.specification(width=WIDE), "line")
    assert curve[0]["y"] == diagnosis.spectrum.singular_values[0]
    assert curve[-1] == {**curve[-1], "x": 1.0, "y": diagnosis.spectrum.singular_values[-1]}
    (noise,) = layers(picture.specification(width=WIDE), "rule")
    assert [line["y"] for line in noise] == [diagnosis.spectrum.noise]
    assert "storage noise 0.1312" in [key.label for key in picture.legend]


def test_noise_far_below_the_spectrum_is_said_not_drawn(diagnosis: Diagnosis) -> None:
    assert diagnosis.spectrum is not None
    quiet = dataclasses.replace(diagnosis, spectrum=dataclasses.replace(diagnosis.spectrum, noise=1e-9))
    picture = diagnosis_curves.spectrum(subjects_of([quiet]))
    assert layers(picture.specification(width=WIDE), "rule") == []
    assert picture.notes == ("The storage noise, 1e-09, lies below the picture.",)


def test_rank_curves_lines_and_knee(diagnosis: Diagnosis) -> None:
    section = needed(diagnosis)
    picture = diagnosis_curves.rank_needed(subjects_of([diagnosis]))
    specification = picture.specification(width=WIDE)
    curves = {curve[0]["colour"]: curve for curve in layers(specification, "line")}
    refitted, truncated = curves[MODEL_COLOURS[0]], curves[HIGH_RANK_COLOUR]
    # The curves begin at the last rank that is out of sight: nothing to see is left out.
    _, y = picture.axes()
    assert y.high is not None
    hidden = [
        point.rank
        for point in section.points
        if point.truncated.value > y.high and (point.refitted is None or point.refitted.value > y.high)
    ]
    drawn = [point for point in section.points if point.rank >= hidden[-1]]
    assert 0 < len(drawn) < len(section.points)
    assert [(row["x"], row["y"]) for row in refitted] == [
        (point.rank, point.refitted.value) for point in drawn if point.refitted
    ]
    assert [(row["x"], row["y"]) for row in truncated] == [
        (point.rank, point.truncated.value) for point in drawn
    ]
    ((knee,),) = layers(specification, "rect")
    assert (knee["x"], knee["until"]) == (section.knee.low, section.knee.high)
    rules = [row for layer in layers(specification, "rule") for row in layer]
    assert section.knee.value in [row.get("x") for row in rules]
    full = section.points[-1].refitted
    assert full is not None
    assert {section.original.value, full.value + section.tolerance} <= {row.get("y") for row in rules}
    # What lies above the frame is not drawn as a point on top of it, and the reader is told.
    (points,) = layers(specification, "point")
    assert all(row["y"] <= y.high for row in points)
    assert len(points) < len(refitted) + len(truncated)
    assert "run out of the picture" in picture.notes[0]


def test_ranks_that_were_not_refitted_have_no_point(diagnosis: Diagnosis) -> None:
    section = needed(diagnosis)
    points = tuple(
        dataclasses.replace(point, refitted=None) if place % 2 else point
        for place, point in enumerate(section.points)
    )
    record = dataclasses.replace(diagnosis, rank_needed=dataclasses.replace(section, points=points))
    (trace, _) = diagnosis_curves.rank_needed(subjects_of([record])).traces
    expected = [point.rank for point in points if point.refitted]
    assert [point.x for point in trace.points] == expected[-len(trace.points) :]
    assert len(trace.points) >= 2


def test_least_rank_is_marked_on_the_curve(diagnosis: Diagnosis) -> None:
    assert diagnosis.logprob_rank is not None
    picture = diagnosis_curves.logprob_rank(subjects_of([diagnosis]))
    ((diamond,),) = layers(picture.specification(width=NARROW), "point")
    assert diamond["x"] == diagnosis.logprob_rank.least_rank
    assert diamond["y"] == diagnosis.logprob_rank.singular_values[diagnosis.logprob_rank.least_rank - 1]


def test_heads_have_rows_and_the_control_another_mark(diagnosis: Diagnosis) -> None:
    assert diagnosis.better_head is not None
    picture = diagnosis_rows.better_head(subjects_of([diagnosis]))
    assert picture.rows == (
        "softmax, as large",
        "mos, K = 4",
        "sigsoftmax",
        "moss, K = 4",
        "plif",
        "trunk, K = 4",
    )
    assert [mark.shape for mark in picture.marks] == ["ring"] + ["dot"] * 5
    gains = [fit.gain for fit in diagnosis.better_head.fits if fit.head != "softmax"]
    assert [(mark.value, mark.low, mark.high) for mark in picture.marks] == [
        dataclasses.astuple(gain) for gain in gains
    ]
    assert picture.lines == (0.0,)


def test_a_token_count_of_zero_has_no_mark_but_its_figure(diagnosis: Diagnosis) -> None:
    assert diagnosis.unreachable is not None
    none = dataclasses.replace(diagnosis.unreachable, never=())
    picture = diagnosis_rows.unreachable(subjects_of([dataclasses.replace(diagnosis, unreachable=none)]))
    points = [row for layer in layers(picture.specification(width=WIDE), "point") for row in layer]
    drawn = [row["row"] for row in points if "x" in row]
    assert drawn == ["can be first", "undecided"]
    assert picture.figures[2] == "0 (0.0%)"
    assert picture.notes == ("A row without a mark stands for no token.",)


def test_gradient_shows_quantiles_and_null(diagnosis: Diagnosis) -> None:
    assert diagnosis.gradient is not None
    kept, null = diagnosis_rows.gradient(subjects_of([diagnosis])).marks
    assert (kept.low, *(kept.inner or ()), kept.high) == tuple(
        diagnosis.gradient.quantiles[place] for place in (0, 1, 3, 4)
    )
    assert kept.value == diagnosis.gradient.quantiles[2]
    assert (null.value, null.shape) == (diagnosis.gradient.null_norm, "diamond")


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_models_side_by_side_keep_their_colours(width: int, diagnosis: Diagnosis, other: Diagnosis) -> None:
    subjects = subjects_of([diagnosis, other])
    for draw in (
        diagnosis_curves.loss,
        diagnosis_curves.spectrum,
        diagnosis_curves.anisotropy,
        diagnosis_curves.logprob_rank,
        diagnosis_curves.rank_needed,
        diagnosis_rows.better_head,
        diagnosis_rows.unreachable,
        diagnosis_rows.gradient,
    ):
        specification = draw(subjects).specification(width=width)  # type: ignore[operator]
        used = {
            row["colour"]
            for layer in specification["layer"]
            for row in layer["data"]["values"]
            if "colour" in row
        }
        assert {MODEL_COLOURS[0], MODEL_COLOURS[1]} <= used
        assert not set(MODEL_COLOURS[2:]) & used


def test_an_axis_holds_what_can_be_drawn() -> None:
    linear, log = Axis(title=""), Axis(title="", log=True)
    for value in (math.nan, math.inf, -math.inf, 1e300):
        assert not linear.holds(value)
        assert not log.holds(value)
    assert linear.holds(0)
    assert not log.holds(0)
    fitted = log.fitted([0.5, 64.0])
    assert fitted.contains(0.5)
    assert fitted.contains(64.0)
    assert not fitted.contains(0.1)
    for one in (linear.fitted([3.0]), log.fitted([3.0])):
        assert one.low is not None
        assert one.high is not None
        assert one.low < 3.0 < one.high
    assert Axis(title="", log=True, powers_of_two=True).fitted([8, 576]).ticks(9) == [
        8.0,
        16.0,
        32.0,
        64.0,
        128.0,
        256.0,
        512.0,
    ]


def test_long_curves_are_thinned_but_keep_their_ends() -> None:
    few = thinned(list(range(50_000)))
    assert len(few) <= MOST_POINTS
    assert few[:16] == list(range(16))
    assert few[-1] == 49_999
    assert few == sorted(set(few))
    assert thinned([1, 2]) == [1, 2]


def test_an_interval_that_is_no_number_leaves_its_point(diagnosis: Diagnosis) -> None:
    section = needed(diagnosis)
    broken = Estimate(value=3.3, low=math.nan, high=math.inf)
    points = tuple(dataclasses.replace(point, refitted=broken, truncated=broken) for point in section.points)
    record = dataclasses.replace(diagnosis, rank_needed=dataclasses.replace(section, points=points))
    specification = diagnosis_curves.rank_needed(subjects_of([record])).specification(width=WIDE)
    (drawn,) = layers(specification, "point")
    assert len(drawn) == 2 * len(points)
    assert layers(specification, "area") == []
