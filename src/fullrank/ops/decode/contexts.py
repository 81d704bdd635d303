"""Context rows and log prior of a few tokens in one kernel, without gradients: how a decoding step begins.

    rows_k = f(L_k h + l_k + s),    log_prior = log_softmax(G h)

with f the identity or tanh and s [r] what all components start from, or 0. `centred`, rows read a multiple of
h and the prior h over its norm, and a second kernel takes the mean over k of L_k h + l_k off every row. In
torch this is up to a dozen launches, which together can cost nearly as much as the scores of a vocabulary.
L [K r, H] is read once for every 16 tokens. All arithmetic is fp32, the products take the narrow dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.triton_base import jit, obstacle, on_device, tl, triton

DTYPES = (torch.bfloat16, torch.float16)
# With twice as many tokens torch's products were as fast on states of width 2048.
FEW = 32
# Tokens, outputs and inputs that a program takes at a time.
TOKENS, OUTPUTS, INPUTS = 16, 32, 128


def serves(states: Tensor, *weights: Tensor) -> bool:
    """Whether the kernel takes states [..., H] with such weights."""
    return (
        states.is_cuda
        and 0 < states.numel() <= FEW * states.shape[-1]
        and obstacle(states.device, states.dtype, dtypes=DTYPES) is None
        and all(
            weight.dtype == states.dtype and weight.device == states.device and weight.is_contiguous()
            for weight in weights
        )
    )


@jit
def products_of(  # type: ignore[no-untyped-def]
    states, weight, token, tokens, output, outputs, H: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Some tokens' states times some rows of a weight, [TOKENS, OUTPUTS]."""
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for first in range(0, H, INPUTS):
        d = first + tl.arange(0, INPUTS)
        h = tl.load(
            states + token[:, None] * H + d[None, :],
            mask=(token < tokens)[:, None] & (d < H)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + output.to(tl.int64)[:, None] * H + d[None, :],
            mask=(output < outputs)[:, None] & (d < H)[None, :],
            other=0.0,
        )
        total = tl.dot(h, tl.trans(w), total)
    return total


