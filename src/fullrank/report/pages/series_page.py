"""The page of a series: whether curves turned, every metric over training, and the scaling law."""

from __future__ import annotations

import math

from fullrank.report.charts import series_charts as charts
from fullrank.report.charts.theme import MUTED, Key
from fullrank.report.figures import NONE, Cell
from fullrank.report.page import Column, Page, Section, Table, draw
from fullrank.report.text import shown
from fullrank.results import Estimate, Series
from fullrank.results.series import ANSWERS, UNDECIDED, Curve, Saturation

CAUSE = (
    "A turn is an observation, not its cause. Godey et al. (2024, arXiv:2404.07647) propose that a "
    "narrow output layer, whose rank is at most its width, makes small models degrade late in training. "
    "Kulkarni et al. (2026, arXiv:2602.20433) trained 108 models: low effective rank came with late "
    "degradation but did not cause it; batch size and weight decay did. Nothing on this page decides "
    "between them."
)


def series_page(record: Series) -> Page:
    """The page of a series."""
    turned = [one for one in record.saturation if one.turned]
    tested = [one for one in record.saturation if not one.reason]
    sections = [_saturation(record), _controls(record), _overview(record), _scaling(record), _reading()]
    return Page(
        title="Over training",
        lead=(
            f"{shown(record.metric)} of {_count(len({one.model for one in record.saturation}), 'model')} "
            "from "
            f"{shown(record.source, 200)}. " + _answer(turned, tested)
        ),
        sections=tuple(section for section in sections if section is not None),
    )


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _answer(turned: list[Saturation], tested: list[Saturation]) -> str:
    if not tested:
        return "No curve has enough points to show whether it turned."
    undecided = sum(one.outcome == UNDECIDED for one in tested)
    rest = f" Of {_count(undecided, 'curve')} it is undecided." if undecided else ""
    if not turned:
        return f"None of {_count(len(tested), 'curve')} is shown to have turned before its end.{rest}"
    named = "; ".join(
        f"{charts.name(one.model, one.shots)} lost {one.lost_percent:.0f}% since step {one.best_step:,}"
        for one in turned[:4]
    )
    more = f"; and {len(turned) - 4} more" if len(turned) > 4 else ""
    return f"{len(turned)} of {_count(len(tested), 'curve')} turned before the end: {named}{more}.{rest}"


def _pairs(record: Series) -> list[tuple[Curve, Saturation]]:
    """Curves of the primary metric with what was found, those that turned first, by falling loss."""
    primary = [curve for curve in record.curves if curve.metric == record.metric]
    pairs = list(zip(primary, record.saturation, strict=True))
    # A loss that is no number comes last.
    return sorted(pairs, key=lambda pair: (not pair[1].turned, -_or(pair[1].lost_percent, -1.0)))


def _or(value: float, instead: float) -> float:
    return instead if math.isnan(value) else value


def _saturation(record: Series) -> Section:
    ordered = _pairs(record)
    pairs = [(curve, found) for curve, found in ordered if curve.steps and found.best_value]
    shots = any(one.shots is not None for one in record.saturation)
    columns = (
        Column(name="model"),
        *((Column(name="shots"),) if shots else ()),
        Column(name="best step"),
        Column(name="best"),
        Column(name="last"),
        Column(name="lost", unit="%, with 95% interval"),
        Column(name="turned"),
        Column(name="p"),
        Column(name="p", unit="over all curves"),
        Column(name="seen from", unit="% rise"),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            shown(one.model),
            *((one.shots,) if shots else ()),
            one.best_step,
            one.best_value,
            one.final_value,
            Estimate(value=one.lost_percent, low=one.interval[0], high=one.interval[1]),
            "too few points" if one.reason else ANSWERS.get(one.outcome, shown(one.outcome)),
            NONE if one.reason else f"{one.p_value:.2g}",
            NONE if one.reason else f"{one.adjusted_p:.2g}",
            NONE if not math.isfinite(one.smallest_rise_percent) else f"{one.smallest_rise_percent:.3g}",
        )
        for _, one in ordered
    ]
    noise = tuple(
        (
            charts.name(one.model, one.shots, 40),
            one.points,
            one.first_step,
            None if math.isnan(one.noise_percent) else one.noise_percent,
            None if math.isnan(one.noise_correlation) else one.noise_correlation,
            None if math.isnan(one.turned_up_to) else one.turned_up_to,
            shown(one.reason or one.noise_origin, 200),
        )
        for _, one in ordered
    )
    notes = []
    if len(pairs) > charts.MOST_PANELS:
        notes.append(f"The first {charts.MOST_PANELS} of {len(pairs)} curves are drawn; the table holds all.")
    return Section(
        title=f"Did {shown(record.metric)} turn?",
        text=(
            "Each panel is one curve after its steep beginning, as a distance from its best checkpoint. "
            "A curve that is still improving ends at zero; one that has turned ends above it. Bars are "
            "95% intervals by the standard errors of the evaluations, where the file has them.",
        ),
        chart=draw(
            charts.panels,
            pairs,
            name=f"{shown(record.metric)} relative to the best checkpoint, by model",
            description="Small multiples over training steps. All figures are in the table below.",
            legend=charts.PANEL_LEGEND,
        )
        if pairs
        else None,
        notes=tuple(notes),
        definition=(
            "A curve is called turned if, in simulations of curves that never turn, a rise this clear over "
            f"its noise comes in fewer than {100 * record.level:g}% of calls, over all curves (Holm), and at "
            f"least {record.material_percent:g}% of the best value was lost. It is called not turned if the "
            "interval of the loss excludes every rise that the test would have seen, and undecided "
            "otherwise. Seen from is the rise that the test finds nine times in ten. Noise is the scatter "
            "around a smooth trend before the turn; neighbouring checkpoints may share it, as far as the "
            "points do not exclude it. Standard errors of the evaluations are drawn but are no noise here: "
            "all checkpoints of a model answer the same items. Losses and perplexities are compared by their "
            "logarithm.",
        ),
        table=Table(
            caption="One row a curve. Lost is from the best checkpoint to the last, as a share of the best.",
            columns=columns,
            rows=tuple(rows),
        ),
        more_tables=(
            Table(
                caption="What the test took for noise.",
                columns=(
                    Column(name="curve"),
                    Column(name="points"),
                    Column(name="steep until", unit="step"),
                    Column(name="noise", unit="% of the best"),
                    Column(name="correlation", unit="of neighbours"),
                    Column(name="by itself turned up to", unit="correlation"),
                    Column(name="from"),
                ),
                rows=noise,
                folded="The noise of every curve",
            ),
        ),
    )


