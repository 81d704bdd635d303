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
from fullrank.diagnose.answers import Answers, Progress
from fullrank.diagnose.settings import USUAL, Settings, default_memory, tokens_for
from fullrank.errors import FullrankError
from fullrank.fit import collect, head_states
from fullrank.fit import states as states_of
from fullrank.models import anatomy, checks
from fullrank.models.head_anatomy import has_own_head
from fullrank.models.loading import Loaded, from_objects, load
from fullrank.models.randomness import restored_randomness, seed_generators
from fullrank.results.diagnosis import BY_NAME, QUESTIONS, Diagnosis, TextFacts


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
                tokens=tokens_for(settings, build.facts.parameters, build.output.weight),
                window=settings.window,
                longest=anatomy.longest(loaded.model),
                bos=bos,
                warn=say,
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
    """Restore the random states at the end, and start kernels on the device of their inputs."""
    on_gpu = device.type == "cuda"
    with (
        restored_randomness(device),
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
        seed_generators(answers.settings.seed, answers.output.weight.device)
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
