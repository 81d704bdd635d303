"""The record of the attention question, from what `attention_measures` has kept.

A figure of all heads is the mean over heads and queries of a window, with its interval over windows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fullrank.diagnose.attention import critical as attention_critical
from fullrank.diagnose.attention.losses import TOLERANCE, Losses, effective_size
from fullrank.diagnose.attention.measures import STEP, TEMPERATURES, Tally
from fullrank.fit import estimates
from fullrank.results.attention import (
    Attention,
    AttentionCritical,
    AttentionHead,
    AttentionKept,
    AttentionLength,
    AttentionNormaliser,
    AttentionSets,
    AttentionTemperature,
)
from fullrank.results.estimate import Estimate

STATISTICS = ("f", "distance")
"""By which a top set may be told from a random one."""


def record(
    tally: Tally,
    normalisers: tuple[AttentionNormaliser, ...],
    kept: tuple[AttentionKept, ...],
    losses: Losses | None,
    compared: float,
    positions: int,
) -> Attention:
    where = tally.plan
    counts = {layer: table.shape[1] for layer, table in sorted(tally.tables["entropy"].items())}
    critical = _critical(tally)
    narrow = tuple(
        layer
        for layer, table in sorted(tally.tables["visible"].items())
        if float(table[:, :, -1].max()) <= where.lengths[-1] - where.queries
    )
    return Attention(
        weights="eager" if losses is not None else "outputs",
        scores="queries and keys" if tally.recomputed else "logarithms of the weights",
        difference=tally.difference,
        eager_difference=compared,
        eager_positions=positions,
        layers=len(counts),
        heads=sum(counts.values()),
        sliding_layers=narrow,
        windows=tally.windows,
        queries=where.queries,
        reference_size=where.reference if tally.values_known else 0,
        level=attention_critical.LEVEL,
        false_share=attention_critical.FALSE_SHARE,
        tests=0 if critical is None else len(STATISTICS) * len(where.lengths),
        step=STEP,
        by_length=tuple(_lengths(tally, critical)),
        by_size=tuple(_sets(tally)),
        by_temperature=tuple(_temperatures(tally)),
        by_head=tuple(_heads(tally, counts, critical)),
        loss=None if losses is None else losses.as_it_is(),
        loss_tokens=0 if losses is None else len(losses.plain),
        normalisers=normalisers,
        kept=kept,
        tolerance=TOLERANCE,
        effective_size=effective_size(kept),
        notes=tuple(_notes(tally, narrow, critical)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Critical:
    """What the tests say, for each statistic, of sizes beyond 1."""

    sizes: tuple[int, ...]
    level: float
    """Of one test."""
    pooled: dict[str, Tensor]
    """p [lengths, sizes] over all heads."""
    told: dict[str, Tensor]
    """[heads, lengths, sizes]."""
    measured: dict[str, Tensor]
    """[heads, lengths, sizes]."""


def _critical(tally: Tally) -> _Critical | None:
    sizes = tally.plan.sizes[1:]
    if not tally.values_known or not sizes or tally.windows < attention_critical.LEAST_WINDOWS:
        return None
    pooled, told, measured = {}, {}, {}
    for name in STATISTICS:
        top, other = tally.stacked(f"set {name} top"), tally.stacked(f"set {name} random")
        if top is None or other is None:
            return None
        differences = (top - other)[..., 1:]
        p = attention_critical.p_values(differences)
        pooled[name] = attention_critical.p_values(differences.nanmean(1))
        told[name], measured[name] = attention_critical.told_apart(p), ~p.isnan()
    level = attention_critical.LEVEL / (len(STATISTICS) * len(tally.plan.lengths))
    return _Critical(sizes=sizes, level=level, pooled=pooled, told=told, measured=measured)


def _lengths(tally: Tally, critical: _Critical | None) -> Iterator[AttentionLength]:
    for place, length in enumerate(tally.plan.lengths):
        plain = {
            name: _estimate(tally, name, place)
            for name in ("entropy", "effective_tokens", "first_mass", "sensitivity")
        }
        others = {
            name: mean_of(tally, name, place=place)
            for name in ("visible", "log_largest", "log_smallest", "score_range", "exponent", "envelope_says")
        }
        yield AttentionLength(
            length=length,
            critical=() if critical is None else tuple(_told(critical, name, place) for name in STATISTICS),
            **plain,  # type: ignore[arg-type]
            **others,  # type: ignore[arg-type]
        )


def _told(critical: _Critical, statistic: str, place: int) -> AttentionCritical:
    p = critical.pooled[statistic][place]
    # Sizes that do not fit this length were measured in no head.
    there = [number for number in range(len(critical.sizes)) if not bool(p[number].isnan())]
    first = attention_critical.first_kept(p, critical.level)
    return AttentionCritical(
        statistic=statistic,
        sizes=tuple(critical.sizes[number] for number in there),
        p=tuple(rounded(p[number]) for number in there),
        critical=None if first is None else critical.sizes[first],
        heads_told=tuple(int(critical.told[statistic][:, place, number].sum()) for number in there),
        heads=len(critical.told[statistic]),
    )


def _sets(tally: Tally) -> Iterator[AttentionSets]:
    if tally.stacked("set f top") is None:
        return
    for place, length in enumerate(tally.plan.lengths):
        for number, size in enumerate(tally.plan.sizes):
            if not math.isfinite(mean_of(tally, "set f top", number, place=place) or math.nan):
                continue
            estimated = {
                f"{name}{ending}": _estimate(tally, f"set {table} {kind}", place, number)
                for name, table in (("separable", "recall"), ("precision", "precision"), ("f", "f"))
                for ending, kind in (("", "top"), ("_random", "random"))
            }
            plain = {
                f"{name}{ending}": mean_of(tally, f"set {table} {kind}", number, place=place)
                for name, table in (("mass", "mass"), ("distance", "last_distance"), ("bound", "bound"))
                for ending, kind in (("", "top"), ("_random", "random"))
            }
            yield AttentionSets(
                length=length,
                size=size,
                exceeded=int(tally.exceeded[place, number]),
                **estimated,  # type: ignore[arg-type]
                **plain,  # type: ignore[arg-type]
            )


def _temperatures(tally: Tally) -> Iterator[AttentionTemperature]:
    exact, quotient = tally.stacked("temperature exact"), tally.stacked("temperature estimated")
    above = tally.stacked("temperature above")
    assert exact is not None
    assert quotient is not None
    assert above is not None
    for number, temperature in enumerate(TEMPERATURES):
        norms, estimated = exact[:, :, -1, number], quotient[:, :, -1, number]
        yield AttentionTemperature(
            temperature=temperature,
            exact=rounded(norms.mean()),
            exact_largest=rounded(norms.max()),
            bound=0.5 / temperature,
            estimated=rounded(estimated.mean()),
            estimated_largest=rounded(estimated.mean(0).max()),
            above_quarter=rounded(above[:, :, -1, number].mean()),
        )


def _heads(tally: Tally, counts: dict[int, int], critical: _Critical | None) -> Iterator[AttentionHead]:
    where = tally.plan
    reference = where.sizes.index(where.reference) if where.reference else None
    plain = ("visible", "entropy", "effective_tokens", "first_mass", "largest", "sensitivity")
    tables = {name: tally.stacked(name) for name in plain}
    sets = {
        "separable": tally.stacked("set recall top"),
        "separable_random": tally.stacked("set recall random"),
        "f": tally.stacked("set f top"),
        "f_random": tally.stacked("set f random"),
    }
    number = 0
    for layer, heads in counts.items():
        for head in range(heads):
            figures: dict[str, Any] = {
                name: rounded(table[:, number, -1].mean())
                for name, table in tables.items()
                if table is not None
            }
            for name, table in sets.items():
                value = math.nan
                if table is not None and reference is not None:
                    value = float(table[:, number, -1, reference].mean())
                figures[name] = rounded(value) if math.isfinite(value) else None
            for name in STATISTICS:
                figures[f"critical_{name}"] = (
                    None if critical is None else _first_lost(critical, name, number)
                )
            yield AttentionHead(
                layer=layer, head=head, key_head=head * tally.key_heads[layer] // heads, **figures
            )
            number += 1


def _first_lost(critical: _Critical, statistic: str, head: int) -> int | None:
    """The least measured size at the longest context at which a head is not told apart."""
    lost = critical.measured[statistic][head, -1] & ~critical.told[statistic][head, -1]
    return min((size for size, gone in zip(critical.sizes, lost.tolist(), strict=True) if gone), default=None)


def _notes(tally: Tally, narrow: tuple[int, ...], critical: _Critical | None) -> Iterator[str]:
    if narrow:
        yield (
            f"{len(narrow)} layers have a sliding window: their queries see fewer positions than the context "
            "has, and only those count."
        )
    if any(tally.key_heads[layer] < table.shape[1] for layer, table in tally.tables["entropy"].items()):
        yield "Queries are grouped: several heads share their keys and values."
    if not tally.values_known:
        yield (
            "The model shows its weights only, not queries, keys and values: there is no envelope and no set "
            "of values to measure, and its attention cannot be exchanged."
        )
    elif not tally.recomputed:
        yield (
            "The model does more than a softmax of scaled scores, so its own weights were measured, and "
            "logarithms of them stand for the scores."
        )
    if tally.values_known and critical is None:
        yield (
            f"{tally.windows} windows are too few to test from which size on a top set is like a random one: "
            f"expected {attention_critical.LEAST_WINDOWS} or more."
        )
    if not tally.plan.reference:
        yield f"Contexts of {tally.plan.lengths[-1]} tokens are too short for sets of 2 or more."


def _estimate(tally: Tally, name: str, place: int, number: int | None = None) -> Estimate:
    """Mean over heads and queries, with its interval over windows; heads that were not measured left out."""
    table = tally.stacked(name)
    assert table is not None
    values = (table[:, :, place] if number is None else table[:, :, place, number]).nanmean(1)
    found = estimates.mean(values, torch.arange(len(values)))
    return Estimate(value=rounded(found.value), low=rounded(found.low), high=rounded(found.high))


def mean_of(tally: Tally, name: str, number: int | None = None, *, place: int = -1) -> float | None:
    table = tally.stacked(name)
    if table is None:
        return None
    values = table[:, :, place] if number is None else table[:, :, place, number]
    mean = float(values.nanmean())
    return rounded(mean) if math.isfinite(mean) else None


def rounded(value: float | Tensor) -> float:
    """Seven digits: more would be noise, and a record has thousands of figures."""
    return float(f"{float(value):.7g}")