def _controls(record: Series) -> Section | None:
    if not record.controls:
        return None
    return Section(
        title="Models of one size",
        text=(
            "Variants of one size side by side. They tell whether size is enough to make a curve turn, "
            "not what is.",
        ),
        items=tuple(shown(sentence, 1000) for sentence in record.controls),
    )


def _overview(record: Series) -> Section | None:
    curves = [curve for curve in record.curves if curve.steps]
    if not curves:
        return None
    colours = charts.model_colours(curves)
    legend = [Key(label=shown(model, 40), colour=colour, mark="line") for model, colour in colours.items()]
    if len({curve.model for curve in curves}) > len(colours):
        legend.append(Key(label="other models", colour=MUTED, mark="line"))
    return Section(
        title="Every metric over training",
        chart=draw(
            charts.overview,
            curves,
            colours,
            name="Every metric over training steps, a line a model",
            description="Small multiples, one a metric and number of shots. All values are in results.json.",
            legend=tuple(legend),
        ),
        notes=tuple(shown(note, 500) for note in record.notes),
    )


def _scaling(record: Series) -> Section:
    fit = record.scaling
    title = "Against a scaling law"
    if fit is None:
        return Section(title=title, text=(f"No law was fitted: {shown(record.scaling_reason, 500)}.",))
    note = shown(fit.note, 1000)
    term = "" if fit.B is None else f" + {fit.B:g} / T^{fit.beta:g}"
    return Section(
        title=title,
        text=(
            f"The law L = A / N^alpha{term} + E was fitted to the last checkpoints of the models with at "
            f"least {_large(fit.fit_from)} parameters. The others stand where they are; a positive gap is a "
            "loss above the law.",
            f"{note[:1].upper()}{note[1:]}.",
        ),
        chart=draw(
            charts.scaling,
            fit,
            name="Loss over parameters, with the fitted law",
            description="Last and best checkpoints by model size. All figures are in the table below.",
            legend=charts.SCALING_LEGEND,
        ),
        table=Table(
            caption="Gaps are to the law, in percent of what it predicts, with 95% of where one would lie.",
            columns=(
                Column(name="model"),
                Column(name="parameters"),
                Column(name="tokens"),
                Column(name="last"),
                Column(name="law"),
                Column(name="gap of the last", unit="%"),
                Column(name="gap of the best", unit="%"),
                Column(name="fitted"),
            ),
            rows=tuple(
                (
                    shown(point.model),
                    _large(point.parameters),
                    _large(point.tokens),
                    point.final,
                    point.predicted,
                    point.final_gap_percent,
                    point.best_gap_percent,
                    "yes" if point.fitted else "no",
                )
                for point in fit.points
            ),
        ),
        more_tables=(
            Table(
                caption="Constants of the law.",
                columns=(Column(name="constant"), Column(name="value"), Column(name="origin")),
                rows=(
                    ("A", fit.A, "fitted"),
                    ("alpha", fit.alpha, "fitted"),
                    *(
                        (("B", fit.B, "published"), ("beta", fit.beta, "published"))
                        if fit.B is not None
                        else ()
                    ),
                    (
                        "E",
                        fit.E.value if "E" in fit.fixed else fit.E,
                        "published" if "E" in fit.fixed else "fitted",
                    ),
                ),
            ),
        ),
    )


def _large(value: float) -> str:
    """A count of parameters or tokens in millions or billions."""
    return f"{value / 1e9:.3g}B" if value >= 1e9 else f"{value / 1e6:.3g}M"


def _reading() -> Section:
    return Section(
        title="How to read this, and what it does not show",
        text=(
            "The best checkpoint is the best of several noisy ones, so it looks a little better than it "
            "is; the interval of the loss allows for that. An interval that reaches 0 says that the "
            "noise alone could have made the loss.",
            "“Not turned” is no proof that a curve will not turn: a small rise hides in the noise, and "
            "training may go on. A few points, or checkpoints far apart, show only large turns.",
            CAUSE,
        ),
    )
