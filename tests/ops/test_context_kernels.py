"""Contexts and priors of a few tokens in one kernel against their definition, and when heads take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullrank.heads import build

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


SCALE = 0.3
"""Of the states that centred rows read."""


def definition(
    states: Tensor,
    weight: Tensor,
    bias: Tensor,
    gate: Tensor,
    start: Tensor | None,
    *,
    tanh: bool,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    states, weight, bias, gate = (each.double() for each in (states, weight, bias, gate))
    logits = states @ gate.t()
    if centred:
        logits = logits / states.norm(dim=-1, keepdim=True)
        states = states * SCALE
    rows = (states @ weight.t() + bias).unflatten(-1, (gate.shape[0], -1))
    log_prior = torch.log_softmax(logits, -1)
    if centred:
        rows = rows - rows.mean(-2, keepdim=True)
    if start is not None:
        rows = rows + start.double()[..., None, :]
    return torch.tanh(rows) if tanh else rows, log_prior


@pytest.mark.interpreter
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("form", ["plain", "tanh", "centred"])
@pytest.mark.parametrize(
    ("shape", "K", "r", "H"), [((1,), 10, 20, 24), ((3, 7), 3, 5, 130), ((17,), 1, 33, 8)]
)
def test_rows_and_prior(shape, K, r, H, form, started):
    from fullrank.ops.decode import contexts as context_kernels

    draw = torch.Generator().manual_seed(0)

    def some(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).half()

    states, weight, bias, gate = some(*shape, H), some(K * r, H) / H**0.5, some(K * r), some(K, H)
    # As a head has it: the last entries of wider rows.
    start = some(*shape, r + 3)[..., 3:] if started else None
    options = {"tanh": form == "tanh", "centred": form == "centred"}
    scale = SCALE if form == "centred" else 1.0
    rows, log_prior = context_kernels.few_contexts(states, weight, bias, gate, start, scale=scale, **options)
    want, prior = definition(states, weight, bias, gate, start, **options)
    torch.testing.assert_close(rows.double(), want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(log_prior.double(), prior, rtol=1e-5, atol=1e-5)


# The interpreter has no products in bf16: what follows runs on a GPU.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mos": ("mos", {"components": 10}),
    "mos-as-published": ("mos", {"components": 3, "as_published": True}),
    "mos-not-centred": ("mos", {"components": 10, "centred": False}),
    "trunk": ("trunk", {"components": 4, "private": 16}),
    "projected": ("mos", {"components": 4, "width": 48}),
}


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from fullrank.ops.decode import contexts as context_kernels

    calls: list[int] = []
    taken = context_kernels.few_contexts

    def counting(states: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(states.shape[0])
        return taken(states, *rest, **options)

    monkeypatch.setattr(context_kernels, "few_contexts", counting)
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_cuda_heads_decode_from_it(monkeypatch, form):
    name, options = FORMS[form]
    torch.manual_seed(0)
    head = build(name, hidden=96, vocab=500, **options).cuda()
    for part in head.contexts.differences:
        nn.init.normal_(part.weight, std=96**-0.5)
    narrow = build(name, hidden=96, vocab=500, **options).cuda().to(torch.bfloat16)
    narrow.load_state_dict(head.state_dict())
    exact = build(name, hidden=96, vocab=500, **options).cuda().double()
    exact.load_state_dict(narrow.state_dict())
    states = torch.randn(5, 96, device="cuda", dtype=torch.bfloat16)
    calls = count_calls(monkeypatch)
    with torch.no_grad():
        common, owned, log_prior = narrow.contexts.parts([states])
        want_common, want, prior = exact.contexts.parts([states.double()])
        # What the rows start from is rounded by itself.
        torch.testing.assert_close(owned.double(), want, rtol=8e-3, atol=8e-3)
        torch.testing.assert_close(log_prior.double(), prior, rtol=1e-4, atol=1e-4)
        assert (common is None) == (want_common is None)
        _, entries = narrow.top(states, 1)
        assert torch.equal(entries[:, 0], narrow(states).argmax(-1))
    assert calls == [5, 5, 5]
    # Gradients, hooks, many tokens and another dtype go the long way.
    narrow.contexts.parts([states])
    with torch.no_grad():
        narrow.contexts.parts([states.repeat(20, 1)])
        head.contexts.parts([states.float()])
        with narrow.contexts.gate.register_forward_hook(lambda *_: None):
            narrow.contexts.parts([states])
    assert calls == [5, 5, 5]
