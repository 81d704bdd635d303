"""Pieces change neither loss nor gradient, hold no N x V tensor, and reduce as `ops.mixture_nll` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullrank.errors import FullrankError
from fullrank.heads import Head, build, pieces
from fullrank.heads.labels import Labels
from fullrank.ops import mixture_nll

HEADS: dict[str, dict[str, Any]] = {
    "mixtape": {"gate_width": 4},
    "mixtape shared": {"gate_width": 4, "frequent": 300},
    "facets": {},
    "pointer": {"rerank": (40, 9)},
}


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation returned, in the forward and the backward pass."""

    elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def case(name: str, *, vocab: int, time: int, dtype: torch.dtype = torch.float64) -> tuple[Head, Any, Tensor]:
    torch.manual_seed(0)
    head = build(name.split()[0], hidden=8, vocab=vocab, **HEADS[name]).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.5)
    states = [torch.randn(3, time, width, dtype=dtype, requires_grad=True) for width in head.state_widths]
    return head, states, torch.randint(vocab, (3, time))


@pytest.mark.parametrize("name", HEADS)
def test_the_loss_holds_no_tokens_by_vocabulary_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, time = 1500, 100
    head, states, ids = case(name, vocab=vocab, time=time, dtype=torch.float32)
    monkeypatch.setattr(pieces, "default_workspace", lambda device: 1 << 20)
    with LargestTensor() as largest:
        loss, _ = head(states, ids, context=ids, return_stats=True)
        loss.backward()
    assert largest.elements < 3 * time * vocab / 4


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 11])
def test_pieces_of_any_size_are_one(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head, states, ids = case(name, vocab=310, time=5)
    targets = ids.clone()
    targets[0, 1] = targets[1, :] = -100
    leaves = [*states, *head.parameters()]

    def everything() -> list[Tensor]:
        loss, stats = head(states, targets, context=ids, return_stats=True)
        with torch.no_grad():
            log_probs = head(states, context=ids)
        return [loss, *stats, log_probs, *torch.autograd.grad(loss, leaves)]

    whole = everything()
    for module in ("mixtape", "facets", "pointer"):
        monkeypatch.setattr(f"fullrank.heads.{module}.piece_tokens", lambda device, columns: tokens)
    for ours, theirs in zip(everything(), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", HEADS)
def test_nothing_counted_is_a_loss_of_zero_with_gradient_zero(name: str) -> None:
    head, states, ids = case(name, vocab=310, time=3)
    empty: dict[str, Any] = {"context": ids, "return_stats": True}
    for targets, weight in ((torch.full_like(ids, -100), None), (ids, torch.zeros(3, 3))):
        loss, stats = head(states, targets, token_weight=weight, **empty)
        assert float(loss.detach()) == 0.0
        for gradient in torch.autograd.grad(loss, [*states, *head.parameters()]):
            assert float(gradient.abs().max()) == 0.0
        if weight is None:
            assert stats.argmax.tolist() == [[-1] * 3] * 3
            assert float(stats.nll.abs().max()) == float(stats.entropy.abs().max()) == 0.0


def test_an_ignored_row_may_hold_anything() -> None:
    head, states, ids = case("mixtape shared", vocab=310, time=3)
    ids[1] = -100
    with torch.no_grad():
        states[0][1] = torch.nan
    loss = head(states, ids)
    loss.backward()
    assert bool(loss.isfinite())
    assert float(states[0].grad[1].abs().max()) == 0.0
    assert all(bool(parameter.grad.isfinite().all()) for parameter in head.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions_are_those_of_the_fused_loss(reduction: str, weighted: bool) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(7, 1, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    targets = torch.tensor([3, -100, 0, 8, 8, -100, 1])
    options: dict[str, Any] = {
        "reduction": reduction,
        "token_weight": torch.rand(7) - 0.2 if weighted else None,
        "ignore_index": -100,
    }
    expected = mixture_nll(rows, torch.zeros(7, 1, dtype=torch.float64), weight, targets, **options)
    tokens = pieces.CountedTokens(Labels(targets=targets, stats=False, **options), 9)
    log_probs = torch.log_softmax(rows[:, 0] @ weight.t(), 1)[tokens.index]
    torch.testing.assert_close(tokens.reduce(-log_probs.gather(1, tokens.targets[:, None])[:, 0]), expected)


def test_a_weight_that_wants_a_gradient_is_refused() -> None:
    head, states, ids = case("pointer", vocab=310, time=3)
    with pytest.raises(FullrankError, match="token_weight requires a gradient"):
        head(states, ids, context=ids, token_weight=torch.ones(3, 3, requires_grad=True))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", ["mixtape", "pointer"])
def test_low_precision_gradients_add_up_over_pieces_without_rounding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many pieces in bf16 must give the gradient of W that one piece gives."""
    head, states, ids = case(name, vocab=60, time=30, dtype=torch.bfloat16)

    def gradient() -> Tensor:
        return torch.autograd.grad(head(states, ids, context=ids), head.decoder.weight)[0].float()

    whole = gradient()
    monkeypatch.setattr(f"fullrank.heads.{name}.piece_tokens", lambda device, columns: 1)
    assert float((gradient() - whole).norm() / whole.norm()) < 4e-3
