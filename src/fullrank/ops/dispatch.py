"""The public operations: check the arguments, choose an implementation.

    impl="auto"        the fastest path that serves the call
    impl="chunked"     bounded workspace, gradient in the forward pass, on any device
    impl="triton"      the same with one kernel for the elementwise work, on CUDA; raises where it cannot
    impl="reference"   the definition, materialised; differentiable any number of times

All return fp32 (fp64 for fp64 inputs). Under autocast the products run in autocast's dtype, the rest as ever.
A CUDA graph can capture them after a warm-up call; what then changes for targets is in `targets.py`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops import autograd, reference
from fullrank.ops.gradients import Needs
from fullrank.ops.plan import default_workspace
from fullrank.ops.pointwise import IDENTITY, Pointwise
from fullrank.ops.trunk import trunk_serves

IMPLEMENTATIONS = ("auto", "triton", "chunked", "reference")
REDUCTIONS = ("mean", "sum", "none")


class TokenStats(NamedTuple):
    """What a pass knows of every token besides the loss; none of it carries gradients."""

    nll: Tensor
    """[N] nats, before token weights; 0 where ignored."""
    argmax: Tensor
    """[N] the most probable vocabulary entry of the mixture; -1 where ignored."""
    entropy: Tensor
    """[N] nats, of the mixture; 0 where ignored."""


def linear_logprob(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    workspace: int | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Target score f(z_y) and normaliser logsumexp_v f(z_v) of every row, both differentiable.

    rows [R, D], weight [V, D], targets [R], bias [V] -> ([R], [R]). Four products for forward and backward,
    two with everything but the rows frozen. `workspace` bounds the extra memory in bytes.
    """
    if rows.ndim != 2:
        raise FullrankError(f"rows have shape {_shape(rows)}, expected [R, D]: flatten what leads the width")
    _check_shapes(rows, weight, targets, bias)
    product = _product_dtype(rows, weight)
    rows = rows.to(product)
    _check_implementation(impl)
    if impl == "reference":
        autograd.check_targets(targets, weight.shape[0], None)
        return reference.linear_logprob(rows, weight.to(product), targets, bias=bias, pointwise=pointwise)
    target, lse, *_ = autograd.rows_statistics(
        rows, weight, targets.long(), bias, pointwise.trained, pointwise.kind, pointwise.constant, None,
        _needs(rows, None, weight, bias, pointwise), workspace, impl,
    )  # fmt: skip
    return target, lse


