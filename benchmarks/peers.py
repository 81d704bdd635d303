"""One output layer's inputs, and every implementation of its loss that can be had.

    fullrank            fullrank.mixture_nll
    eager               logits, log_softmax, logsumexp over the components; for K = 1 F.cross_entropy
    compiled            torch.compile of: F.cross_entropy of each row, then logsumexp over the components
    cce, cce exact      Apple's cut_cross_entropy on flattened rows, with its gradient filter and, for K = 1,
                        without
    liger               Liger's fused linear cross-entropy as it comes; for K > 1 on flattened rows
    liger 16x           the same for K = 1 with chunks 16 times as large: its own option for speed
    torch               F.linear_cross_entropy in chunks (torch >= 2.13)
    quack, quack 8192   QuACK's chunked_linear_cross_entropy for K = 1, with chunks of 4096 rows, as it comes,
                        and of 8192

All but eager need only the nll of every row: nll = -logsumexp_k (log_prior_k - nll_k).
An implementation that is not installed raises on being made; that is a line of the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fullrank.ops import mixture_nll

Loss = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """A layer of K components; for K = 1 the prior is 0 and takes no gradient."""

    rows: Tensor
    """[N, K, D]"""
    log_prior: Tensor
    """[N, K], fp32"""
    weight: Tensor
    """[V, D]"""
    targets: Tensor
    """[N]"""

    @property
    def leaves(self) -> list[Tensor]:
        return [each for each in (self.rows, self.log_prior, self.weight) if each.requires_grad]

    @property
    def gradient_bytes(self) -> int:
        return sum(leaf.numel() * leaf.element_size() for leaf in self.leaves)

    def drop_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def flat(self) -> tuple[Tensor, Tensor]:
        """Rows [N * K, D] and their targets [N * K]."""
        return self.rows.flatten(0, 1), spread_targets(self.targets, self.rows.shape[1])

    def mix(self, row_nll: Tensor) -> Tensor:
        """The mean loss from the nll of every row."""
        return -torch.logsumexp(self.log_prior - row_nll.view(self.log_prior.shape), dim=1).mean()


def draw_inputs(
    *,
    N: int,
    K: int,
    D: int,
    V: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> LayerInputs:
    """Scores of spread 1, gate logits of spread 1, targets at random."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=device)

    gates = normal(N, K)
    return LayerInputs(
        rows=normal(N, K, D).to(dtype).requires_grad_(),
        weight=normal(V, D).div_(D**0.5).to(dtype).requires_grad_(),
        log_prior=gates.log_softmax(-1).requires_grad_(K > 1),
        targets=torch.randint(V, (N,), generator=draw, device=device),
    )


def spread_targets(targets: Tensor, K: int) -> Tensor:
    """[N] -> [N * K], each K times."""
    return targets[:, None].expand(-1, K).reshape(-1)


def fullrank_loss(inputs: LayerInputs, **options: Any) -> Loss:
    return lambda: mixture_nll(inputs.rows, inputs.log_prior, inputs.weight, inputs.targets, **options)


