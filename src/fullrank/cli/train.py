"""`fullrank train`: a recipe, your text, any head; stopped and killed runs continue where they were."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fullrank.errors import FullrankError

if TYPE_CHECKING:
    from rich.console import Console

    from fullrank.results import Provenance, Training
    from fullrank.train.branch import Parent
    from fullrank.train.config import Config
    from fullrank.train.loop import Outcome


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a language model with any head; run the same command again to continue a run.

    Recipes: awd-lstm-ptb, awd-lstm-wt2 (as published), awd-lstm (ours, fast), transformer-tiny,
    pythia-14m, -31m, -70m, -160m, -410m, llama-tiny, -14m, -60m, -130m, -350m.
    Example: fullrank train transformer-tiny --data texts/ --head mos --components 4 --out runs/a
    """

    recipe: Annotated[str, tyro.conf.Positional] = ""
    """A recipe's name; none with --from."""
    parent: Annotated[str, tyro.conf.arg(name="from", metavar="RUN@STEP")] = ""
    """A run to begin from, at a step that it keeps (default: its last checkpoint), with its settings and text
    but for what --head, --set, --data or --tokens change."""
    data: tuple[Path, ...] = ()
    """A directory or archive with train, valid and test text, or any files (plain, .json, .jsonl, .parquet,
    also compressed or in archives), directories and hub datasets NAME:CONFIG:SPLIT. Missing splits are cut
    from the end of train. FILE#FIELD names the field of rows."""
    tokens: Path | None = None
    """A directory with tokens made elsewhere, train.bin and so on, in place of --data; missing splits are cut
    from the end of train."""
    verify: bool = False
    """Read all tokens once more to see that no byte of them has changed."""
    out: Path = Path("runs/train")
    """Directory of the run: config, checkpoints, log, results, page, and the model's card (README.md)."""
    head: str | None = None
    """The head's name: softmax, mos, moss, moc, trunk, sigsoftmax, doc, ...; softmax, or that of the run in
    --from."""
    components: int | None = None
    """Components of a mixture; short for --set head.components."""
    width: int | None = None
    """Width of the head's rows; short for --set head.width."""
    seed: int | None = None
    """Seed of everything random; short for --set seed."""
    settings: Annotated[
        tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE"), tyro.conf.UseAppendAction
    ] = ()
    """Any setting of the recipe, such as steps=120 or optimiser.lr=1e-3; may be given many times."""
    print_config: bool = False
    """Print every setting, as --set takes it, and stop."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: cuda where there is one."""
    track: tuple[Literal["tensorboard", "wandb", "trackio", "none"], ...] = ("tensorboard",)
    """Trackers besides log.jsonl; none for that alone."""
    monitors: bool = True
    """Measure rank and geometry at every evaluation."""
    vocab_parallel: bool = False
    """Split the head's matrix over the vocabulary between processes (torchrun, accelerate launch)."""
    fsdp: bool = False
    """Shard weights, gradients and optimiser between processes with FSDP2."""


def train(options: Train) -> Path | None:
    from rich.console import Console

    from fullrank import results
    from fullrank.train.config import lines
    from fullrank.train.processes import is_main, one_voice

    with one_voice():
        parent = _parent(options)
        config = _config(options, parent)
        if options.print_config:
            print("\n".join(lines(config) if is_main() else ()))
            return None
        tokens = options.tokens
        if parent is not None and not options.data and tokens is None:
            tokens = parent.tokens
        if bool(options.data) == (tokens is not None):
            raise FullrankError(
                "both --data and --tokens were given: choose one"
                if options.data
                else "nothing to train on: pass --data with a directory or files of text"
            )
        results.check_writable(options.out)

    from fullrank.results import cache_directory
    from fullrank.train.loop import Options
    from fullrank.train.loop import train as run

    console = Console()
    with _shown(console) as shown:
        outcome = run(
            config,
            Options(
                data=options.data,
                out=options.out,
                cache=cache_directory() / "tokens",
                device=options.device,
                trackers=tuple(name for name in options.track if name != "none"),
                monitors=options.monitors,
                vocab_parallel=options.vocab_parallel,
                fsdp=options.fsdp,
                tokens=tokens,
                parent=parent,
                verify=options.verify,
            ),
            shown,
        )
    return _conclude(console, options, config, outcome)


def _parent(options: Train) -> Parent | None:
    if bool(options.recipe) == bool(options.parent):
        from fullrank.train.recipes import RECIPES

        what = "both a recipe and --from were given" if options.recipe else "no recipe was given"
        raise FullrankError(f"{what}: expected one of {', '.join(RECIPES)}, or --from RUN@STEP")
    if not options.parent:
        return None
    from fullrank.train.branch import parent_of

    return parent_of(options.parent)


