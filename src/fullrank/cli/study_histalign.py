"""`fullrank study histalign`: which output layer completes prompts that two words fit equally well?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.results import Templates


@dataclass(frozen=True, kw_only=True)
class Histalign:
    """Train the last layers of a model on ambiguous templates with softmax, TRIME, HistAlign and mos.

    Run the same command again to go on with one that was stopped.

    Example: fullrank study histalign --out runs/histalign
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """A directory, a hub name or a .gguf file; SmolLM2-135M, which a package carries, by default."""
    methods: tuple[str, ...] = ("base", "cache", "softmax", "trime", "histalign", "histalign_sum", "mos")
    """Which to compare, base among them."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each draws its own split of the word pairs, prompts, order and start of the head."""
    layers: int = 2
    """How many of the last layers are trained, with what the head adds."""
    prompts: int = 192
    """Prompts to train on."""
    held_out: int = 96
    """Prompts of either split that is judged."""
    epochs: int = 3
    """Passes over the prompts."""
    components: int = 2
    """Of mos: one for each answer."""
    as_published: bool = False
    """Train on the answers alone, with a memory of temperature sqrt(H) whose weight is 1 and not learned."""
    text: tuple[Path, ...] = ()
    """Files of ordinary text, for training and for judging; the documentation of Python by default."""
    judged_tokens: int = 2048
    """Tokens of it that are judged on."""
    cache: Path | None = None
    """Where finished trainings are kept for the next run; fullrank's cache directory by default."""
    out: Path = Path("runs/histalign")
    """Directory for results.json and report.html."""


def histalign(options: Histalign) -> None:
    from rich.console import Console

    from fullrank import report, results
    from fullrank.cli import outcome
    from fullrank.cli.progress import Bar, device_name
    from fullrank.models import loading
    from fullrank.studies import histalign as study
    from fullrank.studies.histalign_setting import Config

    config = Config(
        methods=options.methods,
        seeds=options.seeds,
        layers=options.layers,
        train=options.prompts,
        held_out=options.held_out,
        epochs=options.epochs,
        components=options.components,
        as_published=options.as_published,
        judged_tokens=options.judged_tokens,
    )
    results.check_writable(options.out)
    report.check_installed()
    console = Console()
    made = results.provenance(seed=None, device=device_name("cpu"))
    directory = options.cache or results.cache_directory() / "histalign"
    results.check_writable(directory)
    with Bar(console) as bar:
        loaded = loading.load(options.model, say=lambda message: bar.update(message, 0.0))
        record = study.run(loaded, options.text, config, directory=directory, progress=bar.update)
    outcome.write(record, made, options.out)
    for drawn in tables(record):
        console.print(drawn)
    outcome.say_where(console, options.out)


def tables(record: Templates) -> list[Table]:
    """Completions of prompts without overlap, and what they cost elsewhere; means over seeds."""
    import statistics

    from rich.table import Table

    drawn = []
    for scores, name in (("full", "the model"), ("memory", "the memory alone")):
        title = f"Both answers in the top k of {name}, no word seen in training, %"
        one = Table(title=title, title_justify="left")
        one.add_column("method", no_wrap=True)
        for head in ("@2", "@5", "@10", "@25", "distracted", *(["rank"] if scores == "full" else [])):
            one.add_column(head, justify="right")
        for method in record.methods:
            found = method.accuracy("no overlap", scores)
            shares = [*found.top.values(), found.distracted]
            cells = [f"{100 * statistics.fmean(share):.1f}" for share in shares]
            cells += [f"{statistics.fmean(method.least_rank):,.0f}"] if scores == "full" else []
            one.add_row(method.method, *cells)
        drawn.append(one)
    losses = Table(title="Loss, nats per token, and its change from base", title_justify="left")
    losses.add_column("method", no_wrap=True)
    for head in ("ordinary text", "names, first", "repeated", "beside names"):
        losses.add_column(head, justify="right")
    for method in record.methods:
        changed = method.method != "base"
        losses.add_row(
            method.method,
            *(
                f"{one.loss.value:.3f}" + (f" {one.change.value:+.3f}" if changed else "")
                for one in method.losses
            ),
        )
    return [*drawn, losses]
