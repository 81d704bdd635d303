"""`fullrank eval MODEL` with --text or --tasks: a run or any other causal language model."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

from fullrank.errors import FullrankError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from fullrank.cli.eval import Eval
    from fullrank.results import Evaluated
    from fullrank.results.evaluation import Score
    from fullrank.train.cache import Cache

TOKENS, WINDOW = 16384, 512
"""Of the text, unless --limit and --length say otherwise."""


def check(options: Eval) -> None:
    """Raise for what only a run can be asked."""
    if options.dynamic:
        raise FullrankError("--dynamic follows the text with a run's training data: leave it out with --text")
    for name, given in (("batch", options.batch), ("stride", options.stride)):
        if given is not None:
            raise FullrankError(
                f"--{name} is for runs: leave it out with --text, where windows lie side by side"
            )


def check_tasks(options: Eval) -> None:
    """Raise for what tasks are not asked."""
    for name in ("text", "dynamic", "cache", "stride", "batch", "length"):
        if getattr(options, name) not in ((), False, None):
            raise FullrankError(f"--{name} was given with --tasks, which stand alone: leave it out")


def measure_tasks(options: Eval, device: str, progress: Callable[[str, float], None]) -> Evaluated:
    """The scores of lm-evaluation-harness."""
    from fullrank.models.anatomy import longest
    from fullrank.results import Evaluated
    from fullrank.train.loaded import load_any
    from fullrank.train.tasks import task_scores

    progress("loading the model", 0.0)
    loaded = load_any(options.run, checkpoint=options.checkpoint, device=device)
    progress("lm-evaluation-harness", 0.0)
    found = task_scores(loaded, options.tasks, path=options.task_path, limit=options.limit)
    limit = longest(loaded.model)
    return Evaluated(
        run=loaded.name, recipe="", head=head_of(loaded.model), checkpoint="", step=0, split="", tokens=0,
        context=limit, length=limit or 0, stride=limit or 0, batch=1, scores=(), tasks=found,
    )  # fmt: skip


def head_of(model: Any) -> str:
    return model.lm_head.name if hasattr(model, "head_inputs") else "softmax"


def measure(
    options: Eval, cache: Cache | None, device: str, progress: Callable[[str, float], None]
) -> Evaluated:
    """The model's losses on the text, and with a cache if asked: tuned on a third, judged on the rest."""
    from fullrank.fit import collect
    from fullrank.models.anatomy import longest
    from fullrank.results import Evaluated
    from fullrank.train.cache import Trace, trace_transformers, tune, with_cache
    from fullrank.train.loaded import load_any

    progress("loading the model", 0.0)
    loaded = load_any(str(options.run), checkpoint=options.checkpoint, device=device)
    windows = collect.tokenise(
        loaded.tokenizer,
        list(options.text),
        tokens=options.limit or TOKENS,
        window=options.length or WINDOW,
        longest=longest(loaded.model),
        in_order=True,
    )
    ids = windows.ids
    start = time.perf_counter()
    way = trace_transformers(loaded, ids, progress=functools.partial(progress, "plain"))
    each = ids.shape[1] - 1
    judged = slice(len(ids) // 3 * each if options.tune else 0, None)
    rest = Trace(tokens=way.tokens[judged], losses=way.losses[judged], states=way.states[judged])
    size = float(windows.sizes.flatten()[judged].sum())
    scores = [_score("plain", rest.losses, size, start)]
    if cache is not None:
        start = time.perf_counter()
        if options.tune:
            first = slice(0, judged.start)
            held = Trace(tokens=way.tokens[first], losses=way.losses[first], states=way.states[first])
            chosen = {"windows": (cache.window,)} if options.window is not None else {}
            told = functools.partial(progress, "cache: tuning")
            cache = tune(held, **chosen, device=device, progress=told)
        # The cache looks back into the part that is not judged: it is the same text.
        losses = with_cache(way, cache, device=device, progress=functools.partial(progress, "cache"))
        scores.append(_score("cache", losses[judged], size, start, cache, options.tune))
    return Evaluated(
        run=loaded.name,
        recipe="",
        head=head_of(loaded.model),
        checkpoint="",
        step=0,
        split=", ".join(windows.sources),
        tokens=len(rest.tokens),
        context=ids.shape[1],
        length=ids.shape[1],
        stride=ids.shape[1],
        batch=1,
        scores=tuple(scores),
    )


def _score(
    method: str, losses: np.ndarray, size: float, start: float, settings: Any = None, tuned: bool = False
) -> Score:
    from types import SimpleNamespace

    from fullrank.results.evaluation import Score
    from fullrank.train.evaluate import summarise

    text: Any = SimpleNamespace(tokens=losses, bytes=size)
    found = summarise(losses, text, seconds=time.perf_counter() - start)
    return Score(
        method=method,
        settings={
            name: float(value)
            for name, value in (dataclasses.asdict(settings) if settings is not None else {}).items()
        },
        tuned=tuned,
        loss=found.loss,
        standard_error=found.standard_error,
        perplexity=found.perplexity,
        bits_per_byte=found.bits_per_byte,
        counted=found.counted,
        seconds=found.seconds,
        frequency=(),
    )
