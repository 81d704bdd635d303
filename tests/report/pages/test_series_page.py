"""The page of a series: every figure, nothing but text, and every record can be drawn."""

import dataclasses
import math
from html import unescape

import pytest

import fullrank.report
from fullrank.report.charts import series_charts as charts
from fullrank.report.charts.theme import DARK, NARROW, WIDE
from fullrank.report.pages.series_page import series_page
from fullrank.results import Estimate, Provenance, Series
from fullrank.results.series import NOT_TURNED, TURNED, Curve, Saturation, Scaling, ScalingPoint


def curve(model: str, values: tuple[float, ...], *, metric: str = "ppl", errors: bool = True) -> Curve:
    return Curve(
        model=model, shots=0, metric=metric, unit="perplexity", lower_is_better=True,
        steps=tuple(range(0, 1000 * len(values), 1000)), values=values,
        standard_errors=tuple(0.04 * value for value in values) if errors else None, dropped=0,
    )  # fmt: skip


def found(one: Curve, **changes: object) -> Saturation:
    best = min(one.values, default=math.nan)
    record = Saturation(
        model=one.model, shots=one.shots, metric=one.metric, outcome=NOT_TURNED,
        best_step=one.steps[one.values.index(best)] if one.steps else 0, best_value=best,
        final_step=one.steps[-1] if one.steps else 0, final_value=one.values[-1] if one.values else math.nan,
        lost_percent=37.25, interval=(11.5, 63.5), p_value=0.0321, adjusted_p=0.0642,
        smallest_rise_percent=77.5, turned_up_to=math.nan, noise_correlation=0.8, first_step=0,
        points=len(one.steps),
        noise_percent=4.25, noise_origin="standard errors", reason="",
    )  # fmt: skip
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def near(value: float) -> Estimate:
    return Estimate(value=value, low=0.9 * value, high=1.1 * value)


LAW = Scaling(
    metric="loss", unit="nats", shots=None, A=near(119.09), alpha=near(0.246), B=410.7, beta=0.28,
    E=Estimate(value=1.69, low=1.69, high=1.69), fixed=("B", "beta", "E"), fit_from=4e8,
    points=tuple(
        ScalingPoint(
            model=name, parameters=size, tokens=3e11, final=3.3, best=3.2, predicted=near(3.05),
            final_gap_percent=near(8.125), best_gap_percent=near(4.5), fitted=size > 4e8,
        )
        for name, size in (("p-70m", 7e7), ("p-1b", 1e9))
    ),
    note="parameter counts were read from the names",
)  # fmt: skip


@pytest.fixture
def record() -> Series:
    turned, steady = curve("p-70m", (400.0, 94.3, 120.0, 142.4)), curve("p-1b", (90.0, 20.0, 9.0, 7.5))
    return Series(
        source="curves.csv", metric="ppl",
        curves=(steady, turned, curve("p-1b", (0.0, 0.2, 0.4, 0.5), metric="sciq_acc", errors=False)),
        saturation=(found(steady), found(turned, outcome=TURNED, p_value=0.001, lost_percent=51.0)),
        level=0.01, material_percent=2.0, scaling=LAW, scaling_reason="",
        controls=("p-70m and p-70m-deduped share the size",), notes=("2 values were left out",),
    )  # fmt: skip


def test_page_holds_every_figure(record: Series, made: Provenance) -> None:
    html = unescape(fullrank.report.render(record, made))
    for words in ("94.3", "142.4", "0.032", "0.064", "77.5", "12 to 64", "1,000", "8.12", "119", "0.246",
                  "410.7", "1.69",
                  "share the size", "2 values were left out", "read from the names", "sciq_acc"):  # fmt: skip
        assert words in html, words
    assert "1 of 2 curves turned" in html
    assert "Nothing on this page decides between them" in html
    assert html.index("p-70m, 0-shot") < html.index("p-1b, 0-shot")


@pytest.mark.usefixtures("blank_pictures")
def test_reason_without_a_law(record: Series, made: Provenance) -> None:
    without = dataclasses.replace(record, scaling=None, scaling_reason="pass --tokens-per-step", controls=())
    html = fullrank.report.render(without, made)
    assert "No law was fitted: pass --tokens-per-step." in html
    assert "Models of one size" not in html


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_marks_and_colours(record: Series, width: int) -> None:
    pairs = list(zip(record.curves[:2], record.saturation, strict=True))
    drawn = charts.panels(pairs, width=width)
    assert len(drawn["concat"]) == 2
    for panel, (one, verdict) in zip(drawn["concat"], pairs, strict=True):
        rows = {layer["mark"]["type"]: layer["data"]["values"] for layer in panel["layer"] if "data" in layer}
        colour = charts.TURNED if verdict.turned else charts.STEADY
        assert {layer["mark"]["stroke"] for layer in panel["layer"] if layer["mark"]["type"] == "line"} == {
            colour
        }
        heights = [row["y"] for row in rows["line"]]
        best = min(one.values)
        assert heights == pytest.approx([100 * (value / best - 1) for value in one.values])
        assert {row["mark"] for row in rows["line"]} >= {"best"}
    text = str(
        [
            drawn,
            charts.scaling(LAW, width=width),
            charts.overview(record.curves, {"p-1b": "#0072b2"}, width=width),
        ]
    )
    used = {text[place : place + 7] for place in range(len(text)) if text[place] == "#"}
    assert used <= set(DARK)


def test_hostile_names_stay_text(record: Series, made: Provenance) -> None:
    name = "</svg><script>alert(1)</script>\u202e\x00"
    one = curve(name, (4.0, 3.0, 2.0, 1.0))
    odd = dataclasses.replace(
        record, source=name, metric=name, curves=(dataclasses.replace(one, metric=name),),
        saturation=(found(one),), controls=(name,), notes=(name,),
        scaling=dataclasses.replace(LAW, points=(dataclasses.replace(LAW.points[0], model=name),)),
    )  # fmt: skip
    html = fullrank.report.render(odd, made)
    assert "<script" not in html
    assert "\u202e" not in html
    assert "\x00" not in html


def test_odd_records_can_be_drawn(record: Series, made: Provenance) -> None:
    nothing = curve("empty", ())
    single = curve("single", (3.0,), errors=False)
    zero = dataclasses.replace(curve("zero", (0.0, 0.0, 0.0, 0.0), errors=False), lower_is_better=False)
    none = {
        "interval": (math.nan, math.nan),
        "lost_percent": math.nan,
        "noise_percent": math.nan,
        "reason": "few",
    }
    odd = dataclasses.replace(
        record,
        curves=(nothing, single, zero),
        saturation=(found(nothing, **none), found(single, **none), found(zero, lost_percent=0.0)),
        scaling=dataclasses.replace(
            LAW, A=Estimate(value=1.0, low=math.nan, high=math.nan), B=None, beta=None
        ),
    )
    html = fullrank.report.render(odd, made)
    assert "too few points" in html
    empty = dataclasses.replace(record, curves=(), saturation=(), scaling=None, scaling_reason="nothing")
    assert "No curve has enough points" in fullrank.report.render(empty, made)


def test_only_so_many_panels(record: Series) -> None:
    one = curve("m", (4.0, 3.0, 2.0, 1.0))
    many = [(one, found(one))] * (charts.MOST_PANELS + 3)
    assert len(charts.panels(many, width=WIDE)["concat"]) == charts.MOST_PANELS
    page = series_page(
        dataclasses.replace(record, curves=tuple(a for a, _ in many), saturation=tuple(b for _, b in many))
    )
    assert any(f"of {len(many)} curves" in note for note in page.sections[0].notes)