def linear_nll(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    workspace: int | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """-log p(y) = normaliser - f(z_y) and the normaliser of every row: as `linear_logprob`, but here a
    confident row keeps its digits."""
    if impl == "reference":
        target, lse = linear_logprob(rows, weight, targets, bias=bias, pointwise=pointwise, impl=impl)
        return lse - target, lse
    if rows.ndim != 2:
        raise FullrankError(f"rows have shape {_shape(rows)}, expected [R, D]: flatten what leads the width")
    _check_shapes(rows, weight, targets, bias)
    _check_implementation(impl)
    rows = rows.to(_product_dtype(rows, weight))
    _, lse, nll, *_ = autograd.rows_statistics(
        rows, weight, targets.long(), bias, pointwise.trained, pointwise.kind, pointwise.constant, None,
        _needs(rows, None, weight, bias, pointwise), workspace, impl,
    )  # fmt: skip
    return nll, lse


@overload
def mixture_nll(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = ...,
    pointwise: Pointwise = ...,
    reduction: str = ...,
    token_weight: Tensor | None = ...,
    ignore_index: int = ...,
    return_stats: Literal[False] = ...,
    workspace: int | None = ...,
    impl: str = ...,
    row_skip: float = ...,
) -> Tensor: ...
@overload
def mixture_nll(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = ...,
    pointwise: Pointwise = ...,
    reduction: str = ...,
    token_weight: Tensor | None = ...,
    ignore_index: int = ...,
    return_stats: Literal[True],
    workspace: int | None = ...,
    impl: str = ...,
    row_skip: float = ...,
) -> tuple[Tensor, TokenStats]: ...
def mixture_nll(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    reduction: str = "mean",
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    return_stats: bool = False,
    workspace: int | None = None,
    impl: str = "auto",
    row_skip: float = 0.0,
) -> Tensor | tuple[Tensor, TokenStats]:
    """Negative log-likelihood of a mixture of K softmaxes (or of what `pointwise` makes of them), in nats.

    rows [N, K, D], log_prior [N, K] (normalised over K; -inf switches a component off), weight [V, D],
    targets [N], bias [V] (-inf masks a vocabulary entry), token_weight [N].

    reduction="mean" divides by the summed weights of the counted tokens and "sum" does not: three products
    for forward and backward, two with W frozen, one without gradients. "none" returns [N], weights applied,
    for four (two with W frozen). Tokens whose target is `ignore_index` count nothing, whatever their rows
    hold; if none is left, or the weights sum to 0, a mean is 0 with gradient 0. Signed weights call for
    "sum".

    return_stats=True returns (loss, TokenStats) from the same pass (with "none" and gradients: from one
    product more). `workspace` bounds the memory beyond inputs and gradients, in bytes; 256 MiB on a CPU by
    default, on CUDA 2 GiB or a sixteenth of the device's memory.

    row_skip > 0 leaves rows with a posterior share of at most row_skip out of the gradients of rows, weight
    and bias where that saves time: 1 + 2 (kept rows / all rows) products instead of 3. Such a row gets
    gradient 0 instead of one of norm at most 2 row_skip w max|f'| max_v |W_v|, with w the token's weight; W's
    gradient misses at most 2 max|f'| times the sum over the skipped rows of share w |row|, in the sum of the
    norms of its V rows. The loss and all other gradients stay exact, and so does everything with 0, with one
    component, with reduction="none" and its unknown upstream gradient, with impl="reference", in a captured
    CUDA graph, and for a chunk of tokens that keeps most of its rows. `posterior_shares` tells which rows are
    above a bound.
    """
    _check_mixture(rows, log_prior, weight, targets, bias)
    check_reduction(targets, reduction, token_weight)
    if not 0.0 <= row_skip < 1.0:
        raise FullrankError(
            f"row_skip={row_skip!r} is no bound on a posterior share: expected 0 <= row_skip < 1; "
            "pass 0 to skip nothing"
        )
    product = _product_dtype(rows, weight)
    rows = rows.to(product)
    _check_implementation(impl)
    needs = _needs(rows, log_prior, weight, bias, pointwise)
    function = (pointwise.trained, pointwise.kind, pointwise.constant)

    def evaluate(mean: bool, stats: bool, needs: Needs) -> tuple[Tensor, TokenStats]:
        loss, *stat, _, _, _, _, _, _ = autograd.mixture(
            rows, log_prior, weight, targets.long(), bias, token_weight, *function, mean, ignore_index,
            stats, needs, workspace, impl, float(row_skip),
        )  # fmt: skip
        return loss, TokenStats(*stat)

    if impl == "reference":
        autograd.check_targets(targets, weight.shape[0], ignore_index)
        loss = reference.mixture_nll(
            rows, log_prior, weight.to(product), targets, bias=bias, pointwise=pointwise,
            reduction=reduction, token_weight=token_weight, ignore_index=ignore_index,
        )  # fmt: skip
    elif reduction != "none" or not any(needs):
        loss, stats = evaluate(reduction == "mean", return_stats, needs)
        if reduction == "none":
            loss = stats.nll
            if token_weight is not None:
                loss = torch.where(targets != ignore_index, loss * token_weight.to(loss.dtype), 0.0)
        return (loss, stats) if return_stats else loss
    else:
        _, _, row_nll, *_ = autograd.rows_statistics(
            rows.flatten(0, 1), weight, targets.long().repeat_interleave(rows.shape[1]), bias, *function,
            ignore_index, needs, workspace, impl,
        )  # fmt: skip
        joint = log_prior.to(row_nll.dtype) - row_nll.view(log_prior.shape)
        counted = targets != ignore_index
        # Neither an ignored token, whatever its prior holds, nor one that no component can emit may bring
        # inf - inf to the gradient.
        hopeless = torch.isneginf(joint).all(1)
        joint = torch.where((counted & ~hopeless)[:, None], joint, 0.0)
        loss = torch.where(hopeless, torch.inf, -torch.logsumexp(joint, dim=1))
        if token_weight is not None:
            loss = loss * token_weight.to(loss.dtype)
        loss = torch.where(counted, loss, 0.0)
    if not return_stats:
        return loss
    with torch.no_grad():
        return loss, evaluate(False, True, Needs())[1]


def trunk_nll(
    trunk: Tensor,
    private: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: str = "mean",
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    workspace: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """`mixture_nll` of rows [trunk; private_k]: trunk [N, D - r], private [N, K, r], the rest as there.

    The trunk's part of every product is made once and not K times: see `trunk.py`. reduction="none" with
    gradients goes the way of whole rows, as on CUDA does what the kernels cannot serve (private parts wider
    than 128, fp32).
    """
    if trunk.ndim != 2 or private.ndim != 3 or private.shape[:1] != trunk.shape[:1]:
        raise FullrankError(
            f"trunk has shape {_shape(trunk)} and private {_shape(private)}, "
            "expected [N, D - r] and [N, K, r]"
        )
    width = trunk.shape[1] + private.shape[2]
    # A row of the right shape without its memory: the checks ask for no more.
    _check_mixture(private[:, :, :1].expand(-1, -1, width), log_prior, weight, targets, bias)
    check_reduction(targets, reduction, token_weight)
    _check_implementation(impl)
    needs = _needs(trunk, log_prior, weight, bias, IDENTITY)
    needs = needs._replace(rows=needs.rows or (private.requires_grad and torch.is_grad_enabled()))
    product = _product_dtype(trunk, weight)
    unserved = impl == "auto" and not trunk_serves(trunk.device, product, private.shape[2])
    if impl == "reference" or unserved or (reduction == "none" and any(needs)) or trunk.shape[1] == 0:
        rows = torch.cat([trunk[:, None].expand(-1, private.shape[1], -1), private], dim=2)
        return mixture_nll(
            rows, log_prior, weight, targets, bias=bias, reduction=reduction, token_weight=token_weight,
            ignore_index=ignore_index, workspace=workspace, impl=impl,
        )  # fmt: skip
    loss, nll, *_ = autograd.trunk_mixture(
        trunk.to(product), private.to(product), log_prior, weight, targets.long(), bias, token_weight,
        reduction == "mean", ignore_index, needs, workspace, impl,
    )  # fmt: skip
    if reduction != "none":
        return loss
    if token_weight is not None:
        nll = torch.where(targets != ignore_index, nll * token_weight.to(nll.dtype), 0.0)
    return nll


def mixture_log_probs(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    workspace: int | None = None,
) -> Tensor:
    """Normalised log-probabilities [N, V] of the mixture: rows [N, K, D], log_prior [N, K].

    With gradients this is the definition, N x K x V numbers. Without, it goes through the tokens in pieces
    that fit the workspace beside the result; the smallest piece is one component of one token.
    """
    _check_mixture(rows, log_prior, weight, None, bias)
    product = _product_dtype(rows, weight)
    rows = rows.to(product)
    weight = weight.to(product)
    if any(_needs(rows, log_prior, weight, bias, pointwise)):
        return reference.mixture_log_probs(rows, log_prior, weight, bias=bias, pointwise=pointwise)
    (N, K, _), V = rows.shape, weight.shape[0]
    if _mixing_serves(rows, pointwise):
        size = max(1, _workspace(workspace, rows.device) // (K * V * rows.itemsize))
        pieces = zip(rows.split(size), log_prior.split(size), strict=True)
        mixed = [_mix(part, prior, weight, bias, pointwise, best=False)[0] for part, prior in pieces]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)
    out = rows.new_full((N, V), -torch.inf, dtype=reference.compute_dtype(product))
    # The definition holds about eight copies of its scores at once.
    fitting = max(1, _workspace(workspace, rows.device) // (8 * out.itemsize * V))
    components = min(K, fitting)
    step = fitting // components
    for start in range(0, N, step):
        tokens = slice(start, start + step)
        for first in range(0, K, components):
            some = (tokens, slice(first, first + components))
            part = reference.mixture_log_probs(
                rows[some], log_prior[some], weight, bias=bias, pointwise=pointwise
            )
            out[tokens] = torch.logaddexp(out[tokens], part)
    return out


def row_scores(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, pointwise: Pointwise = IDENTITY
) -> Tensor:
    """f(W row + b) [R, V] of rows [R, D], before any normaliser; masked entries are -inf."""
    _check_shapes(rows, weight, None, bias)
    product = _product_dtype(rows, weight)
    return reference.bent_scores(rows.to(product), weight.to(product), bias, pointwise)


@torch.no_grad()
def mixture_argmax(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY,
    workspace: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The largest log-probability [N] of the mixture and its entry [N]; on CUDA without a table of N x V."""
    _check_mixture(rows, log_prior, weight, None, bias)
    product = _product_dtype(rows, weight)
    rows, weight = rows.to(product), weight.to(product)
    (_, K, _), V = rows.shape, weight.shape[0]
    each = K * V * (rows.itemsize if _mixing_serves(rows, pointwise) else 8 * 4)
    size = max(1, _workspace(workspace, rows.device) // each)
    found = []
    for part, prior in zip(rows.split(size), log_prior.split(size), strict=True):
        if _mixing_serves(rows, pointwise):
            found.append(_mix(part, prior, weight, bias, pointwise, best=True))
        else:
            best = mixture_log_probs(part, prior, weight, bias=bias, pointwise=pointwise).max(1)
            found.append((best.values, best.indices))
    values, entries = (torch.cat(column) for column in zip(*found, strict=True))
    return values, entries


def _mixing_serves(rows: Tensor, pointwise: Pointwise) -> bool:
    if not rows.is_cuda or rows.dtype == torch.float64 or rows.shape[0] == 0:
        return False
    from fullrank.ops import triton

    return triton.obstacle(rows.device, rows.dtype, pointwise) is None


def _mix(
    rows: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pointwise: Pointwise,
    *,
    best: bool,
) -> tuple[Tensor, Tensor]:
    from fullrank.ops import mixing_kernels

    # Autocast reaches in here, and the dtype is decided.
    with torch.autocast(rows.device.type, enabled=False):
        scores = torch.mm(rows.flatten(0, 1), weight.t())
    shift = None if bias is None else bias.float()
    return mixing_kernels.mix_scores(scores, log_prior.float(), shift, pointwise, best=best)


def check_reduction(targets: Tensor, reduction: str, token_weight: Tensor | None) -> None:
    """Raise for a reduction or for token weights that no loss here can take."""
    if reduction not in REDUCTIONS:
        raise FullrankError(f"reduction={reduction!r} is unknown: expected one of {', '.join(REDUCTIONS)}")
    if token_weight is not None:
        if token_weight.shape != targets.shape:
            raise FullrankError(
                f"token_weight has shape {_shape(token_weight)}, expected that of targets, {_shape(targets)}"
            )
        if token_weight.requires_grad and torch.is_grad_enabled():
            raise FullrankError(
                "token_weight requires a gradient, which the loss does not give: "
                "pass token_weight.detach(), or weigh the result of reduction='none'"
            )


def _check_implementation(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise FullrankError(f"impl={impl!r} is unknown: expected one of {', '.join(IMPLEMENTATIONS)}")


def _workspace(workspace: int | None, device: torch.device) -> int:
    return default_workspace(device) if workspace is None else workspace


def _needs(
    rows: Tensor, log_prior: Tensor | None, weight: Tensor, bias: Tensor | None, pointwise: Pointwise
) -> Needs:
    if not torch.is_grad_enabled():
        return Needs()
    tensors = (rows, log_prior, weight, bias, pointwise.trained)
    return Needs(*(tensor is not None and tensor.requires_grad for tensor in tensors))


def _product_dtype(rows: Tensor, weight: Tensor) -> torch.dtype:
    kind = rows.device.type
    # Asked by name: torch 2.11 cannot trace its own question whether a device has autocast.
    autocast = kind in ("cpu", "cuda", "mps", "xpu") and torch.is_autocast_enabled(kind)
    if autocast and rows.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    if rows.dtype != weight.dtype:
        raise FullrankError(
            f"rows are {rows.dtype} and weight is {weight.dtype}, expected one dtype: "
            "cast one of them, or run under torch.autocast"
        )
    return rows.dtype


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _check_mixture(
    rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor | None, bias: Tensor | None
) -> None:
    if rows.ndim != 3:
        raise FullrankError(
            f"rows have shape {_shape(rows)}, expected [N, K, D]: for one component pass rows[:, None, :]"
        )
    if rows.shape[1] == 0:
        raise FullrankError(f"rows have shape {_shape(rows)}, expected [N, K, D] with K >= 1 components")
    _check_shapes(rows, weight, targets, bias)
    if log_prior.shape != rows.shape[:2]:
        raise FullrankError(
            f"log_prior has shape {_shape(log_prior)}, expected [N, K] = {list(rows.shape[:2])} as in rows"
        )
    _check_float("log_prior", log_prior)
    _check_device(rows, log_prior=log_prior)


def _check_shapes(rows: Tensor, weight: Tensor, targets: Tensor | None, bias: Tensor | None) -> None:
    if weight.ndim != 2 or weight.shape[0] == 0 or weight.shape[1] != rows.shape[-1]:
        raise FullrankError(
            f"weight has shape {_shape(weight)}, expected [V, D] with V >= 1 and D={rows.shape[-1]} as in "
            f"rows {_shape(rows)}: transpose it or project the rows"
        )
    _check_float("rows", rows)
    _check_float("weight", weight)
    _check_device(rows, weight=weight)
    if targets is not None:
        if targets.shape != rows.shape[:1]:
            raise FullrankError(
                f"targets have shape {_shape(targets)}, expected {list(rows.shape[:1])} as in "
                f"rows {_shape(rows)}: flatten both alike"
            )
        if targets.dtype not in (torch.int32, torch.int64):
            raise FullrankError(f"targets are {targets.dtype}, expected int64 or int32 token ids")
        _check_device(rows, targets=targets)
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise FullrankError(
                f"bias has shape {_shape(bias)}, expected [V] = [{weight.shape[0]}] as weight"
            )
        _check_float("bias", bias)
        _check_device(rows, bias=bias)


def _check_float(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise FullrankError(f"{name} has dtype {tensor.dtype}, expected a floating-point one: use .float()")


def _check_device(rows: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != rows.device:
            raise FullrankError(
                f"{name} is on {tensor.device} and rows are on {rows.device}: move one with .to(device)"
            )


__all__ = [
    "TokenStats",
    "linear_logprob",
    "mixture_argmax",
    "mixture_log_probs",
    "mixture_nll",
    "row_scores",
    "trunk_nll",
]
