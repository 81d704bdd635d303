"""Random problems, plain-torch answers to them, and ways to force a cut of the work.

The answers here share no code with the package: f is written out again, and the piecewise-linear f as a
sum of clamped ramps, so that a wrong definition cannot agree with itself.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fullrank.ops import (
    IDENTITY,
    SIGSOFTMAX,
    CappedSigsoftmax,
    PiecewiseLinear,
    Pointwise,
    Softcap,
    linear_logprob,
    mixture_nll,
)
from fullrank.ops import workspace as workspace_module
from fullrank.ops.arguments import product_dtype
from fullrank.ops.workspace import Plan, make_plan
from tests.peak_memory import peak_bytes

TRAINED = ("rows", "log_prior", "weight", "bias", "slopes")
CAP, LIMIT = 3.0, 2.0
TRAINABLE = {"plif": 6, "capped_sigsoftmax": 1}
"""Numbers that f trains."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    installed = importlib.util.find_spec("triton") is not None
    if not installed or os.environ.get("TRITON_INTERPRET") != "1":
        why = "runs on a GPU instead" if installed else "Triton is not installed"
        for item in items:
            if item.get_closest_marker("interpreter"):
                item.add_marker(pytest.mark.skip(reason=why))
    for item in items:
        if item.get_closest_marker("interpreter"):
            # It works with NumPy, which warns of the logarithm of 0 that a kernel then leaves unused.
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Arguments of `mixture_nll`; `slopes` belong to the piecewise-linear f, or are the lift of another."""

    rows: Tensor
    log_prior: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None = None
    token_weight: Tensor | None = None
    slopes: Tensor | None = None
    kind: str = "identity"

    @property
    def pointwise(self) -> Pointwise:
        if self.kind == "plif":
            return PiecewiseLinear(self.slopes, LIMIT)
        if self.kind == "capped_sigsoftmax":
            return CappedSigsoftmax(self.slopes, CAP)
        return {"identity": IDENTITY, "sigsoftmax": SIGSOFTMAX, "softcap": Softcap(CAP)}[self.kind]

    def to(self, dtype: torch.dtype) -> Problem:
        """All floating-point tensors in one dtype."""
        changed = {
            field.name: value.to(dtype)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and value.is_floating_point()
        }
        return replace(self, **changed)

    def leaves(self, trained: tuple[str, ...] = TRAINED) -> Problem:
        """Fresh leaves, with gradients for the named tensors that are there."""
        changed = {
            field.name: value.detach().clone().requires_grad_(field.name in trained)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and value.is_floating_point()
        }
        return replace(self, **changed)

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name in TRAINED if (value := getattr(self, name)) is not None}

    def nll(self, **options: Any) -> Any:
        return mixture_nll(
            self.rows, self.log_prior, self.weight, self.targets, bias=self.bias, pointwise=self.pointwise,
            token_weight=self.token_weight, **options,
        )  # fmt: skip

    def logprob(self, **options: Any) -> tuple[Tensor, Tensor]:
        """`linear_logprob` of all rows, each with its token's target."""
        targets = self.targets.repeat_interleave(self.rows.shape[1])
        return linear_logprob(
            self.rows.flatten(0, 1), self.weight, targets, bias=self.bias, pointwise=self.pointwise, **options
        )

    def bent(self) -> Tensor:
        """f(rows W^T + b) [N, K, V]: products in the problem's dtype, the rest in fp32 or fp64."""
        wide = torch.float64 if self.rows.dtype == torch.float64 else torch.float32
        scores = (self.rows @ self.weight.t()).to(wide)
        if self.bias is not None:
            scores = scores + self.bias.to(wide).clamp(min=-1e30)
        if self.kind == "sigsoftmax":
            scores = scores + functional.logsigmoid(scores)
        elif self.kind == "softcap":
            scores = CAP * torch.tanh(scores / CAP)
        elif self.kind == "capped_sigsoftmax":
            capped = CAP * torch.tanh(scores / CAP)
            scores = capped - functional.softplus(-capped - self.slopes.to(wide))
        elif self.kind == "plif":
            scores = ramps(scores, self.slopes.to(wide))
        if self.bias is not None:
            scores = scores.masked_fill(self.bias == -torch.inf, -torch.inf)
        return scores

    def log_probs(self) -> Tensor:
        """Plain log-probabilities [N, V] of the mixture."""
        components = self.bent().log_softmax(-1)
        return torch.logsumexp(components + self.log_prior.to(components.dtype)[..., None], dim=1)

    def plain_nll(self, reduction: str = "mean") -> Tensor:
        """The loss by plain autograd; every target must count."""
        nll = -self.log_probs().gather(1, self.targets[:, None])[:, 0]
        share = torch.ones_like(nll) if self.token_weight is None else self.token_weight.to(nll.dtype)
        if reduction == "none":
            return nll * share
        return (nll * share).sum() / (share.sum() if reduction == "mean" else 1.0)


