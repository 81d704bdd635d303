"""The public loss of a mixture whose rows share a trunk, and its torch operator `fullrank::trunk`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops import arguments, autograd
from fullrank.ops.mixture.operator import mixture_nll
from fullrank.ops.products import Needs, fake_sums, needs_of
from fullrank.ops.reduce import Look, reduce_losses
from fullrank.ops.trunk.chunked import TrunkPass
from fullrank.ops.trunk.reference import whole_rows
from fullrank.ops.workspace import over_chunks


def trunk_nll(
    trunk: Tensor, private: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, *,
    bias: Tensor | None = None, reduction: str = "mean", token_weight: Tensor | None = None,
    ignore_index: int = -100, workspace: int | None = None, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """`mixture_nll` of rows [trunk; private_k]: trunk [N, D - r], private [N, K, r], the rest as there.

    The trunk's part of every product is made once and not K times: see `chunked.py`. reduction="none" with
    gradients goes the way of whole rows, as on CUDA does what the kernels cannot serve (private parts wider
    than 128, fp32).
    """
    if trunk.ndim != 2 or private.ndim != 3 or private.shape[:1] != trunk.shape[:1]:
        raise FullrankError(
            f"trunk has shape {arguments.shape_of(trunk)} and private {arguments.shape_of(private)}, "
            "expected [N, D - r] and [N, K, r]"
        )
    width = trunk.shape[1] + private.shape[2]
    # A row of the right shape without its memory: the checks ask for no more.
    arguments.check_mixture(private[:, :, :1].expand(-1, -1, width), log_prior, weight, targets, bias)
    arguments.check_reduction(targets, reduction, token_weight)
    arguments.check_implementation(impl)
    needs = needs_of(trunk, log_prior, weight, bias, None)
    needs = Needs(needs.rows or (private.requires_grad and torch.is_grad_enabled()), *needs[1:])
    product = arguments.product_dtype(trunk, weight, impl)
    # A compiler cannot look into Triton: then the operator finds out, and takes torch's operations.
    asked = impl == "auto" and trunk.is_cuda and not torch.compiler.is_compiling()
    unserved = asked and not kernels_serve(impl, trunk.device, product, private.shape[2])
    if impl == "reference" or unserved or (reduction == "none" and any(needs)) or trunk.shape[1] == 0:
        return mixture_nll(
            whole_rows(trunk, private), log_prior, weight, targets, bias=bias, reduction=reduction,
            token_weight=token_weight, ignore_index=ignore_index, workspace=workspace, impl=impl,
        )  # fmt: skip
    loss, nll, *_ = trunk_loss(
        trunk, private, log_prior, weight, targets.long(), bias, token_weight, reduction == "mean",
        ignore_index, needs, product, workspace, impl,
    )  # fmt: skip
    if reduction != "none":
        return loss
    return torch.where(targets != ignore_index, reduce_losses(nll, token_weight, "none"), 0.0)


def kernels_serve(impl: str, device: torch.device, product: torch.dtype, private: int) -> bool:
    """Whether the kernels take the components; impl="triton" raises where they cannot."""
    if impl == "chunked" or (impl == "auto" and device.type != "cuda"):
        return False
    from fullrank.ops import triton_base
    from fullrank.ops.trunk.kernels import DTYPES, WIDEST

    why = triton_base.obstacle(device, product, dtypes=DTYPES)
    if why is None and private > WIDEST:
        why = f"private parts are {private} wide, expected at most {WIDEST}"
    return triton_base.refuse_or_say(impl, why)


TRUNK = (
    "(Tensor trunk, Tensor private, Tensor log_prior, Tensor weight, Tensor targets, Tensor? bias, "
    "Tensor? token_weight, bool mean, SymInt ignore_index, bool[] needs, ScalarType product, "
    "SymInt? workspace, str impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
"""loss, nll [N], factor, then the gradients of the differentiable inputs."""
PLACES = (0, 1, 2, 3, 5)


def _make_trunk(
    trunk: Tensor, private: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None,
    token_weight: Tensor | None, mean: bool, ignore_index: int, needs: Sequence[bool],
    product: torch.dtype,
    workspace: int | None, impl: str,
) -> autograd.Result:  # fmt: skip
    wide, wanted = arguments.compute_dtype(product), Needs(*needs)
    with autograd.without_autocast(trunk.device):
        look = Look(targets, weight.shape[0], ignore_index)
        work = TrunkPass(
            trunk, private, weight, bias, needs=wanted, product=product, workspace=workspace,
            kernel=kernels_serve(impl, trunk.device, product, private.shape[2]),
        )  # fmt: skip
        work.score_ahead()
        tokens = look.tokens()
        weights = tokens.weights(token_weight, wide)
        nll, d_prior = over_chunks(
            work, log_prior, tokens, None if weights is None else weights.at_most_one, size=work.size,
            wide=wide, prior_gradient=wanted.prior,
        )  # fmt: skip
        nll = tokens.blank(nll, 0.0)
        loss, factor = tokens.loss(nll, weights, mean=mean)
        return autograd.Result(loss, (nll,), factor, (work.d_trunk, work.d_private, d_prior, *work.made))


@torch.library.custom_op("fullrank::trunk", mutates_args=(), schema=TRUNK)
def trunk_mixture(*inputs: Any) -> tuple[Tensor, ...]:
    return _make_trunk(*inputs).as_tensors()


@trunk_mixture.register_fake
def _(
    trunk: Tensor, private: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None,
    token_weight: Tensor | None, mean: bool, ignore_index: int, needs: Sequence[bool],
    product: torch.dtype,
    workspace: int | None, impl: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted, wide = Needs(*needs), arguments.compute_dtype(product)
    nll = trunk.new_empty(trunk.shape[0], dtype=wide)
    gradients = (
        torch.empty_like(trunk) if wanted.rows else None,
        torch.empty_like(private) if wanted.rows else None,
        nll.new_empty(log_prior.shape) if wanted.prior else None,
        *fake_sums(wanted, weight, None, wide)[:2],
    )
    return nll.new_empty(()), nll, nll.new_empty(()), *autograd.or_empty(nll, *gradients)


def _trunk_backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return autograd.scaled(ctx, upstream, _make_trunk, places=PLACES)


trunk_mixture.register_autograd(_trunk_backward, setup_context=partial(autograd.keep_tensors, places=PLACES))
trunk_loss = autograd.Operator(
    trunk_mixture, _make_trunk, autograd.keep_made, _trunk_backward, autograd.LOSS_TENSORS
)
