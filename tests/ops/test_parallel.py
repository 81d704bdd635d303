"""W split over processes against one process: values and gradients.

Run as a script this file starts three gloo processes that work through a file of problems, once all three
together and once with the third left out; the tests compare what they wrote with the plain operation.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.ops import (
    IDENTITY,
    SIGSOFTMAX,
    CappedSigsoftmax,
    PiecewiseLinear,
    Softcap,
    mixture_log_probs,
    mixture_nll,
)
from fullrank.ops import parallel as vocab_parallel

PROCESSES = 3
SECONDS = 120
CAP, LIMIT = 3.0, 2.0
KINDS = ("identity", "sigsoftmax", "softcap", "capped_sigsoftmax", "plif")
REDUCTIONS = ("mean", "sum", "none")
INPUTS = ("rows", "log_prior", "weight", "bias", "slopes")
SHARDED = ("weight", "bias")


# What a process does.


def pointwise_of(case: dict[str, Any]) -> Any:
    if case["kind"] == "plif":
        return PiecewiseLinear(case["slopes"], LIMIT)
    if case["kind"] == "capped_sigsoftmax":
        return CappedSigsoftmax(case["slopes"], CAP)
    return {"identity": IDENTITY, "sigsoftmax": SIGSOFTMAX, "softcap": Softcap(CAP)}[case["kind"]]


def differentiate(case: dict[str, Any], loss_of: Any) -> dict[str, Tensor]:
    """Loss and gradients, the latter from a second backward pass over the same graph."""
    leaves = dict(case)
    for name in INPUTS:
        if case[name] is not None:
            leaves[name] = case[name].detach().clone().requires_grad_(name in case["trained"])
    with torch.autocast("cpu", torch.bfloat16, enabled=case["autocast"]):
        loss = loss_of(leaves)
    out = {"loss": loss.detach()}
    if loss.requires_grad:
        uneven = torch.linspace(-1.0, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)
        upstream = uneven if loss.ndim else None
        loss.backward(upstream, retain_graph=True)
        for name in case["trained"]:
            leaves[name].grad = None
        loss.backward(upstream)
        out |= {name: leaves[name].grad for name in case["trained"]}
    return out


def options_of(case: dict[str, Any], *names: str) -> dict[str, Any]:
    return {"bias": case["bias"], "pointwise": pointwise_of(case)} | {name: case[name] for name in names}


def solve(case: dict[str, Any], group: Any, *, start: int, stop: int) -> dict[str, Any]:
    own = dict(case)
    own |= {name: case[name][start:stop] for name in SHARDED if case[name] is not None}

    def loss_of(leaves: dict[str, Any]) -> Tensor:
        return vocab_parallel.mixture_nll(
            leaves["rows"], leaves["log_prior"], leaves["weight"], leaves["targets"],
            start=start + case["shift"], group=group,
            **options_of(leaves, "reduction", "token_weight", "ignore_index", "workspace"),
        )  # fmt: skip

    try:
        out: dict[str, Any] = differentiate(own, loss_of)
    except FullrankError as error:
        return {"error": str(error)}
    if not case["autocast"]:
        out["log_probs"] = vocab_parallel.log_probs(
            own["rows"], own["log_prior"], own["weight"], start=start, group=group, **options_of(own)
        )
        out["stats"] = tuple(
            vocab_parallel.token_stats(
                own["rows"],
                own["log_prior"],
                own["weight"],
                own["targets"],
                start=start,
                group=group,
                **options_of(own, "ignore_index"),
            )
        )
    return out


def work(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    # A CPU without bf16 instructions says so; not our warning.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=PROCESSES,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    groups = {3: None, 2: distributed.new_group([0, 1])}
    cases = torch.load(folder / "cases.pt")
    for size, group in groups.items():
        if rank >= size:
            continue
        done = {}
        for name, case in cases.items():
            V = case["weight"].shape[0]
            start, stop = vocab_parallel.split(V, size)[rank]
            if case["shift"]:
                case = {**case, "shift": case["shift"] if rank == size - 1 else 0}
            done[name] = solve(case, group, start=start, stop=stop)
        torch.save(done, folder / f"done-{size}-{rank}.pt")
    if rank == PROCESSES - 1:
        with pytest.raises(FullrankError, match="not in the group"):
            vocab_parallel.place(groups[2])
    distributed.barrier()
    distributed.destroy_process_group()


def launch(folder: Path) -> None:
    """Run the processes; one that fails ends all, and so does a hang."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", __file__, str(folder)]
    with (folder / "log.txt").open("w") as log:
        parent = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        code = parent.wait(SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    assert code == 0, f"exit code {code}\n{(folder / 'log.txt').read_text()}"


def main(folder: Path) -> int:
    """Fork the processes from one that has torch in memory: importing it takes longer than all the work."""
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # which a backward pass imports
    # Nothing here has started a thread that a fork could lose.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work, args=(folder, rank)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    while None in (codes := [process.exitcode for process in processes]):
        if any(codes):
            break
        time.sleep(0.02)
    return int(codes != [0] * PROCESSES)


# The problems.


def make_cases(make_problem: Any) -> dict[str, dict[str, Any]]:
    def case(problem: Any, **options: Any) -> dict[str, Any]:
        made = {name: getattr(problem, name) for name in (*INPUTS, "targets", "token_weight", "kind")}
        made |= {
            "reduction": "mean", "ignore_index": -100, "workspace": None, "autocast": False, "shift": 0,
            "trained": [name for name in INPUTS if made[name] is not None],
        }  # fmt: skip
        return made | options

    cases = {}
    for kind in KINDS:
        for reduction in REDUCTIONS:
            problem = make_problem(N=9, V=11, kind=kind, bias=True, token_weight=True)
            cases[f"{kind}-{reduction}"] = case(problem, reduction=reduction)
    plain = make_problem(N=9, V=11)
    for reduction in REDUCTIONS:
        # Target 0, seen from a shard that starts at 4 (three processes) or 6 (two), is the mark itself.
        for mark in (-4, -6):
            problem = make_problem(N=9, V=11, bias=True, token_weight=True, seed=3)
            problem.targets[:3] = torch.tensor([0, mark, 0])
            problem.targets[6] = mark
            problem.rows[6] = torch.nan
            problem.log_prior[6] = torch.nan
            cases[f"ignored{mark}-{reduction}"] = case(problem, reduction=reduction, ignore_index=mark)
        nothing = make_problem(N=9, V=11, bias=True)
        nothing.targets[:] = -100
        cases[f"nothing-{reduction}"] = case(nothing, reduction=reduction)
    for kind in KINDS:
        masked = make_problem(N=9, V=11, kind=kind, bias=True)
        # All of the last shard, some entries of the others, and one token's target.
        masked.bias[[1, 5, 6, 7, 8, 9, 10]] = -torch.inf
        masked.targets[:] = torch.tensor([0, 2, 3, 4, 0, 2, 3, 4, 5])
        cases[f"masked-{kind}"] = case(masked, reduction="none")
    off = make_problem(N=9, V=11)
    off.log_prior[:, 1] = -torch.inf
    cases["component-off"] = case(off)
    for workspace in (20000, 1 << 24):
        cases[f"workspace-{workspace}"] = case(
            make_problem(N=40, K=2, D=5, V=300, kind="sigsoftmax", bias=True), workspace=workspace
        )
    cases["one-entry-each"] = case(make_problem(N=9, K=2, V=3))
    cases["no-token"] = case(make_problem(N=0, V=11, bias=True, kind="plif"))
    cases["rows-alone"] = case(plain, trained=["rows"])
    cases["weight-alone"] = case(plain, trained=["weight"])
    cases["prior-alone"] = case(plain, trained=["log_prior"])
    cases["frozen"] = case(plain, trained=[])
    uneven = make_problem(N=9, V=11, token_weight=True)
    uneven.token_weight[2] = 0.0
    cases["weight-zero"] = case(uneven)
    cases["int32"] = {**case(plain), "targets": plain.targets.int()}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        cases[name] = case(make_problem(N=60, K=3, D=24, V=103, kind="sigsoftmax", bias=True, dtype=dtype))
    cases["autocast"] = case(make_problem(N=60, K=3, D=24, V=103, dtype=torch.float32), autocast=True)
    confident = make_problem(N=6, K=1, D=4, V=11, dtype=torch.float32)
    confident.log_prior[:] = 0.0
    confident.rows[:] = confident.weight[confident.targets][:, None] * 8.0
    cases["confident"] = case(confident, reduction="none")
    outside = make_problem(N=9, V=11)
    outside.targets[4] = 11
    cases["outside"] = case(outside)
    cases["overlapping"] = case(make_problem(N=200, V=11), shift=-2)
    return cases


ERRORS = ("outside", "overlapping")


@pytest.fixture(scope="module")
def cases(make_problem) -> dict[str, dict[str, Any]]:
    return make_cases(make_problem)


@pytest.fixture(scope="module")
def done(cases, tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    """For each size of the group, what each of its processes found."""
    folder = tmp_path_factory.mktemp("processes")
    torch.save(cases, folder / "cases.pt")
    launch(folder)
    return {size: [torch.load(folder / f"done-{size}-{rank}.pt") for rank in range(size)] for size in (2, 3)}


def joined(parts: list[dict[str, Any]], name: str) -> Tensor:
    """W's and b's gradient from all shards; anything else must be the same everywhere."""
    if name in SHARDED:
        return torch.cat([part[name] for part in parts])
    for part in parts[1:]:
        torch.testing.assert_close(part[name], parts[0][name], rtol=0, atol=0, equal_nan=True)
    return parts[0][name]


def one_process(case: dict[str, Any]) -> dict[str, Tensor]:
    def loss_of(leaves: dict[str, Any]) -> Tensor:
        return mixture_nll(
            leaves["rows"], leaves["log_prior"], leaves["weight"], leaves["targets"],
            **options_of(leaves, "reduction", "token_weight", "ignore_index"),
        )  # fmt: skip

    return differentiate(case, loss_of)


several = pytest.mark.slow(
    reason="three processes and all their problems; tests/heads/test_vocab_parallel.py splits W by default"
)
DOUBLE = (
    *(f"{kind}-{reduction}" for kind in KINDS for reduction in REDUCTIONS),
    *(f"ignored{mark}-{reduction}" for mark in (-4, -6) for reduction in REDUCTIONS),
    *(f"nothing-{reduction}" for reduction in REDUCTIONS),
    *(f"masked-{kind}" for kind in KINDS),
    *("component-off", "workspace-20000", f"workspace-{1 << 24}", "one-entry-each", "no-token"),
    *("rows-alone", "weight-alone", "prior-alone", "frozen", "weight-zero", "int32"),
)


@several
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", DOUBLE)
def test_values_and_gradients_equal_those_of_one_process(cases, done, name, size):
    case, parts = cases[name], [part[name] for part in done[size]]
    want = one_process(case)
    assert parts[0].keys() - {"log_probs", "stats"} == want.keys()
    for key, value in want.items():
        got = joined(parts, key)
        assert got.dtype == value.dtype
        torch.testing.assert_close(got, value, rtol=1e-11, atol=1e-13)


def test_every_case_is_compared(cases):
    low = {"fp32", "bf16", "fp16", "autocast", "confident"}
    assert set(cases) == {*DOUBLE, *low, *ERRORS}


@several
def test_nothing_counted_is_a_loss_and_gradient_of_zero(done):
    for part in done[3]:
        for key in ("loss", *INPUTS[:4]):
            assert not part["nothing-mean"][key].any()


@several
@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_target_has_an_infinite_loss_and_no_gradient(cases, done, kind):
    parts = [part[f"masked-{kind}"] for part in done[3]]
    loss = joined(parts, "loss")
    assert torch.isposinf(loss[8])
    assert torch.isfinite(loss[:8]).all()
    assert not joined(parts, "rows")[8].any()
    gradient = joined(parts, "weight")
    assert not gradient[torch.isneginf(cases[f"masked-{kind}"]["bias"])].any()


@several
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [name for name in DOUBLE if not name.startswith("ignored")])
def test_log_probabilities_are_gathered_whole(cases, done, name, size):
    case = cases[name]
    want = mixture_log_probs(case["rows"], case["log_prior"], case["weight"], **options_of(case))
    got = joined([part[name] for part in done[size]], "log_probs")
    torch.testing.assert_close(got, want.detach(), rtol=1e-11, atol=1e-13)


@several
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", DOUBLE)
def test_token_statistics_equal_those_of_one_process(cases, done, name, size):
    case = cases[name]
    _, want = mixture_nll(
        case["rows"], case["log_prior"], case["weight"], case["targets"], return_stats=True,
        **options_of(case, "ignore_index"),
    )  # fmt: skip
    for part in done[size]:
        for got, column in zip(part[name]["stats"], want, strict=True):
            torch.testing.assert_close(got, column, rtol=1e-11, atol=1e-13)


@several
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("name", "floor"), [("fp32", 1e-7), ("bf16", 1e-4), ("fp16", 1e-5), ("autocast", 1e-4)]
)
def test_narrow_types_err_no_further_than_the_plain_path(cases, done, tools, name, floor, size):
    case = cases[name]
    parts = [part[name] for part in done[size]]
    plain = one_process({**case, "autocast": case["autocast"]})
    exact = {key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
             for key, value in case.items()}  # fmt: skip
    truth = one_process({**exact, "autocast": False})
    for key, value in truth.items():
        got = joined(parts, key)
        assert got.dtype == plain[key].dtype
        tools.as_good(got, plain[key], value, floor=floor)


