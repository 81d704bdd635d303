"""How many R x V x D products each call makes, counted on what the engine really runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fullrank.ops import autograd, linear_nll
from fullrank.ops.products import Bins

N, K, D, V = 24, 3, 6, 50
PRODUCT = 2 * N * K * D * V
ALL = ("rows", "log_prior", "weight", "bias", "slopes")

every_kind = pytest.mark.parametrize("kind", ["identity", "sigsoftmax", "plif"])


def flops_of_last_two(*args: Tensor, **_: Any) -> int:
    """Of mm(a, b) and addmm_(sum, a, b), also with out=, which torch's own formulas do not take."""
    (m, n), (_n, k) = args[-2].shape, args[-1].shape
    return 2 * m * n * k


flops_of_last_two._get_raw = True


@pytest.fixture
def counter(monkeypatch) -> dict[str, float]:
    """Counts inside the operators, where a counter around the call would see one opaque node."""
    aten = torch.ops.aten
    formulas = dict.fromkeys((aten.mm, aten.addmm_), flops_of_last_two)
    flops = FlopCounterMode(display=False, custom_mapping=formulas)
    total = {"products": 0.0}

    @contextlib.contextmanager
    def counted(device: torch.device) -> Iterator[None]:
        with flops:
            yield
        seen = flops.get_flop_counts().get("Global", {})
        # Mixing K components for the statistics is a batched product without the factor D.
        total["products"] += sum(n for op, n in seen.items() if "bmm" not in str(op)) / PRODUCT

    monkeypatch.setattr(autograd, "without_autocast", counted)
    return total


@pytest.mark.parametrize(
    ("reduction", "weights", "stats"),
    [("mean", False, False), ("sum", True, False), ("mean", True, True)],
    ids=["mean", "weighted-sum", "weighted-mean-stats"],
)
@pytest.mark.parametrize(
    ("trained", "products"),
    [(ALL, 3), (("rows",), 2), (("rows", "log_prior"), 2), (("weight",), 2), (("log_prior",), 1), ((), 1)],
    ids=["all", "rows", "rows-and-prior", "weight", "prior", "nothing"],
)
@pytest.mark.parametrize("cutting", ["whole", "chunks"])
def test_known_weights(make_problem, cut, counter, cutting, trained, products, reduction, stats, weights):
    problem = make_problem(N, K, D, V, token_weight=weights, dtype=torch.float32).leaves(trained)
    result = problem.nll(reduction=reduction, workspace=cut(cutting, problem), return_stats=stats)
    if trained:
        (result[0] if stats else result).backward()
    assert counter["products"] == products


@every_kind
def test_three_for_every_f(make_problem, counter, kind):
    problem = make_problem(N, K, D, V, kind=kind, dtype=torch.float32, bias=True).leaves()
    problem.nll().backward()
    assert counter["products"] == 3


@pytest.mark.parametrize("cutting", ["whole", "chunks"])
@pytest.mark.parametrize(
    ("trained", "products"),
    [(ALL, 4), (("rows",), 3), (("rows", "log_prior"), 3), ((), 1)],
    ids=["all", "rows", "rows-and-prior", "nothing"],
)
def test_none(make_problem, cut, counter, trained, products, cutting):
    problem = make_problem(N, K, D, V, dtype=torch.float32).leaves(trained)
    loss = problem.nll(reduction="none", workspace=cut(cutting, problem))
    if trained:
        loss.square().sum().backward()
    assert counter["products"] == products


@pytest.mark.parametrize(
    ("trained", "products"), [(ALL, 4), (("rows",), 3), ((), 1)], ids=["all", "frozen", "nothing"]
)
@every_kind
def test_linear_logprob(make_problem, counter, kind, trained, products):
    problem = make_problem(N, K, D, V, kind=kind, dtype=torch.float32).leaves(trained)
    target, lse = problem.logprob()
    if trained:
        (target.sin() + lse.square()).sum().backward()
    assert counter["products"] == products


def test_no_gradients_one_product(make_problem, counter):
    problem = make_problem(N, K, D, V, dtype=torch.float32).leaves()
    with torch.no_grad():
        problem.nll(return_stats=True)
    assert counter["products"] == 1


@pytest.mark.parametrize(("trained", "products"), [(ALL, 4), ((), 1)], ids=["all", "nothing"])
def test_a_cut_vocabulary_costs_one_product_more(make_problem, cut, counter, trained, products):
    problem = make_problem(N, K, D, V, dtype=torch.float32).leaves(trained)
    loss = problem.nll(workspace=cut("blocks", problem))
    if trained:
        loss.backward()
    assert counter["products"] == products


def test_ignored_tokens_cost_nothing(make_problem, counter):
    problem = make_problem(N, K, D, V, dtype=torch.float32).leaves()
    problem.targets[: N // 2] = -100
    problem.nll().backward()
    assert counter["products"] == 1.5


def test_ignored_rows_cost_nothing(make_problem, counter):
    problem = make_problem(N, 1, D, V, dtype=torch.float32).leaves()
    problem.targets[: N // 2] = -100
    nll, lse = linear_nll(problem.rows[:, 0], problem.weight, problem.targets)
    (nll + lse).sum().backward()
    assert counter["products"] == 4 / 2 / K


@pytest.mark.parametrize("copies", [1, 3, 64])
def test_sums_of_bins_are_the_same_by_way_of_copies(copies: int) -> None:
    generator = torch.Generator().manual_seed(0)
    bins = torch.randint(7, (5, 40), generator=generator)
    values = torch.randn(5, 40, dtype=torch.float64, generator=generator)
    expected = [1.0 + float(values[bins == one].sum()) for one in range(7)]
    sums = torch.ones(7, dtype=torch.float64)
    Bins(bins.clone(), 7, copies).add(sums, values)
    assert sums.tolist() == pytest.approx(expected, abs=1e-12)
