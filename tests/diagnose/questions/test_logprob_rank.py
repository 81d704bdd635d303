"""Rank of log-probabilities: heads and states of known rank, in every precision, against the full table."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as options
from hypothesis import strategies as some

from fullrank.diagnose.questions.logprob_rank import logprob_rank
from fullrank.errors import FullrankError
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import Softcap
from fullrank.theory import least_rank

HALF = [torch.float32, torch.bfloat16, torch.float16]


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_spectrum(rows, values, seed=0):
    D = len(values)
    left = torch.linalg.qr(gaussian(rows, D, seed=seed)).Q
    return (left * values) @ torch.linalg.qr(gaussian(D, D, seed=seed + 1)).Q.T


def name(dtype):
    return str(dtype).split(".")[-1]


def layer(weight, bias=None, tokens=None, **more):
    stored = None if bias is None else bias.float()
    return OutputLayer(weight=weight.float(), bias=stored, tokens=tokens or len(weight), **more)


def ask(hidden, output, **more):
    found = logprob_rank(hidden.float(), output, **more)
    assert found.least_rank <= found.ceiling
    assert found.contexts == len(hidden)
    return found


def table(hidden, output):
    """Log-probabilities in fp64, of the tokens that are no padding."""
    logits = hidden.double() @ output.weight.double().T
    if output.bias is not None:
        logits = logits + output.bias.double()
    return torch.log_softmax(output.pointwise(logits)[:, : output.tokens], dim=1)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rank", [1, 5, 23, 24])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_of_known_rank_as_they_are_stored(dtype, rank, bias):
    V, D, N = 600, 24, 200
    weight = 0.05 * (gaussian(V, rank) @ gaussian(rank, D, seed=1)).to(dtype)
    shift = gaussian(V, seed=2).to(dtype) if bias else None
    found = ask(gaussian(N, D, seed=3), layer(weight, shift), storage=name(dtype))
    assert found.least_rank == rank + bias
    assert found.ceiling == D + bias
    assert found.method == "core"
    assert found.columns == V
    assert found.gap_rank == found.least_rank


def uneven():
    """Rows in 7 directions with uneven columns, an orthonormal basis of these, and states outside of them."""
    weight = gaussian(500, 7) @ gaussian(7, 24, seed=1) * torch.logspace(0, 3, 24, dtype=torch.float64)
    rows = torch.linalg.qr(weight.float().double().T @ gaussian(500, 7, seed=2)).Q
    states = gaussian(200, 24, seed=3)
    return weight, rows, states - states @ rows @ rows.T


UNEVEN, ROWS, OUTSIDE = uneven()
STATES = gaussian(100, 16, seed=1)
WIDE = gaussian(300, 48, seed=1)
SHORT = gaussian(500, 6) @ gaussian(6, 16, seed=1)
STEEP = with_spectrum(1000, torch.logspace(0, -5, 64, dtype=torch.float64))
STEEP_STATES = with_spectrum(500, torch.logspace(0, -4, 64, dtype=torch.float64), seed=7)
MEAN_ROW = 1000 * gaussian(48, seed=5)
FLAT = gaussian(800, 9) @ gaussian(9, 48, seed=2)
PADDED = torch.cat([gaussian(300, 5) @ gaussian(5, 24, seed=1), 3 * gaussian(50, 24, seed=2)])
MASK = torch.cat([torch.zeros(300), torch.full((50,), -1e4)])
HALF_STATES = (gaussian(300, 6) @ gaussian(6, 32, seed=1)).bfloat16()

RANKS = {
    # Only the basis of the rows tells that these states have nothing in their space.
    "outside of uneven rows": (OUTSIDE, layer(UNEVEN), {}, 0),
    "one direction of uneven rows": (OUTSIDE + OUTSIDE[:, :1] * ROWS[:, 2], layer(UNEVEN), {}, 1),
    # A constant is a shift.
    **{f"bias {size}": (STATES, layer(gaussian(777, 16), torch.full((777,), size)), {}, 16)
       for size in (0.0, 0.1, -3.3, 1e4)},
    **{f"bias of size {size}": (STATES, layer(gaussian(500, 16), size * (5 + gaussian(500, seed=2))), {}, 17)
       for size in (1e-3, 1.0, 1e3)},
    # b = W β: the column space of [W, b] is that of W.
    "bias in the columns": (STATES, layer(SHORT, SHORT @ gaussian(16, seed=2)), {}, 6),
    "huge mean state": (WIDE + 100 * gaussian(48, seed=4), layer(gaussian(800, 48, seed=1)), {}, 48),
    # The mean row is a dimension of the matrix and none of the log-probabilities.
    "huge mean row": (WIDE, layer(gaussian(800, 48) + MEAN_ROW), {}, 48),
    "short and huge mean row": (WIDE, layer(FLAT + MEAN_ROW), {}, 9),
    "steep matrix": (gaussian(500, 64), layer(STEEP), {}, 64),
    "steep states": (STEEP_STATES, layer(gaussian(1000, 64)), {}, 64),
    "steep states and matrix": (STEEP_STATES, layer(STEEP), {}, 64),
    "half precision": (HALF_STATES, layer(gaussian(400, 32, seed=2)), {"dtype": torch.bfloat16}, 6),
    "as if exact": (HALF_STATES, layer(gaussian(400, 32, seed=2)), {"dtype": torch.float32}, 32),
    "padding": (gaussian(100, 24, seed=3), layer(PADDED, tokens=300), {}, 5),
    "padding as tokens": (gaussian(100, 24, seed=3), layer(PADDED), {}, 24),
    # A bias that masks the padding is no dimension either.
    "masked padding": (gaussian(100, 24, seed=3), layer(PADDED, MASK, tokens=300), {}, 5),
    "soft cap far away": (gaussian(200, 8), layer(gaussian(300, 8) / 10, pointwise=Softcap(1e4)), {}, 8),
    "equal rows": (gaussian(50, 6), layer(torch.ones(40, 6)), {}, 0),
    "zero states": (torch.zeros(50, 6), layer(gaussian(40, 6)), {}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", RANKS)
def test_known_ranks(name):
    states, output, options, rank = RANKS[name]
    assert ask(states, output, **options).least_rank == rank


def test_the_dtype_of_the_states_is_their_precision():
    assert logprob_rank(HALF_STATES, layer(gaussian(400, 32, seed=2))).least_rank == 6


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("confined", [3, 20])
def test_states_that_are_confined_to_a_subspace(dtype, confined):
    states = (gaussian(300, confined) @ gaussian(confined, 40, seed=1)).to(dtype)
    found = ask(states, layer(gaussian(500, 40, seed=2)), dtype=dtype)
    assert found.least_rank == found.gap_rank == confined
    assert found.ceiling == 40
    # Both short: the smaller one counts where they are in general position.
    short = layer(gaussian(500, 10, seed=2) @ gaussian(10, 40, seed=3))
    assert ask(states, short, dtype=dtype).least_rank == min(10, confined)


@pytest.mark.parametrize("bias", [False, True])
def test_states_behind_a_layer_norm(bias):
    D = 32
    states = torch.nn.functional.layer_norm(gaussian(400, D).float(), (D,)) * (0.5 + torch.rand(D))
    output = layer(gaussian(500, D, seed=1), gaussian(500, seed=2) if bias else None)
    found = ask(states, output, states_rank=D - 1, norm="LayerNorm")
    assert found.least_rank == found.ceiling == D - 1 + bias
    assert "LayerNorm" in found.ceiling_reason
    # With a shift the states span everything, and a bias then adds nothing (docs/theory.md, Statement 8).
    shifted = ask(states + 3 * gaussian(D, seed=3).float(), output, states_rank=D - bias)
    assert shifted.least_rank == shifted.ceiling == D


def test_fewer_contexts_than_the_width():
    found = ask(gaussian(20, 64), layer(gaussian(500, 64, seed=1)))
    assert found.least_rank == found.ceiling == 20
    assert "only 20 contexts" in found.ceiling_reason
    assert "more text" in found.ceiling_reason


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("V", [2, 3, 20, 40, 41, 42])
def test_vocabularies_no_larger_than_the_width(V, bias):
    output = layer(gaussian(V, 40), gaussian(V, seed=1) if bias else None)
    found = ask(gaussian(100, 40, seed=2), output)
    assert found.least_rank == found.ceiling == min(V - 1, 40 + bias)


@options(max_examples=60)
@given(
    N=some.integers(2, 30),
    V=some.integers(2, 30),
    D=some.integers(2, 12),
    rank=some.integers(1, 12),
    confined=some.integers(1, 12),
    bias=some.booleans(),
    padding=some.integers(0, 5),
    seed=some.integers(0, 10000),
)
def test_the_answer_is_that_of_the_full_table(N, V, D, rank, confined, bias, padding, seed):
    weight = gaussian(V + padding, min(rank, D), seed=seed) @ gaussian(min(rank, D), D, seed=seed + 1)
    states = gaussian(N, min(confined, D), seed=seed + 2) @ gaussian(min(confined, D), D, seed=seed + 3)
    shift = gaussian(V + padding, seed=seed + 4) if bias else None
    output = layer(weight, shift, tokens=V)
    found = ask(states, output)
    generic = min(rank, D, confined)
    expected = min(N, V - 1, generic + bias)
    assert found.least_rank == expected
    assert least_rank(table(states.float(), output), source_dtype=torch.float32).rank <= expected
    full = torch.linalg.svdvals(table(states, output) - table(states, output).mean(dim=1, keepdim=True))
    if len(full) >= expected and float(full[expected - 1]) > 1e-3 * float(full[0]):
        assert least_rank(table(states.float(), output), source_dtype=torch.float32).rank == expected


@options(max_examples=25)
@given(
    scale=some.floats(1e-3, 1e3), bias=some.booleans(), rank=some.integers(1, 10), seed=some.integers(0, 1000)
)
def test_scale_rotation_and_order_do_not_matter(scale, bias, rank, seed):
    V, D = 60, 10
    weight = gaussian(V, rank, seed=seed) @ gaussian(rank, D, seed=seed + 1)
    states, shift = gaussian(40, D, seed=seed + 2), gaussian(V, seed=seed + 3) if bias else None
    turn = torch.linalg.qr(gaussian(D, D, seed=seed + 4)).Q
    order = torch.randperm(V, generator=torch.Generator().manual_seed(seed))
    one = ask(states, layer(weight, shift))
    other = ask(states @ turn / scale, layer(scale * weight[order] @ turn, shift[order] if bias else None))
    assert one.least_rank == other.least_rank == rank + bias


def test_a_soft_cap_breaks_the_ceiling_of_the_width():
    output = layer(2 * gaussian(300, 8), pointwise=Softcap(5.0))
    found = ask(gaussian(200, 8, seed=1), output)
    assert found.method == "columns"
    assert found.least_rank > 8 + 1
    assert found.ceiling == 200
    assert (found.contexts, found.columns) == (200, 300)
    assert "not linear" in found.ceiling_reason
    # Without the cap the same layer has its width.
    assert ask(gaussian(200, 8, seed=1), layer(2 * gaussian(300, 8))).least_rank == 8


def test_large_samples_of_a_capped_head_are_cut(monkeypatch):
    from fullrank.diagnose.questions import logprob_rank as module

    monkeypatch.setattr(module, "CONTEXTS", 30)
    monkeypatch.setattr(module, "COLUMNS", 50)
    output = layer(gaussian(90, 8), pointwise=Softcap(5.0), tokens=80)
    found = logprob_rank(gaussian(60, 8, seed=1).float(), output)
    assert (found.contexts, found.columns, found.ceiling) == (30, 50, 30)


def test_figures_are_finite_and_the_floor_is_in_their_units():
    found = ask(gaussian(100, 12), layer(gaussian(200, 5) @ gaussian(5, 12, seed=1)))
    assert found.singular_values == tuple(sorted(found.singular_values, reverse=True))
    assert 0 < found.noise_floor < found.singular_values[found.least_rank - 1]
    assert math.isfinite(found.gap)
    assert found.gap > 100


def test_one_state_is_refused():
    with pytest.raises(FullrankError, match="1 states"):
        logprob_rank(torch.zeros(1, 4), layer(gaussian(10, 4)))
