"""The page of training runs: the loss, alarms, rank and geometry over steps, and the settings.

One run has the page to itself, with every evaluation in a table. Several share its pictures, with one row
each in a table: that is how heads are compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from fullrank.report.charts import training_charts as charts
from fullrank.report.charts.training_charts import Look
from fullrank.report.figures import NONE, figure, interval, number, whole
from fullrank.report.page import Answer, Page, Section, Tile, draw
from fullrank.report.pages.series_page import CAUSE
from fullrank.report.pages.training_quantities import ATTENTION, GEOMETRY, MIXTURE, PROGRESS, head_width
from fullrank.report.pages.training_tables import (
    differences,
    every_evaluation,
    facts,
    perplexity,
    settings,
    summary,
)
from fullrank.report.text import shown
from fullrank.results import Training, Trainings
from fullrank.results.series import UNDECIDED

MOST_ALARMS = 40
REASONS = {
    "finished": "finished",
    "stopped": "was stopped",
    "nan": "stopped because its loss was no number",
    "": "has not ended",
}


def training_page(record: Training) -> Page:
    """The page of one run."""
    drawn = charts.looks([record])
    run = record
    return Page(
        title=f"Training {shown(run.name, 60)}",
        lead=(
            f"{shown(run.recipe or 'a recipe', 60)} with the head {shown(run.head or 'unknown', 40)}: "
            f"{run.parameters:,} parameters, {run.vocabulary:,} tokens in the vocabulary, on "
            f"{shown(run.device or 'an unknown device', 60)}"
            f"{f', {run.processes} processes' if run.processes > 1 else ''}."
        ),
        answers=(
            Answer(
                name="",
                colour=drawn[0].colour,
                sentences=tuple(_sentences(run)),
                tiles=(_quality_tile(run), _rank_tile(run)),
            ),
        ),
        sections=_sections(drawn, (every_evaluation(run), settings(run))),
    )


def trainings_page(record: Trainings) -> Page:
    """The page of several runs side by side."""
    drawn = charts.looks(record.runs)
    heads = list(dict.fromkeys(shown(run.head, 40) for run in record.runs))
    best = min(
        (look for look in drawn if (one := look.run.best()) and math.isfinite(one.loss)),
        key=lambda look: look.run.best().loss,  # type: ignore[union-attr]
        default=None,
    )
    lead = f"{len(drawn)} runs side by side, with the heads {', '.join(heads)}."
    if best is not None:
        found = best.run.best()
        assert found is not None
        lead += (
            f" The lowest validation loss is {found.loss:.4f} nats per token, by {best.name} at step "
            f"{found.step:,}."
        )
    warnings = []
    if len({_digest(run) for run in record.runs}) > 1 or len({run.vocabulary for run in record.runs}) > 1:
        warnings.append(
            "These runs were not trained on the same tokens: their losses per token do not compare; bits per "
            "byte do, on the same text."
        )
    if len({run.steps for run in record.runs}) > 1:
        warnings.append("These runs have not seen equally many steps: compare them where all have a value.")
    going = [look.name for look in drawn if look.run.reason != "finished"]
    if going:
        warnings.append(f"Not finished: {', '.join(going)}.")
    return Page(
        title="Training runs",
        lead=lead,
        warnings=tuple(warnings),
        sections=_sections(drawn, (differences(drawn),)),
    )


def _digest(run: Training) -> str:
    return run.data.get("digest", "")


def _sections(drawn: Sequence[Look], last: tuple[Section | None, ...]) -> tuple[Section, ...]:
    found = [
        _loss(drawn),
        _alarms(drawn),
        _grid("Progress", charts.panels(drawn, PROGRESS), drawn),
        _grid(
            "The output layer",
            charts.panels(drawn, GEOMETRY),
            drawn,
            text=(
                "Rank and geometry of the output matrix W, of the last layer’s states and of sampled "
                "log-probabilities, at every evaluation."
            ),
            definition=_GEOMETRY,
        ),
        _grid(
            "The mixture",
            [*charts.panels(drawn, MIXTURE), *charts.shares(drawn)],
            drawn,
            text="How the components of a mixture are used; hovering a line names its component.",
            definition=_MIXTURE,
        ),
        _attention(drawn),
        *last,
        Section(title="What this does not show", text=(CAUSE,)),
    ]
    return tuple(section for section in found if section is not None)


def _loss(drawn: Sequence[Look]) -> Section:
    curves = charts.loss(drawn)
    return Section(
        title="Loss",
        chart=draw(
            curves.specification,
            name="Loss over training steps",
            description="Validation loss in nats per token over steps. The table holds the figures.",
            legend=curves.legend,
        )
        if curves.drawable()
        else None,
        notes=curves.notes,
        table=summary(drawn),
        more_tables=(facts(drawn),),
    )


def _grid(
    title: str,
    panels: list[charts.Panel],
    drawn: Sequence[Look],
    *,
    text: str = "",
    definition: tuple[str, ...] = (),
) -> Section | None:
    panels = [panel for panel in panels if panel.curves.drawable()]
    if not panels:
        return None
    marked = any(panel.curves.marked for panel in panels)
    keys = tuple(key for key in charts.legend(drawn) if marked or key.mark != "diamond")
    return Section(
        title=title,
        text=(text,) if text else (),
        chart=draw(
            charts.grid,
            panels,
            name=f"{title} over training steps",
            description="Small multiples over training steps. The values are in results.json.",
            legend=keys,
        ),
        definition=definition,
    )


def _attention(drawn: Sequence[Look]) -> Section | None:
    """What attention does, or why nothing is said of it."""
    why = [
        f"{f'{look.name}: ' if len(drawn) > 1 else ''}{shown(reason, 200)}."
        for look in drawn
        if (reason := look.run.unmeasured.get("attention"))
    ]
    section = _grid(
        "Attention",
        charts.panels(drawn, ATTENTION),
        drawn,
        text=(
            "Means over layers, heads and a few queries of validation text, each of which sees at least half "
            "of the context."
        ),
        definition=_ATTENTION,
    )
    if section is not None:
        return dataclasses.replace(section, notes=tuple(why)) if why else section
    return Section(title="Attention", text=("Not measured.", *why)) if why else None


def _alarms(drawn: Sequence[Look]) -> Section | None:
    told = [(look, alarm) for look in drawn for alarm in look.run.alarms]
    if not told:
        return None
    items = [
        f"{f'{look.name}, ' if len(drawn) > 1 else ''}step {alarm.step:,}, {shown(alarm.kind, 40)}: "
        f"{shown(alarm.message, 600)}."
        for look, alarm in told[:MOST_ALARMS]
    ]
    more = len(told) - len(items)
    return Section(
        title="Alarms",
        items=tuple(items),
        notes=(f"{more} more are in results.json.",) if more > 0 else (),
    )


def _sentences(run: Training) -> list[str]:
    validation, best = run.validation(), run.best()
    if not validation:
        found = [f"After {run.steps:,} steps there is no evaluation yet."]
    else:
        last = validation[-1]
        found = [
            f"After {last.step:,} steps ({number(last.epoch)} epochs) the validation loss is "
            f"{last.loss:.4f} nats per token, perplexity {figure(last.perplexity)}."
        ]
        if best is not None and best.step != last.step:
            found.append(f"It was lowest at step {best.step:,}, {best.loss:.4f}.")
    found += [_turn(run), f"The run {_end(run)}; {_alarm_count(run)}."]
    return [sentence for sentence in found if sentence]


def _end(run: Training) -> str:
    going = f" (step {run.steps:,} of {run.planned:,})" if run.planned > run.steps else ""
    return REASONS.get(run.reason, "ended") + going


def _turn(run: Training) -> str:
    one = run.saturation
    if one is None:
        return ""
    if one.reason:
        return f"Whether the curve turned was not tested: {shown(one.reason, 200)}."
    low, high = one.interval
    between = "" if math.isnan(low) else f" (95% interval {low:.1f} to {high:.1f}%)"
    if one.turned:
        return (
            f"The curve turned after step {one.best_step:,} and lost {one.lost_percent:.1f}%{between} since."
        )
    if one.outcome == UNDECIDED:
        return f"Undecided whether the curve turned: from best to last {one.lost_percent:.1f}%{between}."
    return f"The curve did not turn; {one.power}."


def _alarm_count(run: Training) -> str:
    count = len(run.alarms)
    return "no alarm was raised" if not count else f"{count} alarm{'s were' if count > 1 else ' was'} raised"


def _quality_tile(run: Training) -> Tile:
    question = "How good is it?"
    estimate = perplexity(run.valid)
    if estimate is None or not math.isfinite(estimate.value):
        return Tile(question=question, value=NONE, unit="", remarks=("no validation loss yet",))
    remarks = [f"95% interval {interval(estimate)}"] if interval(estimate) else []
    test = perplexity(run.test)
    if test is not None:
        remarks.append(f"test {figure(test.value)}{f' ({interval(test)})' if interval(test) else ''}")
    return Tile(
        question=question,
        value=figure(estimate.value),
        unit="validation perplexity per token",
        remarks=tuple(remarks),
    )


def _rank_tile(run: Training) -> Tile:
    question = "What rank do its log-probabilities have?"
    measured = [one for one in run.validation() if math.isfinite(one.monitors.get("logprob_rank", math.nan))]
    width = head_width(run)
    remark: tuple[str, ...] = (f"width D = {whole(width)}",) if math.isfinite(width) else ()
    if not measured:
        return Tile(question=question, value=NONE, unit="", remarks=("not measured", *remark))
    monitors = measured[-1].monitors
    ceiling = monitors.get("logprob_rank_ceiling", math.nan)
    effective = monitors.get("head_effective_rank", math.nan)
    if math.isfinite(effective):
        remark += (f"effective rank of W {whole(effective)}",)
    unit = f"of at most {whole(ceiling)}" if math.isfinite(ceiling) else ""
    return Tile(question=question, value=whole(monitors["logprob_rank"]), unit=unit, remarks=remark)


_GEOMETRY = (
    "With σ the singular values of W [V, D] and p = σ / Σσ, the effective rank is exp H(p), shown as a share "
    "of D, and the singular entropy is log D − H(p). Anisotropy is the mean cosine of two states of the last "
    "layer, as they are and after their mean is subtracted.",
    "The rank of the log-probabilities is the least rank over everything that softmax cannot tell apart, of "
    "sampled contexts and tokens, in double precision. One softmax of width D has at most D, or D + 1 with a "
    "bias (dotted: D). No sample shows more than its own size (dashed). The effective rank of their singular "
    "values tells how evenly that rank is used.",
)
_ATTENTION = (
    "The effective number of tokens is exp of the entropy of a query’s weights, as shares of their sum. The "
    "sensitivity is the spectral norm of the Jacobian of the weights in their scores, before these are "
    "divided by the temperature T; of softmax it is at most 1 / (2 T) (dashed), which two weights of a half "
    "reach.",
)
_MIXTURE = (
    "The prior entropy is that of a token’s prior over K components, over log K: 1 where all are used alike, "
    "0 where each token uses one. A component is dead if its mean prior is below 0.01 / K and no token gives "
    "it 0.05. The divergence is the mean KL of one component’s distribution to another’s: 0 where all are "
    "copies.",
)
