"""Log-probabilities of mixtures over the whole vocabulary, and their largest: for decoding and for looking.

On CUDA one product and the kernels of `kernels.py` make them; elsewhere the definition does, a
piece at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.ops.arguments import check_mixture, check_shapes, compute_dtype, product_dtype
from fullrank.ops.mixture import reference
from fullrank.ops.pointwise import IDENTITY, Pointwise
from fullrank.ops.products import needs_of
from fullrank.ops.workspace import workspace_of


def mixture_log_probs(
    rows: Tensor, log_prior: Tensor, weight: Tensor, *, bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY, workspace: int | None = None,
) -> Tensor:  # fmt: skip
    """Normalised log-probabilities [N, V] of the mixture: rows [N, K, D], log_prior [N, K].

    With gradients this is the definition, N x K x V numbers. Without, it goes through the tokens in pieces
    that fit the workspace beside the result; the smallest piece is one component of one token.
    """
    check_mixture(rows, log_prior, weight, None, bias)
    product = product_dtype(rows, weight)
    rows = rows.to(product)
    if any(needs_of(rows, log_prior, weight, bias, pointwise.trained)):
        return reference.mixture_log_probs(rows, log_prior, weight, bias=bias, pointwise=pointwise)
    return _table(rows, log_prior, weight, bias, pointwise, workspace)


def _table(
    rows: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise,
    workspace: int | None,
) -> Tensor:  # fmt: skip
    """`mixture_log_probs` without gradients, of rows in the dtype of the products."""
    (N, K, _), V = rows.shape, weight.shape[0]
    if _mixing_serves(rows, pointwise):
        size = max(1, workspace_of(workspace, rows.device) // (K * V * rows.itemsize))
        table = rows.new_empty((N, V), dtype=torch.float32)
        pieces = zip(rows.split(size), log_prior.split(size), table.split(size), strict=True)
        for part, prior, place in pieces:
            _mix(part, prior, weight, bias, pointwise, out=place)
        return table
    out = rows.new_full((N, V), -torch.inf, dtype=compute_dtype(rows.dtype))
    # The definition holds about eight copies of its scores at once.
    fitting = max(1, workspace_of(workspace, rows.device) // (8 * out.itemsize * V))
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
    check_shapes(rows, weight, None, bias)
    product = product_dtype(rows, weight)
    return reference.bent_scores(rows.to(product), weight, bias, pointwise)


@torch.no_grad()
def mixture_argmax(
    rows: Tensor, log_prior: Tensor, weight: Tensor, *, bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY, workspace: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The largest log-probability [N] of the mixture and its entry [N]; on CUDA without a table of N x V."""
    check_mixture(rows, log_prior, weight, None, bias)
    product = product_dtype(rows, weight)
    rows = rows.to(product)
    (_, K, _), V = rows.shape, weight.shape[0]
    each = K * V * (rows.itemsize if _mixing_serves(rows, pointwise) else 8 * 4)
    size = max(1, workspace_of(workspace, rows.device) // each)
    found = []
    for part, prior in zip(rows.split(size), log_prior.split(size), strict=True):
        if _mixing_serves(rows, pointwise):
            found.append(_mix(part, prior, weight, bias, pointwise))
        else:
            best = _table(part, prior, weight, bias, pointwise, None).max(1)
            found.append((best.values, best.indices))
    if len(found) == 1:
        return found[0]
    values, entries = (torch.cat(column) for column in zip(*found, strict=True))
    return values, entries


def _mixing_serves(rows: Tensor, pointwise: Pointwise) -> bool:
    if not rows.is_cuda or rows.dtype == torch.float64 or rows.shape[0] == 0:
        return False
    from fullrank.ops import triton_base

    return triton_base.obstacle(rows.device, rows.dtype, pointwise) is None


def _mix(
    rows: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise, *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities into `out` [N, V]; without it the best of each token and its entry."""
    from fullrank.ops.decode import kernels

    # Autocast reaches in here, and the dtype is decided.
    with torch.autocast(rows.device.type, enabled=False):
        scores = torch.mm(rows.flatten(0, 1), weight.to(rows.dtype).t())
    shift = None if bias is None else bias.float()
    return kernels.mix_scores(scores, log_prior.float(), shift, pointwise, best=out is None, out=out)
