"""`fullrank eval`: how well a run predicts a split: plain, with weights that follow it, with a cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from fullrank.cli.progress import Bar, device_name, device_of
from fullrank.errors import FullrankError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from fullrank.results import Evaluated
    from fullrank.results.evaluation import FrequencyBin
    from fullrank.train.cache import Cache
    from fullrank.train.dynamic import Dynamic


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Evaluate a training run: every token of a split once, in nats, perplexity and bits per byte.

    Example: fullrank eval runs/t --dynamic --cache --tune
    Of any model: fullrank eval path/to/model --text book.txt --cache --tune
    Tasks of lm-evaluation-harness: fullrank eval runs/t --tasks lambada_openai
    """

    run: Annotated[Path, tyro.conf.Positional]
    """The --out of `fullrank train`; with --text or --tasks also a transformers directory, a hub name or a
    .gguf file."""
    text: tuple[Path, ...] = ()
    """Text files in place of a run's split; --limit is 16384 tokens then, --length 512."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness, alone; --limit bounds the examples of each."""
    task_path: Path | None = None
    """Directory with tasks of one's own in YAML files."""
    split: str = "test"
    """valid or test."""
    dynamic: bool = False
    """Also with dynamic evaluation: after every segment the weights take a step on it."""
    cache: bool = False
    """Also with a neural cache: recent states vote for the tokens that followed them."""
    tune: bool = False
    """Choose the cache's settings, and rate and decay of dynamic evaluation, on the validation split; the
    cache's with --text on its first third."""
    checkpoint: str = "best"
    """best by validation, last, or a step that was kept."""
    limit: int = 0
    """Only the first so many tokens; 0 is all."""
    batch: int | None = None
    """Sequences at once; what the run was evaluated with by default. 1 is exact for an LSTM."""
    length: int | None = None
    """Tokens of a sequence at once; for a transformer its window. The run's by default."""
    stride: int | None = None
    """For a transformer, tokens from one window to the next: smaller gives each token more to see."""
    lr: float | None = None
    """Of dynamic evaluation, per root mean square of the gradient."""
    epsilon: float | None = None
    """Of dynamic evaluation, added to the root mean square."""
    decay: float | None = None
    """Of dynamic evaluation, towards the trained weights, a segment."""
    segment: int | None = None
    """Of dynamic evaluation, tokens between two updates."""
    statistics: int | None = None
    """Of dynamic evaluation, batches of training text for the gradients' sizes; 0 is the whole split."""
    weight: float | None = None
    """Of the cache in the mixture."""
    theta: float | None = None
    """Of the cache, the sharpness of the vote."""
    window: int | None = None
    """Of the cache, the tokens that it holds."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: cuda where there is one."""
    out: Path | None = None
    """Directory for results.json; RUN/eval by default, with --text runs/eval."""


DYNAMIC = {"lr": "lr", "epsilon": "epsilon", "decay": "decay", "segment": "length", "statistics": "batches"}
"""Options of dynamic evaluation, as its settings call them."""
CACHE = {"weight": "weight", "theta": "theta", "window": "window"}


def evaluate(options: Eval) -> Path:
    from rich.console import Console

    from fullrank import results
    from fullrank.cli import eval_model

    console = Console()
    own = not options.text and not options.tasks
    out = options.out or (options.run / "eval" if own else Path("runs/eval"))
    dynamic, cache = _settings(options)
    device = device_of(options.device)
    if options.tasks:
        eval_model.check_tasks(options)
    if options.text:
        eval_model.check(options)
    run = None
    if not options.text and not options.tasks:
        from fullrank.train.folder import open_run

        if (options.run / "config.json").is_file() and not results.is_run(options.run):
            raise FullrankError(
                f"{options.run} is a model and no training run, which has splits of its own: give "
                "--text FILE or --tasks NAME to evaluate it on"
            )
        run = open_run(options.run, checkpoint=options.checkpoint, device=device)
        if options.split not in run.corpus.splits:
            raise FullrankError(
                f"the run has no split {options.split!r}: expected one of {', '.join(run.corpus.splits)}"
            )
    results.check_writable(out)
    with Bar(console) as bar:
        if options.tasks:
            record = eval_model.measure_tasks(options, device, bar.update)
        elif run is None:
            record = eval_model.measure(options, cache, device, bar.update)
        else:
            record = measure(options, run, dynamic, cache, device, bar.update)
    made = results.provenance(seed=0 if run is None else run.config.seed, device=device_name(device))
    results.save(record, out / "results.json", made)
    if record.tasks:
        console.print(tasks_table(record))
    else:
        console.print(table(record))
        if record.scores[0].frequency:
            console.print(frequencies(record))
        for line in remarks(record):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"results {out / 'results.json'}", highlight=False, markup=False, soft_wrap=True)
    return out / "results.json"


