"""The scaling law: the published constants come back from points made with them, and so do planted gaps."""

import numpy
import pytest

from fullrank.diagnose.series import scaling
from fullrank.diagnose.series.scaling import Model, NoFitError, predict
from fullrank.results.series import Scaling

TOKENS = 3e11
LARGE = (4.1e8, 1e9, 1.4e9, 2.8e9, 6.9e9)
SMALL = (1.4e7, 7e7, 1.6e8)


def published(parameters: float, tokens: float = TOKENS) -> float:
    """Godey et al.: A and alpha on the Pile, the rest by Hoffmann et al."""
    return float(predict(parameters, tokens, A=119.09, alpha=0.246, B=410.7, beta=0.28, E=1.69))


def model(parameters: float, final: float, *, tokens: float = TOKENS) -> Model:
    return Model(name=f"{parameters:g}", parameters=parameters, tokens=tokens, final=final, best=0.98 * final)


def fitted(models: list[Model], *, is_published: bool = True, fit_from: float = 4e8) -> Scaling:
    return scaling.fit(
        models, metric="loss", unit="nats", shots=None, published=is_published, fit_from=fit_from
    )


def test_published_values() -> None:
    assert [published(size) for size in (4.1e8, 1.6e8, 1.4e7)] == pytest.approx(
        [2.847, 3.083, 4.020], abs=1e-3
    )


def test_law_comes_back_and_small_models_stand_above_it() -> None:
    """Small models that end 8% above the law, as published, are found 8% above it."""
    models = [model(size, published(size)) for size in LARGE] + [
        model(size, 1.08 * published(size)) for size in SMALL
    ]
    found = fitted(models[::-1])
    assert fitted(models[::-1]) == found
    assert found.A.value == pytest.approx(119.09, rel=1e-4)
    assert found.alpha.value == pytest.approx(0.246, rel=1e-4)
    assert (found.B, found.beta, found.E.value, found.fixed) == (410.7, 0.28, 1.69, ("B", "beta", "E"))
    assert [point.parameters for point in found.points] == sorted((*SMALL, *LARGE))
    for point in found.points:
        assert point.fitted == (point.parameters in LARGE)
        gap = 0.0 if point.fitted else 8.0
        assert point.final_gap_percent.value == pytest.approx(gap, abs=1e-3)
        assert point.final_gap_percent.low <= point.final_gap_percent.value <= point.final_gap_percent.high
        assert point.best_gap_percent.value == pytest.approx(0.98 * (100 + gap) - 100, abs=1e-3)


def test_models_may_have_seen_different_tokens() -> None:
    models = [model(size, published(size, 1e10 * size**0.1), tokens=1e10 * size**0.1) for size in LARGE]
    assert fitted(models).alpha.value == pytest.approx(0.246, rel=1e-4)


@pytest.mark.parametrize(
    "is_published",
    # A law with all its parameters free takes twenty times as long to fit.
    [True, pytest.param(False, marks=pytest.mark.slow)],
)
def test_predictions_cover_models_that_scatter(is_published: bool) -> None:
    """Of 80 laws with 1% scatter between 5 models, 95% of predictions for one more model should hold."""
    random = numpy.random.default_rng(3)
    inside = 0
    for _ in range(80):
        noise = numpy.exp(0.01 * random.standard_normal(6))
        models = [
            model(size, published(size) * one) for size, one in zip((1.6e8, *LARGE), noise, strict=True)
        ]
        point = fitted(models, is_published=is_published).points[0]
        inside += point.predicted.low <= point.final <= point.predicted.high
        # The gap tells the same: whether the model lies where one more model would.
        assert (point.final_gap_percent.low <= 0 <= point.final_gap_percent.high) == (
            point.predicted.low <= point.final <= point.predicted.high
        )
    assert inside >= 71


def test_a_model_apart_widens_the_interval() -> None:
    sizes = (4.1e8, 7e8, 1e9, 1.4e9, 2e9, 2.8e9, 4e9, 6.9e9, 1.2e10)
    plain, apart = (
        fitted([model(size, published(size) * (share if size == 2e9 else 1.001)) for size in sizes])
        for share in (1.0, 1.2)
    )
    assert apart.alpha.high - apart.alpha.low > 20 * (plain.alpha.high - plain.alpha.low)


def test_free_law_comes_back() -> None:
    models = [
        model(size, float(predict(size, TOKENS, A=500.0, alpha=0.3, B=0.0, beta=1.0, E=0.7)))
        for size in (*LARGE, 1.2e10)
    ]
    found = fitted(models, is_published=False)
    assert found.alpha.value == pytest.approx(0.3, rel=1e-3)
    assert found.A.value == pytest.approx(500, rel=1e-2)
    assert found.E.value == pytest.approx(0.7, rel=1e-3)
    assert (found.B, found.beta, found.fixed) == (None, None, ())


@pytest.mark.parametrize(
    ("models", "is_published", "words"),
    [
        ([model(4.1e8, 2.8), model(7e7, 3.3)], True, ["1 model of 1 size", "needs 4", "--fit-from"]),
        ([model(4.1e8, 2.8 + place) for place in range(5)], True, ["5 models of 1 size"]),
        ([model(size, published(size)) for size in LARGE[:3]], True, ["3 models", "needs 4"]),
        ([model(size, published(size)) for size in LARGE[:4]], False, ["4 models", "needs 5"]),
        ([model(size, 1.5) for size in LARGE], True, ["not above the published", "1.5", "--web-text"]),
        ([model(size, 2.0, tokens=size) for size in LARGE], False, ["different numbers of tokens"]),
        ([model(size, -0.1) for size in LARGE], False, ["not positive"]),
    ],
)
def test_refusals(models: list[Model], is_published: bool, words: list[str]) -> None:
    with pytest.raises(NoFitError) as raised:
        fitted(models, is_published=is_published)
    for word in words:
        assert word in str(raised.value)


def test_names() -> None:
    parameters = {
        "pythia-70m": 7e7, "EleutherAI/pythia-410m-deduped": 4.1e8, "pythia-1b-bf16": 1e9, "6.9b": 6.9e9,
        "pythia-2.8b": 2.8e9, "pythia-70m-0.25MtokBS": 7e7, "pythia-160m-0.5MtokBS": 1.6e8, "gpt2": None,
        "pythia-14m-seed8": 1.4e7, "SmolLM2-135M-Instruct": 1.35e8, "0.25MtokBS": None, "t5-11billion": None,
    }  # fmt: skip
    assert {name: scaling.parameters_of(name) for name in parameters} == parameters
    batches = dict.fromkeys(parameters) | {
        "pythia-70m-0.25MtokBS": 262_144, "pythia-160m-0.5MtokBS": 524_288, "0.25MtokBS": 262_144,
    }  # fmt: skip
    assert {name: scaling.batch_of(name) for name in parameters} == batches
