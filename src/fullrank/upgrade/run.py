"""An upgrade from end to end: load, give the head, measure that nothing changed, train, judge.

Nothing is written here but what the next run may use: the states of the body, which any run with the same
model and text finds, and trainings, done and half done, from which the same call goes on after a crash and
ends with the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fullrank.errors import FullrankError
from fullrank.fit import checkpoints, collect, comparison, estimates
from fullrank.fit.teacher import check_students
from fullrank.heads import HEADS
from fullrank.models.anatomy import longest
from fullrank.models.loading import Loaded, quiet
from fullrank.results import cache_directory
from fullrank.results.upgrade import Preserved, Upgrade, UpgradedModel, UpgradeTraining
from fullrank.upgrade import teaching, whole
from fullrank.upgrade import training as fit
from fullrank.upgrade.upgrade import dequantised, upgrade

COMPARED_TOKENS, COMPARED_WINDOW = 512, 128
"""Of the text on which the upgraded model is held against the original."""
SAME = 1e-3
"""Nats by which any log-probability may differ where two models are said to say the same."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What an upgrade made."""

    model: Any
    """A `FullrankForCausalLM`; None where `auto` found no head worth it."""
    record: Upgrade
    checkpoints: Path | None = None
    """Where trainings are kept; to be removed once the model is written."""


def states_directory() -> Path:
    """Where the states of bodies are kept between runs."""
    return cache_directory() / "states"


def run(
    loaded: Loaded,
    head: str = "mos",
    *,
    options: dict[str, Any] | None = None,
    train: Sequence[Path] = (),
    default_text: bool = False,
    unfreeze: bool = False,
    settings: fit.Settings | None = None,
    cache: Path | None = None,
    teacher: Callable[[], Loaded] | None = None,
    progress: fit.Progress = lambda stage, share: None,
) -> Outcome:
    """Upgrade a loaded model, and train its head where text is given.

    `default_text` trains on the text that every Python carries. `head` may be "auto", which needs text. With
    `unfreeze` the whole model is trained, in place of the head on the body's states. `teacher` loads a model
    of the same tokenizer, and all is trained to say what that says of the text; its body is let go before.
    """
    settings = fit.Settings() if settings is None else settings
    options = dict(options or {})
    asked, training = head, bool(train) or default_text
    if head == "auto" and not training:
        raise FullrankError("--head auto tries heads on a text: give one with --train")
    if teacher is not None and not training:
        raise FullrankError("--teacher is asked what it says of a text: give one with --train")
    if unfreeze and not training:
        raise FullrankError("--unfreeze trains the whole model on a text: give one with --train")
    if unfreeze and not settings.matrix:
        raise FullrankError(
            "--unfreeze trains the matrix with all else, tied if it is: leave --keep-tied out"
        )
    if settings.align and (head != "cache" or not training):
        raise FullrankError(
            "--align ranks the memories of a cache in training: give --head cache and a text with --train"
        )
    with _in_memory():
        loaded = dequantised(loaded)
    if training and loaded.model.dtype != torch.float32:
        raise FullrankError(f"heads are trained in float32, the model is in {loaded.model.dtype}: load it so")
    facts = _facts(loaded)
    taught_by: Loaded | None = None
    if teacher is not None:
        with _in_memory():
            taught_by = dequantised(teacher())
        teaching.check_tokens(loaded, taught_by)
        window = min(settings.window, longest(taught_by.model) or settings.window)
        settings = dataclasses.replace(settings, window=window)
    # What heads draw at their start: the same in every process.
    torch.manual_seed(settings.seed)
    with _in_memory():
        if not training:
            progress("upgrading", 0.0)
            model = upgrade(loaded, head, **options)
            return _untrained(loaded, model, facts, train, progress)
        cache = states_directory() if cache is None else cache
        plain = upgrade(loaded, "softmax").lm_head
        reading: Any = {
            "settings": settings,
            "cache": cache,
            "fingerprint": loaded.fingerprint,
            "progress": progress,
        }
        models, refused = (
            _candidates(loaded, options) if head == "auto" else ({head: upgrade(loaded, head, **options)}, {})
        )
        model = next(iter(models.values()))
        windows = _windows(loaded, model, train, settings)
        teacher_facts = None if taught_by is None else _facts(taught_by)
        directory = _directory(cache, asked, models, windows.ids, facts, settings, unfreeze, teacher_facts)
        teaches: teaching.TeacherModel | None = None
        if taught_by is not None and teacher_facts is not None:
            check_students(one.lm_head for one in models.values())
            teaches = teaching.collect(
                taught_by, teacher_facts, model.lm_head, windows, settings=settings, cache=cache,
                progress=progress,
            )  # fmt: skip
            taught_by = None
            teaching.let_go()
        text = _read(model, loaded, train, reading) if head == "auto" or not unfreeze else None
        # Before any is trained.
        kept = {name: preserved(loaded, one, train, progress) for name, one in models.items()}
        if text is not None:
            head, found = fit.fit(
                models,
                plain,
                text,
                settings=settings,
                refused=refused,
                directory=directory,
                teacher=teaches,
                progress=progress,
            )
        # A whole model is trained from an untrained head, as its controls are.
        model = models[head]
        if text is not None and unfreeze:
            model = upgrade(loaded, head, **_accepted(head, options))
        del models
        if text is None or unfreeze:
            trained = whole.fit_whole(
                model, plain, windows, settings=settings, directory=directory, teacher=teaches,
                progress=progress,
            )  # fmt: skip
            found = trained if text is None else dataclasses.replace(trained, candidates=found.candidates)
    notes = loaded.notes
    if settings.align:
        notes = (
            *notes,
            f"The cache was trained on its likelihood and, with weight {settings.align:g}, on HistAlign's "
            "ranking loss; the losses above are likelihoods alone.",
        )
    if asked == "auto" and (unused := sorted(set(options) - set(_accepted(head, options)))):
        notes = (*notes, f"{head} has no option {', '.join(unused)}: it was trained without.")
    return _trained(asked, model, notes, facts, kept[head], found, directory)