def _settings(options: Eval) -> tuple[Dynamic | None, Cache | None]:
    """What was asked for, checked before anything is read."""
    from fullrank.train.cache import Cache
    from fullrank.train.dynamic import Dynamic

    if options.tune and not (options.dynamic or options.cache):
        raise FullrankError("--tune chooses settings of --cache and --dynamic: give one of them too")
    for flag, names in (("dynamic", DYNAMIC), ("cache", CACHE)):
        given = [name for name in names if getattr(options, name) not in (None, False)]
        if given and not getattr(options, flag):
            raise FullrankError(f"--{given[0]} is a setting of --{flag}: give --{flag} too, or leave it out")
    chosen = ("weight", "theta", "lr", "decay")
    tuned = [name for name in chosen if getattr(options, name) is not None]
    if options.tune and tuned:
        raise FullrankError(f"--tune chooses {tuned[0]} itself: give --tune or --{tuned[0]}, not both")
    if options.limit < 0:
        raise FullrankError(f"--limit is {options.limit}, expected tokens to count, or 0 for all")

    def made(cls: type, names: dict[str, str]) -> Any:
        values = {setting: getattr(options, name) for name, setting in names.items()}
        return cls(**{setting: value for setting, value in values.items() if value is not None})

    return (
        made(Dynamic, DYNAMIC) if options.dynamic else None,
        made(Cache, CACHE) if options.cache else None,
    )


def measure(
    options: Eval,
    run: Any,
    dynamic: Dynamic | None,
    cache: Cache | None,
    device: str,
    progress: Callable[[str, float], None],
) -> Evaluated:
    """Every method that was asked for, plain first."""
    import time

    import numpy as np

    from fullrank.models.anatomy import longest
    from fullrank.results import Evaluated
    from fullrank.results.evaluation import Score
    from fullrank.train.cache import trace, tune, with_cache
    from fullrank.train.dynamic import evaluate_dynamic
    from fullrank.train.evaluate import by_frequency, limited, summarise, token_counts, token_losses

    eos, splits = run.corpus.vocabulary.eos, run.corpus.splits
    split, train = splits[options.split], splits["train"]
    tokens = np.asarray(limited(split.tokens, options.limit))
    counts = token_counts(train.tokens, run.corpus.vocabulary.size)
    batch = run.config.evaluate_batch if options.batch is None else options.batch
    length = run.config.length if options.length is None else options.length
    shape: dict[str, Any] = {
        "eos": eos, "batch": batch, "length": length, "stride": options.stride, "device": device,
    }  # fmt: skip

    def told(label: str) -> Callable[[float], None]:
        return lambda share: progress(label, share)

    def score(
        method: str, losses: np.ndarray, start: float, settings: Any = None, tuned: bool = False
    ) -> Score:
        found = summarise(losses, split, seconds=time.perf_counter() - start)
        return Score(
            method=method,
            settings={name: float(value) for name, value in dataclasses.asdict(settings).items()}
            if settings is not None
            else {},
            tuned=tuned,
            loss=found.loss,
            standard_error=found.standard_error,
            perplexity=found.perplexity,
            bits_per_byte=found.bits_per_byte,
            counted=found.counted,
            seconds=found.seconds,
            frequency=by_frequency(losses, tokens, counts),
        )

    start = time.perf_counter()
    if cache is None:
        scores = [score("plain", token_losses(run.model, tokens, **shape, progress=told("plain")), start)]
    else:
        # One way through the text serves both.
        way = trace(run.model, tokens, **shape, progress=told("plain"))
        scores = [score("plain", way.losses, start)]
        start = time.perf_counter()
        if options.tune:
            valid = way
            if options.split != "valid":
                held = np.asarray(limited(splits["valid"].tokens, options.limit))
                valid = trace(run.model, held, **shape, progress=told("cache: validation split"))
            windows = {"windows": (cache.window,)} if options.window is not None else {}
            cache = tune(valid, **windows, device=device, progress=told("cache: tuning"))
        losses = with_cache(way, cache, device=device, progress=told("cache"))
        scores.append(score("cache", losses, start, cache, options.tune))
    if dynamic is not None:
        start = time.perf_counter()
        found = evaluate_dynamic(
            run.model,
            split,
            train,
            eos=eos,
            settings=dynamic,
            tuned_on=splits["valid"] if options.tune else None,
            limit=options.limit,
            device=device,
            progress=told("dynamic"),
        )
        scores.append(score("dynamic", found.losses, start, found.settings, options.tune))
    context = None if run.model.carries_state else longest(run.model)
    return Evaluated(
        run=str(options.run),
        recipe=run.config.recipe,
        head=run.config.head.name,
        checkpoint=options.checkpoint,
        step=run.step,
        split=options.split,
        tokens=len(split.tokens),
        context=context,
        length=length,
        stride=length if options.stride is None else options.stride,
        batch=batch,
        scores=tuple(scores),
    )