def eager_mixture(rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    components = (rows @ weight.t()).float().log_softmax(-1)
    log_probs = torch.logsumexp(components + log_prior[:, :, None], dim=1)
    return functional.nll_loss(log_probs, targets)


def row_nll(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """rows [R, D], targets [R] -> [R]; what the compiler makes one read and one write of the scores of."""
    return functional.cross_entropy((rows @ weight.t()).float(), targets, reduction="none")


def compiled_mixture(rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    nll = row_nll(rows.flatten(0, 1), weight, spread_targets(targets, rows.shape[1]))
    return -torch.logsumexp(log_prior - nll.view(log_prior.shape), dim=1).mean()


def compiled_softmax(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy((rows @ weight.t()).float(), targets)


def compiled_by(compiler: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile with this backend; "none" leaves the function as it is."""
    return function if compiler == "none" else torch.compile(function, backend=compiler, dynamic=False)


def make_fullrank(inputs: LayerInputs, compiler: str) -> Loss:
    return fullrank_loss(inputs)


def make_eager(inputs: LayerInputs, compiler: str) -> Loss:
    if inputs.rows.shape[1] == 1:
        return lambda: compiled_softmax(inputs.rows[:, 0], inputs.weight, inputs.targets)
    return lambda: eager_mixture(inputs.rows, inputs.log_prior, inputs.weight, inputs.targets)


def make_compiled(inputs: LayerInputs, compiler: str) -> Loss:
    if inputs.rows.shape[1] == 1:
        one = compiled_by(compiler, compiled_softmax)
        return lambda: one(inputs.rows[:, 0], inputs.weight, inputs.targets)
    every = compiled_by(compiler, compiled_mixture)
    return lambda: every(inputs.rows, inputs.log_prior, inputs.weight, inputs.targets)


def cce_function(*, filtered: bool) -> Callable[..., Tensor]:
    """(rows, weight, targets, reduction) -> loss; its release 25.1.1 returns no normaliser, but rows' nll."""
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    epsilon = "auto" if filtered else None
    return lambda rows, weight, targets, reduction: function(
        rows, weight, targets, reduction=reduction, filter_eps=epsilon
    )


def liger_function(*, chunks: int = 1) -> Callable[..., Tensor]:
    module = importlib.import_module("liger_kernel.transformers.functional")
    function = module.liger_fused_linear_cross_entropy
    more = {"chunk_mem_const": chunks} if chunks > 1 else {}
    return lambda rows, weight, targets, reduction: function(
        rows, weight, targets, reduction=reduction, **more
    )


def torch_function() -> Callable[..., Tensor]:
    if not hasattr(functional, "linear_cross_entropy"):
        raise RuntimeError(f"torch {torch.__version__} has no linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda rows, weight, targets, reduction: functional.linear_cross_entropy(
        rows, weight, targets, reduction=reduction, options=options
    )


def make_quack(inputs: LayerInputs, chunk: int) -> Loss:
    """It has the mean of one row a token alone."""
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda: function(inputs.rows[:, 0], inputs.weight, inputs.targets, chunk_size=chunk)


def by_rows(inputs: LayerInputs, function: Callable[..., Tensor]) -> Loss:
    """A loss from a function of rows, weight, targets and reduction."""
    K = inputs.rows.shape[1]
    if K == 1:
        return lambda: function(inputs.rows[:, 0], inputs.weight, inputs.targets, "mean")
    # The targets of the rows are made once: no time of the peer's.
    _, targets = inputs.flat()
    return lambda: inputs.mix(function(inputs.rows.flatten(0, 1), inputs.weight, targets, "none"))


IMPLEMENTATIONS: dict[str, Callable[[LayerInputs, str], Loss]] = {
    "fullrank": make_fullrank,
    "compiled": make_compiled,
    "eager": make_eager,
    "cce": lambda inputs, compiler: by_rows(inputs, cce_function(filtered=True)),
    "cce exact": lambda inputs, compiler: by_rows(inputs, cce_function(filtered=False)),
    "liger": lambda inputs, compiler: by_rows(inputs, liger_function()),
    "liger 16x": lambda inputs, compiler: by_rows(inputs, liger_function(chunks=16)),
    "torch": lambda inputs, compiler: by_rows(inputs, torch_function()),
    "quack": lambda inputs, compiler: make_quack(inputs, 4096),
    "quack 8192": lambda inputs, compiler: make_quack(inputs, 8192),
}

ONLY_ONE = {"liger 16x", "cce exact", "quack", "quack 8192"}
"""What is measured for one component only."""


def implementations(K: int, without: tuple[str, ...]) -> list[str]:
    left_out = {*without, *(() if K == 1 else ONLY_ONE)}
    return [name for name in IMPLEMENTATIONS if name not in left_out]
