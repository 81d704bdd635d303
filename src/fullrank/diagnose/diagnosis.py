"""A diagnosis from end to end: load, collect states, answer one question after the other.

Each answer stands by itself. It is on disk, with how it came to be, before the next question is asked
(`results_file`); one that fails or is interrupted is listed in `missing` with its reason, and the others are
kept. Nothing V wide and N long is ever made; `memory` bounds what is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fullrank.diagnose import results_file
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
from fullrank.fit.controls import plain_layer
from fullrank.heads import Head
from fullrank.models import anatomy, checks
from fullrank.models.head_anatomy import has_own_head
from fullrank.models.loading import Loaded, from_objects, load
from fullrank.results.diagnosis import BY_NAME, QUESTIONS, Diagnosis, TextFacts

Progress = Callable[[str, float], None]

LEAST_TOKENS = 3072
"""Tokens that a model of any size is run on, where they are not given."""


LARGEST_BUFFER = 1 << 29
"""Bytes of V-wide scores at a time: more are no faster."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How much work a diagnosis does. The defaults take SmolLM2-135M four minutes on two cores."""

    tokens: int | None = None
    """Tokens of text to run the model on; None: as many as `body_work` pays for."""
    body_work: float = 2.6e12
    """Multiplications that running the body may take, where tokens are not given."""
    most_tokens: int = 1 << 18
    """However small the model is."""
    window: int = 512
    """Tokens a window: the longest context."""
    memory: int = 0
    """Bytes that states, buffers and copies of the output matrix may take, beside the model and one copy of
    its output matrix in fp32; 0 is 2 GiB, ten copies and six of the states."""
    heads: tuple[str, ...] = ()
    """None: mos, and trunk as well where a pass over the vocabulary is cheap."""
    components: int | None = None
    """Components of the mixtures; None: by the split of the rows."""
    seeds: int = 1
    """Fits of the best head and its control."""
    fit_work: float = 5e12
    """Multiplications that one fit may take on a processor; a GPU does a thousand times that."""
    power: bool = True
    """Whether a gain is planted, to see what the fits would have seen."""
    search_seconds: float = 20.0
    """Time for the search for unreachable tokens and the capacity."""
    gradient_tokens: int = 512
    attention_loss_tokens: int = 1024
    """Tokens on which attention is changed, one change after the other; its other figures use all tokens."""
    seed: int = 0


USUAL = Settings()

QUICK = Settings(
    body_work=1.2e12,
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
    heads=("mos", "trunk", "sigsoftmax"),
    search_seconds=12.0,
)
"""For a GPU: a million tokens and more heads, in three minutes for a model of 135 million parameters."""


class Interrupted(KeyboardInterrupt):
    """The work was stopped; `record` holds what was answered until then."""

    def __init__(self, record: Diagnosis) -> None:
        super().__init__()
        self.record = record


