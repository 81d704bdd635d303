"""f and f' of every pointwise function: values, slopes, far ends and the shapes of its errors."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.nn import functional

from fullrank.errors import FullrankError
from fullrank.ops import IDENTITY, SIGSOFTMAX, CappedSigsoftmax, PiecewiseLinear, Softcap, mixture_nll
from fullrank.ops.pointwise import from_parts

FUNCTIONS = {
    "identity": IDENTITY,
    "sigsoftmax": SIGSOFTMAX,
    "softcap": Softcap(2.5),
    "capped_sigsoftmax": CappedSigsoftmax(torch.tensor([0.7], dtype=torch.float64), 2.5),
    "plif": PiecewiseLinear(torch.tensor([0.3, 1.7, 0.9, 0.2, 2.0], dtype=torch.float64), 3.0),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


@every_function
def test_both_faces_agree(name):
    """The tile evaluation gives the definition's value and autograd's slope."""
    function = FUNCTIONS[name]
    scores = torch.linspace(-9.1, 9.3, 400, dtype=torch.float64, requires_grad=True)
    value = function(scores)
    (slope,) = torch.autograd.grad(value.sum(), scores)
    for gradient in (True, False):
        tile = function.evaluate_(scores.detach().clone(), gradient=gradient)
        torch.testing.assert_close(tile.value, value.detach(), rtol=1e-13, atol=1e-13)
    tile = function.evaluate_(scores.detach().clone(), gradient=True)
    got = torch.ones_like(slope) if tile.slope is None else tile.slope
    torch.testing.assert_close(got, slope, rtol=1e-12, atol=1e-12)


@every_function
def test_monotone(name):
    scores = torch.linspace(-12, 12, 2001, dtype=torch.float64)
    assert (FUNCTIONS[name](scores).diff() > 0).all()


@every_function
def test_nan_stays_nan_and_infinities_keep_their_order(name):
    value = FUNCTIONS[name](torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0]))
    assert value[0].isnan()
    assert value[1] > value[3] > value[2]


def test_sigsoftmax_is_z_plus_log_sigmoid_far_below_zero():
    """log(sigmoid(z)) is -inf in fp32 from z = -104 on; the true value at -200 is 2z."""
    assert SIGSOFTMAX(torch.tensor(-200.0)) == -400.0
    assert SIGSOFTMAX.evaluate_(torch.tensor([-200.0]), gradient=True).slope == 2.0
    assert SIGSOFTMAX(torch.tensor(50.0)) == 50.0


@pytest.mark.parametrize("shift", [0.0, -200.0, 90.0])
def test_sigsoftmax_loss_far_from_zero(shift):
    """All scores near `shift`: the loss must keep its digits, not drown in -inf."""
    scores = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64) + shift
    truth = functional.cross_entropy((scores + functional.logsigmoid(scores))[None], torch.tensor([1]))
    got = mixture_nll(
        torch.ones(1, 1, 1),
        torch.zeros(1, 1),
        scores.float()[:, None],
        torch.tensor([1]),
        pointwise=SIGSOFTMAX,
    )
    assert abs(got.item() - truth.item()) < 1e-4 * truth.item()


def test_softcap_stays_inside_its_cap():
    value = Softcap(5.0)(torch.tensor([-1e4, -1.0, 0.0, 1.0, 1e4], dtype=torch.float64))
    assert value.abs().max() <= 5.0
    assert value[3] == pytest.approx(5.0 * torch.tensor(0.2, dtype=torch.float64).tanh().item(), rel=1e-15)


def test_capped_sigsoftmax_is_sigsoftmax_after_the_cap():
    scores = torch.linspace(-9, 9, 91, dtype=torch.float64)
    plain = CappedSigsoftmax(torch.zeros(1, dtype=torch.float64), 2.5)
    torch.testing.assert_close(plain(scores), SIGSOFTMAX(Softcap(2.5)(scores)), rtol=1e-14, atol=1e-14)
    # Lifted beyond the cap it is the soft cap alone, for any score there can be.
    lifted = CappedSigsoftmax(torch.tensor([18.5]), 2.5)
    torch.testing.assert_close(
        lifted(scores.float() * 1e4), Softcap(2.5)(scores.float() * 1e4), rtol=0, atol=2e-7
    )


def test_capped_sigsoftmax_gradients():
    lift = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    scores = torch.linspace(-6, 6, 17, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda s, z: CappedSigsoftmax(s, 2.0)(z), (lift, scores))


@given(
    slopes=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12),
    limit=st.floats(0.1, 50.0),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_plif_is_continuous_at_its_knots(slopes, limit, dtype):
    function = PiecewiseLinear(torch.tensor(slopes, dtype=dtype), limit)
    knots = torch.linspace(-limit, limit, len(slopes) + 1, dtype=torch.float64)
    tiny = limit * 64 * torch.finfo(dtype).eps
    below, above = (function((knots + side * tiny).to(dtype)).double() for side in (-1, 1))
    # Both sides of a knot differ by what a slope makes of the gap, and rounding.
    room = (2 * tiny + 8 * torch.finfo(dtype).eps * limit) * max(slopes) * len(slopes)
    assert (above - below).abs().max() <= room


def test_plif_equals_its_ramps_and_goes_on_outside(tools):
    draw = torch.Generator().manual_seed(1)
    slopes = torch.rand(7, generator=draw, dtype=torch.float64) + 0.1
    scores = torch.linspace(-40, 40, 997, dtype=torch.float64)
    function = PiecewiseLinear(slopes, tools.limit)
    torch.testing.assert_close(function(scores), tools.ramps(scores, slopes), rtol=1e-12, atol=1e-12)
    far = function(torch.tensor([-31.0, -30.0, 30.0, 31.0], dtype=torch.float64))
    assert far[1] - far[0] == pytest.approx(slopes[0].item())
    assert far[3] - far[2] == pytest.approx(slopes[-1].item())


def test_plif_gradients():
    draw = torch.Generator().manual_seed(2)
    slopes = (torch.rand(5, generator=draw, dtype=torch.float64) + 0.1).requires_grad_()
    scores = (torch.rand(30, generator=draw, dtype=torch.float64) * 8 - 4).requires_grad_()
    assert gradcheck(lambda s, z: PiecewiseLinear(s, 2.0)(z), (slopes, scores))


@every_function
def test_rebuilt_from_parts(name):
    function = FUNCTIONS[name]
    again = from_parts(function.kind, function.constant, function.trained)
    scores = torch.linspace(-5, 5, 31, dtype=torch.float64)
    assert torch.equal(again(scores), function(scores))


@every_function
def test_deepcopy(name):
    scores = torch.linspace(-5, 5, 31, dtype=torch.float64)
    assert torch.equal(copy.deepcopy(FUNCTIONS[name])(scores), FUNCTIONS[name](scores))


def test_deepcopied_plif_has_slopes_of_its_own():
    slopes = torch.nn.Parameter(torch.ones(3))
    twin = copy.deepcopy(PiecewiseLinear(slopes, 1.0))
    with torch.no_grad():
        slopes.mul_(2.0)
    assert torch.equal(twin.slopes, torch.ones(3))
    assert twin.slopes.requires_grad


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Softcap(0.0), r"cap=0\.0, expected a positive finite"),
        (lambda: Softcap(float("inf")), r"cap=inf, expected a positive finite"),
        (lambda: Softcap(float("nan")), r"cap=nan, expected a positive finite"),
        (lambda: PiecewiseLinear(torch.ones(2, 3), 1.0), r"shape \[2, 3\], expected \[bins\]"),
        (lambda: PiecewiseLinear(torch.ones(0), 1.0), r"shape \[0\], expected \[bins\]"),
        (lambda: PiecewiseLinear(torch.ones(3), -1.0), r"limit=-1\.0, expected a positive finite"),
        (lambda: from_parts("cubic", 0.0, None), r"'cubic': expected identity, sigsoftmax, softcap, c"),
        (lambda: CappedSigsoftmax(torch.ones(2), 1.0), r"lift has shape \[2\], expected one number"),
        (lambda: CappedSigsoftmax(torch.ones(1), -1.0), r"cap=-1\.0, expected a positive finite"),
    ],
    ids=[
        "cap-0",
        "cap-inf",
        "cap-nan",
        "slopes-2d",
        "slopes-none",
        "limit-negative",
        "unknown-kind",
        "lift-2",
        "lift-cap",
    ],
)
def test_errors(make, message):
    with pytest.raises(FullrankError, match=message):
        make()
