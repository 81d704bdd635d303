"""`fullrank study histalign`: which output layer follows its prompt?

Ambiguous templates by default; with --task, texts generated from tables or behind the beginnings of articles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fullrank.errors import FullrankError

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.models.loading import Loaded
    from fullrank.results import Generation, Templates

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Histalign:
    """Train the last layers of a model on ambiguous templates with softmax, TRIME, HistAlign and mos.

    Run the same command again to go on with one that was stopped.

    With --task restaurants or articles texts are generated and measured instead, at each method's best rate.

    Example: fullrank study histalign --out runs/histalign
    Example: fullrank study histalign --task restaurants --data e2e-nlg --out runs/restaurants
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """A directory, a hub name or a .gguf file; SmolLM2-135M, which a package carries, by default."""
    task: Literal["templates", "restaurants", "articles"] = "templates"
    """templates: prompts that two words fit; restaurants: descriptions from E2E NLG's tables; articles:
    continuations of WikiText-2."""
    data: Path | None = None
    """Folder of E2E NLG (devset.csv, testset_w_refs.csv) or of WikiText-2 (train.txt, test.txt)."""
    judge: str | None = None
    """Another model, whose loss of a generated text is its coherence; restaurants and articles."""
    rates: tuple[float, ...] = (3e-5, 1e-4, 3e-4)
    """Learning rates that every method tries with the first seed."""
    steps: int = 96
    """Of training; restaurants and articles."""
    generated: int = 64
    """Test prompts that texts are generated for; restaurants and articles."""
    new_tokens: int = 64
    """Tokens of a generated text, at most."""
    methods: tuple[str, ...] = ()
    """Which to compare, of templates base among them; by default the task's usual ones. On request:
    histalign_cosine, and of templates trime_uncredited and histalign_uncredited."""
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
    """Files of ordinary text, to judge on and, of templates, to train on; the documentation of Python by
    default."""
    judged_tokens: int = 2048
    """Tokens of it that are judged on."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: cuda where there is one."""
    cache: Path | None = None
    """Where finished trainings are kept for the next run; fullrank's cache directory by default."""
    out: Path = Path("runs/histalign")
    """Directory for results.json and report.html."""


OWN = {
    "templates": ("prompts", "held_out", "epochs", "as_published"),
    "texts": ("data", "judge", "steps", "generated", "new_tokens"),
}
"""Options of templates alone, and of restaurants and articles."""


def histalign(options: Histalign) -> Path:
    from rich.console import Console

    from fullrank import results
    from fullrank.cli import outcome
    from fullrank.cli.progress import Bar, device_name, device_of
    from fullrank.models import loading

    templates = options.task == "templates"
    _check(options, OWN["texts" if templates else "templates"])
    results.check_writable(options.out)
    console = Console()
    device = device_of(options.device)
    made = results.provenance(seed=None, device=device_name(device))
    directory = options.cache or results.cache_directory() / ("histalign" if templates else "generation")
    results.check_writable(directory)
    study = _templates if templates else _texts
    with Bar(console) as bar:
        run = study(options, directory, bar.update)
        loaded = loading.load(options.model, device=device, say=lambda message: bar.update(message, 0.0))
        record = run(loaded)
    outcome.write(record, made, options.out)
    for drawn in tables(record) if templates else [generation_table(record)]:
        console.print(drawn)
    return outcome.say_where(console, options.out)


def _check(options: Histalign, others: Sequence[str]) -> None:
    """Raise for an option that another task has: it would be left out without a word."""
    usual = Histalign()
    given = next((name for name in others if getattr(options, name) != getattr(usual, name)), None)
    if given is not None:
        flag = given.replace("_", "-")
        raise FullrankError(f"--{flag} is no option of --task {options.task}: leave it out")
    if options.task != "templates" and options.data is None:
        raise FullrankError(f"--task {options.task} needs --data, the folder of its texts")


def _templates(options: Histalign, directory: Path, progress: Progress) -> Callable[[Loaded], Any]:
    """The study of a model that is loaded next; what is wrong with the options is said before."""
    from fullrank.studies import histalign as study
    from fullrank.studies.histalign_setting import METHODS, Config

    config = Config(
        methods=options.methods or METHODS,
        seeds=options.seeds,
        rates=options.rates,
        layers=options.layers,
        train=options.prompts,
        held_out=options.held_out,
        epochs=options.epochs,
        components=options.components,
        as_published=options.as_published,
        judged_tokens=options.judged_tokens,
    )
    return lambda loaded: study.run(loaded, options.text, config, directory=directory, progress=progress)


def _texts(options: Histalign, directory: Path, progress: Progress) -> Callable[[Loaded], Any]:
    from fullrank.cli.progress import device_of
    from fullrank.models import loading
    from fullrank.studies import generation, generation_tasks

    config = generation.Config(
        methods=options.methods or generation.METHODS,
        seeds=options.seeds,
        rates=options.rates,
        layers=options.layers,
        steps=options.steps,
        prompts=options.generated,
        new_tokens=options.new_tokens,
        components=options.components,
        judged_tokens=options.judged_tokens,
    )
    data = options.data
    assert data is not None
    generation_tasks.check(options.task, data)
    judge = None if options.judge is None else loading.load(options.judge, device=device_of(options.device))
    task, name = generation_tasks.read(options.task, data, judge), "" if judge is None else judge.name
    return lambda loaded: generation.run(
        loaded, task, config, directory=directory, data=data.name, judge=name, files=options.text,
        progress=progress,
    )  # fmt: skip


def generation_table(record: Generation) -> Table:
    """Measures by method; means over seeds."""
    import statistics

    from rich.table import Table

    names = list(dict.fromkeys(name for method in record.methods for name in method.scores))
    drawn = Table(title=f"Texts behind {record.prompts} prompts", title_justify="left")
    drawn.add_column("method", no_wrap=True)
    for head in ("loss", "ordinary text", *names):
        drawn.add_column(head, justify="right")
    for method in record.methods:
        cells = [method.losses, method.ordinary, *(method.scores[name] for name in names)]
        drawn.add_row(method.method, *(f"{statistics.fmean(cell):.3g}" if cell else "" for cell in cells))
    people = (f"{record.people[name]:.3g}" if name in record.people else "" for name in names)
    drawn.add_row("people", "", "", *people)
    return drawn


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
