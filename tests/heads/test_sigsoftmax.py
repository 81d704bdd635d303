"""Sigsoftmax: p ~ exp(z) sigmoid(z), Kanai et al. 2018: no bound on the rank, and not blind to a shift."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullrank.heads import build


def test_the_equation(cases: dict[str, Any], component: Any) -> None:
    head = cases["sigsoftmax-with-bias"].build().double()
    state = torch.randn(1, 6, dtype=torch.float64)
    expected = component(head, head.project.weight @ state[0], sigmoid=True)
    torch.testing.assert_close(head(state)[0].exp(), expected, rtol=1e-9, atol=1e-12)


def test_sigsoftmax_is_not_shift_invariant(cases: dict[str, Any]) -> None:
    """Far above zero it is softmax(z), far below softmax(2 z): why a bias matters there."""
    head = cases["sigsoftmax-with-bias"].build().double()
    state = torch.randn(3, 6, dtype=torch.float64)
    scores = head.project(state) @ head.decoder.weight.t()
    for shift, factor in ((60.0, 1.0), (-60.0, 2.0)):
        with torch.no_grad():
            head.decoder.bias.fill_(shift)
        torch.testing.assert_close(head(state), torch.log_softmax(factor * scores, -1), atol=1e-8, rtol=0)


@pytest.mark.parametrize("name", ["sigsoftmax", "moss"])
def test_over_a_cap_a_lift_takes_the_part_of_the_bias(cases: dict[str, Any], name: str) -> None:
    """p ~ exp(u) sigmoid(u + lift) of the capped score u = c tanh(z / c)."""
    cap, options = 1.5, {"components": 2} if name == "moss" else {}
    head = cases[name].build(bias=True, **options).double()
    head.cap_scores(cap)
    inputs = cases[name].inputs(head, dtype=torch.float64)
    with torch.no_grad():
        head.lift.fill_(0.3)
    rows, log_prior = head.rows(inputs.each)
    capped = cap * torch.tanh(head.decoder(rows) / cap)
    components = torch.log_softmax(capped + torch.log(torch.sigmoid(capped + head.lift)), dim=-1)
    prior = torch.zeros(*rows.shape[:-1]) if log_prior is None else log_prior
    expected = torch.logsumexp(components + prior[..., None], dim=-2)
    torch.testing.assert_close(head(inputs.states), expected)
    loss, truth = head(inputs.states, inputs.targets), -expected.gather(-1, inputs.targets[..., None]).mean()
    torch.testing.assert_close(loss, truth)
    (ours,), (theirs,) = (torch.autograd.grad(one, head.lift) for one in (loss, truth))
    torch.testing.assert_close(ours, theirs)
    assert float(theirs.abs()) > 1e-4
    again = build(name, hidden=6, vocab=11, width=4, bias=True, **options)
    again.cap_scores(cap)
    again.double().load_state_dict(head.state_dict())
    torch.testing.assert_close(again(inputs.states), head(inputs.states))


@pytest.mark.parametrize("biased", [False, True])
def test_its_rank_is_not_bounded_by_the_width(cases: dict[str, Any], rank_of: Any, biased: bool) -> None:
    assert rank_of(cases["sigsoftmax"], bias=biased) > 3 * (4 + 1)