@several
@pytest.mark.parametrize("size", [2, 3])
def test_a_confident_row_keeps_its_digits(cases, done, size):
    """In fp32 a loss below the spacing of numbers near 1, and its gradient, are right to six digits."""
    case, parts = cases["confident"], [part["confident"] for part in done[size]]
    exact = {key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
             for key, value in case.items()}  # fmt: skip
    want = one_process(exact)
    assert want["loss"].min() < 1e-8
    for key in ("loss", "rows"):
        got = joined(parts, key).double()
        # The scores themselves are rounded: near 30, to 2e-6.
        torch.testing.assert_close(got, want[key], rtol=3e-5, atol=1e-30)


@several
@pytest.mark.parametrize("size", [2, 3])
def test_a_wrong_target_or_shard_raises_on_every_process(done, size):
    for part in done[size]:
        assert "target 11 lies in 0 shards of W, expected exactly one: check" in part["outside"]["error"]
        assert (
            "lies in 2 shards" in part["overlapping"]["error"] or "0 shards" in part["overlapping"]["error"]
        )


# On one process.


def test_a_lone_process_gives_the_plain_result(make_problem, tools):
    problem = make_problem(kind="plif", bias=True, token_weight=True)

    def loss_of(leaves: Any) -> Tensor:
        return vocab_parallel.mixture_nll(
            leaves.rows, leaves.log_prior, leaves.weight, leaves.targets, start=0, bias=leaves.bias,
            pointwise=leaves.pointwise, token_weight=leaves.token_weight,
        )  # fmt: skip

    loss, gradients = tools.differentiate(problem, loss_of)
    want, wanted = tools.differentiate(problem, lambda leaves: leaves.plain_nll())
    torch.testing.assert_close(loss, want)
    for name, value in wanted.items():
        torch.testing.assert_close(gradients[name], value)


