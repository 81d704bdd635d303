"""What a reader should know first: rules over the finished answers, each with its bound in sight.

A finding states what was measured. It is no verdict: none of these is known to cause a loss of quality, and
sound models have some of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullrank.results.diagnosis import Diagnosis, Finding

COLLAPSED = 0.9
"""Mean cosine, or share of the variance in one direction, from which on a last layer counts as collapsed."""
OUTLIER = 0.25
"""Share of a layer's variance in one coordinate from which on it is a finding."""

GAIN = 0.001
"""Nats per token that a head must surely gain: heads that come back as they started differ by rounding alone,
always the same way, and an interval over tokens calls that sure."""


def findings(record: Diagnosis) -> tuple[Finding, ...]:
    rules = (_rank, _unreachable, _collapse, _outliers, _needed, _gain)
    return tuple(found for rule in rules for found in rule(record))


def _rank(record: Diagnosis) -> Iterator[Finding]:
    spectrum, rank = record.spectrum, record.logprob_rank
    width = min(record.model.width, record.model.tokens)
    if spectrum is not None and spectrum.numerical_rank < width:
        yield Finding(
            code="rank_deficient_head",
            question="spectrum",
            sentence=f"The output matrix has rank {spectrum.numerical_rank} of {width}: "
            f"{width - spectrum.numerical_rank} singular values are within the noise of its storage.",
        )
    elif rank is not None and rank.method == "core" and rank.least_rank < rank.ceiling:
        yield Finding(
            code="rank_deficient_logprobs",
            question="logprob_rank",
            sentence=f"The log-probabilities have rank {rank.least_rank}, where {rank.ceiling} would be "
            f"possible ({rank.ceiling_reason}).",
        )


def _unreachable(record: Diagnosis) -> Iterator[Finding]:
    found = record.unreachable
    if found is not None and found.never:
        duplicates = f", {found.duplicates} of them because another row is equal" if found.duplicates else ""
        yield Finding(
            code="unreachable_tokens",
            question="unreachable",
            sentence=f"{len(found.never)} of {found.vocabulary:,} tokens can never be the most probable one"
            f"{duplicates}.",
        )


def _collapse(record: Diagnosis) -> Iterator[Finding]:
    if record.anisotropy is None or not record.anisotropy.layers:
        return
    last = record.anisotropy.layers[-1]
    if last.cosine.low > COLLAPSED:
        yield Finding(
            code="collapsed_layer",
            question="anisotropy",
            sentence=f"The states of the last layer ({last.name}) point one way: their mean cosine is "
            f"{last.cosine.value:.2f}.",
        )
    elif last.top_variance_share > COLLAPSED:
        yield Finding(
            code="collapsed_layer",
            question="anisotropy",
            sentence=f"The states of the last layer ({last.name}) vary along one direction: it holds "
            f"{last.top_variance_share:.0%} of their variance.",
        )


def _outliers(record: Diagnosis) -> Iterator[Finding]:
    if record.anisotropy is None:
        return
    layers = [
        layer
        for layer in record.anisotropy.layers
        if layer.outliers and layer.outliers[0].variance_share >= OUTLIER
    ]
    if layers:
        worst = max(layers, key=lambda layer: layer.outliers[0].variance_share)
        yield Finding(
            code="outlier_dimension",
            question="anisotropy",
            sentence=f"One dimension, {worst.outliers[0].dimension}, holds "
            f"{worst.outliers[0].variance_share:.0%} of the variance at {worst.name}; {len(layers)} of "
            f"{len(record.anisotropy.layers)} layers have a dimension with {OUTLIER:.0%} or more.",
        )


def _needed(record: Diagnosis) -> Iterator[Finding]:
    found = record.rank_needed
    if found is not None and found.still_falling:
        yield Finding(
            code="width_is_used",
            question="rank_needed",
            sentence=f"The loss falls up to the full width: the last doubling of the rank bought "
            f"{found.slope.value:.3f} nats per token (95%: {found.slope.low:.3f} to {found.slope.high:.3f}).",
        )


def _gain(record: Diagnosis) -> Iterator[Finding]:
    found = record.better_head
    if found is not None and found.best and found.best_gain.low > GAIN:
        gain = found.best_gain
        yield Finding(
            code="better_head",
            question="better_head",
            sentence=f"{found.best} does better than either refitted softmax by {gain.value:.4f} nats per "
            f"token (95%: {gain.low:.4f} to {gain.high:.4f}) on these frozen states.",
        )