def table(record: Evaluated) -> Table:
    from rich.markup import escape
    from rich.table import Table

    what = f"step {record.step:,}, {record.split} split" if record.recipe else record.split
    drawn = Table(title=escape(f"{record.run}: {record.head}, {what}"), title_justify="left")
    drawn.add_column("method")
    for header in ("nats per token", "perplexity", "bits per byte", "tokens", "seconds"):
        drawn.add_column(header, justify="right")
    for one in record.scores:
        drawn.add_row(
            one.method, f"{one.loss:.4f} ± {one.standard_error:.4f}", f"{one.perplexity:.2f}",
            f"{one.bits_per_byte:.4f}", f"{one.counted:,}", f"{one.seconds:.1f}",
        )  # fmt: skip
    return drawn


def tasks_table(record: Evaluated) -> Table:
    import math

    from rich.markup import escape
    from rich.table import Table

    drawn = Table(title=escape(f"{record.run}: {record.head}, lm-evaluation-harness"), title_justify="left")
    for header in ("task", "metric"):
        drawn.add_column(header)
    drawn.add_column("value", justify="right")
    for one in record.tasks:
        error = "" if math.isnan(one.standard_error) else f" ± {one.standard_error:.4f}"
        drawn.add_row(one.task, one.metric, f"{one.value:.4f}{error}")
    return drawn


def frequencies(record: Evaluated) -> Table:
    """Nats per token by how often a token occurs in training, a column a method."""
    from rich.table import Table

    drawn = Table(title="Nats per token by occurrences in the training split", title_justify="left")
    for header in ("occurrences", "tokens", *(one.method for one in record.scores)):
        drawn.add_column(header, justify="right")
    for row, first in enumerate(record.scores[0].frequency):
        losses = [_loss(one.frequency[row]) for one in record.scores]
        drawn.add_row(_range(first), f"{first.counted:,}", *losses)
    return drawn


def _range(entry: FrequencyBin) -> str:
    return f"{entry.low:,} or more" if entry.high is None else f"{entry.low:,} to {entry.high - 1:,}"


def _loss(entry: FrequencyBin) -> str:
    return f"{entry.loss:.3f} ± {entry.standard_error:.3f}" if entry.counted else ""


def remarks(record: Evaluated) -> list[str]:
    """What a reader must know of the figures: settings, where they come from, and what was left out."""
    lines = []
    for one in record.scores:
        if one.settings:
            words = ", ".join(f"{name} {value:.4g}" for name, value in one.settings.items())
            origin = "chosen on the validation split" if one.tuned else "not tuned for this run"
            if one.tuned and not record.recipe:
                origin = "chosen on the first third of the text, judged on the rest"
            if one.tuned and record.split == "valid":
                origin = "chosen on this very text, so the loss is too low"
            lines.append(f"{one.method}: {words}; {origin}")
    counted = record.scores[0].counted
    if counted < record.tokens:
        lines.append(
            f"only the first {counted:,} of {record.tokens:,} tokens; bits per byte take as much of the bytes"
        )
    return lines