def _windows(loaded: Loaded, model: Any, train: Sequence[Path], settings: fit.Settings) -> collect.Windows:
    with _named():
        return collect.tokenise(
            loaded.tokenizer,
            list(train),
            tokens=settings.tokens,
            window=settings.window,
            longest=longest(model),
        )


def _directory(
    cache: Path,
    asked: str,
    models: dict[str, Any],
    ids: torch.Tensor,
    facts: UpgradedModel,
    settings: fit.Settings,
    unfreeze: bool,
    teacher: UpgradedModel | None,
) -> Path:
    """Where the trainings of this call are kept, and of no other."""
    heads = {name: one.config.head for name, one in models.items()}
    device = next(next(iter(models.values())).parameters()).device.type
    taught_by = "" if teacher is None else teacher.fingerprint
    plans = [facts.fingerprint, asked, heads, dataclasses.asdict(settings), unfreeze, device, taught_by]
    return cache / f"training-{checkpoints.digest(plans, ids)[:24]}"


def _untrained(
    loaded: Loaded, model: Any, facts: UpgradedModel, text: Sequence[Path], progress: fit.Progress
) -> Outcome:
    kept = preserved(loaded, model, text, progress)
    name = model.lm_head.name
    record = Upgrade(
        model=facts,
        asked=name,
        head=name,
        options=_options(model),
        parameters=_parameters(model),
        preserved=kept,
        training=None,
        saved=True,
        verdict=f"The model has a {name} head and has not been trained: it says {_near(kept)}.",
        notes=loaded.notes,
    )
    return Outcome(model=model, record=record)


def _near(kept: Preserved) -> str:
    """What the comparison shows, in words: neither plif over a soft cap nor bf16 is the original exactly."""
    if kept.largest <= SAME:
        return "what the original says"
    return f"nearly what the original says, {max(kept.kl.value, 0.0):.2g} nats per token from it"


def _trained(
    asked: str,
    model: Any,
    notes: Sequence[str],
    facts: UpgradedModel,
    kept: Preserved,
    found: UpgradeTraining,
    directory: Path | None,
) -> Outcome:
    name = model.lm_head.name
    saved = asked != "auto" or fit.worth_it(found)
    words = fit.verdict(name, found)
    if not saved:
        words = f"No head is worth it on this text, and no model was written: {words}"
    notes = list(notes)
    if saved and found.untied:
        notes.append(
            f"The output matrix was tied to the input embedding and is one of its own now, "
            f"{model.lm_head.decoder.weight.numel():,} parameters more: the body was frozen and would have "
            "changed with it."
        )
    record = Upgrade(
        model=facts,
        asked=asked,
        head=name,
        options=_options(model),
        parameters=_parameters(model),
        preserved=kept,
        training=found,
        saved=saved,
        verdict=words,
        notes=tuple(notes),
    )
    return Outcome(model=model if saved else None, record=record, checkpoints=directory)


