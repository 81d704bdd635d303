"""A diagnosis from end to end: load, collect states, answer one question after the other.

Each answer stands by itself: one that fails or is interrupted is listed in `missing` with its reason, and the
others are kept. Nothing V wide and N long is ever made; `memory` bounds what is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fullrank import results
from fullrank.diagnose import findings, verdict
from fullrank.diagnose.attention import question as attention
from fullrank.diagnose.questions import (
    anisotropy,
    better_head,
    gradient,
    logprob_rank,
    loss,
    rank_needed,
    spectrum,
    unreachable,
)
from fullrank.errors import FullrankError
from fullrank.fit import collect, comparison, head_states
from fullrank.fit import states as states_of
from fullrank.heads import Head, build
from fullrank.heads.base import without_matrix
from fullrank.models import anatomy
from fullrank.models.head_anatomy import has_own_head
from fullrank.models.loading import Loaded, load
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import Softcap
from fullrank.results.diagnosis import BY_NAME, QUESTIONS, Diagnosis, Missing, TextFacts

Progress = Callable[[str, float], None]

LEAST_TOKENS = 3072
"""Tokens that a model of any size is run on, where they are not given."""
NOT_ASKED = "not asked for"
INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How much work a diagnosis does. The defaults take SmolLM2-135M four minutes on two cores."""

    tokens: int | None = None
    """Tokens of text to run the model on; None: as many as `body_work` pays for."""
    body_work: float = 4e12
    """Multiplications that running the body may take, where tokens are not given."""
    most_tokens: int = 1 << 18
    """However small the model is."""
    window: int = 512
    """Tokens a window: the longest context."""
    memory: int = 2 << 30
    """Bytes that states and buffers may take beside the model."""
    heads: tuple[str, ...] = ("mos", "trunk")
    components: int | None = None
    """Components of the mixtures; None: by the split of the rows, `most_components` at most."""
    most_components: int = 4
    seeds: int = 1
    """Fits of the best head and its control."""
    fit_work: float = 2e12
    """Multiplications that one fit may take on a processor; a GPU does a thousand times that."""
    power: bool = True
    """Whether a gain is planted, to see what the fits would have seen."""
    search_seconds: float = 25.0
    """Time for the search for unreachable tokens and the capacity."""
    gradient_tokens: int = 512
    attention_loss_tokens: int = 1024
    """Tokens on which attention is changed, one change after the other; its other figures use all tokens."""
    seed: int = 0


USUAL = Settings()

QUICK = Settings(
    body_work=1e12,
    most_tokens=1 << 15,
    heads=("mos",),
    seeds=1,
    fit_work=3e11,
    power=False,
    search_seconds=8.0,
    gradient_tokens=256,
    attention_loss_tokens=512,
)
"""A first look in ninety seconds: fewer tokens, one mixture, short fits, nothing planted."""

THOROUGH = Settings(
    body_work=1e15,
    most_tokens=1 << 20,
    memory=16 << 30,
    heads=comparison.candidates(),
    most_components=8,
    seeds=2,
    fit_work=1e13,
    search_seconds=60.0,
)
"""For a GPU: a million tokens, every head, eight components where they are wanted."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came after some questions were answered; `record` holds them."""

    def __init__(self, record: Diagnosis) -> None:
        super().__init__()
        self.record = record