def run(
    model: Any = None,
    *,
    tokenizer: Any = None,
    text: Sequence[Path | str] | collect.Windows = (),
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    settings: Settings = USUAL,
    out: Path | str | None = None,
    fresh: bool = False,
    replace: bool = False,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    device_map: str | dict[str, Any] | None = None,
    batch_size: int | None = None,
    bos: bool | None = None,
    progress: Progress = lambda stage, share: None,
    say: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Diagnose a model: a path, a hub name, a .gguf file, the bundled model for None, a `Loaded`, or a model
    of transformers that is in memory, with its `tokenizer`.

    `text` are files, or windows of tokens; `only` and `skip` names of questions; attention is asked only
    where `only` names it. `batch_size` is in windows, None by what fits; `bos` says whether windows begin
    with the begin token, None as the tokenizer has it; `device_map` is accelerate's, for a model that no
    device can hold.

    With `out`, results.json is there after every answer, and states are kept beside it. Answers that an
    earlier run left for the same model, text and settings are kept and not asked for again unless `fresh`;
    results of another model or text are an error unless `replace`. `say` gets a line for what a user should
    know on the way.
    """
    asked = chosen_questions(only, skip)
    out = None if out is None else Path(out)
    earlier = results_file.earlier(out, replace=replace)
    progress("loading the model", 0.0)
    with contextlib.ExitStack() as stack:
        loaded = _loaded(
            model,
            tokenizer,
            stack,
            revision=revision,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            device=device,
            dtype=dtype,
            device_map=device_map,
            say=lambda message: progress(message, 0.0),
        )
        build = anatomy.examine(loaded)
        if isinstance(model, str | Path):
            build = dataclasses.replace(build, facts=dataclasses.replace(build.facts, given=str(model)))
        where = torch.device(device) if device_map else build.output.weight.device
        stack.enter_context(_caller_undisturbed(where))
        if isinstance(text, collect.Windows):
            windows = text
        else:
            windows = collect.tokenise(
                loaded.tokenizer,
                [Path(one) for one in text],
                tokens=tokens_for(settings, build.facts.parameters),
                window=settings.window,
                longest=anatomy.longest(loaded.model),
                bos=bos,
            )
        if not settings.memory:
            memory = default_memory(windows.ids.numel(), build.output.weight)
            settings = dataclasses.replace(settings, memory=memory)
        facts = _text_facts(windows)
        if earlier is not None and out is not None:
            if not replace:
                results_file.check_nothing_lost(earlier, build.facts, facts, asked, settings, out)
            elif results_file.difference(earlier, build.facts, facts):
                earlier = None
        file = results_file.ResultsFile(
            out, build.facts, facts, settings, asked, earlier=earlier, device=checks.device_name(str(where))
        )
        ask = [name for name in asked if fresh or name not in file.found]
        if len(ask) < len(asked):
            held = ", ".join(name for name in asked if name not in ask)
            say(f"kept from an earlier run on the same model and text: {held} (--fresh asks anew)")
        name = functools.partial(_name, loaded.tokenizer)
        if windows.starts_with_bos and ask:
            whose = ", as the tokenizer has it (--bos no leaves it out)" if windows is not text else ""
            say(f"every window begins with {name(int(windows.ids[0, 0]))}{whose if bos is None else ''}")
        own = has_own_head(loaded.model)
        states: Any = None
        if set(ask) - set(BY_NAME):
            options: dict[str, Any] = {
                "memory": settings.memory, "batch": batch_size, "say": say,
                "progress": functools.partial(progress, "running the model"),
            }  # fmt: skip
            if own:
                states = head_states.collect_states(loaded.model, windows, **options)
            else:
                directory = stack.enter_context(_directory(out))
                states = collect.collect(loaded.model, build, windows, directory, **options)
        watched = (loaded.model, windows.ids) if "attention" in ask else None
        if own:
            from fullrank.diagnose import own_heads

            head: Any = loaded.model.lm_head
            answers: Answers = own_heads.answers_of(head)(build, states, settings, name, watched, head=head)
        else:
            if model is None or isinstance(model, str | Path):
                # The body has done its work, and its memory is better used for what follows.
                build = dataclasses.replace(build, blocks=())
                del loaded
            if device_map and watched is None:
                build = _on(build, where)
            answers = Answers(build, states, settings, name, watched)
        del watched
        return answer(answers, ask, file, progress)


def _loaded(model: Any, tokenizer: Any, stack: contextlib.ExitStack, **options: Any) -> Loaded:
    in_memory = not (model is None or isinstance(model, str | Path | Loaded))
    if in_memory == (tokenizer is None):
        raise FullrankError(
            f"a model in memory ({type(model).__name__}) needs its tokenizer: pass tokenizer="
            if in_memory
            else "tokenizer= was given, which goes with a model in memory: leave it out"
        )
    if isinstance(model, Loaded):
        return model
    if not in_memory:
        return load(model, **options)
    stack.enter_context(_modes_kept(model))
    return from_objects(model, tokenizer)


@contextlib.contextmanager
def _modes_kept(model: Any) -> Iterator[None]:
    """A model that someone trains is in training mode again afterwards."""
    modes = {part: part.training for part in model.modules()} if isinstance(model, torch.nn.Module) else {}
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextlib.contextmanager
def _caller_undisturbed(device: torch.device) -> Iterator[None]:
    """Random numbers go on as they were; and kernels start on the device of what they are given."""
    on_gpu = device.type == "cuda"
    with (
        torch.random.fork_rng(devices=[device] if on_gpu else []),
        torch.cuda.device(device) if on_gpu else contextlib.nullcontext(),
    ):
        yield


def _on(build: anatomy.Anatomy, device: torch.device) -> anatomy.Anatomy:
    """The output layer on a device, if it has room: a matrix that was offloaded is there no longer."""
    torch.cuda.empty_cache()
    output = build.output
    with contextlib.suppress(torch.OutOfMemoryError):
        bias = None if output.bias is None else output.bias.to(device)
        output = dataclasses.replace(output, weight=output.weight.to(device), bias=bias)
    return dataclasses.replace(build, output=output)


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
        self._ready: tuple[Head, states_of.Parts] | None = None
        self.held = 0
        if states is not None:
            self.states = states
            device = self.output.weight.device
            self.hidden = states.hidden.to(device)
            self.targets = states.targets.to(device)
            self.held = 4 * (states.hidden.numel() + states.layers.numel())
        # A quarter of what is left for one V-wide buffer: there may be two, and what a question holds itself.
        self.limit = min(LARGEST_BUFFER, max(1, settings.memory - self.held) // 4)

    def needs(self, question: str) -> int:
        """Bytes that a question takes at most, beside the model, one copy of W in fp32, and the states."""
        V, D = self.output.weight.shape
        N, sampled = (0, 0) if not self.held else (len(self.hidden), len(self.states.layer_positions))
        # Slices of W in fp64, and their Gram matrix with its vectors.
        slices = 32 * min(V, 8192) * D + 64 * D * D
        biased = 4 * V * (D + 1) if self.output.bias is not None else 0
        match question:
            case "loss":
                return self.limit * 5 // 4
            case "spectrum":
                return slices
            case "anisotropy":
                return 40 * sampled * D
            case "logprob_rank":
                return slices + 40 * min(N, logprob_rank.SLICE + D) * D + 3 * biased
            case "gradient":
                return slices + 2 * self.limit
            case "rank_needed" | "better_head":
                # W refitted, rows of it that are not drawn from, with those that are trained, for a planted
                # gain and for what is written down; the states in three parts, and their rows.
                return 40 * V * D + 12 * N * D + self.limit * 3 // 2
            case "unreachable":
                # W and its standard coordinates in fp64, and a copy in fp32 for the search.
                return 24 * V * D + 16 * min(V * V, 1 << 25)
        return 0

    def check_memory(self, question: str) -> None:
        """Raise where an answer would take more memory than it may."""
        needed = self.held + self.needs(question)
        if needed > self.settings.memory:
            raise FullrankError(
                f"states and buffers of this question take {needed / 2**30:.1f} GiB, more than --memory "
                f"{self.settings.memory / 2**30:.1f} GiB: allow more"
            )

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
            self._ready = plain_layer(self.output), states_of.split(whole)
        return self._ready

    def _heads(self) -> tuple[str, ...]:
        # A trunk gains no more than the mixture it is cut from; fitting it says how much less.
        weight = self.output.weight
        cheap = weight.device.type != "cpu" or len(weight) <= comparison.SMALL_VOCABULARY
        return ("mos", "trunk") if cheap else ("mos",)

    def effort(self) -> comparison.Settings:
        """What fits may take."""
        settings = self.settings
        return comparison.Settings(
            memory=4 * self.limit, seeds=settings.seeds, work=settings.fit_work, seed=settings.seed
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
        effort = dataclasses.replace(self.effort(), work=self.settings.fit_work / 10)
        return rank_needed.rank_needed(plain, parts, settings=effort, progress=progress)

    def better_head(self, progress: Progress) -> object:
        plain, parts = self.ready()
        return better_head.better_head(
            plain,
            parts,
            heads=self.settings.heads or self._heads(),
            components=self.settings.components,
            measure_power=self.settings.power,
            settings=self.effort(),
            progress=progress,
        )

    def unreachable(self, progress: Progress) -> object:
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


def tokens_for(settings: Settings, parameters: int) -> int:
    """How many tokens to run a model on: as given, or as its size allows."""
    if settings.tokens is not None:
        return settings.tokens
    return max(LEAST_TOKENS, min(settings.most_tokens, int(settings.body_work / (2 * parameters))))


def default_memory(tokens: int, weight: torch.Tensor) -> int:
    """Bytes, where they are not given: no question needs more."""
    return (2 << 30) + 4 * (10 * weight.numel() + 6 * tokens * weight.shape[1])


def answer(
    answers: Answers,
    ask: Sequence[str],
    file: results_file.ResultsFile,
    progress: Progress = lambda stage, share: None,
) -> Diagnosis:
    """Ask the questions one after the other; each answer is in the file before the next is asked for."""
    for name in ask:
        started = time.monotonic()

        def report(label: str, share: float, name: str = name) -> None:
            progress(f"{name}: {label}" if label else name, share)

        # An answer is the same whatever was asked, or drawn by the caller, before it.
        torch.manual_seed(answers.settings.seed)
        try:
            progress(name, 0.0)
            answers.check_memory(name)
            file.add(name, getattr(answers, name)(report), time.monotonic() - started)
            progress(name, 1.0)
        except KeyboardInterrupt:
            file.save()
            raise Interrupted(file.record()) from None
        except (FullrankError, torch.OutOfMemoryError, MemoryError, torch.linalg.LinAlgError) as error:
            file.fail(name, str(error).split("\n")[0] or type(error).__name__)
    if set(ask) <= set(BY_NAME) and ask and not file.found:
        # Nothing else was asked, and nothing is known: a page without any answer would help nobody.
        raise FullrankError(file.failed[ask[0]])
    file.save()
    return file.record()


def _text_facts(windows: collect.Windows) -> TextFacts:
    count, length = windows.ids.shape
    numbers = torch.arange(count).repeat_interleave(length - 1)
    parts = [len(range(*part.indices(count))) * (length - 1) for part in states_of.thirds(count)]
    return TextFacts(
        sources=windows.sources,
        sha256=windows.sha256,
        bytes=int(windows.sizes.sum()),
        tokens=len(numbers),
        window=length,
        windows=count,
        starts_with_bos=windows.starts_with_bos,
        fit_tokens=parts[0],
        choose_tokens=parts[1],
        held_out_tokens=parts[2],
    )


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
