"""Better heads: a mixture that no softmax of the width can say, and softmaxes that nothing can beat."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fullrank.diagnose.questions import better_head as module
from fullrank.diagnose.questions.better_head import better_head
from fullrank.errors import FullrankError
from fullrank.fit import comparison
from fullrank.fit.controls import plain_layer
from fullrank.fit.states import Part, Parts
from fullrank.fit.trainee import Trainee
from fullrank.heads import Head
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import Softcap
from fullrank.results import Estimate
from fullrank.results.diagnosis import BetterHead, HeadFit

V, D = 64, 8
SETTINGS = comparison.Settings(seeds=1, rates=(0.12, 0.5), epochs=12)
QUICK = dataclasses.replace(SETTINGS, rates=(0.12,), epochs=3)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = 1.2 * gaussian(V, D)


def turn(seed: int) -> Tensor:
    return torch.linalg.qr(gaussian(D, D, seed=seed)).Q


def one_softmax(hidden: Tensor) -> Tensor:
    return hidden @ WEIGHT.T


def turned_softmax(hidden: Tensor) -> Tensor:
    return hidden @ torch.linalg.qr(torch.eye(D) + 0.3 * gaussian(D, D, seed=1)).Q @ WEIGHT.T


def two_softmaxes(hidden: Tensor) -> Tensor:
    """log of 0.5 softmax(W R₁ h) + 0.5 softmax(W R₂ h): full rank, where softmax has rank D."""
    parts = [torch.log_softmax(hidden @ turn(seed) @ WEIGHT.T, dim=-1) for seed in (1, 2)]
    return torch.logaddexp(*parts) - math.log(2)


def parts_of(truth: Callable[[Tensor], Tensor], windows: tuple[int, int, int] = (200, 50, 100)) -> Parts:
    """Windows of 20 Gaussian states, each a block, and tokens from the truth."""
    made = []
    for place, count in enumerate(windows):
        hidden = gaussian(count, 20, D, seed=20 + place)
        draw = torch.Generator().manual_seed(30 + place)
        shares = torch.softmax(truth(hidden).flatten(0, 1), dim=1)
        targets = torch.multinomial(shares, 1, generator=draw).view(count, 20)
        blocks = torch.arange(count)[:, None].expand(count, 20)
        made.append(Part(states=(hidden,), targets=targets, ids=targets, blocks=blocks))
    return Parts(fit=made[0], choose=made[1], held_out=made[2])


FEW = (30, 10, 20)


def model(softcap: float | None = None) -> Head:
    if softcap is None:
        return plain_layer(OutputLayer(weight=WEIGHT, tokens=V))
    return plain_layer(OutputLayer(weight=WEIGHT, tokens=V, pointwise=Softcap(softcap)))


def by_name(found: BetterHead) -> dict[str, HeadFit]:
    return {one.head: one for one in found.fits}


@pytest.mark.slow(reason="eight seconds; tests/fit/test_comparison.py finds one in the default tier")
def test_a_mixture_is_found_where_the_truth_is_a_mixture() -> None:
    parts = parts_of(two_softmaxes)
    truth = two_softmaxes(parts.held_out.states[0]).flatten(0, 1)
    ideal = float(torch.nn.functional.cross_entropy(truth, parts.held_out.targets.flatten()))
    found = better_head(model(), parts, heads=("mos",), measure_power=False, settings=SETTINGS)
    fits = by_name(found)
    assert found.best == "mos"
    assert found.best_gain.low > 0.2
    assert fits["mos"].gain.low > 0.2
    assert fits["mos"].gain_over_equal.low > 0.2
    # Most of the way from the controls to the truth, and never beyond it.
    control = min(fits["softmax"].loss.value, fits["softmax_equal"].loss.value)
    assert ideal < fits["mos"].loss.value < ideal + 0.4 * (control - ideal)
    # A mixture that is forced into a softmax: no refit of the control gets near.
    assert control > ideal + 0.4
    # Without training the split says that there is something, and along how many directions.
    assert found.split.sure >= 1
    assert found.split.found[0] > 2 * found.split.null
    assert found.split.components == module.components_for(found.split.sure)
    assert found.split.gain.low > 0


@pytest.mark.parametrize(
    ("truth", "windows", "rates", "epochs"),
    [
        (one_softmax, (80, 20, 80), (0.12,), 4),
        # tests/fit fits a turned softmax in the default tier.
        pytest.param(one_softmax, (200, 50, 100), (0.12,), 12, marks=pytest.mark.slow),
        pytest.param(turned_softmax, (200, 50, 100), (0.12, 0.5), 12, marks=pytest.mark.slow),
    ],
)
def test_nothing_beats_a_softmax_where_the_truth_is_one(
    truth: Callable[[Tensor], Tensor], windows: tuple[int, int, int], rates: tuple[float, ...], epochs: int
) -> None:
    settings = dataclasses.replace(SETTINGS, rates=rates, epochs=epochs)
    found = better_head(
        model(), parts_of(truth, windows), heads=("mos",), measure_power=False, settings=settings
    )
    assert found.best_gain.low <= 0.001
    assert abs(found.best_gain.value) < 0.01
    assert found.split is not None
    assert found.split.sure == 0
    # What the text teaches any softmax is the refit's, and no head's.
    assert found.refit_gain is not None
    if truth is turned_softmax:
        assert found.refit_gain.low > 0.2
        assert found.control != "original"
    else:
        assert abs(found.refit_gain.value) < 0.01


# Five seconds; tests/fit/test_power.py plants gains too, and this is what the question makes of one.
@pytest.mark.slow
def test_a_planted_gain_says_what_would_have_been_seen() -> None:
    settings = dataclasses.replace(SETTINGS, rates=(0.12,), epochs=6)
    without, found = (
        better_head(
            model(), parts_of(one_softmax, (100, 25, 50)), heads=("mos",), components=2, measure_power=asked,
            settings=settings,
        )
        for asked in (False, True)
    )  # fmt: skip
    assert without.power is None
    assert found.power.planted.value >= module.LEAST_PLANTED
    # What of it was not found may be there in the text as well: the interval reaches further up.
    assert found.best_gain.value == without.best_gain.value
    assert found.best_gain.low == without.best_gain.low
    missed = max(0.0, found.power.planted.value - found.power.found.value)
    assert without.best_gain.high <= found.best_gain.high <= without.best_gain.high + missed
    if math.isfinite(found.power.smallest):
        assert found.power.found.low > 0
        assert found.power.smallest > 0
    else:
        assert found.power.found.value < 0.4 * found.power.planted.value or found.power.found.low <= 0


def test_the_record_says_what_was_done() -> None:
    parts, seen = parts_of(one_softmax, FEW), []
    heads = ("mos", "sigsoftmax", "trunk")
    found = better_head(
        model(), parts, heads=heads, components=3, measure_power=False,
        settings=dataclasses.replace(QUICK, seeds=2),
        progress=lambda label, share: seen.append((label, share)),
    )  # fmt: skip
    fits = by_name(found)
    assert list(fits) == ["softmax", "softmax_equal", *heads]
    assert (found.seeds, found.fit_tokens, found.held_out_tokens, found.trained_rows) == (2, 600, 400, V)
    assert {name: fit.components for name, fit in fits.items()} == {
        "softmax": 1, "softmax_equal": 1, "mos": 3, "sigsoftmax": 1, "trunk": 3,
    }  # fmt: skip
    nothing = Estimate(value=0.0, low=0.0, high=0.0)
    assert fits["softmax"].gain == fits["softmax_equal"].gain_over_equal == nothing
    for fit in found.fits:
        # Seeds of two heads are taken in pairs, and a head with one seed counts it twice.
        if len(fit.gain_by_seed) == len(fits["softmax"].gain_by_seed):
            assert fit.gain.value == pytest.approx(fits["softmax"].loss.value - fit.loss.value, abs=1e-6)
        assert fit.gain.value == pytest.approx(sum(fit.gain_by_seed) / len(fit.gain_by_seed), abs=1e-6)
        assert fit.learning_rate == 0.12
        assert fit.curve[0].steps == 0
        assert fit.steps in [point.steps for point in fit.curve]
    assert len(fits[found.best].gain_by_seed) == 2
    # It is chosen by its loss on the tokens set aside for that.
    chosen = {name: min(point.loss for point in fits[name].curve) for name in heads}
    assert found.best == min(heads, key=lambda name: chosen[name])
    assert found.control in ("original", "softmax", "softmax_equal")
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert {label.removeprefix("fitting ") for label, _ in seen} >= set(fits)
    assert parts.held_out.states[0].shape == (20, 20, D)
    losses = torch.nn.functional.cross_entropy(
        one_softmax(parts.held_out.states[0]).flatten(0, 1), parts.held_out.targets.flatten()
    )
    assert found.original.value == pytest.approx(float(losses), rel=1e-5)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("name", comparison.candidates())
def test_every_head_starts_as_the_model(name: str, softcap: float | None) -> None:
    parts, plain = parts_of(one_softmax, FEW), model(softcap)
    head = module.starting_as(plain, name, parts, 3)
    setting = comparison.setting_for([head], plain, parts, QUICK)
    found = Trainee(head, setting, 0).exact_losses(parts.held_out)
    original = Trainee(plain, setting, 0).exact_losses(parts.held_out)
    # Pieces are not tanh.
    near = 2e-3 if name == "plif" and softcap else 1e-4
    torch.testing.assert_close(found, original, rtol=near, atol=near)


def test_components_have_room_for_the_directions() -> None:
    assert [module.components_for(sure) for sure in range(9)] == [2, 2, 4, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    "wrong", [{"heads": ("mos", "mixtape")}, {"heads": ("mos",), "components": 1}, {"heads": ()}]
)
def test_refusals(wrong: dict[str, object]) -> None:
    with pytest.raises(FullrankError, match=r"expected some of .*sigsoftmax"):
        better_head(model(), parts_of(one_softmax, FEW), settings=QUICK, **wrong)  # type: ignore[arg-type]
