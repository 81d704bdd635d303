"""Any shape is cut to fit the workspace, or the error names a workspace that does."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.ops.workspace import MIB, Plan, default_workspace, make_plan

CPU = torch.device("cpu")


def bytes_of(plan: Plan, *, K: int, D: int, product: torch.dtype, buffers: int) -> int:
    """What the parts of a pass take at once, added up from the sizes alone."""
    narrow, wide = product.itemsize, 8 if product == torch.float64 else 4
    scores = plan.tokens * K * plan.block * narrow
    chunk = plan.tokens * K * D * 2 * (narrow + wide)
    tiles = plan.tile_tokens * K * plan.block * wide * buffers
    piece = plan.slice_rows * D * (narrow + wide) if narrow < wide else 0
    return scores + chunk + tiles + piece


@given(
    N=st.integers(0, 10**6),
    K=st.integers(1, 4096),
    D=st.integers(1, 20_000),
    V=st.integers(1, 10**6),
    product=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    workspace=st.integers(1, 1 << 32),
    device=st.sampled_from(["cpu", "cuda"]),
    buffers=st.sampled_from([4, 9]),
)
@example(N=512, K=4, D=64, V=262_144, product=torch.float32, workspace=256 * MIB, device="cpu", buffers=9)
@example(N=512, K=1, D=20_000, V=2, product=torch.bfloat16, workspace=400_000, device="cpu", buffers=9)
@example(N=512, K=1, D=20_000, V=10**6, product=torch.bfloat16, workspace=400_000, device="cpu", buffers=9)
@example(N=512, K=4096, D=1, V=1, product=torch.float32, workspace=300_000, device="cpu", buffers=9)
@example(N=2, K=1, D=1, V=1, product=torch.float64, workspace=139, device="cpu", buffers=9)
def test_sizes_fit_the_workspace_or_the_error_names_one_that_does(
    N, K, D, V, product, workspace, device, buffers
):
    arguments = {
        "N": N,
        "K": K,
        "D": D,
        "V": V,
        "product": product,
        "device": torch.device(device),
        "tile_buffers": buffers,
    }
    try:
        plan = make_plan(**arguments, workspace=workspace)
    except FullrankError as error:
        workspace = int(re.search(r"workspace=(\d+)", str(error))[1])
        plan = make_plan(**arguments, workspace=workspace)
    assert bytes_of(plan, K=K, D=D, product=product, buffers=buffers) <= workspace
    assert 1 <= plan.tile_tokens <= plan.tokens <= max(N, 1)
    assert 1 <= plan.block <= V
    assert 1 <= plan.slice_rows <= V


def test_error_says_what_came_and_what_would_do():
    with pytest.raises(
        FullrankError, match=r"workspace of 1000 bytes.* 4 rows of width 8: pass workspace=\d+"
    ):
        make_plan(N=1, K=4, D=8, V=100, product=torch.float32, device=CPU, tile_buffers=4, workspace=1000)


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
        device=CPU,
        tile_buffers=4,
        workspace=default_workspace(CPU),
    )
    assert (plan.block == V) == whole
    assert plan.tokens * K >= 64


def test_default_workspaces():
    assert default_workspace(CPU) == 256 * MIB
    assert default_workspace(torch.device("cuda")) == 2048 * MIB
