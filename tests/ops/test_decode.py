"""Log-probabilities and best entries of mixtures against their definition; the kernels as well."""

from __future__ import annotations

import pytest
import torch

from fullrank.ops import (
    IDENTITY,
    SIGSOFTMAX,
    Softcap,
    mixture_argmax,
    mixture_log_probs,
    row_scores,
)
from fullrank.ops.mixture import reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FUNCTIONS = {"identity": IDENTITY, "sigsoftmax": SIGSOFTMAX, "softcap": Softcap(3.0)}
every_function = pytest.mark.parametrize("kind", FUNCTIONS)


def draw(N, K, D, V, *, device="cpu", dtype=torch.float32, seed=0):
    """rows, log_prior, weight and a bias with masks; one component of the first token is switched off."""
    source = torch.Generator().manual_seed(seed)
    rows = torch.randn(N, K, D, generator=source)
    log_prior = torch.randn(N, K, generator=source)
    if K > 1:
        log_prior[0, 0] = -torch.inf
    bias = torch.randn(V, generator=source)
    bias[::5] = -torch.inf
    weight = torch.randn(V, D, generator=source) / D**0.5 * 3
    return (
        rows.to(device, dtype), log_prior.log_softmax(1).to(device), weight.to(device, dtype), bias.to(device)
    )  # fmt: skip


def agree(rows, log_prior, weight, bias, f, found, best):
    """Found log-probabilities [N, V], and best values and entries, against fp64."""
    shift = None if bias is None else bias.double()
    exact = reference.mixture_log_probs(
        rows.double(), log_prior.double(), weight.double(), bias=shift, pointwise=f
    )
    bound = 2e-5 if rows.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound)
    torch.testing.assert_close(best[0].double(), exact.amax(1), rtol=bound, atol=bound)
    torch.testing.assert_close(exact.gather(1, best[1][:, None])[:, 0], exact.amax(1), rtol=bound, atol=bound)


@pytest.fixture(params=[True, False], ids=["large", "small"])
def block(request, monkeypatch):
    """The number of entries that a program of the mixture takes."""
    from fullrank.ops.decode import kernels as mixing_kernels

    monkeypatch.setattr(mixing_kernels, "FILLING", 0 if request.param else 10**9)
    return mixing_kernels.LARGE if request.param else mixing_kernels.SMALL


def test_programs_take_more_entries_where_there_are_many_tokens():
    from fullrank.ops.decode.kernels import LARGE, SMALL, block_size

    assert [block_size(N, 50304) for N in (1, 8, 10, 11, 64)] == [SMALL, SMALL, SMALL, LARGE, LARGE]


@pytest.mark.interpreter
@pytest.mark.parametrize("K", [1, 17])
def test_kernels_with_either_block(block, K):
    from fullrank.ops.decode.kernels import mix_scores

    rows, log_prior, weight, bias = draw(2, K, 8, 2 * block + 70)
    scores = rows.flatten(0, 1) @ weight.t()
    found, _ = mix_scores(scores, log_prior, bias, IDENTITY, best=False)
    best = mix_scores(scores, log_prior, bias, IDENTITY, best=True)
    agree(rows, log_prior, weight, bias, IDENTITY, found, best)


@pytest.mark.interpreter
@pytest.mark.parametrize("K", [1, 20])
def test_the_first_of_equal_entries_is_the_best(block, K):
    from fullrank.ops.decode.kernels import mix_scores

    V = 3 * block + 10
    scores = torch.randn(2 * K, V, generator=torch.Generator().manual_seed(1))
    log_prior = torch.randn(2, K, generator=torch.Generator().manual_seed(2)).log_softmax(1)
    peak = torch.full((2 * K, 1), 9.0)
    scores[:, [block - 1, block, 2 * block + 3, V - 1]] = peak
    assert mix_scores(scores, log_prior, None, IDENTITY, best=True)[1].tolist() == [block - 1] * 2
    scores[:, block - 1] = 0.0
    scores[:, [block + 7, block + 8]] = peak
    assert mix_scores(scores, log_prior, None, IDENTITY, best=True)[1].tolist() == [block] * 2


@pytest.mark.interpreter
@pytest.mark.parametrize("K", [2, 18])
def test_the_best_may_lie_in_the_last_partial_block(block, K):
    from fullrank.ops.decode.kernels import mix_scores

    V = 2 * block + 3
    scores = torch.randn(2 * K, V, generator=torch.Generator().manual_seed(0))
    scores[K:, V - 1] = 12.0
    scores[:K, V - 2] = 12.0
    value, entry = mix_scores(scores, torch.zeros(2, K).log_softmax(1), None, IDENTITY, best=True)
    assert entry.tolist() == [V - 2, V - 1]
    want = scores.double().log_softmax(1).view(2, K, V).exp().mean(1).log().amax(1)
    torch.testing.assert_close(value.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.interpreter
def test_entries_far_below_the_best_keep_their_log_probability(block):
    """On the common scale that finds the best they would vanish: the table has one for each entry."""
    from fullrank.ops.decode.kernels import mix_scores

    V = block + 5
    scores = -torch.linspace(0.0, 900.0, V).repeat(3, 1)
    scores[1] *= 0.5
    scores[2] = scores[2].flip(0) - 30.0
    log_prior = torch.tensor([[-0.1, -60.0, -150.0]])
    exact = (scores.double().log_softmax(1) + log_prior.double().mT).logsumexp(0)
    found, _ = mix_scores(scores, log_prior, None, IDENTITY, best=False)
    assert exact.amin() < -200.0
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-6, atol=1e-5)
    value, entry = mix_scores(scores, log_prior, None, IDENTITY, best=True)
    torch.testing.assert_close(value.double(), exact.amax()[None], rtol=1e-6, atol=1e-5)
    assert entry.item() == exact.argmax().item() == 0


