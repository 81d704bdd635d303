"""What mixtures share: where they start, dropout as each paper has it, and what rounding costs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads import RowHead, build
from fullrank.heads.contexts import GATES, LockedDropout, does_what_its_weights_say
from fullrank.heads.start import Start

SINGLE = {"moc": "softmax", "mos": "softmax", "trunk": "softmax", "doc": "softmax", "moss": "sigsoftmax"}
"""The head that one component of a mixture is alone."""
DROPOUT = {"moc": False, "mos": False, "moss": False, "trunk": False, "doc": True}
"""Which mixtures share one mask among their components."""


def contexts_of(head: Any, states: list[Tensor]) -> Tensor:
    contexts, _ = head.contexts(states)
    return contexts


def masks(head: RowHead, states: list[Tensor]) -> Tensor:
    """What dropout multiplied every context entry with."""
    head.eval()
    plain = contexts_of(head, states)
    head.train()
    return contexts_of(head, states) / plain


def test_dropout_is_locked_over_time_and_drawn_as_the_paper_has_it(mixture: Any) -> None:
    head = mixture.build(dropout=0.4, width=32, **({"private": 16} if mixture.name == "trunk" else {}))
    inputs = mixture.inputs(head, (7, 3))
    mask = masks(head, inputs.each)
    kept = mask.abs() > 1e-6
    torch.testing.assert_close(mask, kept / 0.6, atol=1e-4, rtol=0)
    assert 0.5 < kept.float().mean() < 0.7
    assert (kept == kept[:, :1]).all(), "one mask serves all times of a sequence"
    assert (kept[0] != kept[1]).any(), "every sequence has its own mask"
    assert bool((kept[:, :, 0] == kept[:, :, 1]).all()) is DROPOUT[mixture.name]


@pytest.mark.parametrize("name", ["mos", "moss"])
def test_one_mask_for_all_components(name: str) -> None:
    head = build(name, hidden=6, vocab=11, width=32, dropout=0.4, shared_dropout=True, components=3)
    states = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(0))
    assert isinstance(head, RowHead)
    kept = masks(head, [states]).abs() > 1e-6
    assert 0.4 < kept.float().mean() < 0.8
    assert (kept == kept[:, :1, :1]).all(), "of all times and components"
    assert (kept[0] != kept[1]).any()


@pytest.mark.parametrize("components", [2, 5, 15])
def test_masks_of_their_own_divide_the_penalty_of_dropout(components: int) -> None:
    """By the number of components that are equal, as those of a mixture at its start are."""
    draws = 40_000
    states = torch.randn(1, 6, generator=torch.Generator().manual_seed(1)).expand(draws, 6)
    targets = torch.full((draws,), 3)
    penalties = []
    for shared in (False, True):
        torch.manual_seed(0)
        head = build(
            "mos", hidden=6, vocab=11, width=32, components=components, dropout=0.1, shared_dropout=shared
        ).train()
        with torch.no_grad():
            head.decoder.weight.mul_(10.0)  # scores of a trained model's size, not of a fresh one's
        losses = head(states, targets, reduction="none").detach().double()
        # Over -log of the mean probability, which is the same for both.
        penalties.append(float(losses.mean() + losses.neg().exp().mean().log()))
    own, one = penalties
    assert one > 1e-3
    assert own / one == pytest.approx(1 / components, rel=0.1)


def test_dropout_of_flat_states_is_drawn_for_every_token(mixture: Any) -> None:
    head = mixture.build(dropout=0.5, width=32)
    inputs = mixture.inputs(head, (9,))
    kept = masks(head, inputs.each).abs() > 1e-6
    assert all((kept[0] != other).any() for other in kept[1:])


def test_dropout_is_off_in_evaluation_and_random_in_training(mixture: Any) -> None:
    head, plain = mixture.build(dropout=0.4), mixture.build()
    inputs = mixture.inputs(head)
    torch.testing.assert_close(head.eval()(inputs.states), plain(inputs.states), rtol=0, atol=0)
    head.train()
    assert not torch.allclose(head(inputs.states), head(inputs.states), atol=1e-3)


def test_dropout_keeps_the_mean() -> None:
    dropout = LockedDropout(0.25, shared=False)
    contexts = torch.ones(40_000, 1, 1)
    assert dropout(contexts).mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("probability", [-0.1, 1.0, 2.0, float("nan")])
def test_impossible_dropout_is_named(mixture: Any, probability: float) -> None:
    with pytest.raises(FullrankError, match=r"dropout=.*expected 0 <= dropout < 1"):
        mixture.build(dropout=probability)


def test_layers_that_do_more_than_their_weights_say() -> None:
    """The kernel for a few tokens takes weights, and passes by what somebody put around them."""

    class Adapted(nn.Linear):
        pass

    plain, hooked, wrapped = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    hooked.register_forward_pre_hook(lambda *_: None)
    # As libraries do that fetch weights from elsewhere for the time of a call.
    wrapped.forward = lambda states: states  # type: ignore[method-assign]
    found = [
        does_what_its_weights_say(each) for each in (plain, hooked, wrapped, Adapted(3, 2), nn.Identity())
    ]
    assert found == [True, False, False, False, False]


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
    assert log_prior.exp().std(-1).mean() > 0.005, "the gates must be unequal, or no component ever differs"


@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize(("centred", "spread"), [(True, GATES), (False, 1.0)], ids=["centred", "free"])
@pytest.mark.parametrize("name", ["mos", "trunk", "doc"])
def test_gates_start_alike_on_states_of_any_size(
    name: str, centred: bool, spread: float, size: float
) -> None:
    """The gate logits of a mixture that starts as a given layer have one spread."""
    wide, options = 64, {"layers": ((64, 8), (5, 1))} if name == "doc" else {"components": 9}
    head = build(name, hidden=wide, vocab=11, centred=centred, **options)
    weight = nn.Parameter(torch.randn(11, wide))
    head.start_from(
        Start(weight=weight, bias=None, softcap=None, size=size, low=-1.0, high=1.0, widths=(wide, 5))
    )
    states = [size * torch.randn(500, width) for width in head.state_widths]
    _, log_prior = head.contexts(states)
    found = (log_prior - log_prior.mean(-1, keepdim=True)).square().sum(-1) / 8
    assert float(found.mean().detach().sqrt()) == pytest.approx(spread, rel=0.2)


@pytest.mark.parametrize("name", ["mos", "moss", "trunk", "doc"])
def test_a_centred_mixture_keeps_the_plain_heads_row_as_its_mean(cases: dict[str, Any], name: str) -> None:
    """sum_k context_k / K = P h, whatever gates and differences have become."""
    head = cases[name].build().double()
    inputs = cases[name].inputs(head, dtype=torch.float64)
    contexts, _ = head.contexts(inputs.each)
    assert (contexts[..., 0, :] - contexts[..., 1, :]).abs().max() > 0.1
    torch.testing.assert_close(contexts.mean(-2), head.contexts.shared(inputs.each[0]))


@pytest.mark.parametrize("name", ["mos", "moss", "trunk", "doc"])
def test_equal_components_have_gradients_that_part_them(cases: dict[str, Any], name: str) -> None:
    """In exact arithmetic as well: a start that only rounding leaves would be no start."""
    head = cases[name].build(warm=False).double()
    inputs = cases[name].inputs(head, dtype=torch.float64)
    head(inputs.states, inputs.targets).backward()
    part = head.contexts.differences[0]
    each = part.bias.grad.view(head.contexts.counts[0], -1)
    size = head.decoder.weight.grad.abs().max()
    assert (each[0] - each[1]).abs().max() > 1e-5 * size


def test_a_step_of_adam_moves_centred_contexts_alike_at_every_width() -> None:
    """Sixteen times the width moves a context's entries by four times as much; not centred, by sixteen."""

    def moved(width: int, centred: bool) -> float:
        torch.manual_seed(0)
        head: Any = build("mos", hidden=width, vocab=7, components=2, centred=centred)
        head.requires_grad_(False)
        states = torch.randn(64, width)
        before, _ = head.contexts([states])
        # Adam's first step is the rate times the gradient's sign.
        for number, row in enumerate(head.contexts.differences[0].weight):
            row.add_(0.001 * states[0].sign() * (1 if number < width else -1))
        after, _ = head.contexts([states])
        return float((after - before)[0].abs().mean())

    assert moved(512, True) / moved(32, True) == pytest.approx(4.0, rel=0.2)
    assert moved(512, False) / moved(32, False) == pytest.approx(16.0, rel=0.2)


def test_published_mixture_starts_with_unequal_components(cases: dict[str, Any]) -> None:
    for name in ("mos", "moss", "trunk", "doc"):
        head = cases[f"{name}-as-published"].build(warm=False)
        inputs = cases[f"{name}-as-published"].inputs(head)
        contexts, _ = head.contexts(inputs.each)
        assert (contexts[..., 0, :] - contexts[..., 1, :]).abs().max() > 0.1


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
