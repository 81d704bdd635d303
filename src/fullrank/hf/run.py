"""An upgrade from end to end: load, give the head, measure that nothing changed, train, judge.

Nothing is written here but the states of the body, which the next run with the same model and text finds:
after a crash they are not computed again, while the weights of a half-done training on them are lost.
Training of the whole model goes on from its last epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fullrank.diagnose import collect, estimates
from fullrank.diagnose.anatomy import longest
from fullrank.diagnose.loading import Loaded, cache_directory, quiet
from fullrank.errors import FullrankError
from fullrank.heads import Head
from fullrank.hf import fit, whole
from fullrank.hf.upgrade import upgrade
from fullrank.results.upgrade import Candidate, Preserved, Upgrade, UpgradedModel, UpgradeTraining

COMPARED_TOKENS, COMPARED_WINDOW = 512, 128
"""Of the text on which the upgraded model is held against the original."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What an upgrade made."""

    model: Any
    """A `FullrankForCausalLM`; None where `auto` found no head worth it."""
    record: Upgrade


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
    progress: fit.Progress = lambda stage, share: None,
) -> Outcome:
    """Upgrade a loaded model, and train its head where text is given.

    `default_text` trains on the text that every Python carries. `head` may be "auto", which needs text. With
    `unfreeze` the whole model is trained, in place of the head on the body's states.
    """
    settings = fit.Settings() if settings is None else settings
    options = dict(options or {})
    asked, training = head, bool(train) or default_text
    if head == "auto" and not training:
        raise FullrankError("--head auto tries heads on a text: give one with --train")
    if unfreeze and not training:
        raise FullrankError("--unfreeze trains the whole model on a text: give one with --train")
    if unfreeze and not settings.matrix:
        raise FullrankError(
            "--unfreeze trains the matrix with all else, tied if it is: leave --keep-tied out"
        )
    if training and loaded.model.dtype != torch.float32:
        raise FullrankError(f"heads are trained in float32, the model is in {loaded.model.dtype}: load it so")
    facts = _facts(loaded)
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
        candidates: tuple[Candidate, ...] = ()
        text: fit.Text | None
        if head == "auto":
            models, refused = _candidates(loaded, plain, options)
            text = _read(next(iter(models.values())), loaded, train, reading)
            heads = {name: one.lm_head for name, one in models.items()}
            head, candidates = fit.choose_head(
                heads, plain, text, settings=settings, refused=refused, progress=progress
            )
            model = models[head]
            del models, heads
        else:
            model = upgrade(loaded, head, **options)
            text = None if unfreeze else _read(model, loaded, train, reading)
        kept = preserved(loaded, model, train, progress)
        if text is None or unfreeze:
            found = _whole(loaded, model, plain, train, settings, cache, progress)
            found = dataclasses.replace(found, candidates=candidates)
        else:
            found = fit.fit(model, plain, text, settings=settings, candidates=candidates, progress=progress)
    return _trained(asked, model, facts, kept, found)


def _whole(
    loaded: Loaded,
    model: Any,
    plain: Head,
    train: Sequence[Path],
    settings: fit.Settings,
    cache: Path,
    progress: fit.Progress,
) -> UpgradeTraining:
    """Train the whole model; checkpoints stay until it is done."""
    with _named():
        windows = collect.tokenise(
            loaded.tokenizer,
            list(train),
            tokens=settings.tokens,
            window=settings.window,
            longest=longest(model),
        )
    facts = [loaded.fingerprint, model.config.head, dataclasses.asdict(settings)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode("utf8"))
    digest.update(windows.ids.numpy().tobytes())
    directory = cache / f"whole-{digest.hexdigest()[:24]}"
    found = whole.fit_whole(model, plain, windows, settings=settings, directory=directory, progress=progress)
    shutil.rmtree(directory, ignore_errors=True)
    return found


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
        verdict=f"The model has a {name} head and has not been trained: it says what the original says.",
        notes=(),
    )
    return Outcome(model=model, record=record)


def _trained(
    asked: str, model: Any, facts: UpgradedModel, kept: Preserved, found: UpgradeTraining
) -> Outcome:
    name = model.lm_head.name
    saved = asked != "auto" or fit.worth_it(found)
    words = fit.verdict(name, found)
    if not saved:
        words = f"No head is worth it on this text, and no model was written: {words}"
    notes = []
    if found.untied:
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
    return Outcome(model=model if saved else None, record=record)


@torch.no_grad()
def preserved(
    loaded: Loaded,
    model: Any,
    text: Sequence[Path] = (),
    progress: fit.Progress = lambda stage, share: None,
) -> Preserved:
    """Run the original and the upgraded model over some text, end to end, and compare what they say."""
    original = loaded.model
    with _named():
        windows = collect.tokenise(
            loaded.tokenizer,
            list(text),
            tokens=COMPARED_TOKENS,
            window=COMPARED_WINDOW,
            longest=longest(original),
        )
    training = model.training
    model.eval()
    divergences, largest, blocks = [], 0.0, []
    for number, ids in enumerate(windows.ids.to(original.device)):
        progress("comparing with the original", number / len(windows.ids))
        with quiet():
            before = original(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            after = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        before, after = before[:, : after.shape[1]].log_softmax(dim=-1), after
        divergences.append((before.double().exp() * (before - after).double()).sum(dim=-1))
        came = ids[1:, None]
        largest = max(largest, float((before.gather(1, came) - after.gather(1, came)).abs().max()))
        blocks.append(torch.full((len(came),), number))
    model.train(training)
    kl = torch.cat(divergences)
    return Preserved(tokens=len(kl), kl=estimates.mean(kl, torch.cat(blocks)), largest=largest)


def _read(model: Any, loaded: Loaded, train: Sequence[Path], reading: dict[str, Any]) -> fit.Text:
    with _named():
        return fit.read_text(model, loaded.tokenizer, list(train), **reading)


def _candidates(
    loaded: Loaded, plain: Head, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The heads that `auto` tries, on one body, and why others are left out."""
    models: dict[str, Any] = {}
    refused: dict[str, str] = {}
    mixtures = ("mos", "moss", "trunk")
    for name in fit.AUTO:
        if name in fit.BENT and plain.softcap is not None:
            refused[name] = "the model soft-caps its scores, and this head bends them in its own way"
            continue
        given = {key: value for key, value in options.items() if key != "components" or name in mixtures}
        try:
            models[name] = upgrade(loaded, name, **given)
        except FullrankError as error:
            refused[name] = str(error)
    if not models:
        raise FullrankError(f"no head could be tried: {next(iter(refused.values()))}")
    return models, refused


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
