"""Shared-trunk mixture: mos whose contexts differ in their last r entries; the loss shares their product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullrank.ops import mixture_nll

NAMES = ["trunk", "trunk-as-published"]


@pytest.mark.parametrize("name", NAMES)
def test_the_equation(cases: dict[str, Any], component: Any, name: str) -> None:
    """p = sum_k prior_k softmax of the contexts' scores."""
    head = cases[name].build().double()
    inputs = cases[name].inputs(head, (1,), dtype=torch.float64)
    contexts, log_prior = head.contexts(inputs.each)
    prior = log_prior[0].exp()
    parts = [component(head, contexts[0, k]) for k in range(3)]
    expected = sum(prior[k] * part for k, part in enumerate(parts))
    torch.testing.assert_close(head(inputs.states)[0].exp(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_its_rank_is_not_bounded_by_the_width(
    cases: dict[str, Any], rank_of: Any, name: str, biased: bool
) -> None:
    """Above even K (D + 1), which a sum of logits of K components could reach."""
    assert rank_of(cases[name], bias=biased) > 3 * (4 + 1)


@pytest.mark.parametrize("name", ["trunk", "trunk-as-published"])
def test_the_trunk_is_shared_and_only_the_private_entries_differ(cases: dict[str, Any], name: str) -> None:
    head = cases[name].build()
    contexts, _ = head.contexts([torch.randn(5, 6)])
    trunk, private = contexts[..., :2], contexts[..., 2:]
    torch.testing.assert_close(trunk, trunk[:, :1].expand_as(trunk), rtol=0, atol=0)
    assert (private[:, 0] - private[:, 1]).abs().min() > 1e-4


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_the_shared_pass_gives_the_loss_of_whole_rows(
    cases: dict[str, Any], name: str, reduction: str
) -> None:
    head = cases[name].build(bias=True).double()
    inputs = cases[name].inputs(head, (4, 3), dtype=torch.float64)
    contexts, log_prior = head.contexts(inputs.each)
    expected = mixture_nll(
        contexts.flatten(0, 1), log_prior.flatten(0, 1), head.decoder.weight, inputs.targets.flatten(),
        bias=head.decoder.bias, reduction=reduction, impl="reference",
    )  # fmt: skip
    loss = head(inputs.states, inputs.targets, reduction=reduction)
    torch.testing.assert_close(loss.flatten(), expected.flatten())
    leaves = list(head.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(loss.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