def run(
    model: Any = None,
    *,
    text: Sequence[Path | str] | collect.Windows = (),
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    settings: Settings = USUAL,
    out: Path | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress = lambda stage, share: None,
) -> Diagnosis:
    """Diagnose a model: a path, a hub name, a .gguf file, a `Loaded`, or the bundled model for None.

    `text` are files, or windows of tokens; `only` and `skip` names of questions; attention is asked only
    where `only` names it. States are kept under `out`, so that a second run finds them; answers that an
    earlier run left there for the same model and text are kept where they are not asked for again.
    """
    asked = chosen_questions(only, skip)
    progress("loading the model", 0.0)
    if isinstance(model, Loaded):
        loaded = model
    else:
        loaded = load(
            model,
            revision=revision,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            device=device,
            dtype=dtype,
            say=lambda message: progress(message, 0.0),
        )
    build = anatomy.examine(loaded)
    windows = (
        text
        if isinstance(text, collect.Windows)
        else collect.tokenise(
            loaded.tokenizer,
            [Path(one) for one in text],
            tokens=tokens_for(settings, build.facts.parameters),
            window=settings.window,
            longest=anatomy.longest(loaded.model),
        )
    )
    if has_own_head(loaded.model):
        return _own(loaded, build, windows, asked, settings, out, progress)
    with _directory(out) as directory:
        states = None
        if set(asked) - set(BY_NAME):
            states = collect.collect(
                loaded.model,
                build,
                windows,
                directory,
                memory=settings.memory,
                progress=lambda share: progress("running the model", share),
            )
        tokenizer = loaded.tokenizer
        watched = (loaded.model, windows.ids) if "attention" in asked else None
        if not isinstance(model, Loaded):
            # The body has done its work, and its memory is better used for what follows.
            build = dataclasses.replace(build, blocks=())
            del loaded
        answers = Answers(build, states, settings, lambda token: _name(tokenizer, token), watched)
        del watched
        return answer(answers, windows, asked, out, progress)


def _own(
    loaded: Loaded,
    build: anatomy.Anatomy,
    windows: collect.Windows,
    asked: Sequence[str],
    settings: Settings,
    out: Path | None,
    progress: Progress,
) -> Diagnosis:
    """The diagnosis of a model that has one of our heads."""
    from fullrank.diagnose import own_heads

    states = None
    if set(asked) - set(BY_NAME):
        states = head_states.collect_states(
            loaded.model,
            windows,
            memory=settings.memory,
            progress=lambda share: progress("running the model", share),
        )
    model: Any = loaded.model
    answers = own_heads.answers_of(model.lm_head)(
        build,
        states,
        settings,
        lambda token: _name(loaded.tokenizer, token),
        (model, windows.ids) if "attention" in asked else None,
        head=model.lm_head,
    )
    return answer(answers, windows, asked, out, progress)


def chosen_questions(only: Sequence[str], skip: Sequence[str]) -> tuple[str, ...]:
    known = (*QUESTIONS, *BY_NAME)
    unknown = [name for name in (*only, *skip) if name not in known]
    if unknown:
        raise FullrankError(
            f"no question is called {', '.join(unknown)}: expected some of {', '.join(known)}"
        )
    # Those by name come first: they need the whole model, which can go before the others begin.
    asked = tuple(name for name in (*BY_NAME, *QUESTIONS) if name in (only or QUESTIONS) and name not in skip)
    if not asked:
        raise FullrankError("--only and --skip leave no question: name at least one to answer")
    return asked


