"""The differential matrix: every public loss and fused output, every path, every dtype, every odd condition.

Paths are the definition, chunks, chunks over a cut vocabulary, and the kernels in Triton's interpreter. All
are held against fp64 written out by hand (`truth.py`), within what rounding of their products allows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.ops import (
    IDENTITY,
    SIGSOFTMAX,
    Mixture,
    Softcap,
    TopTokens,
    divergence,
    entropy,
    linear_logprob,
    linear_nll,
    mixture_argmax,
    mixture_log_probs,
    mixture_nll,
    token_logprobs,
    trunk_nll,
)
from fullrank.ops import parallel as vocab_parallel
from tests.ops.distil_truth import Teaching, outputs_truth
from tests.ops.truth import CAP, Bounded, Case, truth, uneven

N, K, D, V, PRIVATE = 4, 2, 8, 67, 2
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POINTWISE = {"identity": IDENTITY, "sigsoftmax": SIGSOFTMAX, "softcap": Softcap(CAP)}
CONDITIONS = (
    "plain", "signed", "zero", "ignored", "masked", "confident", "shifted", "odd", "tied", "strided", "none",
)  # fmt: skip
SMALL = 48 * 1024
"""A workspace that cuts the vocabulary."""


@functools.cache
def make_case(
    condition: str, dtype: torch.dtype, kind: str = "identity", components: int = K, private: int = 0
) -> Case:
    draw = torch.Generator().manual_seed(len(condition) * 10 + components)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    vocab = {"odd": 129, "shifted": 200}.get(condition, V)
    # Whole eights of numbers go by descriptors, others do not.
    width = 5 if condition == "odd" else D
    rows, weight, bias = normal(N, components, width), normal(vocab, width), normal(vocab)
    prior, targets = normal(N, components).log_softmax(-1), torch.randint(vocab, (N,), generator=draw)
    token_weight = None
    if condition == "signed":
        token_weight = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64)
    if condition in ("masked", "zero"):
        bias[targets[1]] = bias[3] = -torch.inf
    if condition == "zero":
        # An infinite loss that is given no weight, with a token that no other shares the target of.
        token_weight = torch.ones(N, dtype=torch.float64)
        token_weight[targets == targets[1]] = 0.0
        token_weight[3] *= 0.5
    if condition in ("ignored", "none"):
        targets[1], targets[3] = -100, -100
        rows[1] = torch.nan
        prior[3] = torch.nan
    if condition == "none":
        targets[:] = -100
    if condition == "confident":
        # Margins of 14 to 100 nats over all others; half precision knows a score of 100 up to 0.4.
        margins = torch.linspace(14.0, 28.0 if dtype.itemsize == 2 else 100.0, N, dtype=torch.float64)
        weight *= 0.05
        sure = weight[targets] / weight[targets].norm(dim=1, keepdim=True)
        weight[targets] = 4.0 * sure
        rows = (margins[:, None] * sure / 4.0)[:, None] + 0.02 * rows
        bias *= 0.1
    if condition == "shifted":
        # Some entries far above the first 64: a kernel that anchors its sums there overflows.
        bias += torch.linspace(-50.0, 50.0, vocab, dtype=torch.float64)
        targets[0], targets[1] = 190, 3
    if private:
        rows[:, :, : width - private] = rows[:, :1, : width - private]

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype)

    rows, weight, bias = cast(rows), cast(weight), cast(bias)
    if condition == "tied":
        # One matrix for inputs and outputs: its gradient has two parts.
        rows = weight[targets.roll(1)][:, None, :].expand(-1, components, -1).contiguous()
    if condition == "strided":
        rows = rows.transpose(0, 2).contiguous().transpose(0, 2)
        weight = torch.stack([weight, weight], 2)[..., 0]
        targets = torch.stack([targets, targets], 1)[:, 0]
        prior = prior.t().contiguous().t()
    return Case(
        rows=rows, log_prior=prior.float() if dtype != torch.float64 else prior, weight=weight,
        targets=targets, bias=bias, token_weight=token_weight, kind=kind, private=private,
    )  # fmt: skip


def precision(dtype: torch.dtype, path: str) -> float:
    """Of the products: on a processor half precision is multiplied in fp32, but not by the kernels."""
    if dtype == torch.float64:
        return 2.0**-52
    return torch.finfo(dtype).eps if path == "kernels" else 2.0**-23


def options_of(path: str) -> dict[str, Any]:
    return {
        "reference": {"impl": "reference"},
        "chunked": {"impl": "chunked"},
        "cut": {"impl": "chunked", "workspace": SMALL},
        "kernels": {"impl": "triton"},
    }[path]


def reductions_of(path: str, condition: str) -> tuple[str, ...]:
    """A sum is a mean with another factor at the end, and the interpreter takes its time."""
    if path != "kernels":
        return ("mean", "sum", "none")
    return ("mean", "none") if condition in ("plain", "zero", "ignored", "confident") else ("mean",)


def leaf(tensor: Tensor) -> Tensor:
    """The same numbers in the same memory layout, asking for a gradient."""
    return tensor.detach().requires_grad_()


def differentiate(loss: Tensor, **leaves: Tensor) -> dict[str, Tensor]:
    upstream = uneven(loss.shape[0]).to(loss.dtype) if loss.ndim else None
    found = torch.autograd.grad(loss, list(leaves.values()), upstream)
    return {"loss": loss, **dict(zip(leaves, found, strict=True))}


def run_mixture(case: Case, reduction: str, **options: Any) -> dict[str, Tensor]:
    leaves = {"rows": leaf(case.rows), "log_prior": leaf(case.log_prior), "weight": leaf(case.weight)}
    leaves["bias"] = leaf(case.bias)
    loss = mixture_nll(
        leaves["rows"], leaves["log_prior"], leaves["weight"], case.targets, bias=leaves["bias"],
        pointwise=POINTWISE[case.kind], token_weight=case.token_weight, reduction=reduction, **options,
    )  # fmt: skip
    return differentiate(loss, **leaves)


def run_trunk(case: Case, reduction: str, **options: Any) -> dict[str, Tensor]:
    shared = case.rows.shape[2] - case.private
    leaves = {"trunk": leaf(case.rows[:, 0, :shared]), "private": leaf(case.rows[:, :, shared:])}
    leaves |= {"log_prior": leaf(case.log_prior), "weight": leaf(case.weight), "bias": leaf(case.bias)}
    loss = trunk_nll(
        leaves["trunk"], leaves["private"], leaves["log_prior"], leaves["weight"], case.targets,
        bias=leaves["bias"], token_weight=case.token_weight, reduction=reduction, **options,
    )  # fmt: skip
    return differentiate(loss, **leaves)


def run_parallel(case: Case, reduction: str, **options: Any) -> dict[str, Tensor]:
    leaves = {"rows": leaf(case.rows), "log_prior": leaf(case.log_prior), "weight": leaf(case.weight)}
    leaves["bias"] = leaf(case.bias)
    loss = vocab_parallel.mixture_nll(
        leaves["rows"], leaves["log_prior"], leaves["weight"], case.targets, start=0, bias=leaves["bias"],
        pointwise=POINTWISE[case.kind], token_weight=case.token_weight, reduction=reduction,
    )  # fmt: skip
    return differentiate(loss, **leaves)


def compare(found: dict[str, Tensor], right: dict[str, Bounded], what: str) -> None:
    for name, value in found.items():
        right[name].check(value, f"{what}, {name}")


PLAIN_PATHS = ("reference", "chunked", "cut")
paths = pytest.mark.parametrize(
    "path", [*PLAIN_PATHS, pytest.param("kernels", marks=pytest.mark.interpreter)]
)
MIXTURES = (("identity", 1), ("identity", K), ("sigsoftmax", K), ("softcap", K))
mixtures = pytest.mark.parametrize(("kind", "components"), MIXTURES)
conditions = pytest.mark.parametrize("condition", CONDITIONS)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def by_kernels(wanted: Callable[..., bool], usual: Callable[..., bool]) -> pytest.MarkDecorator:
    """Every condition, dtype, f and number of components that is wanted of the kernels: each takes the
    interpreter half a second, so what is not usual is in the slow tier."""
    cases = [
        pytest.param(
            condition, DTYPES[dtype], kind, components, id=f"{condition}-{dtype}-{kind}-{components}",
            marks=() if usual(condition, dtype, kind, components) else pytest.mark.slow,
        )
        for condition, dtype, (kind, components) in itertools.product(CONDITIONS, DTYPES, MIXTURES)
        if dtype != "fp64" and wanted(condition, dtype, kind, components)
    ]  # fmt: skip
    return pytest.mark.parametrize(("condition", "dtype", "kind", "components"), cases)


@mixtures
@dtypes
@conditions
@pytest.mark.parametrize("path", PLAIN_PATHS)
def test_mixture_loss(path, condition, dtype, kind, components):
    check_mixture_loss(path, condition, dtype, kind, components)


def mixture_wanted(condition: str, dtype: str, kind: str, components: int) -> bool:
    """f is applied in fp32 whatever the dtype, to scores that come out the same; single rows, below, have
    every dtype."""
    if kind != "identity":
        return dtype == "bf16" and condition not in ("signed", "tied", "strided", "none")
    return components > 1 or dtype == "fp32"


def mixture_usual(condition: str, dtype: str, kind: str, components: int) -> bool:
    return dtype == "bf16" or condition in ("plain", "confident", "masked")


@pytest.mark.interpreter
@by_kernels(mixture_wanted, mixture_usual)
def test_mixture_loss_of_kernels(condition, dtype, kind, components):
    check_mixture_loss("kernels", condition, dtype, kind, components)


@functools.cache
def mixture_truth(
    condition: str, dtype: torch.dtype, kind: str, components: int, reduction: str, eps: float
) -> dict[str, Bounded]:
    """Written out once for all paths that multiply in this precision."""
    case = make_case(condition, dtype, kind, components)
    return truth(case, reduction, eps=eps, stored=torch.finfo(dtype).eps)


def check_mixture_loss(path: str, condition: str, dtype: torch.dtype, kind: str, components: int) -> None:
    case, eps = make_case(condition, dtype, kind, components), precision(dtype, path)
    for reduction in reductions_of(path, condition):
        found = run_mixture(case, reduction, **options_of(path))
        compare(found, mixture_truth(condition, dtype, kind, components, reduction, eps), reduction)


@dtypes
@conditions
@paths
def test_trunk_loss(path, condition, dtype):
    if path == "kernels" and dtype != torch.float16:
        pytest.skip("the kernels multiply in half precision, and the interpreter multiplies no bf16")
    case = make_case(condition, dtype, private=PRIVATE)
    eps, stored = precision(dtype, path), torch.finfo(dtype).eps
    for reduction in reductions_of(path, condition):
        found = run_trunk(case, reduction, **options_of(path))
        right = truth(case, reduction, eps=eps, stored=stored, added=path == "kernels")
        compare(found, right, reduction)


@dtypes
@conditions
def test_loss_over_a_split_vocabulary(condition, dtype):
    case = make_case(condition, dtype)
    for reduction in ("mean", "sum", "none"):
        right = truth(case, reduction, eps=precision(dtype, "chunked"), stored=torch.finfo(dtype).eps)
        compare(run_parallel(case, reduction), right, reduction)


@pytest.mark.parametrize("kind", POINTWISE)
@dtypes
@pytest.mark.parametrize("condition", ["plain", "masked", "confident", "shifted", "odd", "tied", "strided"])
@paths
def test_losses_of_single_rows(path, condition, dtype, kind):
    """`linear_nll`, `linear_logprob`: the loss of rows by themselves is that of mixtures of one component."""
    if path == "kernels" and (dtype == torch.float64 or (kind != "identity" and dtype != torch.bfloat16)):
        pytest.skip("the kernels work in fp32; f is applied in it whatever the dtype")
    case = make_case(condition, dtype, kind, 1)
    case = Case(**{**vars(case), "log_prior": torch.zeros_like(case.log_prior)})
    right = truth(case, "none", eps=precision(dtype, path), stored=torch.finfo(dtype).eps)
    leaves = {"rows": leaf(case.rows), "weight": leaf(case.weight), "bias": leaf(case.bias)}
    arguments = (leaves["rows"][:, 0], leaves["weight"], case.targets)
    common = {"bias": leaves["bias"], "pointwise": POINTWISE[kind], **options_of(path)}
    nll, lse = linear_nll(*arguments, **common)
    # A token that its only component cannot emit has no gradient in a mixture, but one by itself.
    if condition != "masked":
        compare(differentiate(nll, **leaves), right, "linear_nll")
    else:
        right["loss"].check(nll, "linear_nll")
    target, again = linear_logprob(*arguments, **common)
    slack = right["loss"].allowed.max() + 2.0**-21 * lse.detach().double().abs()
    Bounded(lse.detach().double(), slack).check(again, "lse")
    slack = right["loss"].allowed.max() + 2.0**-21 * target.detach().double().abs().nan_to_num(0, 0, 0)
    Bounded(right["loss"].value, slack).check(lse.double() - target.double(), "linear_logprob")


@mixtures
@dtypes
@pytest.mark.parametrize(
    "condition", ["plain", "ignored", "masked", "confident", "shifted", "odd", "strided"]
)
def test_outputs_beside_the_loss(condition, dtype, kind, components):
    """Statistics and tables of log-probabilities, whole and over a cut vocabulary."""
    case = make_case(condition, dtype, kind, components)
    right = truth(case, "mean", eps=precision(dtype, "chunked"), stored=torch.finfo(dtype).eps)
    arguments = (case.rows, case.log_prior, case.weight)
    common = {"bias": case.bias, "pointwise": POINTWISE[kind]}
    counted = case.counted
    for workspace in (None, SMALL):
        _, stats = mixture_nll(
            *arguments, case.targets, **common, return_stats=True, workspace=workspace, impl="chunked"
        )
        some = (case.rows[counted], case.log_prior[counted], case.weight)
        table = mixture_log_probs(*some, **common, workspace=workspace)
        best, entry = mixture_argmax(*some, **common, workspace=workspace)
        right["nll"].check(stats.nll, "nll")
        right["entropy"].check(stats.entropy, "entropy")
        whole = right["log_probs"]
        Bounded(whole.value[counted], whole.allowed[counted]).check(table, "log_probs")
        # Two products of other shapes may round apart, so the best entry is one of the best.
        highest = Bounded(whole.value[counted].amax(1), whole.allowed[counted].amax(1))
        highest.check(best, "log_prob of the best")
        highest.check(table.gather(1, entry[:, None])[:, 0], "best entry")
        near = whole.value.gather(1, stats.argmax.clamp_min(0)[:, None])[:, 0]
        assert bool((near >= whole.value.amax(1) - 2 * whole.allowed.amax(1))[counted].all())
        assert bool((stats.argmax[~counted] == -1).all())
        parallel = vocab_parallel.log_probs(*some, start=0, **common)
        Bounded(whole.value[counted], whole.allowed[counted]).check(parallel, "parallel log_probs")


def make_teaching(case: Case, output: str, components: int) -> Teaching:
    """For an output of the matrix: a name, then where its teacher comes from or the temperature."""
    name, *more = output.split()
    draw = torch.Generator().manual_seed(len(output))
    tokens, dtype = case.rows.shape[0], case.rows.dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    asked = Teaching(name=name, temperature=0.7 if "tempered" in more else 1.0, upstream=uneven(tokens) + 0.3)
    if name == "ids" or "top" in more:
        others = 0 if "one" in more else 4
        steps = torch.arange(1, others + 1) * 7
        target = case.targets.masked_fill(~case.counted, 0)[:, None]
        asked.ids = torch.cat([target, (target + steps) % case.weight.shape[0]], 1)
        if name == "ids":
            asked.upstream = uneven(asked.ids.numel()).view(asked.ids.shape) + 0.3
    if "top" in more:
        likely = torch.linspace(0.9, 0.01, asked.ids.shape[1], dtype=torch.float64)
        log_probs = (0.95 * likely / likely.sum()).log() + 0.01 * normal(tokens, 1)
        asked.log_probs = log_probs.to(torch.float64 if dtype == torch.float64 else torch.float32)
    elif name not in ("ids", "entropy"):
        # One that is about as sure of the same tokens: its own width, and its own number of components.
        sure = case.rows.nan_to_num(0.0).double().mean(1, keepdim=True)
        asked.rows = (sure + 0.05 * normal(tokens, components, sure.shape[2])).to(dtype)
        asked.weight = (case.weight.double() + 0.02 * normal(*case.weight.shape)).to(dtype)
        asked.log_prior = normal(tokens, components).log_softmax(1)
        asked.log_prior = asked.log_prior if dtype == torch.float64 else asked.log_prior.float()
    return asked


OUTPUTS = (
    "ids", "ids one", "ids tempered", "entropy", "entropy tempered", "forward", "reverse", "jensen_shannon",
    "forward tempered", "forward top", "reverse top", "jensen_shannon top",
)  # fmt: skip
OUTPUT_CONDITIONS = ("plain", "ignored", "masked", "confident", "shifted", "odd", "tied", "strided", "none")


def kernel_outputs(condition: str, dtype: torch.dtype, kind: str, components: int) -> tuple[str, ...]:
    """What kernels serve: at ids the identity; entropies and divergences in half precision, of which the
    interpreter multiplies fp16, with one temperature for single rows and nothing masked."""
    at_ids = ("ids", "ids one", "forward top") if kind == "identity" else ()
    if dtype != torch.float16 or condition == "masked":
        return at_ids
    if kind != "identity" and condition not in ("plain", "shifted", "odd"):
        # f is applied to scores, which come out the same.
        return ()
    if condition not in ("plain", "confident"):
        # One kernel with four functions: here it is about what it reads, and one row's about its sums.
        return (*at_ids, "entropy", "reverse", *(("forward",) if components == 1 else ()))
    tempered = ("entropy tempered", "forward tempered") if components == 1 else ()
    return (*at_ids, "entropy", "forward", "reverse", "jensen_shannon", *tempered)


# Half precision is multiplied in fp32 here: what it reads is what the wider ones read.
@mixtures
@pytest.mark.parametrize(
    ("condition", "dtype"),
    [
        pytest.param(
            condition, DTYPES[name], id=f"{condition}-{name}",
            marks=pytest.mark.slow
            if DTYPES[name].itemsize == 2 and condition not in ("plain", "confident", "shifted") else (),
        )
        for condition, name in itertools.product(OUTPUT_CONDITIONS, DTYPES)
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["reference", "chunked"])
def test_outputs_with_gradients(path, condition, dtype, kind, components):
    """Log-probabilities at ids, entropy and divergences: values, and gradients for uneven numbers."""
    check_outputs(path, condition, dtype, kind, components)


def outputs_wanted(condition: str, dtype: str, kind: str, components: int) -> bool:
    if condition not in OUTPUT_CONDITIONS or not kernel_outputs(condition, DTYPES[dtype], kind, components):
        return False
    return dtype == "fp16" or condition in ("plain", "confident")


def outputs_usual(condition: str, dtype: str, kind: str, components: int) -> bool:
    if components == 1:
        return dtype == "fp16" and condition in ("plain", "masked", "confident", "shifted", "odd")
    if kind != "identity":
        return condition == "shifted"
    return dtype == "fp16" or (dtype, condition) in (("fp32", "plain"), ("bf16", "confident"))


@pytest.mark.interpreter
@by_kernels(outputs_wanted, outputs_usual)
def test_outputs_of_kernels_with_gradients(condition, dtype, kind, components):
    check_outputs("kernels", condition, dtype, kind, components)


@functools.cache
def taught(
    condition: str, dtype: torch.dtype, kind: str, components: int, output: str, eps: float, teachers: int
) -> tuple[Teaching, dict[str, Bounded]]:
    """Made once for all paths that multiply in this precision."""
    case = make_case(condition, dtype, kind, components)
    asked = make_teaching(case, output, teachers)
    return asked, outputs_truth(case, asked, eps=eps, stored=torch.finfo(dtype).eps)


def check_outputs(path: str, condition: str, dtype: torch.dtype, kind: str, components: int) -> None:
    case = make_case(condition, dtype, kind, components)
    counts = case.counted.double()
    outputs = kernel_outputs(condition, dtype, kind, components) if path == "kernels" else OUTPUTS
    for output in outputs:
        # The kernel knows teachers of one row a token.
        teachers = 1 if path == "kernels" else 3 - components
        asked, right = taught(condition, dtype, kind, components, output, precision(dtype, path), teachers)
        leaves = {"rows": leaf(case.rows), "log_prior": leaf(case.log_prior), "weight": leaf(case.weight)}
        leaves["bias"] = leaf(case.bias)
        common = {
            "bias": leaves["bias"], "pointwise": POINTWISE[kind], "temperature": asked.temperature,
            **options_of(path),
        }  # fmt: skip
        arguments = (leaves["rows"], leaves["log_prior"], leaves["weight"])
        if asked.name == "ids":
            ids = asked.ids.masked_fill(~case.counted[:, None], -100)
            value = token_logprobs(*arguments, ids, **common)
        else:
            common |= {"token_weight": counts, "reduction": "none"}
            if asked.name == "entropy":
                value = entropy(*arguments, **common)
            else:
                teacher = Mixture(asked.rows, asked.log_prior, asked.weight)
                if asked.log_probs is not None:
                    teacher = TopTokens(asked.ids, asked.log_probs)
                value = divergence(*arguments, teacher, kind=asked.name, **common)
        upstream = torch.where(torch.isfinite(value), asked.upstream.to(value.dtype), 0.0)
        found = torch.autograd.grad(value, list(leaves.values()), upstream)
        compare({"value": value, **dict(zip(leaves, found, strict=True))}, right, output)


def decoding_wanted(condition: str, dtype: str, kind: str, components: int) -> bool:
    """Scores come in any dtype, and what follows is in fp32 whatever it was: one mixture has them all."""
    if condition not in ("plain", "masked", "confident", "shifted", "odd"):
        return False
    if kind == "identity":
        return components == K or dtype == "fp32"
    return dtype == {"sigsoftmax": "bf16", "softcap": "fp16"}[kind]


def decoding_usual(condition: str, dtype: str, kind: str, components: int) -> bool:
    return condition == "plain" or kind == "sigsoftmax" or (dtype == "fp32" and components == K)


@pytest.mark.interpreter
@by_kernels(decoding_wanted, decoding_usual)
def test_decoding_kernels(condition, dtype, kind, components):
    from fullrank.ops.decode import kernels

    case = make_case(condition, dtype, kind, components)
    right = truth(case, "mean", eps=precision(dtype, "kernels"), stored=0.0)["log_probs"]
    scores = torch.mm(case.rows.flatten(0, 1), case.weight.t())
    arguments = (scores, case.log_prior, case.bias.float(), POINTWISE[kind])
    table, _ = kernels.mix_scores(*arguments, best=False)
    right.check(table, "table")
    best, entry = kernels.mix_scores(*arguments, best=True)
    assert bool(((best - table.amax(1)).abs() <= 1e-5 * (1 + best.abs())).all())
    assert bool(((table.gather(1, entry[:, None])[:, 0] - best).abs() <= 1e-5 * (1 + best.abs())).all())
