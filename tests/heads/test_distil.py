"""Log-probabilities at ids, entropy and divergences of heads, against the head's own table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads import RowHead
from fullrank.ops import Mixture, TopTokens


@pytest.fixture
def row_case(case: Any) -> Any:
    if not isinstance(case.build(), RowHead):
        pytest.skip("its scores are not rows against one matrix")
    return case


def gradients(head: Any, inputs: Any, value: Tensor) -> list[Tensor | None]:
    upstream = torch.linspace(-1.0, 2.0, value.numel(), dtype=value.dtype).view(value.shape)
    wanted = [*inputs.each, *head.parameters()]
    return list(torch.autograd.grad(value, wanted, upstream, allow_unused=True, retain_graph=True))


def compare(head: Any, inputs: Any, found: Tensor, table: Tensor) -> None:
    """Values, and the gradients of states and of every parameter."""
    torch.testing.assert_close(found, table, rtol=1e-9, atol=1e-11)
    fast, plain = gradients(head, inputs, found), gradients(head, inputs, table)
    for one, other in zip(fast, plain, strict=True):
        if one is None or other is None:
            assert (one if other is None else other) is None or not bool(
                (one if other is None else other).any()
            )
            continue
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_outputs_are_those_of_the_table(row_case: Any, temperature: float) -> None:
    head = row_case.build().double()
    inputs = row_case.inputs(head, dtype=torch.float64, gradient=True)
    log_p = torch.log_softmax(head(inputs.states) / temperature, -1)
    ids = torch.stack([inputs.targets, (inputs.targets + 1) % head.vocab, inputs.targets], -1)
    compare(
        head, inputs, head.token_logprobs(inputs.states, ids, temperature=temperature), log_p.gather(-1, ids)
    )
    shared = torch.tensor([3, 0])
    at = head.token_logprobs(inputs.states, shared, temperature=temperature)
    torch.testing.assert_close(at, log_p[..., shared], rtol=1e-9, atol=1e-11)
    found = head.entropy(inputs.states, temperature=temperature, reduction="none")
    compare(head, inputs, found, -(log_p.exp() * log_p).sum(-1))


def test_divergence_from_another_head_an_output_layer_and_its_top(row_case: Any, cases: Any) -> None:
    head = row_case.build().double()
    inputs = row_case.inputs(head, dtype=torch.float64, gradient=True)
    taught = cases["mos"].build(seed=9).double()
    states = cases["mos"].inputs(taught, seed=8, dtype=torch.float64).states
    plain = cases["softmax-square-with-bias"].build(seed=7).double()
    wide = cases["softmax-square-with-bias"].inputs(plain, seed=8, dtype=torch.float64).states
    weight, bias = plain.decoder.weight, plain.decoder.bias
    for log_q, teacher in (
        (taught(states).detach(), taught.distribution(states)),
        (plain(wide).detach(), Mixture.softmax(wide, weight, bias)),
    ):
        log_p = head(inputs.states)
        each = {
            "forward": (log_q.exp() * (log_q - log_p)).sum(-1),
            "reverse": (log_p.exp() * (log_p - log_q)).sum(-1),
        }
        for kind, right in each.items():
            compare(head, inputs, head.divergence(inputs.states, teacher, kind=kind, reduction="none"), right)
        named, ids = log_q.topk(4, dim=-1)
        at = log_p.gather(-1, ids)
        rests = [(1 - side.exp().sum(-1)).log() for side in (named, at)]
        lumped = (named.exp() * (named - at)).sum(-1) + rests[0].exp() * (rests[0] - rests[1])
        compare(head, inputs, head.divergence(inputs.states, TopTokens(ids, named)), lumped.mean())


def test_token_weights_and_ids_in_the_shape_of_the_states(cases: Any) -> None:
    head = cases["trunk"].build()
    inputs = cases["trunk"].inputs(head)
    weight = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]])
    each = head.entropy(inputs.states, reduction="none")
    assert each.shape == weight.shape
    mean = head.entropy(inputs.states, token_weight=weight)
    torch.testing.assert_close(mean, (each * weight).sum() / weight.sum())
    with pytest.raises(FullrankError, match="ids have shape"):
        head.token_logprobs(inputs.states, inputs.targets)