class Answers:
    """The questions over one model's states, a method each; what two of them share is made once.

    A method that raises FullrankError leaves its question without an answer, for that reason.
    """

    states: collect.States

    def __init__(
        self,
        build: anatomy.Anatomy,
        states: collect.States | None,
        settings: Settings,
        name: Callable[[int], str],
        watched: tuple[Any, torch.Tensor] | None = None,
    ) -> None:
        """`states` is None where only questions by name are asked; `watched` is a model and its windows."""
        self.build, self.settings, self.name, self.watched = build, settings, name, watched
        self.output = build.output
        # A quarter of the memory for one V-wide buffer: there are up to three, and the states.
        self.limit = settings.memory // 4
        self._ready: tuple[Head, states_of.Parts] | None = None
        if states is not None:
            self.states = states
            device = self.output.weight.device
            self.hidden = states.hidden.to(device)
            self.targets = states.targets.to(device)

    def ready(self) -> tuple[Head, states_of.Parts]:
        """The output layer as a head, and the states in three parts."""
        if self._ready is None:
            length = int((self.states.windows == 0).sum())
            device = self.output.weight.device
            whole = states_of.Part(
                states=(self.hidden.view(-1, length, self.hidden.shape[-1]),),
                targets=self.targets.view(-1, length),
                ids=self.targets.view(-1, length),
                blocks=self.states.blocks.view(-1, length).to(device),
            )
            self._ready = plain_head(self.output), states_of.split(whole)
        return self._ready

    def effort(self) -> comparison.Settings:
        """What fits may take."""
        settings = self.settings
        return comparison.Settings(
            memory=settings.memory, seeds=settings.seeds, work=settings.fit_work, seed=settings.seed
        )

    def loss(self, progress: Progress) -> object:
        losses = torch.cat(
            [
                self.output.losses(hidden, targets, self.limit)
                for hidden, targets in zip(self.hidden.split(1024), self.targets.split(1024), strict=True)
            ]
        ).cpu()
        return loss.loss(losses, self.states.sizes, self.states.positions, self.states.blocks)

    def spectrum(self, progress: Progress) -> object:
        return spectrum.spectrum(self.output.weight[: self.output.tokens], self.build.facts.storage)

    def anisotropy(self, progress: Progress) -> object:
        if not self.states.layer_names:
            raise FullrankError("the layers of this architecture were not recognised")
        return anisotropy.anisotropy(
            self.states.layers,
            self.states.layer_positions,
            self.states.layer_blocks,
            self.states.layer_names,
            seed=self.settings.seed,
        )

    def logprob_rank(self, progress: Progress) -> object:
        return logprob_rank.logprob_rank(
            self.hidden,
            self.output,
            storage=self.build.facts.storage,
            states_rank=self.build.states_rank,
            norm=self.build.facts.final_norm,
            dtype=getattr(torch, self.build.facts.dtype),
            seed=self.settings.seed,
        )

    def rank_needed(self, progress: Progress) -> object:
        plain, parts = self.ready()
        # Many ranks share what one head has.
        effort = dataclasses.replace(self.effort(), work=self.settings.fit_work / 4)
        return rank_needed.rank_needed(plain, parts, settings=effort, progress=progress)

    def better_head(self, progress: Progress) -> object:
        plain, parts = self.ready()
        return better_head.better_head(
            plain,
            parts,
            heads=self.settings.heads,
            components=self.settings.components,
            most_components=self.settings.most_components,
            measure_power=self.settings.power,
            settings=self.effort(),
            progress=progress,
        )

    def unreachable(self, progress: Progress) -> object:
        # W and its standard coordinates in fp64, and a copy in fp32 for the search.
        needed = 20 * self.output.weight.numel()
        if needed > self.settings.memory:
            raise FullrankError(
                f"the search needs {needed / 2**30:.1f} GiB for a matrix of this size, more than --memory "
                f"{self.settings.memory / 2**30:.1f} GiB: allow more"
            )
        return unreachable.unreachable(
            self.output,
            self.name,
            seconds=self.settings.search_seconds,
            seed=self.settings.seed,
            progress=progress,
        )

    def attention(self, progress: Progress) -> object:
        assert self.watched is not None
        # Let go of it here, so that the questions after this one have the model's memory.
        (model, ids), self.watched = self.watched, None
        return attention.attention(
            model,
            self.output,
            ids,
            memory=self.settings.memory,
            loss_tokens=self.settings.attention_loss_tokens,
            seed=self.settings.seed,
            progress=progress,
        )

    def gradient(self, progress: Progress) -> object:
        step = max(1, len(self.targets) // self.settings.gradient_tokens)
        return gradient.gradient(
            self.hidden[::step],
            self.targets[::step],
            self.states.blocks[::step],
            self.output,
            limit=self.limit,
        )


def plain_head(output: OutputLayer) -> Head:
    """An output layer as a head, sharing its matrix."""
    with without_matrix():
        head = build("softmax", hidden=output.width, vocab=output.vocabulary, bias=output.bias is not None)
    if isinstance(output.pointwise, Softcap):
        head.cap_scores(output.pointwise.constant)
    elif not output.linear:
        raise FullrankError("its scores are bent by a function that no control has")
    head.decoder.weight = torch.nn.Parameter(output.weight, requires_grad=False)
    if output.bias is not None:
        head.decoder.bias = torch.nn.Parameter(output.bias, requires_grad=False)
    return head


def tokens_for(settings: Settings, parameters: int) -> int:
    """How many tokens to run a model on: as given, or as its size allows."""
    if settings.tokens is not None:
        return settings.tokens
    return max(LEAST_TOKENS, min(settings.most_tokens, int(settings.body_work / (2 * parameters))))


def answer(
    answers: Answers,
    windows: collect.Windows,
    asked: Sequence[str],
    out: Path | None = None,
    progress: Progress = lambda stage, share: None,
) -> Diagnosis:
    """Ask the questions one after the other; answers that an earlier run left in `out` are kept."""
    earlier = _earlier(out, answers.build, windows)
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    seconds: dict[str, float] = {}

    def keep(name: str, reason: str) -> None:
        """Better the earlier answer to a question than none."""
        answer = getattr(earlier, name, None)
        if earlier is not None and answer is not None:
            found[name], seconds[name] = answer, earlier.seconds.get(name, math.nan)
        else:
            missing[name] = reason

    for name in (*QUESTIONS, *BY_NAME):
        if name not in asked:
            keep(name, NOT_ASKED)
    for name in BY_NAME:
        # Nobody misses what is answered by name only.
        missing.pop(name, None)
    stopped = False
    for name in asked:
        if stopped:
            break
        started = time.monotonic()

        def report(label: str, share: float, name: str = name) -> None:
            progress(f"{name}: {label}" if label else name, share)

        try:
            progress(name, 0.0)
            found[name] = getattr(answers, name)(report)
            seconds[name] = time.monotonic() - started
            progress(name, 1.0)
        except KeyboardInterrupt:
            stopped = True
        except (FullrankError, torch.OutOfMemoryError, MemoryError, torch.linalg.LinAlgError) as error:
            missing[name] = str(error).split("\n")[0] or type(error).__name__
    for name in asked:
        if name not in found and name not in missing:
            keep(name, INTERRUPTED)
    record = _record(answers, windows, found, missing, seconds)
    if stopped:
        raise Interrupted(record)
    if set(asked) <= set(BY_NAME) and not found:
        # Nothing else was asked, and nothing is known: a page without any answer would help nobody.
        raise FullrankError(missing[asked[0]])
    return record


def _record(
    answers: Answers,
    windows: collect.Windows,
    found: dict[str, Any],
    missing: dict[str, str],
    seconds: dict[str, float],
) -> Diagnosis:
    count, length = windows.ids.shape
    # Without states the tokens are those of a transformers model: all of a window but its first.
    numbers = torch.arange(count).repeat_interleave(length - 1)
    if hasattr(answers, "states"):
        numbers = answers.states.windows
    length = int((numbers == 0).sum())
    parts = [len(range(*part.indices(count))) * length for part in states_of.thirds(count)]
    text = TextFacts(
        sources=windows.sources,
        sha256=windows.sha256,
        bytes=int(windows.sizes.sum()),
        tokens=len(numbers),
        window=windows.ids.shape[1],
        windows=windows.ids.shape[0],
        starts_with_bos=windows.starts_with_bos,
        fit_tokens=parts[0],
        choose_tokens=parts[1],
        held_out_tokens=parts[2],
    )
    known = (*QUESTIONS, *BY_NAME)
    record = Diagnosis(
        model=answers.build.facts,
        text=text,
        findings=(),
        missing=tuple(Missing(question=name, reason=missing[name]) for name in known if name in missing),
        seconds={name: seconds[name] for name in known if name in seconds},
        **{name: found.get(name) for name in known},
    )
    record = dataclasses.replace(record, findings=findings.findings(record))
    return dataclasses.replace(record, verdict=verdict.verdict(record))


def _earlier(out: Path | None, build: anatomy.Anatomy, windows: collect.Windows) -> Diagnosis | None:
    """The answers that a run on the same model and text has left, if any."""
    if out is None or not (out / "results.json").is_file():
        return None
    try:
        record, _ = results.load(out / "results.json")
    except FullrankError:
        return None
    same = (
        isinstance(record, Diagnosis)
        and record.model.fingerprint == build.facts.fingerprint
        and record.model.dtype == build.facts.dtype
        and record.text.sha256 == windows.sha256
        and record.text.windows == windows.ids.shape[0]
        and record.text.window == windows.ids.shape[1]
    )
    return record if same else None


@contextlib.contextmanager
def _directory(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out / "states"
    else:
        with tempfile.TemporaryDirectory(prefix="fullrank-") as path:
            yield Path(path)


def _name(tokenizer: Any, token: int) -> str:
    """A token's text as the tokenizer's vocabulary spells it."""
    try:
        return str(tokenizer.convert_ids_to_tokens(token) or tokenizer.decode([token]))
    except (TypeError, ValueError, IndexError, KeyError):
        return f"id {token}"
