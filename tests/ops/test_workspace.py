"""Any shape is cut to fit the workspace, and peak memory beyond inputs and gradients stays inside it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.ops import mixture_log_probs
from fullrank.ops.workspace import MIB, Plan, default_workspace, make_plan

ALL = ("rows", "log_prior", "weight", "bias", "slopes")
SHAPES = {
    "many-tokens": (120, 2, 8, 500),
    "large-vocabulary": (6, 2, 8, 10_000),
    "many-components": (8, 20, 8, 800),
    "wide-rows": (120, 3, 200, 40),
    "wide-rows-large-vocabulary": (24, 3, 100, 1500),
}
WORKSPACE = 192 * 1024
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def gradient_bytes(problem, trained=ALL):
    """Every gradient once in its own dtype, and W's sum in fp32 beside a narrower one."""
    total = 0
    for name in trained:
        tensor = getattr(problem, name)
        if tensor is not None:
            total += tensor.numel() * tensor.element_size()
            if name == "weight" and tensor.element_size() < 4:
                total += tensor.numel() * 4
    return total


@every_shape
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("identity", torch.float32),
        ("identity", torch.bfloat16),
        ("capped_sigsoftmax", torch.bfloat16),
        ("plif", torch.float32),
        # The buffers of f are in fp32 whatever the dtype: each f has one of the two here.
        pytest.param("capped_sigsoftmax", torch.float32, marks=pytest.mark.slow),
        pytest.param("plif", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_stays_inside_the_workspace(make_problem, tools, shape, dtype, kind):
    problem = make_problem(*shape, kind=kind, dtype=dtype, bias=kind == "plif").leaves()
    extra = tools.peak_bytes(lambda: problem.nll(workspace=WORKSPACE).backward()) - gradient_bytes(problem)
    assert extra <= WORKSPACE


@every_shape
def test_shapes_are_too_large_for_the_workspace(shape):
    """The tests here mean nothing where all scores and rows would fit anyway."""
    N, K, D, V = shape
    assert N * K * (V + 2 * D) * 2 > WORKSPACE


@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_single_rows_stay_inside_the_workspace(make_problem, tools, shape, dtype):
    problem = make_problem(*shape, kind="sigsoftmax", dtype=dtype, bias=True).leaves(
        ("rows", "weight", "bias")
    )

    def step():
        target, lse = problem.logprob(workspace=WORKSPACE)
        (target - lse).square().sum().backward()

    R = problem.rows.shape[0] * problem.rows.shape[1]
    # Kept from the forward to the backward pass: a dozen numbers a row, as any loss of single rows does.
    extra = tools.peak_bytes(step) - gradient_bytes(problem, ("rows", "weight", "bias")) - 16 * 4 * R
    assert extra <= WORKSPACE


@every_shape
def test_evaluation_stays_inside_the_workspace(make_problem, tools, shape):
    problem = make_problem(*shape, dtype=torch.float32)
    assert tools.peak_bytes(lambda: problem.nll(workspace=WORKSPACE, return_stats=True)) <= WORKSPACE


@pytest.mark.parametrize(
    ("shape", "workspace"), [((40, 3, 8, 2000), MIB), ((4, 50, 8, 2000), MIB)], ids=["tokens", "components"]
)
@pytest.mark.parametrize("kind", ["identity", "plif"])
def test_log_probabilities_hold_the_result_and_the_workspace(make_problem, tools, shape, workspace, kind):
    problem = make_problem(*shape, dtype=torch.float32, kind=kind)

    def whole():
        with torch.no_grad():
            return mixture_log_probs(
                problem.rows,
                problem.log_prior,
                problem.weight,
                pointwise=problem.pointwise,
                workspace=workspace,
            )

    whole()
    assert tools.peak_bytes(whole) - shape[0] * shape[3] * 4 <= workspace


def test_a_larger_workspace_is_used(make_problem, tools):
    """The bound is no accident of small buffers: with room to spare the pass takes more."""
    problem = make_problem(256, 2, 8, 4000, dtype=torch.float32).leaves()
    small, large = (
        tools.peak_bytes(lambda w=w: problem.nll(workspace=w).backward()) for w in (MIB, 64 * MIB)
    )
    assert small < large / 4


def test_too_small_a_workspace_is_refused_with_a_remedy(make_problem):
    problem = make_problem(4, 8, 64, 100, dtype=torch.float32)
    with pytest.raises(FullrankError, match=r"8 rows of width 64: pass workspace=\d+"):
        problem.nll(workspace=10_000)


def test_nothing_outlives_a_dropped_loss(make_problem, tools):
    """No cycle keeps the gradients that the forward pass made: they go with the loss."""
    problem = make_problem(64, 2, 16, 5000, dtype=torch.float32).leaves()
    once = tools.peak_bytes(lambda: problem.nll(workspace=2 * MIB))

    def thrice():
        for _ in range(3):
            problem.nll(workspace=2 * MIB)

    assert tools.peak_bytes(thrice) < 1.2 * once


RESIDENT = """
import os
import torch
from fullrank.ops import mixture_nll

def resident(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

def beyond(N, K, D, V):
    def tensors(N, V):
        prior = torch.full((N, K), 1 / K).log()
        return (torch.randn(N, K, D).requires_grad_(), prior.requires_grad_(),
                torch.randn(V, D).requires_grad_(), torch.randint(V, (N,)))
    mixture_nll(*tensors(16, 64), workspace={workspace}).backward()
    inputs = tensors(N, V)
    before = resident("VmRSS")
    try:
        open("/proc/self/clear_refs", "w").write("5")
    except OSError:
        return "no peaks"
    mixture_nll(*inputs, workspace={workspace}).backward()
    gradients = sum(t.numel() * 4 for t in inputs[:3])
    return resident("VmHWM") - before - gradients

torch.set_num_threads(1)
for shape in {shapes}:
    # Torch is imported once, and each shape has a process of its own.
    if not os.fork():
        print(beyond(*shape), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.slow(reason="a process of its own, five seconds; torch's count of the same passes is above")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_resident_memory_of_a_process():
    """What the kernel counts, in a fresh process: also what the products allocate behind torch's back."""
    workspace = 32 * MIB
    shapes = {"usual": (256, 4, 32, 20_000), "cut": (32, 2, 16, 200_000)}
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT.format(shapes=[*shapes.values()], workspace=workspace)],
        env={"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    if "no peaks" in done.stdout:
        pytest.skip("this kernel does not count peaks anew")
    for name, beyond in zip(shapes, done.stdout.split(), strict=True):
        # A few MiB are the libraries': packed blocks of the products, code pages touched for the first time.
        assert int(beyond) <= workspace + 8 * MIB, name


CPU = torch.device("cpu")
DTYPES = (
    (torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
)  # fmt: skip
"""Of the products, and of rows and W as they come."""


def bytes_of(plan: Plan, *, K: int, D: int, product: torch.dtype, given: torch.dtype, buffers: int) -> int:
    """What the parts of a pass take at once, added up from the sizes alone."""
    narrow, wide = product.itemsize, 8 if product == torch.float64 else 4
    scores = plan.tokens * K * plan.block * narrow
    chunk = plan.tokens * K * D * 2 * (narrow + wide)
    tiles = plan.tile_tokens * K * plan.block * wide * buffers
    piece = plan.matrix_rows * D * (narrow + wide) if product != given or narrow < wide else 0
    return scores + chunk + tiles + piece


@given(
    N=st.integers(0, 10**6),
    K=st.integers(1, 4096),
    D=st.integers(1, 20_000),
    V=st.integers(1, 10**6),
    dtypes=st.sampled_from(DTYPES),
    workspace=st.integers(1, 1 << 32),
    device=st.sampled_from(["cpu", "cuda"]),
    buffers=st.sampled_from([4, 9]),
)
@example(
    N=512,
    K=4,
    D=64,
    V=262_144,
    dtypes=DTYPES[1],
    workspace=256 * MIB,
    device="cpu",
    buffers=9,
)
@example(
    N=512,
    K=1,
    D=20_000,
    V=2,
    dtypes=DTYPES[2],
    workspace=400_000,
    device="cpu",
    buffers=9,
)
@example(
    N=512,
    K=1,
    D=20_000,
    V=10**6,
    dtypes=DTYPES[2],
    workspace=400_000,
    device="cpu",
    buffers=9,
)
@example(N=512, K=4096, D=1, V=1, dtypes=DTYPES[1], workspace=300_000, device="cpu", buffers=9)
@example(N=2, K=1, D=1, V=1, dtypes=DTYPES[0], workspace=139, device="cpu", buffers=9)
def test_sizes_fit_the_workspace_or_the_error_names_one_that_does(
    N, K, D, V, dtypes, workspace, device, buffers
):
    arguments = {
        "N": N,
        "K": K,
        "D": D,
        "V": V,
        "product": dtypes[0],
        "given": dtypes[1],
        "device": torch.device(device),
        "tile_buffers": buffers,
    }
    try:
        plan = make_plan(**arguments, workspace=workspace)
    except FullrankError as error:
        workspace = int(re.search(r"workspace=(\d+)", str(error))[1])
        plan = make_plan(**arguments, workspace=workspace)
    assert bytes_of(plan, K=K, D=D, product=dtypes[0], given=dtypes[1], buffers=buffers) <= workspace
    assert 1 <= plan.tile_tokens <= plan.tokens <= max(N, 1)
    assert 1 <= plan.block <= V
    assert 1 <= plan.matrix_rows <= V


def test_error_says_what_came_and_what_would_do():
    with pytest.raises(
        FullrankError, match=r"workspace of 1000 bytes.* 4 rows of width 8: pass workspace=\d+"
    ):
        make_plan(
            N=1,
            K=4,
            D=8,
            V=100,
            product=torch.float32,
            given=torch.float32,
            device=CPU,
            tile_buffers=4,
            workspace=1000,
        )


@pytest.mark.parametrize(
    ("K", "V", "whole"),
    [(4, 32_768, True), (16, 32_768, True), (1, 256_000, True), (4, 128_000, True), (4, 4_000_000, False)],
)
def test_default_workspace_keeps_usual_vocabularies_whole(K, V, whole):
    """A cut vocabulary costs a fourth product, so the default must not cut where it need not."""
    plan = make_plan(
        N=512,
        K=K,
        D=280,
        V=V,
        product=torch.float32,
        given=torch.float32,
        device=CPU,
        tile_buffers=4,
        workspace=default_workspace(CPU),
    )
    assert (plan.block == V) == whole
    assert plan.tokens * K >= 64


def test_default_workspaces():
    assert default_workspace(CPU) == 256 * MIB
    assert default_workspace(torch.device("cuda")) == 2048 * MIB
