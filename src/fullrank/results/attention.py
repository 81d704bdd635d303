"""The record of `fullrank diagnose --only attention`: what softmax lets the heads of a model select.

Everything is measured at queries that see about L positions, for some context lengths L. "Top" is the set of
the N largest weights of a query, "random" a set of N positions drawn at random, the control that every figure
about a top set needs. docs/attention_theory.md defines each quantity. Entropies and losses are in nats.
"""

from __future__ import annotations

import dataclasses

from fullrank.results.estimate import Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionHead:
    """One head, at the longest context; means over queries."""

    layer: int
    head: int
    key_head: int
    """Which keys and values it reads: several heads share one where queries are grouped."""
    visible: float
    """Positions that a query sees: fewer than the context in a layer with a sliding window."""
    entropy: float
    effective_tokens: float
    """The mean of exp(entropy)."""
    first_mass: float
    """The weight of the first position of the window."""
    largest: float
    """The largest weight of a query."""
    sensitivity: float
    """Spectral norm of the Jacobian of softmax, at most 1/2."""
    separable: float | None
    """Separable share of the top set of `reference_size`; None where the values are unknown."""
    separable_random: float | None
    f: float | None
    f_random: float | None
    critical_f: int | None
    """The first size at which F of the top set of this head is not told from that of a random set; None where
    it is at every size, or where nothing was tested."""
    critical_distance: int | None
    """The same for the cumulative distance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCritical:
    """Whether the top set can be told from a random one of the same size, at one context length."""

    statistic: str
    """f or distance."""
    sizes: tuple[int, ...]
    p: tuple[float, ...]
    """Of the difference, averaged over all heads."""
    critical: int | None
    """The first size at which it cannot be told from 0; None where it can at every size."""
    heads_told: tuple[int, ...]
    """Heads that are told apart one by one."""
    heads: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLength:
    """All heads together at one context length."""

    length: int
    visible: float
    entropy: Estimate
    effective_tokens: Estimate
    first_mass: Estimate
    log_largest: float
    """Mean of log(n times the largest weight), n the number of visible positions: 0 for uniform weights."""
    log_smallest: float | None
    """The same for the smallest visible weight; None where one is 0 and its score is unknown."""
    score_range: float | None
    """Mean of max l - min l: no weight lies outside of exp(±range) / n."""
    exponent: float | None
    """Mean of 2 |q| max |k| / T, the published envelope's exponent; None where q and k are unknown."""
    envelope_says: float | None
    """Share of queries for which exp(exponent) / n is less than 1, so that the envelope says anything."""
    sensitivity: Estimate
    critical: tuple[AttentionCritical, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSets:
    """All heads together at one context length and one size of the sets."""

    length: int
    size: int
    separable: Estimate
    """N_s / N, which is the recall too."""
    separable_random: Estimate
    precision: Estimate
    precision_random: Estimate
    f: Estimate
    f_random: Estimate
    mass: float
    """Of the weights in the set."""
    mass_random: float
    distance: float
    """Cumulative distance of what is outside, at the last query of the first window; a mean over heads."""
    distance_random: float
    bound: float
    """What is proved about it, a mean over the same queries."""
    bound_random: float
    exceeded: int
    """Queries of which the distance is above its bound, of either kind: 0, or the bound is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionTemperature:
    """Sensitivity of softmax(l / T) to l at the longest context; the model has T = 1."""

    temperature: float
    exact: float
    """Mean over heads and queries of the spectral norm of the Jacobian."""
    exact_largest: float
    bound: float
    """1 / (2 T)."""
    estimated: float
    """The paper's difference quotient along one random direction a query, mean."""
    estimated_largest: float
    """The largest over heads of its mean over queries, which the paper shows."""
    above_quarter: float
    """Share of queries whose spectral norm is above 1 / (4 T), the published bound."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionNormaliser:
    """Another normaliser on the same scores, and in place of softmax in the model as it is."""

    name: str
    label: str
    effective_tokens: float | None
    first_mass: float | None
    zeros: float | None
    """Share of the visible positions whose weight is exactly 0."""
    total: float | None
    """Sum of the weights of a query."""
    separable: float | None
    separable_random: float | None
    loss: Estimate | None
    """Next-token loss with this normaliser in every layer, without retraining."""
    change: Estimate | None
    """That minus the loss of the model as it is, token by token; None for softmax, which it has."""
    reason: str
    """Why something is missing, or ""."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionKept:
    """Only the largest weights of every query count, in every head, without renormalising."""

    size: int
    change: Estimate
    """Of the next-token loss."""
    relative: float
    """As a share of the loss of the model as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """What softmax lets the attention heads of a model select."""

    weights: str
    """Where they came from: eager, the model's own eager attention, query by query, or outputs, what the
    model gives as output_attentions."""
    scores: str
    """queries and keys, recomputed; logarithms of the weights, where a model does more than softmax or shows
    no queries."""
    difference: float
    """The largest between the model's own weights and those recomputed from queries and keys; NaN where
    queries and keys are unknown."""
    eager_difference: float
    """The largest between the weights of this run and those of the whole model in eager attention, on the
    first window; NaN where that was too large to hold or there is nothing to compare."""
    eager_positions: int
    """Length of the text on which they were compared."""
    layers: int
    """With attention."""
    heads: int
    """In all layers."""
    sliding_layers: tuple[int, ...]
    """Layers whose queries do not see the whole context."""
    windows: int
    queries: int
    """Of a window at each length."""
    reference_size: int
    """N of the figures a head, 0 where no set fits."""
    level: float
    """Of the tests for the critical size, for all lengths and statistics together."""
    false_share: float
    """Expected at most among the heads that are told apart at one length and size."""
    tests: int
    """Lengths and statistics among which the level is shared; 0 where nothing was tested."""
    step: float
    """Of the difference quotient."""
    by_length: tuple[AttentionLength, ...]
    by_size: tuple[AttentionSets, ...]
    by_temperature: tuple[AttentionTemperature, ...]
    by_head: tuple[AttentionHead, ...]
    loss: Estimate | None
    """Of the model as it is, on the tokens of the what-if."""
    loss_tokens: int
    normalisers: tuple[AttentionNormaliser, ...]
    kept: tuple[AttentionKept, ...]
    tolerance: float
    """Relative rise of the loss that an effective set may cost."""
    effective_size: int | None
    """The least tried size within the tolerance; None where none is, or nothing was tried."""
    notes: tuple[str, ...]
