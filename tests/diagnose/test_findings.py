"""Findings: each planted fact triggers its own finding and no other; a healthy model has none."""

import dataclasses
import math

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
    ModelFacts,
    OutlierDimension,
    RankNeeded,
    Spectrum,
    TextFacts,
    Unreachable,
    UnreachableToken,
)


def around(value, reach=0.01):
    return Estimate(value=value, low=value - reach, high=value + reach)


def geometry(layer):
    return LayerGeometry(
        layer=layer,
        name=f"layer {layer}",
        cosine=around(0.3),
        cosine_centred=around(0.0),
        top_variance_share=0.1,
        effective_rank=50.0,
        outliers=(OutlierDimension(dimension=3, variance_share=0.15, kurtosis=5.0),),
        largest_kurtosis=5.0,
        sinks=2,
    )


HEALTHY = Diagnosis(
    model=ModelFacts(
        name="planted", source="object", architecture="Planted", parameters=1000, layers=2, width=64,
        vocabulary=1050, tokens=1000, tied=True, bias=False, logit_scale=1.0, softcap=None,
        final_norm="RMSNorm", storage="float32", dtype="float32", fingerprint="", notes=(),
    ),
    text=TextFacts(
        sources=("text",), sha256="", bytes=4000, tokens=1000, window=128, windows=8, starts_with_bos=False,
        fit_tokens=571, choose_tokens=143, held_out_tokens=286,
    ),
    findings=(),
    loss=Loss(
        nats_per_token=around(3.0), standard_error=0.005, perplexity=around(20.0), bits_per_byte=around(1.0),
        tokens=1000, bytes=4000, blocks=8, by_position=(),
    ),
    spectrum=Spectrum(
        singular_values=(2.0, 1.0), singular_entropy=0.2, effective_rank=52.0, random_effective_rank=60.0,
        stable_rank=10.0, participation_ratio=40.0, condition=30.0, numerical_rank=64, noise=1e-6,
        noise_origin="rounding to float32",
    ),
    anisotropy=Anisotropy(tokens=500, layers=(geometry(0), geometry(1), geometry(2))),
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
    missing=(),
    seconds={},
)  # fmt: skip


def planted(question, **changes):
    """The healthy record with some fields of one answer changed."""
    return dataclasses.replace(
        HEALTHY, **{question: dataclasses.replace(getattr(HEALTHY, question), **changes)}
    )


def with_layer(place, **changes):
    layers = list(HEALTHY.anisotropy.layers)
    layers[place] = dataclasses.replace(layers[place], **changes)
    return planted("anisotropy", layers=tuple(layers))


def found(record):
    return [(one.code, one.question) for one in findings(record)]


def test_a_healthy_model_has_none():
    assert findings(HEALTHY) == ()


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_without_an_answer_is_no_finding(question):
    assert findings(dataclasses.replace(HEALTHY, **{question: None})) == ()


def test_a_record_without_answers_has_none():
    assert findings(dataclasses.replace(HEALTHY, **dict.fromkeys(QUESTIONS))) == ()


def test_a_head_without_full_rank():
    record = planted("spectrum", numerical_rank=50)
    assert found(record) == [("rank_deficient_head", "spectrum")]
    sentence = findings(record)[0].sentence
    assert "rank 50 of 64" in sentence
    assert "14 singular values" in sentence
    # The log-probabilities' rank follows from it, and is not told twice.
    both = dataclasses.replace(record, logprob_rank=planted("logprob_rank", least_rank=50).logprob_rank)
    assert found(both) == [("rank_deficient_head", "spectrum")]


def test_a_vocabulary_smaller_than_the_width_is_no_defect():
    small = dataclasses.replace(HEALTHY.model, tokens=40, vocabulary=40)
    record = dataclasses.replace(planted("spectrum", numerical_rank=40), model=small)
    assert found(record) == []
    record = dataclasses.replace(planted("spectrum", numerical_rank=30), model=small)
    assert found(record) == [("rank_deficient_head", "spectrum")]
    sentence = findings(record)[0].sentence
    assert "rank 30 of 40" in sentence
    assert "10 singular values" in sentence


def test_log_probabilities_without_full_rank():
    record = planted("logprob_rank", least_rank=63, ceiling_reason="width 64, RMSNorm")
    assert found(record) == [("rank_deficient_logprobs", "logprob_rank")]
    assert "rank 63, where 64" in findings(record)[0].sentence
    assert "width 64, RMSNorm" in findings(record)[0].sentence
    # A sample of a bent head has no ceiling but its size.
    assert found(planted("logprob_rank", least_rank=63, method="columns")) == []


