"""The chunked path on CUDA: the same losses and gradients, within the error that the dtype itself makes."""

import pytest
import torch

from fullrank.ops import IDENTITY, SIGSOFTMAX, Pointwise, Softcap, linear_logprob, mixture_nll
from fullrank.ops.workspace import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def problem(N: int, K: int, D: int, V: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(N + K + D + V)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = draw(N, K, D).to(dtype)
    prior = torch.log_softmax(draw(N, K), dim=1).float()
    weight = (draw(V, D) * D**-0.5 * 3).to(dtype)
    targets = torch.randint(V, (N,), generator=generator)
    return [item.cuda() for item in (rows, prior, weight, targets)]


def gradients(
    rows: torch.Tensor, prior: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **options: object
) -> list[torch.Tensor]:
    leaves = [item.detach().clone().requires_grad_() for item in (rows, prior, weight)]
    loss = mixture_nll(*leaves, targets, **options)  # type: ignore[arg-type]
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("pointwise", [IDENTITY, SIGSOFTMAX, Softcap(10.0)], ids=lambda f: f.kind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("workspace", [None, 2 * MIB], ids=["kept", "blocks"])
def test_as_exact_as_eager(pointwise: Pointwise, dtype: torch.dtype, workspace: int | None) -> None:
    rows, prior, weight, targets = problem(123, 4, 280, 5003, dtype)
    truth = gradients(
        rows.double(), prior.double(), weight.double(), targets, pointwise=pointwise, impl="reference"
    )
    plain = gradients(rows, prior, weight, targets, pointwise=pointwise, impl="reference")
    found = gradients(rows, prior, weight, targets, pointwise=pointwise, workspace=workspace, impl="chunked")
    for got, eager, exact in zip(found, plain, truth, strict=True):
        assert error(got, exact) <= 2 * error(eager, exact) + 1e-6


def test_more_scores_than_int32_can_index() -> None:
    rows, prior, weight, targets = problem(4608, 10, 16, 50257, torch.bfloat16)
    assert rows.shape[0] * rows.shape[1] * weight.shape[0] > 2**31
    whole = mixture_nll(rows, prior, weight, targets, reduction="none", workspace=8192 * MIB)
    pieces = torch.cat(
        [
            mixture_nll(rows[part], prior[part], weight, targets[part], reduction="none", impl="reference")
            for part in torch.arange(len(targets), device="cuda").split(256)
        ]
    )
    assert error(whole, pieces) < 1e-3


@pytest.mark.parametrize("V", [1, 129, 50257])
def test_linear_logprob_on_the_device(V: int) -> None:
    rows, _, weight, targets = problem(77, 1, 64, V, torch.float32)
    target, lse = linear_logprob(rows[:, 0], weight, targets)
    scores = rows[:, 0].double() @ weight.double().t()
    assert error(lse, scores.logsumexp(1)) < 1e-5
    assert torch.allclose(target.double(), scores.gather(1, targets[:, None])[:, 0], atol=1e-4)


@pytest.mark.parametrize(("K", "V"), [(1, 128256), (10, 50304), (64, 128256)])
def test_workspace_bounds_memory(K: int, V: int) -> None:
    workspace = 512 * MIB
    rows, prior, weight, targets = problem(2048, K, 64, V, torch.bfloat16)
    leaves = [item.requires_grad_() for item in (rows, prior, weight)]
    mixture_nll(rows[:8], prior[:8], weight, targets[:8]).backward()  # cuBLAS takes its own workspace once
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mixture_nll(rows, prior, weight, targets, workspace=workspace).backward()
    gradient_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves) + 4 * weight.numel()
    assert torch.cuda.max_memory_allocated() - before <= workspace + gradient_bytes
