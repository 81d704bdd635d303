"""Better heads: a mixture that no softmax of the width can say, and a softmax that nothing can beat."""

import math

import pytest
import torch

from fullrank.diagnose.questions import better_head as module
from fullrank.diagnose.questions.better_head import better_head
from fullrank.errors import FullrankError
from fullrank.fit import frozen
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import Softcap
from fullrank.results import Estimate

V, D = 64, 8


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = 1.2 * gaussian(V, D)


def turn(seed):
    return torch.linalg.qr(gaussian(D, D, seed=seed)).Q


def one_softmax(hidden):
    return hidden @ WEIGHT.T


def turned_softmax(hidden):
    return hidden @ torch.linalg.qr(torch.eye(D) + 0.3 * gaussian(D, D, seed=1)).Q @ WEIGHT.T


def two_softmaxes(hidden):
    """log of 0.5 softmax(W R₁ h) + 0.5 softmax(W R₂ h): full rank, where softmax has rank D."""
    parts = [torch.log_softmax(hidden @ turn(seed) @ WEIGHT.T, dim=1) for seed in (1, 2)]
    return torch.logaddexp(*parts) - math.log(2)


def setting(truth, counts=(4000, 1000, 2000), pointwise=None):
    parts = []
    for place, count in enumerate(counts):
        hidden = gaussian(count, D, seed=20 + place)
        chosen = torch.Generator().manual_seed(30 + place)
        targets = torch.multinomial(torch.softmax(truth(hidden), dim=1), 1, generator=chosen)[:, 0]
        parts.append(frozen.Tokens(hidden=hidden, targets=targets, blocks=torch.arange(count) // 20))
    output = OutputLayer(weight=WEIGHT, tokens=V, **({} if pointwise is None else {"pointwise": pointwise}))
    return frozen.setting(output, frozen.Split(fit=parts[0], choose=parts[1], held_out=parts[2]))


def by_name(found):
    return {one.head: one for one in found.fits}


def test_a_mixture_is_found_where_the_truth_is_a_mixture():
    chosen = setting(two_softmaxes, (4000, 500, 1000))
    held_out = chosen.split.held_out
    scale = float(chosen.output.weight[0, 0] / WEIGHT[0, 0])
    truth = two_softmaxes(held_out.hidden * scale)
    ideal = float(torch.nn.functional.cross_entropy(truth, held_out.targets))
    found = better_head(chosen, heads=("mos",), epochs=20, rates=(0.5,), seeds=2)
    fits = by_name(found)
    assert found.best == "mos"
    assert found.best_gain.low > 0.3
    assert fits["mos"].gain.low > 0.3
    assert fits["mos"].gain_over_equal.low > 0.3
    assert min(fits["mos"].gain_by_seed) > 0.3
    # Most of the way from the controls to the truth, and never beyond it.
    control = min(fits["softmax"].loss.value, fits["softmax_equal"].loss.value)
    assert ideal < fits["mos"].loss.value < ideal + 0.4 * (control - ideal)
    # A mixture that is forced into a softmax: no refit of the control gets near.
    assert control > ideal + 0.4


def test_nothing_beats_a_softmax_where_the_truth_is_one():
    found = better_head(setting(one_softmax), epochs=2, rates=(0.06, 0.2), seeds=2)
    assert found.best_gain.low <= 1e-4
    for one in found.fits:
        assert abs(one.gain.value) < 0.005, one.head
        assert abs(one.loss.value - found.original.value) < 0.005, one.head


@pytest.mark.slow(reason="a second fit of every head, six seconds; the case without refitting is beside it")
def test_nothing_beats_a_softmax_that_has_to_be_refitted():
    # Here all heads have something to learn, which a softmax can say.
    found = better_head(setting(turned_softmax), heads=("mos",), epochs=10, rates=(0.2,), seeds=2)
    fits = by_name(found)
    assert found.original.value > fits["softmax"].loss.value + 0.2
    assert abs(found.best_gain.value) < 0.03
    assert found.best_gain.low <= 0.01


def test_the_record_says_what_was_done():
    chosen = setting(one_softmax, (300, 100, 200))
    seen = []
    found = better_head(
        chosen, epochs=1, rates=(0.02,), seeds=3, progress=lambda label, share: seen.append((label, share))
    )
    fits = by_name(found)
    assert list(fits) == ["softmax", "softmax_equal", "sigsoftmax", "mos", "moss", "trunk"]
    assert (found.seeds, found.fit_tokens, found.held_out_tokens) == (3, 300, 200)
    assert found.trained_rows == len(chosen.trained_rows)
    assert [fits[name].components for name in ("softmax", "mos", "moss", "trunk", "sigsoftmax")] == [
        1,
        2,
        2,
        2,
        1,
    ]
    nothing = Estimate(value=0.0, low=0.0, high=0.0)
    assert fits["softmax"].gain == fits["softmax_equal"].gain_over_equal == nothing
    for one in found.fits:
        assert one.gain.value == pytest.approx(fits["softmax"].loss.value - one.loss.value, abs=1e-6)
        assert one.gain_over_equal.value == pytest.approx(
            fits["softmax_equal"].loss.value - one.loss.value, abs=1e-6
        )
        assert one.gain.value == pytest.approx(sum(one.gain_by_seed) / 3, abs=1e-6)
        assert one.learning_rate == 0.02
    control = min(fits["softmax"].loss.value, fits["softmax_equal"].loss.value)
    assert found.best_gain.value == pytest.approx(control - fits[found.best].loss.value, abs=1e-6)
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert {label for label, _ in seen} == set(fits)
    held_out = chosen.split.held_out
    original = chosen.output.losses(held_out.hidden, held_out.targets)
    assert found.original.value == pytest.approx(float(original.mean()), rel=1e-5)


def test_every_head_starts_as_the_model():
    chosen = setting(one_softmax, (300, 100, 200))
    held_out = chosen.split.held_out
    original = chosen.output.losses(held_out.hidden, held_out.targets)
    for name in (*module.CONTROLS, *module.candidates()):
        contexts, offsets = module._contexts(name, D, 3), module._offsets(name)
        head = frozen.Frozen(
            chosen.output,
            chosen.trained_rows,
            contexts,
            module._pointwise(name) or chosen.output.pointwise,
            offsets[-1] if offsets else None,
        )
        losses = head.exact_losses(held_out, 1 << 20)
        torch.testing.assert_close(losses, original, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("width", [64, 128, 576, 1024])
@pytest.mark.parametrize("components", [2, 4, 8])
def test_the_equal_softmax_has_as_many_parameters_as_the_mixture(width, components):
    def count(name):
        with torch.device("meta"):
            made = module._contexts(name, width, components)
        return sum(parameter.numel() for parameter in made.parameters())

    assert count("softmax_equal") == pytest.approx(count("mos"), rel=0.02)
    assert max(count("softmax"), count("trunk")) < count("mos")


def test_a_soft_cap_leaves_sigsoftmax_out():
    found = better_head(
        setting(one_softmax, (300, 100, 200), Softcap(20.0)), epochs=1, rates=(0.02,), seeds=1
    )
    assert list(by_name(found)) == ["softmax", "softmax_equal", "mos", "trunk"]


def test_only_controls_give_no_best():
    found = better_head(setting(one_softmax, (300, 100, 200)), heads=(), epochs=1, rates=(0.02,), seeds=1)
    assert found.best == ""
    assert math.isnan(found.best_gain.value)
    assert not found.best_gain.low > 0


@pytest.mark.parametrize("wrong", [{"heads": ("mos", "mixtape")}, {"components": 1}, {"seeds": 0}])
def test_what_cannot_be_fitted_is_refused(wrong):
    with pytest.raises(FullrankError, match="expected some of sigsoftmax"):
        better_head(setting(one_softmax, (100, 100, 100)), **wrong)
