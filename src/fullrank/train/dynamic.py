"""Dynamic evaluation: the weights follow the text that they are tested on (Krause et al. 2018, 1709.07432).

The text is read in segments of `length` tokens, one after the other. A segment is predicted first, which is
what counts; then every weight w moves along its gradient g (of the segment's mean loss) and back towards its
trained value w0:

    s  = sqrt(mean over training batches of g²)          gradient statistics, one a weight
    w <- w + min(1, decay · s / s̄) · (w0 - w) - lr · g / (s + epsilon)

s̄ is the mean over the parameter tensors of each tensor's mean s. So no token helps to predict itself.

Units. Here s is the root of a MEAN over batches, and s̄ a MEAN over tensors, so the settings depend on neither
the size of the training split nor the number of tensors. The code published with the mixture of softmaxes
sums both; `from_published` converts its values:

    lr / sqrt(batches)      epsilon / sqrt(batches)      decay / tensors

Gradients are taken with no dropout of any kind, in evaluation mode. A switch that only leaves out the output
dropouts would keep weight drop active. cuDNN refuses the backward pass of torch's recurrent modules in
evaluation mode (pytorch/pytorch#5878), so it is off where a body has one; our LSTM needs no such care.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit.captured import Step, Update
from fullrank.models import FullrankForCausalLM
from fullrank.models.anatomy import longest
from fullrank.ops.arguments import widest_dtype
from fullrank.train import objective
from fullrank.train.evaluate import (
    BLOCKS,
    IGNORED,
    Evaluation,
    Progress,
    Split,
    batches_of,
    in_eval_mode,
    limited,
    summarise,
)

TUNED = 20_000
"""Tokens that settings are chosen on."""
WAYS = {"lr": 2.0, "decay": 4.0}
REACH = 4
"""What is chosen, by factors of what, and how many of them away from where it begins."""
UNBOUNDED = 512
"""Tokens that a body without a limit and without a state is given at once."""


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Settings; the defaults are those published for MoS on WikiText-2, converted to the units here."""

    lr: float = 0.002 / math.sqrt(4177)
    epsilon: float = 0.002 / math.sqrt(4177)
    decay: float = 0.02 / 17
    """Towards the trained weights, a segment."""
    length: int = 5
    """Tokens of a segment, here and in the gradient statistics."""
    batch: int = 100
    """Sequences of a batch of the gradient statistics."""
    batches: int = 0
    """Batches of the gradient statistics; 0 is the whole training split."""

    def __post_init__(self) -> None:
        # Beyond 1 a decay would go past the trained weights, and beyond 1e9 a rate is no fp32 number.
        for name, most in (("lr", 1e9), ("decay", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise FullrankError(f"{name}={getattr(self, name)} is impossible: expected 0 to {most:g}")
        # Weights without a gradient in training, such as those of words never seen, divide by it alone.
        if not 0 < self.epsilon < math.inf:
            raise FullrankError(f"epsilon={self.epsilon} is impossible: expected more than 0")
        for name, least in (("length", 1), ("batch", 1), ("batches", 0)):
            if getattr(self, name) < least:
                raise FullrankError(f"{name}={getattr(self, name)} is impossible: expected at least {least}")


def from_published(
    lr: float, epsilon: float, decay: float, batches: int, tensors: int, *, length: int = 5, batch: int = 100
) -> Dynamic:
    """Settings from the units of the code published with MoS, which sums over `batches` and `tensors`.

    `batches` is the number of batches of its gradient statistics (training tokens / (batch · length)),
    `tensors` the number of its model's parameter tensors.
    """
    if batches < 1 or tensors < 1:
        raise FullrankError(f"batches={batches} and tensors={tensors} are impossible: expected at least 1")
    root = math.sqrt(batches)
    return Dynamic(lr=lr / root, epsilon=epsilon / root, decay=decay / tensors, length=length, batch=batch)


@dataclass(frozen=True, kw_only=True)
class DynamicEvaluation:
    """What came out, and with which settings."""

    evaluation: Evaluation
    settings: Dynamic
    losses: np.ndarray
    """[counted], nats in text order."""


def evaluate_dynamic(
    model: FullrankForCausalLM,
    split: Split,
    train: Split,
    *,
    eos: int,
    settings: Dynamic | None = None,
    tuned_on: Split | None = None,
    limit: int = 0,
    device: torch.device | str = "cpu",
    blocks: int = BLOCKS,
    progress: Progress | None = None,
) -> DynamicEvaluation:
    """Predict the split, or its first `limit` tokens, with weights that follow it; restored at the end. With
    `tuned_on`, by the settings that its first tokens want."""
    settings = Dynamic() if settings is None else settings
    start = time.perf_counter()

    def part(first: float, last: float) -> Progress | None:
        return None if progress is None else lambda share: progress(first + (last - first) * share)

    statistics = gradient_rms(
        model, train.tokens, eos=eos, settings=settings, device=device, progress=part(0, 0.3)
    )
    judged = 0.3
    if tuned_on is not None:
        judged, tried = 0.7, itertools.count()
        first = limited(tuned_on.tokens, min(TUNED, limit or TUNED))

        def loss(of: Dynamic) -> float:
            begun = 0.3 + 0.04 * next(tried)
            told = part(min(judged, begun), min(judged, begun + 0.04))
            found = dynamic_losses(
                model, first, statistics, eos=eos, settings=of, device=device, progress=told
            )
            return float(found.mean(dtype=np.float64))

        settings = tune_dynamic(settings, loss)
    losses = dynamic_losses(
        model,
        limited(split.tokens, limit),
        statistics,
        eos=eos,
        settings=settings,
        device=device,
        progress=part(judged, 1),
    )
    evaluation = summarise(losses, split, seconds=time.perf_counter() - start, blocks=blocks)
    return DynamicEvaluation(evaluation=evaluation, settings=settings, losses=losses)


def gradient_rms(
    model: FullrankForCausalLM,
    tokens: np.ndarray,
    *,
    eos: int,
    settings: Dynamic,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> list[Tensor]:
    """s of every trained parameter: root of the mean squared gradient over batches of training text."""
    weights = _weights(model)
    sums = [torch.zeros_like(weight) for weight in weights]
    stream, number = _training_batches(model, tokens, eos, settings)

    def update(ids: Tensor, targets: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        _, gradients, following = _step(model, weights, ids, targets, carried)
        for total, gradient in zip(sums, gradients, strict=True):
            total.addcmul_(gradient, gradient)
        return following

    step, seen = _captured(update, device), 0
    carried: tuple[Tensor, ...] = ()
    with gradients_without_dropout(model):
        for ids, targets, fresh in stream:
            carried = step(*_there(device, ids, targets), *(() if fresh else carried))
            seen += 1
            if progress is not None:
                progress(min(1.0, seen / number))
            if seen == settings.batches:
                break
    return [total.div_(seen).sqrt_() for total in sums]


def dynamic_losses(
    model: FullrankForCausalLM,
    tokens: np.ndarray,
    statistics: list[Tensor],
    *,
    eos: int,
    settings: Dynamic,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> np.ndarray:
    """-log p of every token [L], fp32 nats in text order, each before the weights have seen it."""
    weights = _weights(model)
    rates = _decay_rates(statistics, settings.decay)
    bounds = [rms + settings.epsilon for rms in statistics]
    losses: list[Tensor] = []
    counted: list[Tensor] = []
    carried: tuple[Tensor, ...] = ()
    done = 0
    with gradients_without_dropout(model), restored(weights) as trained:

        def update(ids: Tensor, targets: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
            nll, gradients, following = _step(model, weights, ids, targets, carried)
            with torch.no_grad():
                torch._foreach_lerp_(weights, trained, rates)
                torch._foreach_addcdiv_(weights, gradients, bounds, value=-settings.lr)
            return nll, *following

        step = _captured(update, device)
        for ids, targets, fresh in _segments(model, tokens, eos, settings):
            nll, *following = step(*_there(device, ids, targets), *(() if fresh else carried))
            carried = tuple(following)
            losses.append(nll.flatten())
            counted.append((targets != IGNORED).flatten())
            done += int(counted[-1].sum())
            if progress is not None:
                progress(done / len(tokens))
    return torch.cat(losses).float().cpu()[torch.cat(counted)].numpy()


def tune_dynamic(settings: Dynamic, loss: Callable[[Dynamic], float]) -> Dynamic:
    """The rate, then the decay, with the least loss: by factors from `settings`, while that lowers it."""

    def asked(of: Dynamic) -> float:
        found = loss(of)
        return found if math.isfinite(found) else math.inf

    least = asked(settings)
    for name, factor in WAYS.items():
        begun = getattr(settings, name)
        # Downwards first, and on from where nothing is finite.
        for way in (1 / factor, factor):
            for distance in range(1, REACH + 1):
                other = dataclasses.replace(settings, **{name: min(begun * way**distance, 1.0)})
                if (found := asked(other)) >= least and least < math.inf:
                    break
                settings, least = other, found
            if getattr(settings, name) != begun:
                break
    return settings


@contextlib.contextmanager
def gradients_without_dropout(model: FullrankForCausalLM) -> Iterator[None]:
    """Gradients in evaluation mode, whatever the caller's modes are."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_eval_mode(model))
        stack.enter_context(torch.enable_grad())
        if any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


@contextlib.contextmanager
def restored(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """Copies of the weights, which are put back bit by bit at the end, also after an exception."""
    trained = [weight.detach().clone() for weight in weights]
    try:
        yield trained
    finally:
        with torch.no_grad():
            for weight, copy in zip(weights, trained, strict=True):
                weight.copy_(copy)


def _weights(model: FullrankForCausalLM) -> list[Tensor]:
    weights: list[Tensor] = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        raise FullrankError(
            "every parameter is frozen, so none can follow the text: call model.requires_grad_() first"
        )
    return weights


def _training_batches(
    model: FullrankForCausalLM, tokens: np.ndarray, eos: int, settings: Dynamic
) -> tuple[Iterator[tuple[Tensor, Tensor, bool]], int]:
    """Batches of training text and their number.

    A body with a context reads whole windows, and fewer of them: a segment alone would show it no context.
    """
    context = _window(model, settings)
    length = settings.length if context is None else min(context, len(tokens))
    batch = max(1, min(settings.batch * settings.length, len(tokens)) // length)
    number = math.ceil(len(tokens) / (batch * length))
    stream = batches_of(model, tokens, eos=eos, batch=batch, length=length)
    return stream, min(number, settings.batches) if settings.batches else number


def _window(model: FullrankForCausalLM, settings: Dynamic) -> int | None:
    """Tokens that a body with a context sees at once; None where a state is carried."""
    return None if model.carries_state else longest(model) or max(UNBOUNDED, settings.length)


def _segments(
    model: FullrankForCausalLM, tokens: np.ndarray, eos: int, settings: Dynamic
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """One row of text. A body with a context reads all of that for every segment, and counts the segment."""
    context = _window(model, settings)
    if context is None:
        yield from batches_of(model, tokens, eos=eos, batch=1, length=settings.length)
        return
    length = min(settings.length, context)
    for start in range(0, len(tokens), length):
        end = min(start + length, len(tokens))
        first = max(0, end - context)
        targets = torch.from_numpy(tokens[first:end].astype(np.int64))
        before = tokens[first - 1] if first else eos
        ids = torch.cat([torch.tensor([int(before)]), targets[:-1]])
        targets[: start - first] = IGNORED
        yield ids[None], targets[None], True


def _captured(update: Update, device: torch.device | str) -> Step:
    """An update that is one CUDA graph on a GPU: a segment's kernels are far shorter than their launches."""
    cuda = torch.device(device).type == "cuda"
    return Step(update, None, captures=cuda, remedy="run it with --device cpu")


def _there(device: torch.device | str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(one.to(device, non_blocking=True) for one in tensors)


def _step(
    model: FullrankForCausalLM,
    weights: list[Tensor],
    ids: Tensor,
    targets: Tensor,
    carried: tuple[Tensor, ...],
) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...]]:
    """Losses of all tokens, gradients of the mean of those that count, and what is carried on."""
    found = objective.token_losses(model, ids, targets, carried)
    gradients = torch.autograd.grad(
        found.nll.sum() / (targets != IGNORED).sum(), weights, allow_unused=True, materialize_grads=True
    )
    # Gradients end at the segment's start.
    carried = tuple(tensor.detach() for tensor in found.carried)
    return found.nll.detach(), list(gradients), carried


def _decay_rates(statistics: list[Tensor], decay: float) -> list[Tensor]:
    """min(1, decay · s / s̄): weights with large gradients are pulled back faster, never past their value."""
    mean = torch.stack([rms.mean(dtype=widest_dtype(rms.device)) for rms in statistics]).mean()
    if not mean > 0:
        return [torch.zeros_like(rms) for rms in statistics]
    return [(rms * (decay / float(mean))).clamp_(max=1.0) for rms in statistics]


__all__ = [
    "Dynamic",
    "DynamicEvaluation",
    "dynamic_losses",
    "evaluate_dynamic",
    "from_published",
    "gradient_rms",
    "tune_dynamic",
]
