"""One record of every kind that has a page, made by hand: nothing is measured, and every field is filled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from fullrank.results import (
    QUESTIONS,
    Collapse,
    Corpus,
    CorpusCurve,
    CorpusNull,
    Diagnosis,
    Estimate,
    Generation,
    Grid,
    Ladder,
    LadderRung,
    Provenance,
    Series,
    Templates,
    Upgrade,
    attention,
    diagnosis,
    generation,
    histalign,
    series,
    upgrade,
)
from fullrank.results import grid as grids
from tests.studies.made_runs import made_by_hand

HOSTILE = (
    "\u202egnp.exe\u2066\x00\x1b[31m\ud800\u200b\u2028x\u0301\u0301\u0301\u0301"
    "</svg></script><script>alert(1)</script><img src=x onerror=alert(2)>\"' {{ 7 * 7 }}"
)
PROVENANCE = Provenance(
    command="fullrank demo --out runs/demo", commit="3f9c1e0a7d2b4c5e6f708192a3b4c5d6e7f80912",
    time="2026-03-05T14:02:11+00:00", device="cpu, 2 threads", seed=17,
    versions={"python": "3.12.3", "torch": "2.13.0"},
)  # fmt: skip
SOFTMAX_GAIN = Estimate(value=0.0, low=0.0, high=0.0)


def near(value: float, half: float = 0.01) -> Estimate:
    return Estimate(value=value, low=value - half, high=value + half)


def changed(value: Any, change: Callable[[Any], Any], keep: tuple[str, ...] = ()) -> Any:
    """The record with every leaf replaced, except in the fields of `keep`. A dictionary has its entries under
    the old keys and under the changed ones."""
    if isinstance(value, tuple):
        return tuple(changed(item, change, keep) for item in value)
    if isinstance(value, dict):
        items = {key: changed(item, change, keep) for key, item in value.items()}
        return items | {change(key): item for key, item in items.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.name not in keep]
        return dataclasses.replace(
            value, **{name: changed(getattr(value, name), change, keep) for name in fields}
        )
    return change(value)


def emptied(record: Any) -> Any:
    """The record with every tuple and dictionary empty and every count 0."""
    empty = {
        field.name: type(value)() if isinstance(value, tuple | dict) else emptied(value)
        if dataclasses.is_dataclass(value) else 0 if type(value) is int else value
        for field in dataclasses.fields(record)
        for value in [getattr(record, field.name)]
    }  # fmt: skip
    return dataclasses.replace(record, **empty)


def rung(
    head: str, width: int, kl: float, floor: float, least_rank: int, components: int = 1
) -> LadderRung:  # fmt: skip
    return LadderRung(
        head=head, width=width, components=components, parameters=1000 * width + components,
        least_rank=least_rank, kl=kl, floor=floor, seconds=11.25,
    )  # fmt: skip


LADDER = Ladder(
    contexts=512, vocabulary=256, least_rank=24, small_width=8, steps=4000, entropy=3.41273,
    rungs=(
        rung("mos", 8, 0.06231, 0.40871, 255, components=8),
        rung("softmax", 24, 0.0007123, 3.1e-13, 24),
        rung("softmax", 8, 0.42137, 0.40871, 8),
        rung("softmax", 16, 0.11874, 0.11021, 16),
        rung("sigsoftmax", 8, 0.30111, 0.40871, 117),
    ),
)  # fmt: skip
ODD_LADDER = Ladder(
    contexts=3, vocabulary=5, least_rank=4, small_width=2, steps=1, entropy=math.nan,
    rungs=(
        rung("softmax", 2, math.inf, 0.0, 2),
        rung("softmax", 2, 0.3, 0.2, 2),
        rung("softmax", 4, 0.0, math.nan, 4),
        rung(HOSTILE, 2, math.nan, 0.21, 3),
        rung("a_name_of_many_words_" * 9, 2, -1e-12, 0.21, 3, components=12345),
        rung("nul \x00, half a pair \ud800, two\nlines", 2, 1e-9, math.nan, 0),
    ),
)  # fmt: skip


def geometry(layer: int, last: int) -> diagnosis.LayerGeometry:
    depth = layer / last
    outliers = (diagnosis.OutlierDimension(dimension=139, variance_share=0.21, kurtosis=14.2),)
    return diagnosis.LayerGeometry(
        layer=layer, name="embedding" if layer == 0 else "final norm" if layer == last else f"block {layer}",
        cosine=near(0.12 + 0.55 * depth, 0.015), cosine_centred=near(0.004 + 0.02 * depth, 0.004),
        top_variance_share=0.11 + 0.4 * depth, effective_rank=310.5 - 150 * depth * (1 - depth),
        outliers=outliers if layer == 2 else (), largest_kurtosis=14.2, sinks=517,
    )  # fmt: skip


def fit(head: str, gain: Estimate, components: int = 1) -> diagnosis.HeadFit:
    return diagnosis.HeadFit(
        head=head, components=components, parameters=28_311_552 + 331_776 * components,
        loss=near(3.2411 - gain.value, 0.041), gain=gain, gain_over_equal=near(gain.value - 0.0031, 0.005),
        gain_by_seed=(gain.value - 0.0004, gain.value + 0.0003, gain.value + 0.0001),
        learning_rate=0.001, steps=600,
    )  # fmt: skip


def rank_point(rank: int) -> diagnosis.RankPoint:
    refitted = 3.236 + 0.9 * (rank / 40 + 1) ** -1.6 + 2.1 * math.exp(-rank / 14)
    return diagnosis.RankPoint(
        rank=rank, truncated=near(refitted + 2.5 * (1 - rank / 576) ** 2 + 0.006, 0.041),
        refitted=near(refitted, 0.04), learning_rate=0.002,
    )  # fmt: skip


SINGULAR_VALUES = (96.0, *(24.0 * (1 - place / 640) ** 0.7 * (place + 1) ** -0.12 for place in range(1, 576)))
DIAGNOSIS = Diagnosis(
    model=diagnosis.ModelFacts(
        name="SmolLM2-135M", source="directory", architecture="LlamaForCausalLM", parameters=134_515_008,
        layers=4, width=576, vocabulary=49_152, tokens=49_149, tied=True, bias=False, logit_scale=1.0,
        softcap=None, final_norm="LlamaRMSNorm", storage="bfloat16", dtype="float32",
        fingerprint="9b1c62d0f4a8e753",
        notes=("The output matrix is the input embedding (tied).", "3 rows of padding are left out."),
    ),
    text=diagnosis.TextFacts(
        sources=("wikitext-2/test.txt",), sha256="173c87a53759e020", bytes=1_256_449, tokens=286_720,
        window=1024, windows=280, starts_with_bos=False, fit_tokens=172_032, choose_tokens=28_672,
        held_out_tokens=86_016,
    ),
    findings=(
        diagnosis.Finding(
            code="unreachable_tokens", question="unreachable",
            sentence="4 tokens can never be the most probable, whatever the context.",
        ),
    ),
    loss=diagnosis.Loss(
        nats_per_token=near(3.2404, 0.037), standard_error=0.0189,
        perplexity=Estimate(value=25.54, low=24.62, high=26.5), bits_per_byte=near(1.0669, 0.0122),
        tokens=286_720, bytes=1_256_449, blocks=280,
        by_position=tuple(
            diagnosis.PositionLoss(
                first=2**power - 1, last=2 ** (power + 1) - 2,
                nats=near(3.05 + 4.4 * 0.62**power, 0.5 * 0.8**power),
            )
            for power in range(10)
        ),
    ),
    spectrum=diagnosis.Spectrum(
        singular_values=SINGULAR_VALUES, singular_entropy=0.1276, effective_rank=507.2,
        random_effective_rank=573.9, stable_rank=9.41, participation_ratio=48.3, condition=39.6,
        numerical_rank=576, noise=0.1312, noise_origin="rounding to bfloat16, entry by entry",
    ),
    anisotropy=diagnosis.Anisotropy(tokens=20_480, layers=tuple(geometry(layer, 4) for layer in range(5))),
    logprob_rank=diagnosis.LogprobRank(
        least_rank=576, gap_rank=576, gap=51_200.0, noise_floor=0.0021, ceiling=576,
        ceiling_reason="the width: RMSNorm keeps it, and there is no bias", contexts=2048, columns=49_152,
        method="core", singular_values=(*(value * 640 for value in SINGULAR_VALUES), 6.1e-4, 5.2e-4),
    ),
    rank_needed=diagnosis.RankNeeded(
        points=tuple(map(rank_point, (8, 16, 32, 64, 128, 192, 256, 384, 512, 576))),
        original=near(3.2583, 0.041), tolerance=0.01, knee=Estimate(value=301.4, low=250.2, high=379.8),
        truncated_knee=Estimate(value=541.0, low=533.0, high=548.5), still_falling=False,
        slope=Estimate(value=0.0105, low=0.0081, high=0.0126),
    ),
    better_head=diagnosis.BetterHead(
        original=near(3.2583, 0.041),
        fits=(
            fit("softmax", SOFTMAX_GAIN),
            fit("softmax_equal", Estimate(value=0.0031, low=-0.0012, high=0.0074)),
            fit("mos", Estimate(value=0.0154, low=0.0078, high=0.0231), 4),
            fit("moss", Estimate(value=0.0171, low=0.0089, high=0.0252), 4),
            fit("plif", Estimate(value=-0.0008, low=-0.0031, high=0.0016)),
        ),
        best="moss", best_gain=Estimate(value=0.0140, low=0.0061, high=0.0218), seeds=3,
        fit_tokens=172_032, held_out_tokens=86_016, trained_rows=17_411,
    ),
    unreachable=diagnosis.Unreachable(
        vocabulary=49_149, argmaxable=49_139,
        never=tuple(
            diagnosis.UnreachableToken(id=identity, text=text, depth=depth)
            for identity, text, depth in (
                (0, "<|endoftext|>", 0.41), (4271, " SolidGoldMagikarp", 0.12),
                (31_007, "\u3000\u3000", 0.033), (48_801, " \u0645\u0631\u062d\u0628\u0627", 0.0081),
            )
        ),
        duplicates=1, undecided=6, padding_never=3, capacity=112, capacity_interval=(108, 117),
        capacity_samples=64, seconds=418.2,
    ),
    gradient=diagnosis.Gradient(
        kept_norm=near(0.1871, 0.0044), kept_energy=near(0.0462, 0.0021), null_norm=0.1083,
        null_energy=0.01172, tokens=8192, quantiles=(0.061, 0.118, 0.164, 0.231, 0.402),
    ),
    missing=(),
    seconds={name: 12.5 * (place + 1) for place, name in enumerate(QUESTIONS)},
)  # fmt: skip
PARTIAL = dataclasses.replace(
    DIAGNOSIS, findings=(), spectrum=None, rank_needed=None, better_head=None, gradient=None,
    missing=(
        diagnosis.Missing(question="rank_needed", reason="interrupted after 3 of 9 ranks."),
        diagnosis.Missing(question="better_head", reason="too few tokens: 900, needs 20,000."),
        diagnosis.Missing(question="gradient", reason="not asked."),
    ),
)  # fmt: skip
"""Half of the questions have no answer, and one of them no reason."""


def wider() -> Diagnosis:
    """Another model on the same text: wider, its loss still falls with rank, and no head gains."""
    needed, better = DIAGNOSIS.rank_needed, DIAGNOSIS.better_head
    assert needed is not None
    assert better is not None
    return dataclasses.replace(
        DIAGNOSIS, findings=(),
        model=dataclasses.replace(
            DIAGNOSIS.model, name="Pythia-160M", width=768, vocabulary=50304, tokens=50277, tied=False
        ),
        rank_needed=dataclasses.replace(
            needed,
            points=tuple(dataclasses.replace(point, rank=point.rank * 4 // 3) for point in needed.points),
            original=near(3.361, 0.04), knee=Estimate(value=740.0, low=620.0, high=768.0), still_falling=True,
        ),
        better_head=dataclasses.replace(
            better, best="mos", best_gain=Estimate(value=0.0021, low=-0.0019, high=0.0058)
        ),
    )  # fmt: skip


def length(value: int) -> attention.AttentionLength:
    def critical(statistic: str, size: int | None, told: tuple[int, int]) -> attention.AttentionCritical:
        return attention.AttentionCritical(
            statistic=statistic, sizes=(2, 16), p=(1e-9, 0.4), critical=size, heads_told=told, heads=4
        )

    return attention.AttentionLength(
        length=value, visible=value - 0.5, entropy=near(1.9), effective_tokens=near(0.13 * value, 0.4),
        first_mass=near(0.3123), log_largest=3.25, log_smallest=-7.5, score_range=10.75, exponent=71.3,
        envelope_says=0.0, sensitivity=near(0.213),
        critical=(critical("f", 16 if value == 64 else None, (4, 2)), critical("distance", None, (4, 4))),
    )  # fmt: skip


def normaliser(name: str, label: str, change: Estimate | None, reason: str) -> attention.AttentionNormaliser:
    return attention.AttentionNormaliser(
        name=name, label=label, effective_tokens=8.3, first_mass=0.31, zeros=0.0, total=1.0, separable=0.637,
        separable_random=0.07, loss=None if reason else near(3.1212), change=change, reason=reason,
    )  # fmt: skip


ATTENTION = attention.Attention(
    weights="eager", scores="queries and keys", difference=3.1e-7, eager_difference=4.2e-7,
    eager_positions=64, layers=2, heads=4, sliding_layers=(1,), windows=12, queries=2, reference_size=16,
    level=0.01, false_share=0.05, tests=4, step=1e-3, by_length=(length(32), length(64)),
    by_size=tuple(
        attention.AttentionSets(
            length=tokens, size=size, separable=near(0.637), separable_random=near(0.0712),
            precision=near(0.21), precision_random=near(0.04), f=near(0.24), f_random=near(0.045), mass=0.82,
            mass_random=0.03, distance=1054.8, distance_random=62.8, bound=3650.9, bound_random=174.9,
            exceeded=0,
        )
        for tokens in (32, 64)
        for size in (1, 16)
    ),
    by_temperature=tuple(
        attention.AttentionTemperature(
            temperature=temperature, exact=0.2 / temperature, exact_largest=0.48 / temperature,
            bound=0.5 / temperature, estimated=0.01 / temperature, estimated_largest=0.02 / temperature,
            above_quarter=0.3259,
        )
        for temperature in (0.1, 1.0, 4.0)
    ),
    by_head=tuple(
        attention.AttentionHead(
            layer=layer, head=head, key_head=head // 2, visible=63.5, entropy=1.2,
            effective_tokens=1.0 + layer + head, first_mass=0.1 * head, largest=0.4, sensitivity=0.21,
            separable=0.5 + 0.1 * head, separable_random=0.07, f=0.3, f_random=0.05,
            critical_f=None if head else 2, critical_distance=None,
        )
        for layer in range(2)
        for head in range(2)
    ),
    loss=near(3.1212), loss_tokens=1536,
    normalisers=(
        normaliser("softmax", "softmax", None, ""),
        normaliser("sparsemax", "sparsemax", None, "sparsemax and entmax15 need the entmax package"),
        normaliser("sink", "softmax with a sink", near(0.1788, 0.02), ""),
    ),
    kept=(
        attention.AttentionKept(size=16, change=near(0.7), relative=0.23),
        attention.AttentionKept(size=64, change=near(0.01), relative=0.004),
    ),
    tolerance=0.01, effective_size=64,
    notes=("Queries are grouped: several heads share their keys and values.",),
)  # fmt: skip
ATTENTION_ALONE = dataclasses.replace(
    DIAGNOSIS, **dict.fromkeys(QUESTIONS), findings=(), attention=ATTENTION
)  # fmt: skip


def curve(model: str, values: tuple[float, ...], metric: str = "ppl", errors: bool = True) -> series.Curve:
    return series.Curve(
        model=model, shots=0, metric=metric, unit="perplexity", lower_is_better=True,
        steps=tuple(range(0, 1000 * len(values), 1000)), values=values,
        standard_errors=tuple(0.04 * value for value in values) if errors else None, dropped=0,
    )  # fmt: skip


def saturation(of: series.Curve, **changes: Any) -> series.Saturation:
    best = min(of.values, default=math.nan)
    record = series.Saturation(
        model=of.model, shots=of.shots, metric=of.metric, outcome=series.NOT_TURNED,
        best_step=of.steps[of.values.index(best)] if of.steps else 0, best_value=best,
        final_step=of.steps[-1] if of.steps else 0, final_value=of.values[-1] if of.values else math.nan,
        lost_percent=37.25, interval=(11.5, 63.5), p_value=0.0321, adjusted_p=0.0642,
        smallest_rise_percent=77.5, turned_up_to=math.nan, noise_correlation=0.8, first_step=0,
        points=len(of.steps), noise_percent=4.25, noise_origin="standard errors", reason="",
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


TURNED, STEADY = curve("p-70m", (400.0, 94.3, 120.0, 142.4)), curve("p-1b", (90.0, 20.0, 9.0, 7.5))
SCALING = series.Scaling(
    metric="loss", unit="nats", shots=None, A=near(119.09, 12.0), alpha=near(0.246, 0.02), B=410.7,
    beta=0.28, E=Estimate(value=1.69, low=1.69, high=1.69), fixed=("B", "beta", "E"), fit_from=4e8,
    points=tuple(
        series.ScalingPoint(
            model=name, parameters=size, tokens=3e11, final=3.3, best=3.2, predicted=near(3.05, 0.3),
            final_gap_percent=near(8.125, 0.8), best_gap_percent=near(4.5, 0.4), fitted=size > 4e8,
        )
        for name, size in (("p-70m", 7e7), ("p-1b", 1e9))
    ),
    note="parameter counts were read from the names",
)  # fmt: skip
SERIES = Series(
    source="curves.csv", metric="ppl",
    curves=(STEADY, TURNED, curve("p-1b", (0.0, 0.2, 0.4, 0.5), metric="sciq_acc", errors=False)),
    saturation=(
        saturation(STEADY), saturation(TURNED, outcome=series.TURNED, p_value=0.001, lost_percent=51.0),
    ),
    level=0.01, material_percent=2.0, scaling_reason="",
    scaling=SCALING,
    controls=("p-70m and p-70m-deduped share the size",), notes=("2 values were left out",),
)  # fmt: skip


def training_text(*sources: str) -> upgrade.TrainingText:
    return upgrade.TrainingText(
        sources=sources or ("book.txt",), sha256="", window=64, fit_tokens=1200, choose_tokens=300,
        held_out_tokens=600,
    )  # fmt: skip


def trained_head(head: str, before: float, after: float) -> upgrade.TrainedHead:
    return upgrade.TrainedHead(
        head=head, parameters=4321, trained=5000, before=near(before), before_error=0.1, after=near(after),
        after_error=0.1, choose_loss=after, after_by_seed=(after,), rate=0.1, steps=(7,), seconds=1.0,
    )  # fmt: skip


def upgraded_model(name: str = "someone/small-model", source: str = "hub") -> upgrade.UpgradedModel:
    return upgrade.UpgradedModel(
        name=name, source=source, architecture="LlamaForCausalLM", fingerprint="", parameters=100_000,
        width=16, vocabulary=256, tied=True,
    )  # fmt: skip


TRAINING = upgrade.UpgradeTraining(
    text=training_text(), unfrozen=False, rows=9, exact=True, seeds=2, control="softmax_equal",
    gain=near(0.0312), gain_by_seed=(0.03, 0.0324),
    fits=(
        trained_head("softmax", 3.1, 2.9), trained_head("softmax_equal", 3.1, 2.8),
        trained_head("mos", 3.1, 2.7688),
    ),
    saved_seed=1, saved_loss=2.7654, untied=True, seconds=1.0,
    candidates=(
        upgrade.Candidate(head="mos", choose_loss=2.77, control_loss=2.81, seconds=3.0, reason=""),
        upgrade.Candidate(
            head="plif", choose_loss=math.nan, control_loss=math.nan, seconds=0.0, reason="W is sharded"
        ),
    ),
)  # fmt: skip
UPGRADE = Upgrade(
    model=upgraded_model(), asked="mos", head="mos", options={"components": "4"}, parameters=123_456,
    saved=True, preserved=upgrade.Preserved(tokens=508, kl=near(0.0), largest=1e-6), training=TRAINING,
    verdict="mos gained +0.0312 nats per token (95%: +0.0212 to +0.0412).", notes=("The body was frozen.",),
)  # fmt: skip
DISTANCE = upgrade.Distance(
    before=near(0.5), before_error=0.1, after=near(0.4), after_error=0.1, after_by_seed=(0.4,)
)
TAUGHT = dataclasses.replace(
    UPGRADE,
    training=dataclasses.replace(
        TRAINING,
        fits=tuple(dataclasses.replace(head, distance=DISTANCE) for head in TRAINING.fits),
        teacher=upgrade.Teaching(
            model=upgraded_model("Tutor", "directory"), loss=near(2.5), control="softmax", gain=near(0.02),
            gain_by_seed=(0.02,),
        ),
    ),
    verdict="In KL from Tutor, mos gained +0.02. In loss on the text, mos showed no gain.",
)  # fmt: skip
COLLAPSE = Collapse(
    model="small-model-mos", head="mos", architecture="LlamaForCausalLM", text=training_text(), rows=9,
    start=near(0.2), cost=near(0.0213, 0.002), upgraded_loss=near(2.5), plain_loss=near(2.6), steps=3,
    seconds=1.0, notes=("The plain model is tied.",), base_model="someone/small-model",
)  # fmt: skip

DIMENSIONS = {"50": 1523, "90": 24_117, "99": 29_950}
ERRORS = (0.97, 0.85, 0.7, 0.55, 0.21, 0.008)


def corpus_curve(construction: str, **changes: Any) -> CorpusCurve:
    record = CorpusCurve(
        construction=construction, contexts=1_821_457, vocabulary=33_278,
        least=5 if construction == "frequent" else None, prior=3.981 if construction == "log" else None,
        norm=1333.5, singular_values=tuple(314.9 / place for place in range(1, 257)),
        singular_value_error=1e-6, method="lanczos", bound="Within 1e-06 of true ones.",
        dimensions=DIMENSIONS,
        dimension_limits={name: (value - 3, value + 4) for name, value in DIMENSIONS.items()},
        dimension_intervals={name: near(float(value), 222.0) for name, value in DIMENSIONS.items()},
        beyond_first={"50": 7950, "90": 30_789, "99": 33_159},
        beyond_first_limits={"50": (7928, 7968), "90": (30_789, 30_789), "99": (33_156, 33_162)},
        grid=(1, 10, 100, 1000, 10_000, 30_000), relative_error=ERRORS,
        relative_error_limits=(
            tuple(0.99 * error for error in ERRORS), tuple(1.01 * error for error in ERRORS)
        ),
        relative_error_interval=(
            (*(0.9 * error for error in ERRORS[:-1]), 0.0),
            tuple(min(1.1 * error, 1.0) for error in ERRORS),
        ),
        blocks=20, seconds=40.0,
        null=CorpusNull(
            dimensions={"50": 1444, "90": 23_023, "99": 28_028},
            relative_error=tuple(0.8 * error for error in ERRORS),
        ),
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


def corpus(name: str, **changes: Any) -> Corpus:
    record = Corpus(
        name=name, sources=("train.txt",), sha256="00", tokenizer="words", order=5, engine="duckdb",
        documents=629, bytes=10_797_148, replaced=7, tokens=2_088_628, pairs=2_086_112, contexts=1_821_457,
        entries=1_968_858, vocabulary=33_278, used=33_277, single=1_744_147,
        curves=tuple(map(corpus_curve, ("probability", "weighted", "frequent", "log"))),
        seconds={"count": 3.0, "probability": 40.0}, notes=("7 places were not UTF-8",),
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


def template_method(name: str, share: float, trained: bool) -> histalign.TemplateMethod:
    change = near(0.0, 0.0) if not trained else near(0.03, 0.005)
    return histalign.TemplateMethod(
        method=name, added=int(name == "histalign"),
        accuracies=tuple(
            histalign.TemplateAccuracy(
                split=split, scores=scores, prompts=60, distracted=(0.1, 0.12),
                top=dict.fromkeys(("2", "5", "10", "25"), (share, share + 0.02)),
            )
            for split in ("train", "one overlap", "no overlap")
            for scores in ("full", "memory")
        ),
        losses=tuple(
            histalign.TextLoss(
                tokens=tokens, count=1234, loss=near(3.4, 0.1), change=change, by_seed=(3.38, 3.42)
            )
            for tokens in ("text", "first", "repeated", "other")
        ),
        least_rank=(576, 576), memory_weight=(-3.25, -3.5) if name == "histalign" else (),
        last_loss=(1.234, 1.25) if trained else (), seconds=(61.0, 59.0),
        rate=3e-4 if trained else None, tried={"0.0001": 1.3, "0.0003": 1.2} if trained else {},
    )  # fmt: skip


TEMPLATES = Templates(
    model="SmolLM2-135M", fingerprint="9b1c", width=576, vocabulary=49_152, layers=4, trained=14_161_920,
    seeds=(0, 1), epochs=3, steps=270, batch=20, text_tokens=1024, rates={"trime": 3e-4}, margin=2.0,
    align=0.5, as_published=False, temperature=24.0, memory_start=-8.0, text=("wikitext-2/train.txt",),
    text_sha256="17", window=512, rank_contexts=1024, rank_tokens=2048,
    methods=(
        template_method("base", 0.31, trained=False), template_method("softmax", 0.62, trained=True),
        template_method("histalign", 0.78, trained=True),
    ),
    notes=("One story was left out.",),
)  # fmt: skip


def writer(name: str, trained: bool) -> generation.GenerationMethod:
    text = generation.GeneratedText(
        prompt="name: Strada, area: city centre\nIn words:",
        pieces=tuple(
            generation.Piece(text=text, kind=kind)
            for text, kind in (("Strada", "copied"), (" serves ", "plain"), ("pizza", "invented"))
        ),
    )  # fmt: skip
    return generation.GenerationMethod(
        method=name, added=int(name == "trime"), rate=1e-4 if trained else None,
        tried={"0.0001": 1.5, "0.0003": 1.6} if trained else {}, losses=(1.51, 1.53),
        scores={"slots said": (0.8, 0.9), "BLEU": (41.2, 42.4)},
        memory_weight=(-4.0, -4.5) if name == "trime" else (), texts=(text,), seconds=(100.0, 101.0),
        ordinary=(3.3, 3.31),
    )  # fmt: skip


GENERATION = Generation(
    task="restaurants", model="SmolLM2-135M", fingerprint="9b1c", data="e2e", data_sha256="17",
    judge="", layers=4, trained=14_161_920, seeds=(0, 1), steps=500, batch=16, prompts=1, new_tokens=64,
    temperature=24.0, memory_start=-8.0, people={"slots said": 0.97},
    methods=(writer("base", trained=False), writer("trime", trained=True)),
    notes=("A text was cut.",), text=("wikitext-2/train.txt",),
)  # fmt: skip


def answer(label: str, unit: str, low: float = -0.3, sentence: str = "") -> grids.GridAnswer:
    return grids.GridAnswer(
        label=label, effect=Estimate(value=-0.2, low=low, high=-0.1), seeds=3, seen=0.1, decision="falls",
        sentence=sentence or f"{label}: falls", unit=unit,
    )  # fmt: skip


def grid(name: str, *runs: grids.GridRun, answers: tuple[grids.GridAnswer, ...] = (), **changes: Any) -> Grid:
    statement = grids.Statement(
        question="Does it?", hypothesis="It does.", comparison="A against B.", smallest=0.01, rule="By sign."
    )
    runs = tuple(dataclasses.replace(run, made=PROVENANCE) for run in runs)
    record = Grid(
        name=name, statement=statement, declared="", small=False, runs=runs, missing=(), answers=answers
    )
    return dataclasses.replace(record, **changes)


def run(name: str, valid: float | None, seed: int = 0, **factors: str) -> grids.GridRun:
    monitors = {"head_effective_rank_share": 0.7 + 0.01 * seed, "gradient_norm": 0.5 + seed,
                "attention_sensitivity": 0.2}  # fmt: skip
    losses = (6.0, 5.0, 4.0 + seed / 10)
    return made_by_hand(name, valid, seed=seed, losses=losses, monitors=monitors, **factors)


GRIDS = {
    "grid": grid(
        "width", run("a", 4.0, width="8"), run("b", 3.5, width="16"), run("trial", 5.0, width="8", trial="1"),
        dataclasses.replace(run("c", None, width="8"), failure="not finite", after_looking=True),
        answers=(
            answer("rank", "share of the width"),
            answer("end", grids.NATS, sentence="end: falls; learnt by 3 of 3"),
            answer("lost", grids.NATS, -math.inf),
        ),
        missing=("d",), small=True, settings=("batch=2",),
    ),
    "grid_attention": grid(
        "attention",
        *(
            run(f"{name}-{heat}-{seed}", 4.0 + seed / 10, seed, normaliser=name, temperature=heat)
            for name in ("softmax", "sigmoid")
            for heat in ("0.5", "1")
            for seed in (0, 1)
        ),
        answers=tuple(answer(str(number), grids.NATS) for number in range(13)),
    ),
    # By rank: c has no wide body, and the second seed of b has no partner.
    "grid_domains": grid(
        "domains",
        *(
            run(f"{name}{width}-{seed}", loss, seed, domain=name, width=str(width), frequent=rank)
            for name, rank, width, losses in (
                ("a", "40", 8, (2.5, 2.7)), ("a", "40", 32, (2.0, 2.0)), ("b", "10", 8, (3.1,)),
                ("b", "10", 32, (3.0, 2.0)), ("c", "20", 8, (1.0,)),
            )
            for seed, loss in enumerate(losses)
        ),
    ),
    "grid_published": grid(
        "published", dataclasses.replace(run("mos-seed0", 4.0, head="mos"), seconds=1800.0)
    ),
}  # fmt: skip
