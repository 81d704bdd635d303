"""The tables of the attention sections: lengths, heads, sets, tests, temperatures and normalisers."""

from __future__ import annotations

from collections.abc import Sequence

from fullrank.report.figures import Cell
from fullrank.report.page import Column, Table
from fullrank.report.text import shown
from fullrank.results.attention import Attention, AttentionLength, AttentionSets

MOST_HEADS = 2000
"""Rows of a table that a page can hold."""


def by_length(lengths: Sequence[AttentionLength]) -> Table:
    return Table(
        caption="All heads by context length; intervals over windows.",
        columns=(
            Column(name="context"),
            Column(name="visible"),
            Column(name="entropy", unit="nats"),
            Column(name="effective tokens"),
            Column(name="first position", unit="weight"),
            Column(name="log n·max"),
            Column(name="log n·min"),
            Column(name="score range"),
            Column(name="2Δ/T"),
            Column(name="spectral norm", unit="at most 0.5"),
        ),
        rows=tuple(
            (
                one.length,
                one.visible,
                one.entropy,
                one.effective_tokens,
                one.first_mass,
                one.log_largest,
                one.log_smallest,
                one.score_range,
                one.exponent,
                one.sensitivity,
            )
            for one in lengths
        ),
        folded="By context length",
    )


def by_head(found: Attention) -> tuple[Table, ...]:
    if not found.by_head:
        return ()
    listed = found.by_head[:MOST_HEADS]
    rest = len(found.by_head) - len(listed)
    return (
        Table(
            caption="Every head at the longest context."
            + (f" {rest:,} more are in results.json." if rest else ""),
            columns=(
                Column(name="layer, head"),
                Column(name="keys of"),
                Column(name="visible"),
                Column(name="effective tokens"),
                Column(name="first position"),
                Column(name="largest weight"),
                Column(name="separable", unit="top"),
                Column(name="separable", unit="random"),
                Column(name="F", unit="top"),
                Column(name="F", unit="random"),
                Column(name="critical N", unit="by F"),
                Column(name="critical N", unit="by distance"),
                Column(name="spectral norm"),
            ),
            rows=tuple(
                (
                    f"{one.layer}, {one.head}",
                    one.key_head,
                    one.visible,
                    one.effective_tokens,
                    one.first_mass,
                    one.largest,
                    one.separable,
                    one.separable_random,
                    one.f,
                    one.f_random,
                    one.critical_f,
                    one.critical_distance,
                    one.sensitivity,
                )
                for one in listed
            ),
            folded=f"All heads ({len(found.by_head):,})",
        ),
    )


def by_size(sets: Sequence[AttentionSets]) -> Table:
    return Table(
        caption="All heads by context length and size of the sets; top, then random. The distance is that of "
        "one "
        "query a head, beside the bound that is proved of it.",
        columns=(
            Column(name="context"),
            Column(name="N"),
            Column(name="separable", unit="top", shows="value"),
            Column(name="separable", unit="random", shows="value"),
            Column(name="precision", unit="top", shows="value"),
            Column(name="precision", unit="random", shows="value"),
            Column(name="F", unit="top", shows="value"),
            Column(name="F", unit="random", shows="value"),
            Column(name="weight", unit="top"),
            Column(name="weight", unit="random"),
            Column(name="distance", unit="top"),
            Column(name="bound", unit="top"),
            Column(name="distance", unit="random"),
            Column(name="bound", unit="random"),
            Column(name="above bound"),
        ),
        rows=tuple(
            (
                one.length,
                one.size,
                one.separable,
                one.separable_random,
                one.precision,
                one.precision_random,
                one.f,
                one.f_random,
                one.mass,
                one.mass_random,
                one.distance,
                one.bound,
                one.distance_random,
                one.bound_random,
                one.exceeded,
            )
            for one in sets
        ),
        folded=f"All sets ({len(sets)})",
    )


def tests(found: Attention) -> tuple[Table, ...]:
    rows: list[tuple[Cell, ...]] = [
        (one.length, shown(test.statistic), size, p, told, test.heads)
        for one in found.by_length
        for test in one.critical
        for size, p, told in zip(test.sizes, test.p, test.heads_told, strict=False)
    ]
    if not rows:
        return ()
    return (
        Table(
            caption="Top against random. p is that of the mean over heads; heads are told apart one by one "
            "with an "
            f"expected false share of at most {found.false_share:g}.",
            columns=(
                Column(name="context"),
                Column(name="statistic"),
                Column(name="N"),
                Column(name="p"),
                Column(name="heads told apart"),
                Column(name="of"),
            ),
            rows=tuple(rows),
            folded=f"Tests ({len(rows)})",
        ),
    )


def by_temperature(found: Attention) -> Table:
    return Table(
        caption="Sensitivity by temperature, at the longest context.",
        columns=(
            Column(name="T"),
            Column(name="spectral norm", unit="mean"),
            Column(name="spectral norm", unit="largest"),
            Column(name="1/(2T)"),
            Column(name="above 1/(4T)", unit="share of queries"),
            Column(name="estimator", unit="mean"),
            Column(name="estimator", unit="largest head"),
        ),
        rows=tuple(
            (
                one.temperature,
                one.exact,
                one.exact_largest,
                one.bound,
                one.above_quarter,
                one.estimated,
                one.estimated_largest,
            )
            for one in found.by_temperature
        ),
        folded="All temperatures",
    )


def normalisers(found: Attention) -> Table:
    return Table(
        caption="Each normaliser on the same scores, at the longest context, and in place of softmax in "
        "every layer "
        "without retraining.",
        columns=(
            Column(name="normaliser"),
            Column(name="effective tokens"),
            Column(name="first position"),
            Column(name="exact zeros", unit="share"),
            Column(name="sum of weights"),
            Column(name=f"separable, N = {found.reference_size}", unit="top"),
            Column(name="separable", unit="random"),
            Column(name="loss", unit="nats per token", shows="value"),
            Column(name="change", unit="nats per token"),
            Column(name="remark"),
        ),
        rows=tuple(
            (
                shown(one.label, 60),
                one.effective_tokens,
                one.first_mass,
                one.zeros,
                one.total,
                one.separable,
                one.separable_random,
                one.loss,
                one.change,
                shown(one.reason, 200) or ("as the model is" if one.name == "softmax" else ""),
            )
            for one in found.normalisers
        ),
    )


def kept(found: Attention) -> tuple[Table, ...]:
    if not found.kept:
        return ()
    return (
        Table(
            caption="Only the N largest weights of every query in every head, without sharing out the rest.",
            columns=(
                Column(name="N"),
                Column(name="change", unit="nats per token"),
                Column(name="relative", unit="of the loss"),
            ),
            rows=tuple((one.size, one.change, one.relative) for one in found.kept),
        ),
    )
