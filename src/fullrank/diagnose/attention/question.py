"""What does softmax let the attention heads select? Asked by name: `fullrank diagnose --only attention`.

Windows of text go through the model once; at some queries of every head the weights, scores and values are
measured as they come (`attention_capture`, `attention_measures`) and forgotten. Then a few windows run again
with other normalisers and with few weights (`attention_losses`). The mathematics is in `theory.attention`,
definitions and proofs in docs/attention_theory.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fullrank.diagnose.attention.capture import Seen, calls_by_name, given_weights, watched
from fullrank.diagnose.attention.losses import KEPT, Losses
from fullrank.diagnose.attention.measures import Plan, Tally, plan
from fullrank.diagnose.attention.record import mean_of, record
from fullrank.errors import FullrankError
from fullrank.models.anatomy import states
from fullrank.models.attention import SETTING
from fullrank.models.normalisers import NORMALISERS, check_available
from fullrank.models.output_layer import OutputLayer
from fullrank.models.sizes import largest
from fullrank.results.attention import Attention, AttentionKept, AttentionNormaliser

Progress = Callable[[str, float], None]

BATCH = 2
"""Windows at once: more would not be faster, and buffers stay small enough for the allocator to reuse."""
PARTS = {"running the model": 0.55, "other normalisers": 0.85, "few weights": 1.0}
"""Where each part of the work ends, roughly."""


def attention(
    model: Any,
    output: OutputLayer,
    ids: Tensor,
    *,
    memory: int,
    loss_tokens: int = 1024,
    seed: int = 0,
    progress: Progress = lambda label, share: None,
) -> Attention:
    """Measure the attention of a transformers model on windows of token ids [windows, window]."""
    window = ids.shape[1]
    where = plan(window)
    missing = {name: _unavailable(name) for name in NORMALISERS}
    available = [name for name, reason in missing.items() if not reason]
    tally = Tally(where, len(ids), seed=seed, memory=memory // 4, what_if=available)
    _require_softmax(model)
    named = calls_by_name(model)
    if named:
        compared, positions = _watch(model, ids, where, tally, memory, progress)
    else:
        compared, positions = math.nan, 0
        _given(model, ids, where, tally, memory, progress)
    losses: Losses | None = None
    kept: tuple[AttentionKept, ...] = ()
    if named:
        few = ids[: max(1, loss_tokens // window)]
        losses = Losses(model, output, few, limit=memory // 4)
    normalisers = tuple(_normalisers(tally, available, missing, losses, progress))
    if losses is not None:
        kept = tuple(_kept(losses, window, memory, progress))
    return record(tally, normalisers, kept, losses, compared, positions)


def _require_softmax(model: Any) -> None:
    """The statements are of softmax, and so is the eager attention that would run in the place of another."""
    names = {layer.__dict__[SETTING].name for layer in model.modules() if SETTING in layer.__dict__}
    if names - {"softmax"}:
        raise FullrankError(
            f"this model has {', '.join(sorted(names))} attention, and what is asked is about softmax: the "
            "monitors in the log of its training say what its heads do"
        )


def _unavailable(name: str) -> str:
    try:
        check_available(name)
    except FullrankError as error:
        return str(error)
    return ""


def _watch(
    model: Any, ids: Tensor, where: Plan, tally: Tally, memory: int, progress: Progress
) -> tuple[float, int]:
    """Measure all windows; the largest difference to the whole model in eager attention, and on how much."""
    rows = where.rows()
    firsts: list[Tensor] = []
    heads = layers = 0
    for start in range(0, len(ids), BATCH):
        part = slice(start, start + BATCH)

        def take(seen: Seen, part: slice = part, start: int = start) -> None:
            nonlocal heads, layers
            tally.take(seen, part)
            if start == 0:
                heads, layers = max(heads, seen.weights.shape[1]), layers + 1
                firsts.append(seen.weights[0].cpu())

        with watched(model, rows, take, memory=memory // 4):
            states(model, ids[part].to(model.device))
        progress("", PARTS["running the model"] * min(1.0, (start + BATCH) / len(ids)))
    # Eager attention holds the weights of all layers at once: the longest context that fits is compared.
    fits = [
        length
        for length in where.lengths
        if 4 * 2 * layers * heads * length**2 <= memory // 2 and length <= ids.shape[1]
    ]
    if not fits:
        return math.nan, 0
    again: list[Tensor] = []
    rows = rows[rows < fits[-1]]
    try:
        given_weights(model, ids[:1, : fits[-1]], rows, lambda seen: again.append(seen.weights[0].cpu()))
    except FullrankError:
        return math.nan, 0
    pairs = [(one[:, : len(rows), : fits[-1]], other) for one, other in zip(firsts, again, strict=False)]
    if len(firsts) != len(again) or any(one.shape != other.shape for one, other in pairs):
        # Layers of other kinds stand between those with attention.
        return math.nan, 0
    return max(float((one - other).abs().max()) for one, other in pairs), fits[-1]


def _given(model: Any, ids: Tensor, where: Plan, tally: Tally, memory: int, progress: Progress) -> None:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    layers, heads = (largest(config, name) or 1 for name in ("num_hidden_layers", "num_attention_heads"))
    needed = 8 * layers * heads * ids.shape[1] ** 2
    if needed > memory:
        raise FullrankError(
            f"{type(model).__name__} gives the weights of all layers at once, {needed / 2**30:.1f} GiB for a "
            f"window of {ids.shape[1]}, more than --memory {memory / 2**30:.1f} GiB: take a shorter --window"
        )
    for number in range(len(ids)):
        part = slice(number, number + 1)
        given_weights(model, ids[part], where.rows(), functools.partial(tally.take, windows=part))
        progress("", PARTS["few weights"] * (number + 1) / len(ids))


def _normalisers(
    tally: Tally,
    available: list[str],
    missing: dict[str, str],
    losses: Losses | None,
    progress: Progress,
) -> Iterator[AttentionNormaliser]:
    begin, end = PARTS["running the model"], PARTS["other normalisers"]
    for place, (name, normaliser) in enumerate(NORMALISERS.items()):
        reason, loss, change = missing[name], None, None
        if losses is None:
            reason = reason or "the model does not let its attention be exchanged"
        elif name == "softmax":
            # What the model has. `replace_normaliser` compares both before it puts another in its place.
            loss = losses.as_it_is()
        elif not reason:
            try:
                loss, change = losses.with_normaliser(name)
            except FullrankError as error:
                reason = str(error)
        figures = dict.fromkeys(
            ("effective_tokens", "first_mass", "zeros", "total", "separable", "separable_random")
        )
        if name in available:
            figures = {one: mean_of(tally, f"if {one}", available.index(name)) for one in figures}
        yield AttentionNormaliser(
            name=name, label=normaliser.label, loss=loss, change=change, reason=reason, **figures
        )
        progress("", begin + (end - begin) * (place + 1) / len(NORMALISERS))


def _kept(losses: Losses, window: int, memory: int, progress: Progress) -> Iterator[AttentionKept]:
    sizes = [size for size in KEPT if size < window]
    begin = PARTS["other normalisers"]
    for place, size in enumerate(sizes):
        yield losses.with_largest(size, memory // 4)
        progress("", begin + (1 - begin) * (place + 1) / len(sizes))
