"""Multi-facet softmax against a loop written from the formula, and what it must be at the start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads.facets import MultiFacet
from fullrank.heads.softmax import Softmax

H, V, D = 3, 10, 4


def build(*, warm: bool = True, **options: Any) -> MultiFacet:
    torch.manual_seed(0)
    head = MultiFacet(**{"hidden": H, "vocab": V, "width": D, **options}).double()
    if warm:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_()
    return head


def some_states(head: MultiFacet, batch: int = 2, time: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(batch, time, width, generator=generator, dtype=torch.float64)
        for width in head.state_widths
    ]


@torch.no_grad()
def slow_log_probs(head: MultiFacet, states: list[Tensor]) -> Tensor:
    """One position and one vocabulary entry at a time."""
    batch, time, hidden = states[0].shape
    P, S = head.partitions, head.softmaxes
    L_j = head.facets.weight.view(P + S - 1, head.width, 2 * hidden)
    out = torch.zeros(batch, time, V, dtype=torch.float64)
    for b in range(batch):
        for t in range(time):
            window = []
            for state in states:
                for back in range(head.positions):
                    window += [0.0] * hidden if t < back else state[b, t - back].tolist()
            blended = []
            for unit in head.blend.weight @ torch.tensor(window, dtype=torch.float64) + head.blend.bias:
                x = float(unit)
                blended.append(0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
            query = torch.tensor([*states[0][b, t].tolist(), *blended], dtype=torch.float64)
            prior = [math.exp(float(z)) for z in head.prior.weight @ query + head.prior.bias]
            for s in range(S):
                scores = []
                for v in range(V):
                    facet = L_j[v % P] if s == 0 else L_j[P + s - 1]
                    score = float(facet @ query @ head.decoder.weight[v])
                    scores.append(score + (0.0 if head.decoder.bias is None else float(head.decoder.bias[v])))
                total = sum(math.exp(score) for score in scores)
                for v in range(V):
                    out[b, t, v] += prior[s] / sum(prior) * math.exp(scores[v]) / total
    return out.log()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"hidden": D, "bias": True},
    {"layers": 1, "positions": 1},
    {"layers": 2, "positions": 6, "partitions": 3, "softmaxes": 2, "bias": True},
    {"partitions": 1, "softmaxes": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_formula_entry_by_entry(options: dict[str, Any]) -> None:
    head = build(**options)
    states = some_states(head)
    with torch.no_grad():
        expected = slow_log_probs(head, states)
        torch.testing.assert_close(head(states), expected, rtol=1e-9, atol=1e-9)
        for v in range(V):
            losses = head(states, torch.full((2, 4), v), reduction="none")
            torch.testing.assert_close(losses, -expected[..., v], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
def test_gradients_are_those_of_the_log_probabilities(options: dict[str, Any]) -> None:
    head = build(**options)
    states = [state.requires_grad_() for state in some_states(head)]
    targets = torch.tensor([[0, 9, 5, -100], [7, 2, -100, 4]])
    counted = targets != -100
    leaves = [*states, *head.parameters()]
    chosen = head(states)[counted].gather(1, targets[counted][:, None])
    plain = torch.autograd.grad(-chosen.mean(), leaves)
    fused = torch.autograd.grad(head(states, targets), leaves)
    for ours, theirs in zip(fused, plain, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_gradcheck() -> None:
    head = build(layers=2, positions=2, bias=True)
    targets = torch.tensor([[0, 9, 6]])

    def loss(last: Tensor, before: Tensor, weight: Tensor, facets: Tensor) -> Tensor:
        changed = {"decoder.weight": weight, "facets.weight": facets}
        return torch.func.functional_call(head, changed, ([last, before], targets))

    leaves = [*some_states(head, 1, 3), head.decoder.weight, head.facets.weight]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


def test_it_starts_as_plain_softmax() -> None:
    head = build(warm=False, hidden=D, vocab=50, bias=True)
    plain = Softmax(hidden=D, vocab=50, bias=True).double()
    plain.load_state_dict({f"decoder.{name}": tensor for name, tensor in head.decoder.state_dict().items()})
    states = some_states(head)
    torch.testing.assert_close(head(states), plain(states[0]), rtol=0, atol=1e-4)
    facets = head.facets.weight.detach().view(6, D, 2 * D)
    identity = torch.eye(D, dtype=torch.float64)
    assert bool((facets[:, :, :D] == identity).all())
    assert bool((facets[-1, :, D:] == 0).all())
    assert 0 < float(facets[:-1, :, D:].abs().max()) <= 0.5e-4


def test_other_widths_start_with_one_projection() -> None:
    head = build(warm=False)
    plain = Softmax(hidden=H, vocab=V, width=D).double()
    with torch.no_grad():
        plain.decoder.weight.copy_(head.decoder.weight)
        plain.project.weight.copy_(head.facets.weight[-D:, :H])
    states = some_states(head)
    torch.testing.assert_close(head(states), plain(states[0]), rtol=0, atol=1e-4)


def test_a_later_state_changes_nothing_before_it_nor_another_sequence() -> None:
    head = build()
    states = some_states(head)
    before = head(states)
    changed = [state.clone() for state in states]
    for state in changed:
        state[0, 2] += 1.0
    after = head(changed)
    same = (before == after).all(-1)
    assert same.tolist() == [[True, True, False, False], [True] * 4]


def test_a_sequence_shorter_than_the_window() -> None:
    head = build(positions=3)
    states = [state[:, :1] for state in some_states(head)]
    torch.testing.assert_close(head(states).detach(), slow_log_probs(head, states))


def test_parameter_count() -> None:
    def count(**options: Any) -> int:
        return sum(parameter.numel() for parameter in build(**options).parameters())

    assert count() == V * D + 9 * H * H + H + 6 * 2 * H * D + 3 * (2 * H + 1)
    other = {"layers": 2, "positions": 1, "partitions": 3, "softmaxes": 2, "bias": True}
    assert count(**other) == V * D + V + 2 * H * H + H + 4 * 2 * H * D + 2 * (2 * H + 1)


def test_the_time_axis_must_be_there() -> None:
    head = build()
    flat = [state.flatten(0, 1) for state in some_states(head)]
    with pytest.raises(FullrankError, match=r"3 positions.*\[8, 3\].*\[batch, time, H\].*positions=1"):
        head(flat)
    assert build(positions=1)(flat).shape == (8, V)
    with pytest.raises(FullrankError, match="1 hidden states, expected 3"):
        head(flat[0])


def test_options_that_cannot_be() -> None:
    with pytest.raises(FullrankError, match=rf"partitions={V + 1}.*V={V}"):
        build(partitions=V + 1)
    for name in ("layers", "positions", "partitions", "softmaxes"):
        with pytest.raises(FullrankError, match=f"{name}=0"):
            build(**{name: 0})