def test_gradcheck(make_problem):
    problem = make_problem(N=3, K=2, D=3, V=5, kind="sigsoftmax", bias=True).leaves()

    def loss_of(*inputs: Tensor) -> Tensor:
        rows, log_prior, weight, bias = inputs
        return vocab_parallel.mixture_nll(
            rows,
            log_prior,
            weight,
            problem.targets,
            start=0,
            bias=bias,
            pointwise=SIGSOFTMAX,
            reduction="none",
        )

    assert torch.autograd.gradcheck(loss_of, (problem.rows, problem.log_prior, problem.weight, problem.bias))


def test_second_derivatives_raise_with_a_remedy(make_problem):
    leaves = make_problem().leaves()
    loss = vocab_parallel.mixture_nll(leaves.rows, leaves.log_prior, leaves.weight, leaves.targets, start=0)
    with pytest.raises(FullrankError, match=r"differentiable once.*impl='reference'"):
        torch.autograd.grad(loss, leaves.rows, create_graph=True)


def test_an_infinite_loss_without_weight_counts_nothing(make_problem):
    problem = make_problem(bias=True, token_weight=True)
    problem.bias[problem.targets[0]] = -torch.inf
    problem.token_weight[problem.targets == problem.targets[0]] = 0.0
    leaves = problem.leaves()
    loss = vocab_parallel.mixture_nll(
        leaves.rows, leaves.log_prior, leaves.weight, leaves.targets, start=0, bias=leaves.bias,
        token_weight=leaves.token_weight.detach(),
    )  # fmt: skip
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(leaves.gradients()[name]).all() for name in ("rows", "weight", "log_prior"))