def ramps(scores: Tensor, slopes: Tensor) -> Tensor:
    """The piecewise-linear f as a sum of ramps, one a bin, the outer ones open."""
    bins = slopes.shape[0]
    step = 2 * LIMIT / bins
    total = torch.zeros_like(scores)
    for i in range(bins):
        ramp = scores - (i * step - LIMIT)
        if i > 0:
            ramp = ramp.clamp(min=0.0)
        if i < bins - 1:
            ramp = ramp.clamp(max=step)
        total = total + slopes[i] * ramp
    return total


def build(
    N: int = 7, K: int = 3, D: int = 5, V: int = 11, *, kind: str = "identity",
    dtype: torch.dtype = torch.float64, bias: bool = False, token_weight: bool = False, seed: int = 0,
    scale: float = 1.0,
) -> Problem:  # fmt: skip
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    return Problem(
        rows=normal(N, K, D) * scale,
        log_prior=normal(N, K).log_softmax(-1),
        weight=normal(V, D),
        targets=torch.randint(V, (N,), generator=draw),
        bias=normal(V) if bias else None,
        token_weight=torch.rand(N, generator=draw, dtype=torch.float64) + 0.1 if token_weight else None,
        slopes=torch.rand(TRAINABLE[kind], generator=draw, dtype=torch.float64) + 0.2
        if kind in TRAINABLE
        else None,
        kind=kind,
    ).to(dtype)


def differentiate(
    problem: Problem, loss_of: Callable[[Problem], Tensor], trained: tuple[str, ...] = TRAINED
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients; a loss a token is weighed unevenly, so that a mixed-up upstream gradient shows."""
    leaves = problem.leaves(trained)
    loss = loss_of(leaves)
    uneven = torch.linspace(-1.0, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)
    loss.backward(uneven if loss.ndim else None)
    return loss.detach(), leaves.gradients()


def relative_error(value: Tensor, truth: Tensor) -> float:
    scale = truth.double().norm().clamp(min=1e-300)
    return float((value.double() - truth.double()).norm() / scale)


def as_good(fast: Tensor, plain: Tensor, truth: Tensor, *, floor: float) -> None:
    """The fast path errs at most twice as far from the fp64 truth as the same-dtype plain path."""
    error, allowed = relative_error(fast, truth), 2 * relative_error(plain, truth) + floor
    assert error <= allowed, f"error {error:.3g} of {tuple(truth.shape)}, allowed {allowed:.3g}"


class Cutter:
    """Forces how a problem is cut, and checks that it is cut that way."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def __call__(self, name: str, problem: Problem) -> int:
        """A workspace under which the problem is cut as named: whole, chunks or blocks (of V)."""
        N, K, _ = problem.rows.shape
        workspace = 1 << 24
        if name != "whole":
            self.patch.setattr(workspace_module, "MOST_ROWS", {"cpu": 2 * K})
        if name == "blocks":
            workspace = smallest_workspace(problem)
        plan = plan_of(problem, workspace)
        assert (plan.tokens < N) == (name != "whole")
        assert (plan.block < problem.weight.shape[0]) == (name == "blocks")
        return workspace


def plan_of(problem: Problem, workspace: int) -> Plan:
    N, K, D = problem.rows.shape
    return make_plan(
        N=N, K=K, D=D, V=problem.weight.shape[0], product=product_dtype(problem.rows, problem.weight),
        given=problem.weight.dtype, device=problem.rows.device,
        tile_buffers=problem.pointwise.tile_buffers, workspace=workspace,
    )  # fmt: skip


def smallest_workspace(problem: Problem) -> int:
    workspace = 256
    while True:
        try:
            plan_of(problem, workspace)
        except ValueError:
            workspace += 64
        else:
            return workspace


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    return build


@pytest.fixture(scope="session")
def tools() -> Any:
    """The helpers of this file, which a test module cannot import."""

    class Tools:
        differentiate = staticmethod(differentiate)
        relative_error = staticmethod(relative_error)
        as_good = staticmethod(as_good)
        peak_bytes = staticmethod(peak_bytes)
        plan_of = staticmethod(plan_of)
        ramps = staticmethod(ramps)
        limit, cap = LIMIT, CAP

    return Tools


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Cutter:
    return Cutter(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def _language_is_replaced_once() -> Iterator[None]:
    """Triton's interpreter puts its own functions into the language at every launch of a kernel, and again at
    every call of a function inside it: half of its time. No kernel is compiled here, so they may stay."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    replace_language, scopes = interpreter._patch_lang, {}

    def once(function: Any) -> Any:
        # What is replaced depends on the modules that a function sees.
        seen = id(function.__globals__)
        if seen not in scopes:
            scopes[seen] = replace_language(function)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", once)
        # Whether a sum of integers overflows is computed, and dropped where no debugger asks.
        builder = interpreter.interpreter_builder
        patched.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
    for scope in reversed(scopes.values()):
        scope.restore()


@pytest.fixture(autouse=True, scope="session")
def warned_of_slow_bf16() -> None:
    """On a CPU without bf16 instructions torch says so once, at the first product; not our warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows, weight = torch.ones(120, 24, dtype=torch.bfloat16), torch.ones(300, 24, dtype=torch.bfloat16)
        rows @ weight.t()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products gain nothing from threads and lose much to them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
