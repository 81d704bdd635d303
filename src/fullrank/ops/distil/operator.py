"""The public outputs of mixtures and their gradients: check, choose an implementation, reduce.

    impl="chunked"             bounded workspace, on any device
    impl="triton"              the same with a kernel between the products, on CUDA
    impl="auto"                the faster of both that serves the call
    impl="reference"           the definition, materialised; differentiable any number of times

Rows, log prior, weight, bias and the parameters of f have gradients, a teacher has none. In products of the
student's size, with W trained:

    log-probabilities at ids, the divergence from top tokens      4
    entropy, divergence from a mixture                            3, and 1 of the teacher's size
    the same with reduction="none"                                4, and 2 of the teacher's size

Without gradients one product, and one of the teacher's. The log prior counts up to a constant of the token,
as it does through a log_softmax. All results are fp32 (fp64 for fp64 inputs). A compiler leaves these calls
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops import arguments
from fullrank.ops.autograd import (
    outside_graphs,
    refuse_second_derivative,
    refuse_transforms,
    scaled_to,
    without_autocast,
)
from fullrank.ops.distil import reference
from fullrank.ops.distil.chunked import Pass
from fullrank.ops.distil.teacher import Mixture, Teacher, check_teacher
from fullrank.ops.pointwise import IDENTITY, Pointwise, from_parts
from fullrank.ops.products import Needs, needs_of
from fullrank.ops.reduce import count_targets, inverse_mass, reduce_losses


@outside_graphs
def token_logprobs(
    rows: Tensor, log_prior: Tensor, weight: Tensor, ids: Tensor, *, bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY, temperature: float = 1.0, ignore_index: int = -100,
    workspace: int | None = None, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Log-probabilities [N, M] of a mixture at ids [N, M], or [M], the same for every token.

    rows [N, K, D], log_prior [N, K], weight [V, D], bias [V]. An id may be there twice. An ignored one gives
    0 without gradient, and a token with none but ignored ids costs nothing. `temperature`: see
    `reference.py`. `workspace` bounds the memory beyond inputs, results and gradients, in bytes.
    """
    student = Mixture(rows, log_prior, weight, bias, pointwise)
    settings = _checked(student, None, temperature, workspace, impl)
    if ids.ndim == 1:
        ids = ids.expand(rows.shape[0], -1)
    _check_ids(ids, rows, weight.shape[0], ignore_index)
    if impl == "reference":
        log_p = settings.log_probs(student, (ids != ignore_index).any(1))
        return reference.at_ids(log_p, ids.long(), ignore_index)
    found = _outcomes(student, settings, Ids(ids.long(), ignore_index), None)
    return torch.where(ids != ignore_index, found[:, :-1], 0.0)