@pytest.mark.parametrize(("V", "processes"), [(11, 3), (12, 3), (3, 3), (1, 1), (50257, 8)])
def test_split_covers_the_vocabulary_evenly(V, processes):
    shards = vocab_parallel.split(V, processes)
    assert [v for start, stop in shards for v in range(start, stop)] == list(range(V))
    assert len(shards) == processes
    sizes = [stop - start for start, stop in shards]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("processes", [0, 4])
def test_split_refuses_an_empty_shard(processes):
    with pytest.raises(FullrankError, match=rf"V=3 .* over {processes} processes.*fewer processes"):
        vocab_parallel.split(3, processes)


def test_bad_arguments_are_named(make_problem):
    problem = make_problem()
    given = (problem.rows, problem.log_prior, problem.weight, problem.targets)
    with pytest.raises(FullrankError, match="reduction='max' is unknown"):
        vocab_parallel.mixture_nll(*given, start=0, reduction="max")
    with pytest.raises(FullrankError, match=r"log_prior has shape .* expected \[N, K\]"):
        vocab_parallel.mixture_nll(problem.rows, problem.log_prior[:, :1], *given[2:], start=0)
    with pytest.raises(FullrankError, match="lies in 0 shards"):
        vocab_parallel.mixture_nll(*given, start=5)


if __name__ == "__main__":
    # Not through an orderly exit: a process that waits for others would be waited for.
    code = main(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)
