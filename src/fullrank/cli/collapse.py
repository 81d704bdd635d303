"""`fullrank collapse`: an upgraded model as a plain one, for runtimes that know no other, and its cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fullrank.cli.progress import Bar, device_name, device_of
from fullrank.cli.upgrade import settings_of

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.results import Estimate
    from fullrank.results.upgrade import Collapse as Record


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """Fit the closest plain softmax head to an upgraded model's, and save a checkpoint of the original kind.

    Example: fullrank collapse runs/mos --text book.txt --out runs/plain
    """

    model: Annotated[str, tyro.conf.Positional]
    """The --out of `fullrank upgrade`, or any directory or hub name of an upgraded model."""
    text: tuple[Path, ...] = ()
    """Text files to fit and judge on; without any, English text that this Python installation carries."""
    out: Path = Path("runs/collapse")
    """New directory for the model, its tokenizer and card (README.md), results.json and report.html."""
    tokens: int | None = None
    """Tokens of text to run the body on; 16384 by default."""
    window: int | None = None
    """Tokens a window, the longest context; 512 by default."""
    epochs: int | None = None
    """Passes over the text at most; 6 by default, fewer where nothing is gained."""
    rows: int | None = None
    """Rows of the output matrix that are fitted one by one; 1536 by default."""
    memory: float | None = None
    """GiB that states and buffers may take beside the model; 2 by default."""
    cache: Path | None = None
    """Where the body's states are kept for the next run; fullrank's cache directory by default."""
    seed: int = 0
    """Seed of everything random."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: cuda where there is one."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""


def collapse(options: Collapse) -> Path:
    from rich.console import Console

    from fullrank import results
    from fullrank.cli import outcome
    from fullrank.report import card

    settings = settings_of(options)
    results.check_writable(options.out)

    import torch

    from fullrank.errors import FullrankError
    from fullrank.models.loading import load
    from fullrank.models.registration import register_when_imported
    from fullrank.upgrade import folder
    from fullrank.upgrade.collapse import collapse as collapsed
    from fullrank.upgrade.run import states_directory

    register_when_imported()
    folder.check_empty(options.out)
    console = Console()
    device = device_of(options.device)
    made = results.provenance(seed=options.seed, device=device_name(device))
    with Bar(console) as bar:
        bar.update("loading the model", 0.0)
        loaded = load(
            options.model,
            revision=options.revision,
            device=device,
            say=lambda message: bar.update(message, 0.0),
        )
        try:
            model, record = collapsed(
                loaded.model,
                loaded.tokenizer,
                options.text,
                settings=settings,
                cache=options.cache or states_directory(),
                fingerprint=loaded.fingerprint,
                name=loaded.name,
                source=loaded.source,
                progress=bar.update,
            )
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise FullrankError(
                "the collapse does not fit into memory: take fewer --tokens, a smaller --memory, or "
                "--device cpu"
            ) from error
        bar.update("writing", 0.0)
        with folder.whole(options.out) as place:
            folder.write_model(model, loaded.tokenizer, place)
            flags = outcome.flags(options)
            card.write(place, card.render(record, made, flags=flags, license=loaded.license))
            outcome.write(record, made, place)
    console.print(table(record))
    console.print(f"{'model':<8}{options.out}", highlight=False, markup=False, soft_wrap=True)
    return outcome.say_where(console, options.out)


def table(record: Record) -> Table:
    """What a collapse costs."""
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(
        title=escape(
            f"{record.model}: {record.head} as a plain {record.architecture}, fitted on "
            f"{record.text.fit_tokens:,} tokens, judged on {record.text.held_out_tokens:,}"
        ),
        title_justify="left",
    )
    drawn.add_column("nats per token, held-out text")
    drawn.add_column("value", justify="right")
    drawn.add_column("95%", justify="right")
    rows = {
        "cost: KL(upgraded || plain)": record.cost,
        "the same before fitting": record.start,
        "loss of the upgraded model": record.upgraded_loss,
        "loss of the plain model": record.plain_loss,
    }
    for label, estimate in rows.items():
        drawn.add_row(label, f"{estimate.value:.4g}", _ends(estimate))
    return drawn


def _ends(estimate: Estimate) -> str:
    return f"{estimate.low:.4g} to {estimate.high:.4g}"
