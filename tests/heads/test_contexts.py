"""Contexts and priors: the two parametrisations against their equations, and dropout as each paper has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.heads import RowHead
from fullrank.heads.contexts import LockedDropout, does_what_its_weights_say

DROPOUT = {"moc": False, "mos": False, "moss": False, "trunk": False, "doc": True}
"""Which mixtures share one mask among their components."""


def contexts_of(head: Any, states: list[Tensor]) -> Tensor:
    contexts, _ = head.contexts(states)
    return contexts


def test_published_contexts_are_tanh_of_a_linear_map(cases: dict[str, Any]) -> None:
    head = cases["mos-as-published"].build().double()
    state = torch.randn(6, dtype=torch.float64)
    contexts, log_prior = head.contexts([state[None]])
    weight, bias = head.contexts.differences[0].weight, head.contexts.differences[0].bias
    for k in range(3):
        rows = slice(4 * k, 4 * (k + 1))
        torch.testing.assert_close(contexts[0, k], torch.tanh(weight[rows] @ state + bias[rows]))
    logits = head.contexts.gate.weight @ state
    torch.testing.assert_close(log_prior[0].exp(), logits.exp() / logits.exp().sum())


def test_our_contexts_are_a_shared_map_plus_differences(cases: dict[str, Any]) -> None:
    head = cases["mos"].build().double()
    state = torch.randn(6, dtype=torch.float64)
    contexts = contexts_of(head, [state[None]])
    part = head.contexts.differences[0]
    for k in range(3):
        rows = slice(4 * k, 4 * (k + 1))
        expected = head.contexts.shared.weight @ state + part.weight[rows] @ state + part.bias[rows]
        torch.testing.assert_close(contexts[0, k], expected)


@pytest.mark.parametrize("name", ["trunk", "trunk-as-published"])
def test_trunk_is_shared_and_only_the_private_entries_differ(cases: dict[str, Any], name: str) -> None:
    head = cases[name].build()
    contexts = contexts_of(head, [torch.randn(5, 6)])
    trunk, private = contexts[..., :2], contexts[..., 2:]
    torch.testing.assert_close(trunk, trunk[:, :1].expand_as(trunk), rtol=0, atol=0)
    assert (private[:, 0] - private[:, 1]).abs().min() > 1e-4


@pytest.mark.parametrize("name", ["doc", "doc-as-published"])
def test_doc_reads_each_layer_for_its_own_components(cases: dict[str, Any], name: str) -> None:
    head = cases[name].build()
    last, older = torch.randn(5, 6), torch.randn(5, 5)
    contexts, log_prior = head.contexts([last, older])
    moved, moved_prior = head.contexts([last, older + 1.0])
    torch.testing.assert_close(moved[:, :2], contexts[:, :2], rtol=0, atol=0)
    torch.testing.assert_close(moved_prior, log_prior, rtol=0, atol=0)
    assert (moved[:, 2] - contexts[:, 2]).abs().max() > 0.1


def test_doc_may_read_a_layer_for_the_prior_alone(cases: dict[str, Any]) -> None:
    head = cases["doc"].build(layers=((6, 0), (5, 2)))
    inputs = cases["doc"].inputs(head)
    log_probs = head(inputs.states)
    assert head.components == 2
    assert (torch.logsumexp(log_probs, -1).abs() < 1e-5).all()


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