@pytest.mark.interpreter
@every_function
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, 1e30])
def test_a_masked_tail_of_the_vocabulary_is_never_seen(kind, rubbish):
    from fullrank.ops.decode.kernels import mix_scores

    rows, log_prior, weight, _ = draw(2, 3, 8, 600)
    bias = torch.zeros(600)
    bias[500:] = -torch.inf
    scores = rows.flatten(0, 1) @ weight.t()
    scores[:, 500:] = rubbish
    f = FUNCTIONS[kind]
    found, _ = mix_scores(scores, log_prior, bias, f, best=False)
    assert (found[:, 500:] == -torch.inf).all()
    best = mix_scores(scores, log_prior, bias, f, best=True)
    agree(rows, log_prior, weight[:500], None, f, found[:, :500], best)


@pytest.mark.interpreter
@pytest.mark.parametrize("K", [3, 17])
def test_a_token_that_nothing_can_emit(K):
    from fullrank.ops.decode.kernels import mix_scores

    scores = torch.randn(2 * K, 300, generator=torch.Generator().manual_seed(0))
    log_prior = torch.zeros(2, K).log_softmax(1)
    for prior, bias in (
        (torch.full((2, K), -torch.inf), None), (log_prior, torch.full((300,), -torch.inf))
    ):  # fmt: skip
        assert (mix_scores(scores, prior, bias, IDENTITY, best=False)[0] == -torch.inf).all()
        value, entry = mix_scores(scores, prior, bias, IDENTITY, best=True)
        assert value.tolist() == [-torch.inf] * 2
        assert entry.tolist() == [0, 0]


@pytest.mark.interpreter
def test_no_number_gives_no_number_and_an_entry_that_exists():
    from fullrank.ops.decode.kernels import mix_scores

    scores = torch.zeros(2 * 2, 512)
    scores[0, 7] = torch.nan
    log_prior = torch.zeros(2, 2).log_softmax(1)
    assert mix_scores(scores, log_prior, None, IDENTITY, best=False)[0].isnan().any(1).tolist() == [
        True,
        False,
    ]
    value, entry = mix_scores(scores, log_prior, None, IDENTITY, best=True)
    assert value.isnan().tolist() == [True, False]
    assert entry.tolist() == [0, 0]


@pytest.mark.interpreter
@pytest.mark.parametrize("pieces", [1, 3])
def test_pieces_write_the_whole_result(monkeypatch, pieces):
    """The way of CUDA, with tensors of the processor."""
    monkeypatch.setattr("fullrank.ops.decode.operator._mixing_serves", lambda *_: True)
    joined = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *given: joined.append(given) or cat(*given))
    N, K, V = 7, 3, 40
    rows, log_prior, weight, bias = draw(N, K, 8, V)
    workspace = -(-N // pieces) * K * V * rows.itemsize
    found = mixture_log_probs(rows, log_prior, weight, bias=bias, workspace=workspace)
    assert not joined
    best = mixture_argmax(rows, log_prior, weight, bias=bias, workspace=workspace)
    assert len(joined) == (0 if pieces == 1 else 2)
    agree(rows, log_prior, weight, bias, IDENTITY, found, best)


@every_function
def test_argmax_is_that_of_the_log_probabilities(kind):
    rows, log_prior, weight, bias = draw(5, 3, 8, 60)
    f = FUNCTIONS[kind]
    found = mixture_log_probs(rows, log_prior, weight, bias=bias, pointwise=f)
    for workspace in (None, 1):
        best = mixture_argmax(rows, log_prior, weight, bias=bias, pointwise=f, workspace=workspace)
        agree(rows, log_prior, weight, bias, f, found, best)


@every_function
def test_scores_of_rows_are_log_probabilities_up_to_the_normaliser(kind):
    rows, log_prior, weight, bias = draw(4, 1, 8, 30)
    scores = row_scores(rows[:, 0], weight, bias, FUNCTIONS[kind])
    want = mixture_log_probs(rows, log_prior, weight, bias=bias, pointwise=FUNCTIONS[kind])
    torch.testing.assert_close(scores.log_softmax(1), want)


@pytest.mark.gpu
@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [(1, 10, 64, 50257), (64, 3, 64, 5001), (16, 20, 64, 50304)])
def test_cuda_kernels(kind, dtype, sizes):
    rows, log_prior, weight, bias = draw(*sizes, device="cuda", dtype=dtype)
    f = FUNCTIONS[kind]
    found = mixture_log_probs(rows, log_prior, weight, bias=bias, pointwise=f)
    agree(
        rows, log_prior, weight, bias, f, found,
        mixture_argmax(rows, log_prior, weight, bias=bias, pointwise=f),
    )  # fmt: skip


@pytest.mark.gpu
def test_cuda_log_probabilities_hold_the_result_and_the_workspace():
    N, K, V, workspace = 300, 4, 50304, 2**25
    rows, log_prior, weight, bias = draw(N, K, 64, V, device="cuda")
    want = mixture_log_probs(rows, log_prior, weight, bias=bias)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = mixture_log_probs(rows, log_prior, weight, bias=bias, workspace=workspace)
    assert torch.cuda.max_memory_allocated() - before <= N * V * 4 + workspace + 2**21
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