@outside_graphs
def entropy(
    rows: Tensor, log_prior: Tensor, weight: Tensor, *, bias: Tensor | None = None,
    pointwise: Pointwise = IDENTITY, temperature: float = 1.0, reduction: str = "mean",
    token_weight: Tensor | None = None, workspace: int | None = None, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """Entropy of a mixture in nats, differentiable: rows [N, K, D], log_prior [N, K], weight [V, D].

    Reductions and token weights [N] are those of `mixture_nll`; a token of weight 0 costs nothing, whatever
    its rows hold.
    """
    student = Mixture(rows, log_prior, weight, bias, pointwise)
    settings = _checked(student, None, temperature, workspace, impl)
    return _reduced(student, settings, "entropy", token_weight, reduction)


@outside_graphs
def divergence(
    rows: Tensor, log_prior: Tensor, weight: Tensor, teacher: Teacher, *, kind: str = "forward",
    bias: Tensor | None = None, pointwise: Pointwise = IDENTITY, temperature: float = 1.0,
    reduction: str = "mean", token_weight: Tensor | None = None, ignore_index: int = -100,
    workspace: int | None = None, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """How far a mixture is from a teacher, in nats: rows [N, K, D], log_prior [N, K], weight [V, D].

    kind="forward" is KL(teacher || student), "reverse" KL(student || teacher), "jensen_shannon" the mean of
    both to their midpoint. The teacher is a `Mixture` over the same vocabulary (`Mixture.softmax(states,
    weight)` for a plain output layer) or `TopTokens`, and has no gradient. Where one has probability and the
    other must have but cannot, the divergence is infinite, without gradient. Reductions and token weights are
    those of `mixture_nll`; `ignore_index` is for ids of top tokens.
    """
    if kind not in reference.KINDS:
        raise FullrankError(f"kind={kind!r} is unknown: expected one of {', '.join(reference.KINDS)}")
    student = Mixture(rows, log_prior, weight, bias, pointwise)
    check_teacher(teacher, rows, weight)
    if isinstance(teacher, Mixture):
        settings = _checked(student, teacher, temperature, workspace, impl, kind)
        return _reduced(student, settings, kind, token_weight, reduction)
    settings = _checked(student, None, temperature, workspace, impl)
    arguments.check_reduction(rows[:, 0, 0], reduction, token_weight)
    _check_ids(teacher.ids, rows, weight.shape[0], ignore_index)
    ids = Ids(teacher.ids.long(), ignore_index)
    counts = _counts(token_weight)
    if impl == "reference":
        log_p = reference.lump(settings.log_probs(student, counts), ids.safe, ids.counted)
    else:
        log_p = _outcomes(student, settings, ids, counts)
        log_p = torch.where(ids.outcomes, log_p, -torch.inf)
    log_q = reference.teacher_outcomes(
        teacher.log_probs.detach().to(log_p.dtype), ids.counted, weight.shape[0]
    )
    known = ids.any if counts is None else ids.any & counts
    log_p, log_q = (torch.where(known[:, None], each, 0.0) for each in (log_p, log_q))
    values = reference.divergence(log_p, log_q, kind)
    return reduce_losses(torch.where(known, values, 0.0), token_weight, reduction)


class Ids:
    """Ids [N, M] of outcomes, of which some may be ignored or there twice."""

    def __init__(self, ids: Tensor, ignore_index: int) -> None:
        given = ids != ignore_index
        self.any = given.any(1)
        """[N], whether a token has any."""
        another = ids.gather(1, given.int().argmax(1, keepdim=True))
        self.safe = torch.where(given, ids, another).masked_fill(~self.any[:, None], 0)
        """[N, M]: in place of an ignored one stands another of the token."""
        self.first = reference.first_places(self.safe)
        """[N, M], where each stands first."""
        columns = torch.arange(ids.shape[1], device=ids.device)
        self.counted = (self.first == columns) & self.any[:, None]
        """[N, M]: each id once."""
        rest = torch.ones_like(self.counted[:, :1])
        self.outcomes = torch.cat([self.counted, rest], 1)
        """[N, M + 1], with the rest."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a pass is made with beside its tensors."""

    product: torch.dtype
    temperature: float
    workspace: int | None
    kind: str
    """Of f, as in `pointwise.from_parts`."""
    constant: float
    impl: str
    teacher: Mixture | None = None
    teacher_product: torch.dtype | None = None
    masked: bool = False
    impossible: bool = False
    """Whether a divergence is infinite for every token: masks are those of the bias."""

    def log_probs(self, mixture: Mixture, counts: Tensor | None) -> Tensor:
        """The definition's [N, V]; a token that does not count may hold anything."""
        rows, log_prior = mixture.rows, mixture.log_prior
        if counts is not None:
            rows = torch.where(counts[:, None, None], rows, 0.0)
            log_prior = torch.where(counts[:, None], log_prior, 0.0)
        rows = rows.to(self.product if mixture is not self.teacher else self.teacher_product)
        return reference.log_probs(mixture._replace(rows=rows, log_prior=log_prior), self.temperature)

    def mixture(self, tensors: tuple[Any, ...]) -> Mixture:
        rows, log_prior, weight, bias, trained = tensors
        return Mixture(rows, log_prior, weight, bias, from_parts(self.kind, self.constant, trained))

    def _kernels(self, rows: Tensor) -> Any:
        """The module that may serve; None where it is not to be asked."""
        if self.impl != "triton" and not (self.impl == "auto" and rows.is_cuda):
            return None
        # Not before it is needed: Triton takes its time to load and is not everywhere.
        from fullrank.ops.distil import fused

        return fused

    def start_values(self, tensors: tuple[Any, ...], needs: Needs) -> Any:
        """As `start`, in the hands of a kernel where that serves."""
        if (fused := self._kernels(tensors[0])) is not None:
            student, teacher = self.mixture(tensors), self.teacher
            size = fused.value_tokens(
                student, teacher, product=self.product, teacher_product=self.teacher_product,
                temperature=self.temperature, masked=self.masked, workspace=self.workspace, impl=self.impl,
            )  # fmt: skip
            if size:
                return fused.KernelValues(
                    student, teacher, needs=needs, product=self.product,
                    teacher_product=self.teacher_product, temperature=self.temperature, size=size,
                )  # fmt: skip
        return self.start(tensors, needs)

    def start(self, tensors: tuple[Any, ...], needs: Needs) -> Pass:
        return Pass(
            self.mixture(tensors), self.teacher, needs=needs, product=self.product,
            teacher_product=self.teacher_product, temperature=self.temperature, masked=self.masked,
            workspace=self.workspace,
        )  # fmt: skip

    def start_masses(self, tensors: tuple[Any, ...], needs: Needs) -> Any:
        """The same for `Masses`."""
        if (fused := self._kernels(tensors[0])) is not None:
            student = self.mixture(tensors)
            size = fused.chunk_size(student, self.product, self.temperature, self.workspace, self.impl)
            if size:
                return fused.KernelMasses(student, needs=needs, product=self.product, size=size)
        return self.start(tensors, needs)


def _checked(
    student: Mixture, teacher: Mixture | None, temperature: float, workspace: int | None, impl: str,
    kind: str = "",
) -> Settings:  # fmt: skip
    rows, log_prior, weight, bias, pointwise = student
    arguments.check_mixture(rows, log_prior, weight, None, bias)
    arguments.check_implementation(impl)
    if not 0.0 < temperature < float("inf"):
        raise FullrankError(f"temperature={temperature} is impossible: expected a positive finite number")
    if impl != "reference":
        refuse_transforms()
    settings = Settings(
        product=arguments.product_dtype(rows, weight, impl), temperature=temperature, workspace=workspace,
        kind=pointwise.kind, constant=pointwise.constant, impl=impl, masked=student.masked,
    )  # fmt: skip
    if teacher is None:
        return settings
    impossible = False
    if settings.masked or teacher.masked:
        mine, theirs = (
            torch.zeros_like(weight[:, 0], dtype=torch.bool) if b is None else torch.isneginf(b)
            for b in (bias, teacher.bias)
        )
        missing = {"forward": mine & ~theirs, "reverse": theirs & ~mine}.get(kind)
        impossible = missing is not None and bool(missing.any())
    return replace(
        settings,
        teacher=teacher.detached(),
        teacher_product=arguments.product_dtype(teacher.rows, teacher.weight, impl),
        masked=settings.masked or teacher.masked,
        impossible=impossible,
    )


def _check_ids(ids: Tensor, rows: Tensor, V: int, ignore_index: int) -> None:
    if ids.ndim != 2 or ids.shape[0] != rows.shape[0] or ids.shape[1] == 0:
        raise FullrankError(
            f"ids have shape {list(ids.shape)}, expected [N, M] with N={rows.shape[0]} as in rows and "
            "M >= 1, or [M] for the same ones at every token: for one id a token pass ids[:, None]"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise FullrankError(f"ids are {ids.dtype}, expected int64 or int32 token ids")
    arguments.check_device(rows, ids=ids)
    count_targets(ids.flatten(), V, ignore_index)


def _counts(token_weight: Tensor | None) -> Tensor | None:
    """Which tokens go through the products; None: all."""
    return None if token_weight is None else token_weight != 0


def _positions(counts: Tensor | None) -> Tensor | None:
    if counts is None or bool(counts.all()):
        return None
    return counts.nonzero()[:, 0]


def _normalised_prior(student: Mixture, settings: Settings, counts: Tensor | None) -> Tensor:
    log_prior = student.log_prior.to(arguments.compute_dtype(settings.product))
    if counts is not None:
        # A token that does not count may hold anything.
        log_prior = torch.where(counts[:, None], log_prior, 0.0)
    return torch.log_softmax(log_prior, 1)


def _outcomes(student: Mixture, settings: Settings, ids: Ids, counts: Tensor | None) -> Tensor:
    """Log-probabilities [N, M + 1] of the outcomes."""
    (N, K, D), M = student.rows.shape, ids.safe.shape[1]
    counts = ids.any if counts is None else ids.any & counts
    log_prior = _normalised_prior(student, settings, counts)
    safe, first, outcomes, rows, prior = ids.safe, ids.first, ids.outcomes, student.rows, log_prior
    # At temperature 1 the components are mixed here, M + 1 numbers a row, else entry by entry in the pass.
    apart = K > 1 and settings.temperature == 1.0
    if apart:
        rows, prior = rows.reshape(N * K, 1, D), log_prior.new_zeros(N * K, 1)
        safe, outcomes, counts, first = (
            each.repeat_interleave(K, 0) for each in (safe, outcomes, counts, first)
        )
    at_ids, rest = Masses.apply(
        settings, safe, _positions(counts), rows, prior, student.weight, student.bias,
        student.pointwise.trained,
    )  # fmt: skip
    found = torch.cat([at_ids.gather(1, first), rest[:, None]], 1)
    found = reference.normalise(found, outcomes)
    if apart:
        found = (found.view(N, K, M + 1) + log_prior[:, :, None]).transpose(1, 2).reshape(-1, K)
        found = reference.logsumexp_where(found, torch.ones_like(found, dtype=torch.bool)).view(N, M + 1)
        # They sum to 1 already, and this gives a sure one its digits back.
        found = reference.normalise(found, ids.outcomes)
    return found


def _reduced(
    student: Mixture, settings: Settings, name: str, token_weight: Tensor | None, reduction: str
) -> Tensor:
    arguments.check_reduction(student.rows[:, 0, 0], reduction, token_weight)
    counts = _counts(token_weight)
    if settings.impl == "reference":
        log_p = settings.log_probs(student, counts)
        if settings.teacher is None:
            values = reference.entropy(log_p)
        else:
            with torch.no_grad():
                log_q = settings.log_probs(settings.teacher, counts).to(log_p.dtype)
            values = reference.divergence(log_p, log_q, name)
        return reduce_losses(values, token_weight, reduction)
    rows, _, weight, bias, pointwise = student
    log_prior = _normalised_prior(student, settings, counts)
    tensors = (rows, log_prior, weight, bias, pointwise.trained)
    # Asked here: inside the function `needs_input_grad` is true for parameters under `torch.no_grad` too.
    needs = needs_of(*tensors)
    late = reduction == "none" and any(needs)
    values = Values.apply(
        settings, name, _positions(counts), None if late else reduction, token_weight, needs, *tensors
    )
    return reduce_losses(values, token_weight, "none") if late else values


class Values(torch.autograd.Function):
    """An output [N] of the tokens, or their reduced loss.

    The forward pass of a reduced loss computes the gradients in `needs`, which the backward pass scales.
    """

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, name: str, positions: Tensor | None, reduction: str | None,
        token_weight: Tensor | None, needs: Needs, *tensors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        log_prior = tensors[1]
        assert log_prior is not None
        ctx.gradients, ctx.options = None, (settings, name, positions, needs)
        share = torch.ones_like(log_prior[:, 0])
        if token_weight is not None:
            share = token_weight.to(share.dtype)
        early = reduction is not None and any(needs)
        # Not scaled by what the weights are divided by: rows times 1/N are subnormal numbers in fp16.
        weights, largest = _at_most_one(share)
        values, work = _evaluate(
            settings, name, positions, tensors, needs if early else Needs(), weights if early else None
        )
        if reduction is None:
            ctx.save_for_backward(*tensors, torch.ones_like(share))
            return values
        mass = inverse_mass(values, token_weight) if reduction == "mean" else 1.0
        ctx.save_for_backward(*tensors, share * mass)
        if early:
            ctx.gradients = work.gradients(), largest * mass
        return reduce_losses(values, token_weight, reduction)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        *tensors, share = ctx.saved_tensors
        settings, name, positions, needs = ctx.options
        early, ctx.gradients = ctx.gradients, None
        if early is not None:
            gradients, factor = early
            return (*[None] * 6, *scaled_to(_dtypes(tensors), gradients, upstream[0], factor))
        weights, largest = _at_most_one(upstream[0] * share)
        _, work = _evaluate(settings, name, positions, tuple(tensors), needs, weights, largest)
        return (*[None] * 6, *_late_gradients(work, tensors))


def _evaluate(
    settings: Settings, name: str, positions: Tensor | None, tensors: tuple[Any, ...], needs: Needs,
    upstream: Tensor | None, largest: Tensor | float = 1.0,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Values [N], and the pass that holds the gradients for upstream [N] times `largest`."""
    with without_autocast(tensors[0].device):
        work = settings.start_values(tensors, needs)
        work.largest = largest
        if settings.impossible:
            # 0 at tokens that do not count would be as good: their weight is 0.
            return tensors[1].new_full(tensors[1].shape[:1], torch.inf), work
        return work.values(name, positions, upstream), work


def _at_most_one(upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers as fp16 wants them, and what they were divided by."""
    largest = upstream.abs().amax() if upstream.numel() else upstream.new_ones(())
    largest = torch.where(largest == 0, 1.0, largest)
    return upstream / largest, largest


def _dtypes(tensors: Sequence[Tensor | None]) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def _late_gradients(work: Any, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of a pass whose upstream numbers were divided by its `largest`, which those of the rows have again."""
    rows, *others = work.gradients()
    first, *dtypes = _dtypes(tensors)
    return [None if rows is None else rows.to(first), *scaled_to(dtypes, others, work.largest)]


class Masses(torch.autograd.Function):
    """`Pass.masses`, whose gradients wait for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, ids: Tensor, positions: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert tensors[0] is not None
        with without_autocast(tensors[0].device):
            at_ids, rest = settings.start_masses(tensors, Needs()).masses(ids, positions)
        ctx.settings, ctx.positions = settings, positions
        ctx.save_for_backward(*tensors, ids, rest)
        return at_ids, rest

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        *tensors, ids, rest = ctx.saved_tensors
        g_ids, g_rest = upstream
        with without_autocast(rest.device):
            work = ctx.settings.start_masses(tuple(tensors), Needs(*ctx.needs_input_grad[3:]))
            both, work.largest = _at_most_one(torch.cat([g_ids, g_rest[:, None]], 1))
            work.mass_gradients(ids, rest, ctx.positions, both[:, :-1], both[:, -1])
        return (*[None] * 3, *_late_gradients(work, tensors))