def _config(options: Train, parent: Parent | None) -> Config:
    from fullrank.train.config import override
    from fullrank.train.recipes import recipe

    short = {"head.components": options.components, "head.width": options.width, "seed": options.seed}
    settings = [f"{name}={value}" for name, value in short.items() if value is not None]
    if parent is None:
        base = recipe(options.recipe, options.head or "softmax")
    else:
        base = parent.config
        if options.head:
            settings.append(f"head.name={options.head}")
    return override(base, [*settings, *options.settings])


def _conclude(console: Console, options: Train, config: Config, outcome: Outcome) -> Path | None:
    """What a person wants to read at the end; the record and its page where the run is over. One process does
    it."""
    from fullrank import report, results
    from fullrank.cli import outcome as outcomes
    from fullrank.diagnose.series.runs import judged
    from fullrank.report import card
    from fullrank.results.training_log import read_log
    from fullrank.train.processes import is_main

    if not is_main():
        return None
    if outcome.reason == "stopped":
        console.print(
            f"stopped at step {outcome.step:,} of {outcome.steps:,}; run the same command to continue",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        raise SystemExit(128 + (outcome.signal or signal.SIGTERM))
    record, drawn = judged(read_log(options.out)), True
    made = results.provenance(seed=config.seed, device=record.device)
    if outcome.fresh or not (options.out / "results.json").exists():
        results.save(record, options.out / "results.json", made)
        try:
            report.write(record, made, options.out / "report.html")
        except FullrankError as error:
            # A machine that trains need not be one that draws.
            console.print(str(error), highlight=False, markup=False, soft_wrap=True)
            drawn = False
        if not _carded(options, record, made):
            words = f"{options.out / card.NAME} is not as fullrank left it, and stays as it is"
            console.print(words, highlight=False, markup=False, soft_wrap=True)
    else:
        console.print("this run had already finished; nothing was changed", highlight=False)
    tests = [one for one in record.evaluations if one.split == "test"]
    for label, one in (("valid", record.best()), ("test", tests[-1] if tests else None)):
        if one is not None:
            words = f"{one.loss:.4f} nats per token, perplexity {one.perplexity:.2f}"
            console.print(f"{label:<8}{words}, {one.bits_per_byte:.4f} bits per byte", highlight=False)
    if drawn:
        outcomes.say_where(console, options.out)
    return options.out / outcomes.RESULTS


def _carded(options: Train, record: Training, made: Provenance) -> bool:
    """Write the card of the run's model; False where there is one of somebody else's."""
    from fullrank.cli import outcome
    from fullrank.report import card
    from fullrank.results.reading import read_json

    if not (options.out / "config.json").exists():
        return True
    # The record has every setting of every head; this one has taken some of them.
    head = read_json(options.out / "config.json")["head"]
    own = {name: value for name, value in head.items() if name not in ("name", "hidden")}
    return card.write(options.out, card.render(record, made, flags=outcome.flags(options), options=own))


def _shown(console: Console) -> Any:
    from fullrank.train.loop import Show
    from fullrank.train.processes import is_main

    class Shown(Show):
        """A bar on a terminal; a line an evaluation everywhere."""

        def __enter__(self) -> Shown:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.main = is_main()
            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.completed:.0f} of {task.total:.0f}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
                disable=not console.is_terminal or not self.main,
            )
            self.bar.start()
            self.task = self.bar.add_task("reading", total=1.0)
            return self

        def __exit__(self, *_: object) -> None:
            self.bar.stop()

        def say(self, message: str) -> None:
            if self.main:
                console.print(message, highlight=False, markup=False, soft_wrap=True)

        def reading(self, label: str, share: float) -> None:
            self.bar.update(self.task, description=label, completed=share)

        def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
            words = f"step, loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"
            self.bar.update(self.task, description=words, completed=done, total=total)

        def evaluation(self, line: dict[str, Any], steps: int) -> None:
            self.say(evaluation_line(line, steps))

    return Shown()


def evaluation_line(line: dict[str, Any], steps: int) -> str:
    """One evaluation in one line."""
    found = line.get("monitors") or {}
    words = [
        f"step {line['step']:>7,} of {steps:,}",
        f"{line['split']} {line['loss']:.4f} nats",
        f"perplexity {line['perplexity']:.2f}",
    ]
    if "head_effective_rank" in found:
        words.append(f"effective rank {found['head_effective_rank']:.1f}")
    if "logprob_rank" in found:
        words.append(f"log-prob rank {found['logprob_rank']:.0f} of {found['logprob_rank_ceiling']:.0f}")
    if "anisotropy" in found:
        words.append(f"cosine {found['anisotropy']:.3f}")
    if "prior_entropy_share" in found:
        words.append(f"prior {found['prior_entropy_share']:.2f} of log K")
    if found.get("dead_components"):
        words.append(f"{found['dead_components']:.0f} dead")
    return "  ".join(words)
