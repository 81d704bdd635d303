"""Mixtape against a loop over tokens, vocabulary entries and leaves, written from the paper's formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads.mixtape import Mixtape, fold

H, V, D, G = 5, 9, 4, 3


def build(**options: Any) -> Mixtape:
    torch.manual_seed(0)
    head = Mixtape(**{"hidden": H, "vocab": V, "width": D, "gate_width": G, **options}).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def leaf_priors(gates: list[float]) -> list[float]:
    """Walk from the root to each leaf; node i has children 2 i + 1 (its gate) and 2 i + 2 (1 - its gate)."""
    leaves = len(gates) + 1
    depth = leaves.bit_length() - 1
    priors = []
    for leaf in range(leaves):
        node, prior = 0, 1.0
        for level in reversed(range(depth)):
            right = leaf >> level & 1
            prior *= 1.0 - gates[node] if right else gates[node]
            node = 2 * node + 1 + right
        priors.append(prior)
    return priors


@torch.no_grad()
def slow_log_probs(head: Mixtape, states: Tensor, ids: list[int]) -> Tensor:
    """One state, one vocabulary entry, one leaf at a time; `ids` are the frequent tokens in their order."""
    K = head.components
    H_k = head.contexts.weight.view(K, D, H)
    U_k = head.gate_features.weight.view(K - 1, G, H)
    out = torch.zeros(states.shape[0], V, dtype=torch.float64)
    for n, g in enumerate(states):
        contexts = [torch.tanh(H_k[k] @ g) for k in range(K)]
        for x in range(V):
            gates = []
            for k in range(K - 1):
                logit = float(head.gate.weight[k] @ g)
                if x in ids:
                    own = ids.index(x)
                    logit += float(head.token_gate[own] @ torch.tanh(U_k[k] @ g))
                    logit += float(head.token_gate_bias[own, k])
                else:
                    logit += float(head.rare_gate_bias[k])
                gates.append(sigmoid(logit))
            priors = leaf_priors(gates)
            out[n, x] = sum(priors[k] * float(contexts[k] @ head.decoder.weight[x]) for k in range(K))
            if head.decoder.bias is not None:
                out[n, x] += head.decoder.bias[x]
        out[n] -= math.log(sum(math.exp(float(z)) for z in out[n]))
    return out


@pytest.mark.parametrize(
    ("components", "frequent", "bias"),
    [
        (2, None, True),
        (4, None, False),
        (4, 4, True),
        (8, 4, False),
        (4, (7, 0, 3), True),
        (2, (0, 1, 2), False),
    ],
)
def test_the_formula_entry_by_entry(components: int, frequent: Any, bias: bool) -> None:
    head = build(components=components, frequent=frequent, bias=bias)
    states = torch.randn(3, H, dtype=torch.float64)
    ids = list(range(V) if frequent is None else range(frequent) if isinstance(frequent, int) else frequent)
    with torch.no_grad():
        expected = slow_log_probs(head, states, ids)
        torch.testing.assert_close(head(states), expected, rtol=1e-10, atol=1e-10)
        every = torch.arange(V).repeat(3, 1)
        for n in range(3):
            losses = head(states[n].expand(V, H), every[n], reduction="none")
            torch.testing.assert_close(losses, -expected[n], rtol=1e-10, atol=1e-10)


def test_four_leaves_are_the_papers_products() -> None:
    s1, s2, s3 = 0.9, 0.3, 0.6
    gates = torch.tensor([[s1, s2, s3]], dtype=torch.float64)
    priors = [s1 * s2, s1 * (1 - s2), (1 - s1) * s3, (1 - s1) * (1 - s3)]
    for leaf, prior in enumerate(priors):
        only = torch.zeros(1, 4, dtype=torch.float64)
        only[0, leaf] = 1.0
        assert float(fold(only, gates)) == pytest.approx(prior, abs=1e-15)


@pytest.mark.parametrize("frequent", [None, 4, (7, 0, 3)], ids=["all", "first", "ids"])
def test_gradients_are_those_of_the_log_probabilities(frequent: Any) -> None:
    head = build(frequent=frequent, bias=True)
    states = torch.randn(2, 3, H, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0, 8, 7], [3, 5, -100]])
    leaves = [states, *head.parameters()]
    log_probs = head(states).flatten(0, 1)[:5]
    plain = torch.autograd.grad(-log_probs.gather(1, targets.view(-1)[:5, None]).mean(), leaves)
    fused = torch.autograd.grad(head(states, targets), leaves)
    for ours, theirs in zip(fused, plain, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_gradcheck() -> None:
    head = build(frequent=4, bias=True)
    targets = torch.tensor([0, 8, 2])

    def loss(states: Tensor, weight: Tensor, token_gate: Tensor) -> Tensor:
        changed = {"decoder.weight": weight, "token_gate": token_gate}
        return torch.func.functional_call(head, changed, (states, targets))

    leaves = [torch.randn(3, H, dtype=torch.float64), head.decoder.weight, head.token_gate]
    assert torch.autograd.gradcheck(
        loss, [leaf.detach().clone().requires_grad_() for leaf in leaves], fast_mode=True
    )


def test_sharing_all_gates_but_of_equal_tokens_changes_nothing() -> None:
    """Rare tokens are those with v_x = 0 and b_x = s: then both forms are one distribution."""
    shared, own = build(frequent=4), build()
    with torch.no_grad():
        own.load_state_dict({**own.state_dict(), "decoder.weight": shared.decoder.weight})
        for name in ("contexts", "gate_features", "gate"):
            getattr(own, name).weight.copy_(getattr(shared, name).weight)
        own.token_gate.zero_()[:4] = shared.token_gate
        own.token_gate_bias.copy_(shared.rare_gate_bias.expand(V, 3))[:4] = shared.token_gate_bias
    states = torch.randn(6, H, dtype=torch.float64)
    torch.testing.assert_close(shared(states), own(states))


def test_its_rank_is_not_bounded_by_the_width() -> None:
    head = build(vocab=40, bias=False)
    with torch.no_grad():
        log_probs = head(torch.randn(60, H, dtype=torch.float64) * 2)
    assert int(torch.linalg.matrix_rank(log_probs)) > 4 * (D + 1)


def test_parameter_count() -> None:
    def count(**options: Any) -> int:
        return sum(parameter.numel() for parameter in build(**options).parameters())

    K = 4
    assert count() == V * D + K * H * D + (K - 1) * (G * H + H + V) + V * G
    assert count(frequent=2) == V * D + K * H * D + (K - 1) * (G * H + H + 2) + 2 * G + (K - 1)
    assert count(components=2, bias=True) == V * D + V + 2 * H * D + (G * H + H + V) + V * G


def test_options_that_cannot_be() -> None:
    for components in (1, 3, 6):
        with pytest.raises(FullrankError, match=rf"components={components}.*power of two"):
            build(components=components)
    for frequent in (0, V + 1):
        with pytest.raises(FullrankError, match=rf"frequent={frequent}.*V={V}"):
            build(frequent=frequent)
    for ids in ((), (1, 1), (-1, 2), (V,)):
        with pytest.raises(FullrankError, match=rf"{len(ids)} frequent ids.*V={V}"):
            build(frequent=ids)
