"""Findings: each planted fact gives its own finding and no other; a healthy model has none."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from fullrank.diagnose.findings import COLLAPSED, GAIN, OUTLIER, findings
from fullrank.results.diagnosis import (
    QUESTIONS,
    Anisotropy,
    BetterHead,
    Diagnosis,
    Estimate,
    Gradient,
    LayerGeometry,
    LogprobRank,
    Loss,
    OutlierDimension,
    RankNeeded,
    Spectrum,
    Unreachable,
    UnreachableToken,
)
from tests.diagnosis_records import around, diagnosis


def outliers(dimension: int, share: float) -> tuple[OutlierDimension, ...]:
    return (OutlierDimension(dimension=dimension, variance_share=share, kurtosis=5.0),)


def layer(number: int) -> LayerGeometry:
    return LayerGeometry(
        layer=number, name=f"layer {number}", cosine=around(0.3), cosine_centred=around(0.0),
        top_variance_share=0.1, effective_rank=50.0, outliers=outliers(3, 0.15), largest_kurtosis=5.0,
        sinks=2,
    )  # fmt: skip


HEALTHY = diagnosis(
    loss=Loss(
        nats_per_token=around(3.0), standard_error=0.005, perplexity=around(20.0), bits_per_byte=around(1.0),
        tokens=1000, bytes=4000, blocks=8, by_position=(),
    ),
    spectrum=Spectrum(
        singular_values=(2.0, 1.0), singular_entropy=0.2, effective_rank=52.0, random_effective_rank=60.0,
        stable_rank=10.0, participation_ratio=40.0, condition=30.0, numerical_rank=64, noise=1e-6,
        noise_origin="rounding to float32",
    ),
    anisotropy=Anisotropy(tokens=500, layers=(layer(0), layer(1), layer(2))),
    logprob_rank=LogprobRank(
        least_rank=64, gap_rank=64, gap=100.0, noise_floor=1e-5, ceiling=64, ceiling_reason="width 64",
        contexts=1000, columns=1000, method="core", singular_values=(2.0, 1.0),
    ),
    rank_needed=RankNeeded(
        points=(), original=around(3.0), tolerance=0.02, knee=around(20.0, 3.0),
        truncated_knee=around(30.0, 3.0), still_falling=False, slope=around(0.001),
    ),
    better_head=BetterHead(
        original=around(3.0), fits=(), best="mos", best_gain=around(0.005), seeds=2, fit_tokens=571,
        held_out_tokens=286, trained_rows=500,
    ),
    unreachable=Unreachable(
        vocabulary=1000, argmaxable=1000, never=(), duplicates=0, undecided=0, padding_never=50, capacity=20,
        capacity_interval=(18, 22), capacity_samples=8, seconds=1.0,
    ),
    gradient=Gradient(
        kept_norm=around(0.3), kept_energy=around(0.1), null_norm=0.25, null_energy=0.064, tokens=100,
        quantiles=(0.1, 0.2, 0.3, 0.4, 0.5),
    ),
)  # fmt: skip


def planted(question: str, **changes: Any) -> Diagnosis:
    """The healthy record with some fields of one answer changed."""
    answer = dataclasses.replace(getattr(HEALTHY, question), **changes)
    return dataclasses.replace(HEALTHY, **{question: answer})


def with_layer(place: int, **changes: Any) -> Diagnosis:
    layers = list(HEALTHY.anisotropy.layers)
    layers[place] = dataclasses.replace(layers[place], **changes)
    return planted("anisotropy", layers=tuple(layers))


def small(rank: int) -> Diagnosis:
    """A vocabulary of 40, below the width of 64."""
    facts = dataclasses.replace(HEALTHY.model, tokens=40, vocabulary=40)
    return dataclasses.replace(planted("spectrum", numerical_rank=rank), model=facts)


DEFICIENT = planted("spectrum", numerical_rank=50)
NEVER = tuple(UnreachableToken(id=number, text="<b>", depth=0.1) for number in (3, 8, 9))
OUTLIERS = planted(
    "anisotropy",
    layers=tuple(
        dataclasses.replace(layer(number), outliers=outliers(number, share))
        for number, share in enumerate((0.3, 0.8, 0.5))
    ),
)
UNBOUNDED = Estimate(value=0.5, low=-math.inf, high=math.inf)

# The record, the code and question of its only finding, and words of the finding's sentence.
FOUND: dict[str, tuple[Diagnosis, str, str, list[str]]] = {
    "rank": (DEFICIENT, "rank_deficient_head", "spectrum", ["rank 50 of 64", "14 singular values"]),
    # The rank of the log-probabilities follows from it.
    "both ranks": (
        dataclasses.replace(DEFICIENT, logprob_rank=planted("logprob_rank", least_rank=50).logprob_rank),
        "rank_deficient_head", "spectrum", [],
    ),
    "small vocabulary": (small(30), "rank_deficient_head", "spectrum", ["30 of 40", "10 singular values"]),
    "log-probabilities": (
        planted("logprob_rank", least_rank=63, ceiling_reason="width 64, RMSNorm"),
        "rank_deficient_logprobs", "logprob_rank", ["rank 63, where 64", "width 64, RMSNorm"],
    ),
    "tokens": (
        planted("unreachable", never=NEVER, argmaxable=997), "unreachable_tokens", "unreachable",
        ["3 of 1,000 tokens can never be the most probable one."],
    ),
    "equal rows": (
        planted("unreachable", never=NEVER, duplicates=2), "unreachable_tokens", "unreachable",
        ["2 of them because another row is equal"],
    ),
    "cosine": (with_layer(-1, cosine=around(0.95)), "collapsed_layer", "anisotropy", ["0.95"]),
    "direction": (with_layer(-1, top_variance_share=0.95), "collapsed_layer", "anisotropy", ["95%"]),
    "cosine and direction": (
        with_layer(-1, cosine=around(0.95), top_variance_share=0.95), "collapsed_layer", "anisotropy", [],
    ),
    **{
        f"outlier in {place}": (
            with_layer(place, outliers=outliers(17, 0.6)), "outlier_dimension", "anisotropy",
            ["17", "60%", f"layer {place}", "1 of 3 layers"],
        )
        for place in range(3)
    },
    "largest outlier": (
        OUTLIERS, "outlier_dimension", "anisotropy", ["80% of the variance at layer 1; 3 of 3 layers"],
    ),
    "width": (
        planted("rank_needed", still_falling=True, slope=around(0.1), knee=around(60.0, 3.0)),
        "width_is_used", "rank_needed", ["0.100 nats per token (95%: 0.090 to 0.110)"],
    ),
    "gain": (
        planted("better_head", best_gain=around(0.05)), "better_head", "better_head",
        ["mos", "0.0500 nats per token (95%: 0.0400 to 0.0600)"],
    ),
}  # fmt: skip

SOUND: dict[str, Diagnosis] = {
    "healthy": HEALTHY,
    **{f"no {name}": dataclasses.replace(HEALTHY, **{name: None}) for name in QUESTIONS},
    "no answer": dataclasses.replace(HEALTHY, **dict.fromkeys(QUESTIONS)),
    "small vocabulary": small(40),
    # A sample of a bent head has no ceiling but its size.
    "sampled columns": planted("logprob_rank", least_rank=63, method="columns"),
    "undecided and padding": planted("unreachable", undecided=12, padding_never=50),
    # Only the states that enter the output matrix count.
    "inner cosine": with_layer(1, cosine=around(0.95)),
    "inner direction": with_layer(1, top_variance_share=0.95),
    "cosine near the bound": with_layer(-1, cosine=around(COLLAPSED + 0.005)),
    "no layers": planted("anisotropy", layers=()),
    "outlier below the bound": with_layer(1, outliers=outliers(17, OUTLIER - 0.01)),
    "no outliers": with_layer(1, outliers=()),
    "loss of a head": planted("better_head", best_gain=around(-0.05)),
    # Rounding alone, always the same way.
    "rounding": planted("better_head", best_gain=around(3e-7, 1e-7)),
    "gain at the bound": planted("better_head", best_gain=around(GAIN, 1e-9)),
    "unbounded gain": planted("better_head", best_gain=UNBOUNDED),
    "no gain": planted("better_head", best_gain=dataclasses.replace(UNBOUNDED, value=math.nan)),
    "no best head": planted("better_head", best="", best_gain=around(0.5)),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_fact_is_the_only_finding(name: str) -> None:
    record, code, question, words = FOUND[name]
    (finding,) = findings(record)
    assert (finding.code, finding.question) == (code, question)
    for word in words:
        assert word in finding.sentence


@pytest.mark.parametrize("name", SOUND)
def test_what_is_not_sure_is_no_finding(name: str) -> None:
    assert findings(SOUND[name]) == ()


def test_findings_come_in_the_order_of_importance() -> None:
    record = dataclasses.replace(
        DEFICIENT,
        unreachable=planted("unreachable", never=NEVER).unreachable,
        anisotropy=with_layer(-1, cosine=around(0.99)).anisotropy,
        rank_needed=planted("rank_needed", still_falling=True).rank_needed,
        better_head=planted("better_head", best_gain=around(0.05)).better_head,
    )
    assert [finding.code for finding in findings(record)] == [
        "rank_deficient_head", "unreachable_tokens", "collapsed_layer", "width_is_used", "better_head",
    ]  # fmt: skip
