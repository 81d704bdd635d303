"""Log-probabilities and best entries of mixtures against their definition; the kernels as well."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fullrank.ops import (
    IDENTITY,
    SIGSOFTMAX,
    Softcap,
    mixture_argmax,
    mixture_log_probs,
    reference,
    row_scores,
)

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FUNCTIONS = {"identity": IDENTITY, "sigsoftmax": SIGSOFTMAX, "softcap": Softcap(3.0)}
every_function = pytest.mark.parametrize("kind", FUNCTIONS)


@pytest.mark.skipif(not INSTALLED or INTERPRETED, reason="needs Triton; already inside the interpreter")
def test_everything_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


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


@interpreter
@every_function
@pytest.mark.parametrize("sizes", [(2, 3, 8, 100), (1, 1, 4, 1), (3, 2, 8, 4500)])
@pytest.mark.parametrize("biased", [True, False])
def test_kernels(kind, sizes, biased):
    from fullrank.ops.mixing_kernels import mix_scores

    rows, log_prior, weight, bias = draw(*sizes)
    if not biased or sizes[3] == 1:
        bias = None
    scores = rows.flatten(0, 1) @ weight.t()
    f = FUNCTIONS[kind]
    found, _ = mix_scores(scores, log_prior, bias, f, best=False)
    agree(rows, log_prior, weight, bias, f, found, mix_scores(scores, log_prior, bias, f, best=True))


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
@pytest.mark.parametrize("sizes", [(1, 10, 64, 50257), (64, 3, 64, 5001)])
def test_cuda_kernels(kind, dtype, sizes):
    rows, log_prior, weight, bias = draw(*sizes, device="cuda", dtype=dtype)
    f = FUNCTIONS[kind]
    found = mixture_log_probs(rows, log_prior, weight, bias=bias, pointwise=f)
    agree(
        rows, log_prior, weight, bias, f, found,
        mixture_argmax(rows, log_prior, weight, bias=bias, pointwise=f),
    )  # fmt: skip