@torch.no_grad()
def preserved(
    loaded: Loaded,
    model: Any,
    text: Sequence[Path] = (),
    progress: fit.Progress = lambda stage, share: None,
) -> Preserved:
    """Run the original and the upgraded model over some text, end to end, and compare what they say."""
    original = loaded.model
    windows = _compared(loaded, text)
    training = model.training
    model.eval()
    divergences, largest, blocks = [], 0.0, []
    for number, ids in enumerate(windows.to(original.device)):
        progress("comparing with the original", number / len(windows))
        with quiet():
            before = original(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            after = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        before, after = before[:, : after.shape[1]].log_softmax(dim=-1), after
        # What has no probability in both is equal, though -inf - (-inf) is no number.
        differences = torch.where(before == after, 0.0, before - after)
        divergences.append((before.double().exp() * differences.double()).sum(dim=-1))
        largest = max(largest, float(differences.abs().max()))
        blocks.append(torch.full((len(before),), number))
    model.train(training)
    kl = torch.cat(divergences)
    return Preserved(tokens=len(kl), kl=estimates.mean(kl, torch.cat(blocks)), largest=largest)


def _compared(loaded: Loaded, text: Sequence[Path]) -> torch.Tensor:
    """Token ids [windows, window] to compare two models on."""
    limit = longest(loaded.model)
    try:
        with _named():
            return collect.tokenise(
                loaded.tokenizer, list(text), tokens=COMPARED_TOKENS, window=COMPARED_WINDOW, longest=limit
            ).ids
    except FullrankError:
        if text:
            raise
    # A vocabulary of words may lack those of the default text: any tokens will do.
    window = min(COMPARED_WINDOW, limit or COMPARED_WINDOW)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(len(loaded.tokenizer), (COMPARED_TOKENS // window, window), generator=generator)


def _read(model: Any, loaded: Loaded, train: Sequence[Path], reading: dict[str, Any]) -> fit.Text:
    with _named():
        return fit.read_text(model, loaded.tokenizer, list(train), **reading)


def _candidates(loaded: Loaded, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The heads that `auto` tries, on one body, and why others are left out."""
    models: dict[str, Any] = {}
    refused: dict[str, str] = {}
    accepted = {name: set(HEADS[name].options()) for name in comparison.candidates()}
    unknown = sorted(set(options) - set().union(*accepted.values()))
    if unknown:
        raise FullrankError(
            f"no head that --head auto tries has an option {', '.join(unknown)}: leave it out, or name a head"
        )
    for name in accepted:
        try:
            models[name] = upgrade(loaded, name, **_accepted(name, options))
        except FullrankError as error:
            refused[name] = str(error)
    if not models:
        raise FullrankError(f"no head could be tried: {next(iter(refused.values()))}")
    return models, refused


def _accepted(head: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a head has."""
    return {name: value for name, value in options.items() if name in HEADS[head].options()}


def _facts(loaded: Loaded) -> UpgradedModel:
    model = loaded.model
    weight = model.get_output_embeddings().weight
    return UpgradedModel(
        name=loaded.name,
        source=loaded.source,
        architecture=type(model).__name__,
        fingerprint=loaded.fingerprint,
        parameters=_parameters(model),
        width=weight.shape[-1],
        vocabulary=weight.shape[0],
        tied=model.get_input_embeddings().weight is weight,
    )


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _options(model: Any) -> dict[str, str]:
    return {
        name: str(value)
        for name, value in (model.config.head or {}).items()
        if name not in ("name", "hidden")
    }


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Errors about text in the words of this command."""
    try:
        yield
    except FullrankError as error:
        raise FullrankError(str(error).replace("--text", "--train")) from error


@contextlib.contextmanager
def _in_memory() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise FullrankError(
            "the upgrade does not fit into memory: take fewer --tokens, a smaller --memory, or --device cpu"
        ) from error
