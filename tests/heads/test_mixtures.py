"""Each head's distribution written out, where mixtures start, what rank they reach, what rounding costs."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fullrank.heads import build
from fullrank.ops import mixture_nll

SINGLE = {"moc": "softmax", "mos": "softmax", "trunk": "softmax", "doc": "softmax", "moss": "sigsoftmax"}
"""The head that one component of a mixture is alone."""
WITH_CONTEXTS = [*SINGLE, *(f"{name}-as-published" for name in SINGLE), "mos-square-with-bias"]


def normalised(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)


def component(head: Any, context: Tensor, bend: str) -> Tensor:
    """The distribution [V] of one context [D], from exponentials."""
    scores = head.decoder.weight @ context
    if head.decoder.bias is not None:
        scores = scores + head.decoder.bias
    return normalised(scores.exp() * torch.sigmoid(scores) if bend == "sigsoftmax" else scores.exp())


@pytest.mark.parametrize("name", WITH_CONTEXTS)
def test_mixture_is_the_weighted_sum_of_its_components(cases: dict[str, Any], name: str) -> None:
    head = cases[name].build().double()
    inputs = cases[name].inputs(head, (1,), dtype=torch.float64)
    contexts, log_prior = head.contexts(inputs.each)
    prior, bend = log_prior[0].exp(), SINGLE[head.name]
    if head.name == "moc":
        expected = component(head, (prior[:, None] * contexts[0]).sum(0), bend)
    else:
        parts = [component(head, contexts[0, k], bend) for k in range(head.components)]
        expected = sum(prior[k] * part for k, part in enumerate(parts))
    torch.testing.assert_close(head(inputs.states)[0].exp(), expected, rtol=1e-9, atol=1e-12)


def test_sigsoftmax_is_the_product_of_exponential_and_sigmoid(cases: dict[str, Any]) -> None:
    head = cases["sigsoftmax-with-bias"].build().double()
    state = torch.randn(1, 6, dtype=torch.float64)
    expected = component(head, head.project.weight @ state[0], "sigsoftmax")
    torch.testing.assert_close(head(state)[0].exp(), expected, rtol=1e-9, atol=1e-12)


def test_low_rank_is_softmax_of_the_product_of_its_maps(cases: dict[str, Any]) -> None:
    head = cases["low-rank"].build().double()
    state = torch.randn(1, 6, dtype=torch.float64)
    expected = component(head, head.up.weight @ head.down.weight @ state[0], "identity")
    torch.testing.assert_close(head(state)[0].exp(), expected, rtol=1e-9, atol=1e-12)


def test_plif_rises_by_its_slopes(cases: dict[str, Any]) -> None:
    head = cases["plif"].build().double()
    with torch.no_grad():
        head.decoder.weight.mul_(2.0)  # scores on both sides of the knots' range as well
    state = torch.randn(20, 6, dtype=torch.float64)
    with torch.no_grad():
        scores = (head.project(state) @ head.decoder.weight.t()).numpy()
        slopes = np.log1p(np.exp(head.steepness.numpy()))
    assert scores.min() < -3.0
    assert scores.max() > 3.0
    knots = np.linspace(-3.0, 3.0, 41)
    heights = np.concatenate([[0.0], np.cumsum(slopes) * 6.0 / 40])
    bent = np.interp(scores, knots, heights)
    bent = np.where(scores < -3.0, (scores + 3.0) * slopes[0], bent)
    bent = np.where(scores > 3.0, heights[-1] + (scores - 3.0) * slopes[-1], bent)
    expected = torch.log_softmax(torch.from_numpy(bent), -1)
    torch.testing.assert_close(head(state), expected, rtol=1e-9, atol=1e-9)


def test_plif_without_spread_starts_as_softmax(cases: dict[str, Any]) -> None:
    plif = cases["plif"].build(spread=0.0, warm=False)
    softmax = cases["softmax"].build(warm=False)
    state = 5.0 * torch.randn(8, 6)
    torch.testing.assert_close(plif(state), softmax(state), atol=1e-4, rtol=0)


@pytest.mark.parametrize("square", [False, True], ids=["projected", "square"])
def test_default_mixture_starts_as_one_component_alone(mixture: Any, square: bool) -> None:
    """One seed gives the mixture and the plain head the same distribution, whatever the gates say."""
    sizes: dict[str, Any] = {"hidden": 4, "width": 4} if square else {"hidden": 6, "width": 4}
    options = dict(sizes)
    if mixture.name == "doc":
        options["layers"] = ((sizes["hidden"], 2), (5, 1))
    head = mixture.build(warm=False, **options)
    torch.manual_seed(0)
    alone = build(SINGLE[mixture.name], vocab=11, **sizes)
    with torch.no_grad():
        for each in (head, alone):
            each.decoder.weight.mul_(50.0)  # scores of a trained model's size, not of a fresh one's
    inputs = mixture.inputs(head)
    expected = alone(inputs.each[0])
    assert expected.std(-1).mean() > 0.3
    torch.testing.assert_close(head(inputs.states), expected, atol=1e-4, rtol=0)

    _, log_prior = head.contexts(inputs.each)
    assert log_prior.exp().std(-1).mean() > 0.05, "the gates must be unequal, or no component ever differs"


def test_published_mixture_starts_with_unequal_components(cases: dict[str, Any]) -> None:
    for name in ("mos", "moss", "trunk", "doc"):
        head = cases[f"{name}-as-published"].build(warm=False)
        inputs = cases[f"{name}-as-published"].inputs(head)
        contexts, _ = head.contexts(inputs.each)
        assert (contexts[..., 0, :] - contexts[..., 1, :]).abs().max() > 0.1


def parameters_beyond_the_matrix(name: str, **options: Any) -> int:
    with torch.device("meta"):
        head = build(name, vocab=10_000, width=280, as_published=True, **options)
    return sum(parameter.numel() for parameter in head.parameters()) - 10_000 * 280


def test_published_parameter_counts_on_penn_treebank() -> None:
    """MoS has 2.62M beyond the matrix; DOC's 22.85M are 1.35M more than MoS's 21.50M, with the same body."""
    mos = parameters_beyond_the_matrix("mos", hidden=620, components=15)
    doc = parameters_beyond_the_matrix("doc", hidden=620, layers=((620, 15), (960, 5)))
    assert mos == 15 * 620 * 280 + 15 * 280 + 15 * 620 == 2_617_500
    assert round(mos / 1e6, 2) == 2.62
    assert round((doc - mos) / 1e6, 2) == 1.35


def least_rank(log_probs: Tensor) -> int:
    """Rank of the log-probabilities less what a shift of each row is free to choose."""
    centred = log_probs - log_probs.mean(-1, keepdim=True)
    values = torch.linalg.svdvals(centred)
    return int((values > values[0] * max(log_probs.shape) * torch.finfo(torch.float64).eps).sum())


@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(
    ("name", "ceiling"),
    [("softmax", 4), ("low-rank", 2), ("moc", 4), ("moc-as-published", 4)]
    + [(name, None) for name in ("mos", "mos-as-published", "moss", "trunk", "doc", "sigsoftmax", "plif")],
)
def test_rank_is_bounded_by_the_width_or_not(
    cases: dict[str, Any], name: str, ceiling: int | None, biased: bool
) -> None:
    head = cases[name].build(vocab=40, bias=biased).double()
    inputs = cases[name].inputs(head, (60,), dtype=torch.float64)
    rank = least_rank(head(inputs.states).detach())
    if ceiling is not None:
        assert rank == ceiling + biased
    else:
        assert rank > 3 * (4 + 1), "above even K (D + 1), which a sum of logits of K components could reach"


# Torch says once that this CPU has no bf16 instructions and goes on with slower ones.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", ["mos", "mos-as-published", "moss", "trunk", "doc", "moc"])
def test_bfloat16_gradients_err_no_further_than_the_plain_path(cases: dict[str, Any], name: str) -> None:
    head = cases[name].build(vocab=200, width=16).bfloat16()
    inputs = cases[name].inputs(head, (8, 8), dtype=torch.bfloat16, gradient=True)
    exact = copy.deepcopy(head).double()
    wide = [state.detach().double().requires_grad_() for state in inputs.each]

    def plain(model: Any, states: list[Tensor]) -> Tensor:
        log_probs = model(states[0] if len(states) == 1 else states)
        return -log_probs.gather(-1, inputs.targets[..., None]).mean()

    def gradients(loss: Tensor, model: Any, states: list[Tensor]) -> list[Tensor]:
        return [gradient.double() for gradient in torch.autograd.grad(loss, [*states, *model.parameters()])]

    truth = gradients(plain(exact, wide), exact, wide)
    same_dtype = gradients(plain(head, inputs.each), head, inputs.each)
    ours = gradients(head(inputs.states, inputs.targets), head, inputs.each)
    leaves = ["state"] * len(wide) + [leaf for leaf, _ in head.named_parameters()]
    for leaf, true, theirs, mine in zip(leaves, truth, same_dtype, ours, strict=True):
        floor = 2**-9 * true.norm()
        assert (mine - true).norm() <= 2 * (theirs - true).norm() + floor, leaf
        assert (mine - true).norm() < 0.1 * true.norm(), leaf


def test_sigsoftmax_is_not_shift_invariant(cases: dict[str, Any]) -> None:
    """Far above zero it is softmax(z), far below softmax(2 z): why a bias matters there."""
    head = cases["sigsoftmax-with-bias"].build().double()
    state = torch.randn(3, 6, dtype=torch.float64)
    scores = head.project(state) @ head.decoder.weight.t()
    for shift, factor in ((60.0, 1.0), (-60.0, 2.0)):
        with torch.no_grad():
            head.decoder.bias.fill_(shift)
        torch.testing.assert_close(head(state), torch.log_softmax(factor * scores, -1), atol=1e-8, rtol=0)


def test_very_unlikely_targets_keep_their_loss(cases: dict[str, Any]) -> None:
    """No floor under the probability: log(p + 1e-8), as released with the paper, would stop at 18.4 nats."""
    head = cases["mos"].build(bias=True)
    with torch.no_grad():
        head.decoder.bias[5] = -300.0
    inputs = cases["mos"].inputs(head)
    loss = head(inputs.states, torch.full_like(inputs.targets, 5))
    assert loss.item() > 250.0
    assert math.isfinite(loss.item())


@pytest.mark.parametrize("name", ["mos", "moss", "trunk", "doc"])
def test_a_head_leaves_out_rows_of_small_share(cases: dict[str, Any], name: str) -> None:
    """`row_skip` reaches the loss: W's gradient is that of the rows above the bound, the loss stays."""
    head = cases[name].build().double()
    assert head.row_skip == 0.0
    inputs = cases[name].inputs(head, (4, 3), dtype=torch.float64)
    losses, gradients = [], []
    for bound in (0.0, 0.6):
        head.row_skip = bound
        loss = head(inputs.states, inputs.targets)
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, head.decoder.weight)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    rows, log_prior = head._flat_rows(inputs.each)
    want = mixture_nll(
        rows, log_prior, head.decoder.weight, inputs.targets.flatten(),
        bias=head.decoder.bias, pointwise=head.pointwise, row_skip=0.6,
    )  # fmt: skip
    assert torch.equal(gradients[1], torch.autograd.grad(want, head.decoder.weight)[0])
    assert (gradients[1] - gradients[0]).norm() > 0.01 * gradients[0].norm()
