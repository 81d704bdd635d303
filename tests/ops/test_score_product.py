"""The product whose scores leave as exponentials, in Triton's interpreter, where the matrix does not go."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fullrank.ops import IDENTITY, SIGSOFTMAX, Pointwise, mixture_nll
from fullrank.ops.mixture import fused, product
from fullrank.ops.mixture.kernels import mix_rows
from fullrank.ops.reduce import Statistics

pytestmark = pytest.mark.interpreter

N, K, D, V = 5, 2, 16, 200


def draw(tokens: int = N) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    return {
        "rows": normal(tokens, K, D).bfloat16(),
        "log_prior": normal(tokens, K).log_softmax(1),
        "weight": (normal(V, D) / math.sqrt(D)).bfloat16(),
        "targets": torch.randint(V, (tokens,), generator=generator),
        "bias": normal(V).bfloat16(),
    }


def gradients(given: dict[str, Tensor], pointwise: Pointwise, *, impl: str) -> list[Tensor]:
    leaves = {name: value for name, value in given.items() if name != "targets"}
    if impl == "reference":
        leaves = {name: value.double() for name, value in leaves.items()}
    leaves = {name: value.detach().requires_grad_() for name, value in leaves.items()}
    loss = mixture_nll(**leaves, targets=given["targets"], pointwise=pointwise, impl=impl, reduction="sum")
    return [loss.detach(), *torch.autograd.grad(loss, list(leaves.values()))]


def check(given: dict[str, Tensor], pointwise: Pointwise = IDENTITY) -> None:
    found, right = (gradients(given, pointwise, impl=impl) for impl in ("triton", "reference"))
    for mine, exact in zip(found, right, strict=True):
        # Q is rounded to bf16, cut off in the interpreter, and so are the rows that it is multiplied by.
        assert float((mine.double() - exact).abs().max()) < 0.03 * float(exact.abs().max())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rows: list[int] = []
    real = fused.raise_rows

    def counted(x: Tensor, *arguments: object, **options: object) -> None:
        rows.append(x.shape[0])
        real(x, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fused, "raise_rows", counted)
    return rows


@pytest.mark.parametrize("pointwise", [IDENTITY, SIGSOFTMAX])
def test_a_row_far_above_its_anchor_is_made_anew(calls: list[int], pointwise: Pointwise) -> None:
    """An entry that is neither the target nor sampled, 200 nats above all others: its exponential passes
    fp32."""
    given = draw()
    step, far = V // product.SAMPLE, 2
    assert far % step
    given["targets"][given["targets"] == far] = far + 1
    given["weight"][far] = 200.0 * given["rows"][1, 0] / given["rows"][1, 0].float().square().sum()
    assert float(given["rows"][1, 0].float() @ given["weight"][far].float()) > 150
    check(given, pointwise)
    assert calls


def test_a_row_without_an_anchor_is_made_anew() -> None:
    """Target and sample masked, and all other scores so low that without an anchor they would be 0."""
    given = draw()
    entries = torch.arange(product.SAMPLE) * (V // product.SAMPLE)
    given["bias"] -= 200.0
    given["bias"][entries[entries < V]] = -torch.inf
    given["targets"][:] = 1
    given["targets"][0] = 0
    loss, d_rows, *_ = gradients(given, IDENTITY, impl="triton")
    assert loss == math.inf
    assert not d_rows[0].any()
    given["targets"][0] = 1
    check(given)


def test_rows_that_are_scored_ahead_are_those_of_their_chunk(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "AHEAD", 0)
    check(draw(tokens=140))
    assert calls == [fused.ROUND_ROWS, 140 * K - fused.ROUND_ROWS]


def test_ignored_tokens_are_scored_ahead_for_nothing(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "AHEAD", 0)
    given = draw(tokens=140)
    given["targets"][::3] = -100
    given["rows"][::3] = torch.nan
    kept = given["targets"] >= 0
    found = gradients(given, IDENTITY, impl="triton")
    part = {name: value[kept] if len(value) == 140 else value for name, value in given.items()}
    loss, d_rows, *_ = gradients(part, IDENTITY, impl="reference")
    assert float(found[0]) == pytest.approx(float(loss), rel=1e-3)
    assert not found[1][~kept].any()
    assert float((found[1][kept].double() - d_rows).abs().max()) < 0.03 * float(d_rows.abs().max())
    assert calls == [fused.ROUND_ROWS, int(kept.sum()) * K]


@pytest.mark.parametrize("other", ["width", "layout", "dtype"])
def test_what_it_cannot_take_goes_the_other_way(calls: list[int], other: str) -> None:
    given = draw()
    if other == "width":
        given["rows"], given["weight"] = given["rows"][..., :12], given["weight"][:, :12]
    elif other == "layout":
        # V is padded to whole 64s, and the copy is laid out anew: not so where it is whole already.
        given["targets"] %= 192
        given["weight"] = given["weight"][:192].t().contiguous().t()
        given["bias"] = given["bias"][:192]
    else:
        given = {n: value.float() if value.is_floating_point() else value for n, value in given.items()}
    check(given)
    assert not calls


def test_the_target_keeps_its_digits_in_bf16() -> None:
    """What stands there is rounded, and the factor of its row makes that good."""
    generator = torch.Generator().manual_seed(0)
    others = 100 * torch.rand(50, generator=generator) + 1
    maximum, target = torch.zeros(50), -torch.rand(50, generator=generator)
    _, factor = mix_rows(
        Statistics(maximum, others, target), torch.zeros(50, 1), torch.empty(50), narrow=True
    )
    exact = others / (others + target.exp())
    entry = cut_off(others)
    assert float((entry - others).abs().max()) > 1e-3
    torch.testing.assert_close(entry * factor[:, 0], exact, rtol=1e-6, atol=0.0)


def cut_off(x: Tensor) -> Tensor:
    """x as the interpreter keeps it in bf16."""
    return (x.view(torch.int32) & -65536).view(torch.float32)
