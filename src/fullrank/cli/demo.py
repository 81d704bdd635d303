"""`fullrank demo`: the rank ladder on a synthetic language, as a table, results.json and report.html."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.results import Ladder


@dataclass(frozen=True, kw_only=True)
class Demo:
    """See the bottleneck and its breaking on a synthetic language of known rank, in about a minute.

    Example: fullrank demo --heads mos trunk --components 8
    """

    out: Path = Path("runs/demo")
    """Directory for results.json and report.html."""
    contexts: int = 256
    """Contexts of the language."""
    vocabulary: int = 128
    """Tokens of the language."""
    rank: int = 24
    """Least rank of the language's log-probabilities: the width at which softmax becomes exact."""
    width: int = 6
    """The small width, at which softmax cannot express the language."""
    components: int = 4
    """Components of the mixtures."""
    steps: int = 500
    """Training steps of every head."""
    heads: tuple[str, ...] = ("moc", "sigsoftmax", "plif", "mos", "trunk")
    """Heads to try at the small width; moss and mixtape can climb as well."""
    seed: int = 0
    """Seed of the language and of every head."""


NEXT = (
    "next    the same of a real model: fullrank diagnose MODEL --text book.txt",
    "        a model of your own with such a head: fullrank train transformer-tiny --data TEXTS --head mos",
)


def demo(options: Demo) -> Path:
    from rich.console import Console

    from fullrank import results
    from fullrank.cli import outcome
    from fullrank.cli.progress import Bar
    from fullrank.studies import ladder

    console = Console()
    config = ladder.Config(
        contexts=options.contexts,
        vocabulary=options.vocabulary,
        rank=options.rank,
        width=options.width,
        components=options.components,
        steps=options.steps,
        seed=options.seed,
        heads=options.heads,
    )
    results.check_writable(options.out)
    with Bar(console) as bar:
        record = ladder.run(config, lambda label, share: bar.update(f"rungs: {label}", share))
    made = results.provenance(seed=options.seed, device="cpu")
    outcome.write(record, made, options.out)
    console.print(table(record))
    for line in findings(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    place = outcome.say_where(console, options.out)
    for line in NEXT:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return place


def table(record: Ladder) -> Table:
    from rich.table import Table

    drawn = Table(
        title=f"Rank ladder: {record.contexts} contexts, {record.vocabulary} tokens, least rank "
        f"{record.least_rank}",
        title_justify="left",
    )
    drawn.add_column("head")
    for header in ("width", "K", "parameters", "least rank learnt", "KL to the truth", "softmax floor"):
        drawn.add_column(header, justify="right")
    previous = None
    for rung in record.rungs:
        if previous == "softmax" and rung.head != "softmax":
            drawn.add_section()
        previous = rung.head
        drawn.add_row(
            rung.head, str(rung.width), str(rung.components), f"{rung.parameters:,}", str(rung.least_rank),
            f"{rung.kl:.4f}", f"{rung.floor:.4f}",
        )  # fmt: skip
    drawn.caption = (
        "KL(truth || model), nats per token, mean over contexts. Floor: the lowest KL found for any softmax "
        "of this width."
    )
    drawn.caption_justify = "left"
    return drawn


def findings(record: Ladder) -> list[str]:
    """What the table shows, counted from it."""
    small = [rung for rung in record.rungs if rung.width == record.small_width]
    below = [rung.head for rung in small if rung.head != "softmax" and rung.kl < rung.floor]
    softmax = next(rung for rung in small if rung.head == "softmax")
    side = "above" if softmax.kl >= softmax.floor else "below"
    return [
        f"entropy of the language: {record.entropy:.4f} nats per token",
        f"softmax at width {record.small_width} ends {side} its floor: {softmax.kl:.4f} against "
        f"{softmax.floor:.4f} nats per token",
        f"below that floor at the same width: {', '.join(below) or 'none'}",
    ]