@jit
def write_rows(  # type: ignore[no-untyped-def]
    states, weight, bias, start, rows, token, tokens, start_stride, block, scale, H: tl.constexpr,
    r: tl.constexpr, K: tl.constexpr, STARTED: tl.constexpr, TANH: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    output = block * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < K * r
    here = (token < tokens)[:, None] & inside[None, :]
    total = products_of(states, weight, token, tokens, output, K * r, H, TOKENS, OUTPUTS, INPUTS)
    total = total * scale + tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    if STARTED:
        begin = tl.load(start + token[:, None] * start_stride + (output % r)[None, :], mask=here, other=0.0)
        total += begin.to(tl.float32)
    if TANH:
        small = tl.exp(-2.0 * tl.abs(total))
        size = (1.0 - small) / (1.0 + small)
        total = tl.where(total < 0.0, -size, size)
    place = rows + token[:, None] * (K * r) + output[None, :]
    tl.store(place, total.to(rows.dtype.element_ty), mask=here)


@jit
def write_prior(  # type: ignore[no-untyped-def]
    states, gate, log_prior, token, tokens, least, H: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr,
    COMPONENTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, COMPONENTS)
    logits = products_of(states, gate, token, tokens, k, K, H, TOKENS, COMPONENTS, INPUTS)
    if UNIT:
        square = tl.zeros([TOKENS], tl.float32) + H * least
        for first in range(0, H, INPUTS):
            d = first + tl.arange(0, INPUTS)
            inside = (token < tokens)[:, None] & (d < H)[None, :]
            h = tl.load(states + token[:, None] * H + d[None, :], mask=inside, other=0.0).to(tl.float32)
            square += tl.sum(h * h, axis=1)
        logits = logits / tl.sqrt(square)[:, None]
    logits = tl.where((k < K)[None, :], logits, float("-inf"))
    below = logits - tl.max(logits, axis=1)[:, None]
    result = below - tl.log(tl.sum(tl.exp(below), axis=1))[:, None]
    place = log_prior + token[:, None] * K + k[None, :]
    tl.store(place, result, mask=(token < tokens)[:, None] & (k < K)[None, :])


@jit
def contexts_kernel(  # type: ignore[no-untyped-def]
    states, weight, bias, start, gate, rows, log_prior, tokens, start_stride, scale, least,
    H: tl.constexpr, r: tl.constexpr, K: tl.constexpr, STARTED: tl.constexpr, TANH: tl.constexpr,
    UNIT: tl.constexpr, COMPONENTS: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    # The prior first: its program has more to do after its product.
    block = tl.program_id(0) - 1
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    if block < 0:
        write_prior(states, gate, log_prior, token, tokens, least, H, K, UNIT, COMPONENTS, TOKENS, INPUTS)
    else:
        write_rows(
            states, weight, bias, start, rows, token, tokens, start_stride, block, scale,
            H, r, K, STARTED, TANH, TOKENS, OUTPUTS, INPUTS,
        )  # fmt: skip


@jit
def centre_kernel(  # type: ignore[no-untyped-def]
    differences, start, rows, start_stride, r: tl.constexpr, K: tl.constexpr,
    STARTED: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """One token's differences [K, r] in fp32 less their mean, plus the start."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = d < r
    begin = tl.zeros([OUTPUTS], tl.float32)
    if STARTED:
        begin += tl.load(start + token * start_stride + d, mask=inside, other=0.0).to(tl.float32)
    for k in range(K):
        begin -= tl.load(differences + (token * K + k) * r + d, mask=inside, other=0.0) / K
    for k in range(K):
        place = (token * K + k) * r + d
        own = tl.load(differences + place, mask=inside, other=0.0)
        tl.store(rows + place, (begin + own).to(rows.dtype.element_ty), mask=inside)


def few_contexts(
    states: Tensor, weight: Tensor, bias: Tensor, gate: Tensor, start: Tensor | None, *, tanh: bool,
    centred: bool = False, scale: float = 1.0, least: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """rows [..., K, r] and log_prior [..., K] in fp32 of states [..., H]: weight [K r, H], bias [K r], gate
    [K, H], start [..., r]. Rows read `scale` times the states; `least` is added to the mean square of its
    entries before the root."""
    (*leading, H), K = states.shape, gate.shape[0]
    r = weight.shape[0] // K
    flat = states.reshape(-1, H).contiguous()
    tokens = flat.shape[0]
    rows = states.new_empty(*leading, K, r)
    log_prior = states.new_empty(*leading, K, dtype=torch.float32)
    begin = flat if start is None else start.reshape(-1, r)
    if begin.stride(-1) != 1:
        begin = begin.contiguous()
    blocks = -(-K * r // OUTPUTS)
    # Differences keep their digits until their mean is taken off.
    made = torch.empty_like(rows, dtype=torch.float32) if centred else rows
    with on_device(states):
        contexts_kernel[(blocks + 1, -(-tokens // TOKENS))](
            flat, weight, bias, begin, gate, made, log_prior, tokens, begin.stride(0),
            scale, least, H=H, r=r, K=K, STARTED=start is not None and not centred,
            TANH=tanh, UNIT=centred, COMPONENTS=max(16, triton.next_power_of_2(K)), TOKENS=TOKENS,
            OUTPUTS=OUTPUTS, INPUTS=INPUTS, num_warps=4, num_stages=4,
        )  # fmt: skip
        if centred:
            centre_kernel[(tokens, -(-r // INPUTS))](
                made, begin, rows, begin.stride(0), r=r, K=K, STARTED=start is not None,
                OUTPUTS=INPUTS, num_warps=1,
            )  # fmt: skip
    return rows, log_prior