def test_unreachable_tokens():
    never = tuple(UnreachableToken(id=number, text="<b>", depth=0.1) for number in (3, 8, 9))
    record = planted("unreachable", never=never, argmaxable=997)
    assert found(record) == [("unreachable_tokens", "unreachable")]
    assert findings(record)[0].sentence == "3 of 1,000 tokens can never be the most probable one."
    record = planted("unreachable", never=never, duplicates=2)
    assert "2 of them because another row is equal" in findings(record)[0].sentence
    assert found(planted("unreachable", undecided=12, padding_never=50)) == []


def test_collapsed_states():
    for changes in ({"cosine": around(0.95)}, {"top_variance_share": 0.95}):
        record = with_layer(-1, **changes)
        assert found(record) == [("collapsed_layer", "anisotropy")]
        assert "95%" in findings(record)[0].sentence or "0.95" in findings(record)[0].sentence
        # Only what enters the output matrix counts.
        assert found(with_layer(1, **changes)) == []
    assert len(findings(with_layer(-1, cosine=around(0.95), top_variance_share=0.95))) == 1
    # An interval that reaches below the bound is not sure.
    assert found(with_layer(-1, cosine=around(COLLAPSED + 0.005))) == []
    assert found(planted("anisotropy", layers=())) == []


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_outlier_dimension_in_any_layer(place):
    outlier = OutlierDimension(dimension=17, variance_share=0.6, kurtosis=9.0)
    record = with_layer(place, outliers=(outlier,))
    assert found(record) == [("outlier_dimension", "anisotropy")]
    sentence = findings(record)[0].sentence
    assert "17" in sentence
    assert "60%" in sentence
    assert f"layer {place}" in sentence
    assert "1 of 3 layers" in sentence
    just = OutlierDimension(dimension=17, variance_share=OUTLIER - 0.01, kurtosis=9.0)
    assert found(with_layer(place, outliers=(just,))) == []
    assert found(with_layer(place, outliers=())) == []


def test_the_worst_outlier_is_named():
    layers = [
        dataclasses.replace(
            layer, outliers=(OutlierDimension(dimension=layer.layer, variance_share=share, kurtosis=3.0),)
        )
        for layer, share in zip(HEALTHY.anisotropy.layers, (0.3, 0.8, 0.5), strict=True)
    ]
    (only,) = findings(planted("anisotropy", layers=tuple(layers)))
    assert "80% of the variance at layer 1; 3 of 3 layers" in only.sentence


def test_a_loss_that_falls_up_to_the_width():
    record = planted("rank_needed", still_falling=True, slope=around(0.1), knee=around(60.0, 3.0))
    assert found(record) == [("width_is_used", "rank_needed")]
    assert "0.100 nats per token (95%: 0.090 to 0.110)" in findings(record)[0].sentence


def test_a_better_head():
    record = planted("better_head", best_gain=around(0.05))
    assert found(record) == [("better_head", "better_head")]
    assert "mos" in findings(record)[0].sentence
    assert "0.0500 nats per token (95%: 0.0400 to 0.0600)" in findings(record)[0].sentence


@pytest.mark.parametrize(
    "gain",
    [
        around(-0.05),
        around(0.005),
        # Rounding alone, always the same way.
        around(3e-7, 1e-7),
        around(GAIN, 1e-9),
        Estimate(value=0.5, low=-math.inf, high=math.inf),
        Estimate(value=math.nan, low=-math.inf, high=math.inf),
    ],
)
def test_gains_that_are_not_sure_or_nothing_are_no_finding(gain):
    assert found(planted("better_head", best_gain=gain)) == []
    assert found(planted("better_head", best="", best_gain=around(0.5))) == []


def test_findings_come_in_the_order_of_what_to_know_first():
    never = (UnreachableToken(id=3, text="x", depth=0.1),)
    record = dataclasses.replace(
        planted("spectrum", numerical_rank=50),
        unreachable=planted("unreachable", never=never).unreachable,
        anisotropy=with_layer(-1, cosine=around(0.99)).anisotropy,
        rank_needed=planted("rank_needed", still_falling=True).rank_needed,
        better_head=planted("better_head", best_gain=around(0.05)).better_head,
    )
    assert [code for code, _ in found(record)] == [
        "rank_deficient_head",
        "unreachable_tokens",
        "collapsed_layer",
        "width_is_used",
        "better_head",
    ]
