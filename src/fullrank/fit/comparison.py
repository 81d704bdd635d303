"""Train an upgraded model's head on the states of its frozen body, against two controls.

The body runs once over the text; its states are kept in files (`states`). Then the upgraded head and two
controls are trained on them in the same way, each starting as the original: same tokens, same rows of W, same
learning rates to choose from, same most steps, same stopping rule (`controls`, `trainee`, `training`).

The text is in three parts in its own order: to train on, to choose learning rates and stopping points on, and
to judge on. The gain is the better control's loss minus the upgraded head's, token by token on the last part,
with an interval over blocks of text and seeds. It is what the head buys this body, frozen, on this text; not
what a body trained with the head would reach.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import collect as windows_of
from fullrank.fit import estimates, frozen, states, trainee, training
from fullrank.fit import setting as ready
from fullrank.fit.controls import CONTROLS, controls, size
from fullrank.heads import Head
from fullrank.heads.rows import RowHead
from fullrank.models.anatomy import longest
from fullrank.results.upgrade import Candidate, TrainedHead, TrainingText, UpgradeTraining

Progress = Callable[[str, float], None]

SMALL_VOCABULARY = 4096
"""Up to here the exact loss costs no more than the estimated one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How much work a training does."""

    tokens: int = 16384
    """Tokens of text to run the body on."""
    window: int = 512
    """Tokens a window: the longest context."""
    memory: int = 2 << 30
    """Bytes that states and buffers may take beside the model."""
    seeds: int = 3
    rates: tuple[float, ...] = frozen.RATES
    epochs: int = 6
    """Passes over the text, at most."""
    patience: int = 2
    """Passes without gain on the text for choosing after which training ends."""
    rows: int = frozen.ROWS
    """Rows of W that are trained where not all are; more if the text has more distinct tokens."""
    exact: bool | None = None
    """Whether to train on the exact loss; None decides by device, vocabulary and head."""
    matrix: bool = True
    """Whether W is trained. A tied W then leaves the input embedding, which stays as it is."""
    seed: int = 0
    align: float = 0.0
    """Weight of HistAlign's ranking loss in the training of a cache head."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """A text as the heads of one model see it."""

    parts: states.Parts
    facts: TrainingText


def read_text(
    model: Any,
    tokenizer: Any,
    files: Sequence[Path],
    *,
    settings: Settings,
    cache: Path,
    fingerprint: str,
    progress: Progress = lambda stage, share: None,
) -> Text:
    """Run an upgraded model's body over the text, or read the states that an earlier run has kept."""
    if model.lm_head.decoder.weight.dtype != torch.float32:
        raise FullrankError(
            f"the head is in {model.lm_head.decoder.weight.dtype}, expected float32, in which heads are "
            "trained and judged: call model.float() first"
        )
    windows = windows_of.tokenise(
        tokenizer, files, tokens=settings.tokens, window=settings.window, longest=longest(model)
    )
    whole = states.collect(
        model,
        windows,
        cache,
        fingerprint=fingerprint,
        memory=settings.memory,
        progress=lambda share: progress("running the body", share),
    )
    parts = states.split(whole)
    device = next(model.parameters()).device
    facts = TrainingText(
        sources=windows.sources,
        sha256=windows.sha256,
        window=windows.ids.shape[1],
        fit_tokens=len(parts.fit),
        choose_tokens=len(parts.choose),
        held_out_tokens=len(parts.held_out),
    )
    moved = states.Parts(
        fit=parts.fit.to(device), choose=parts.choose.to(device), held_out=parts.held_out.to(device)
    )
    return Text(parts=moved, facts=facts)


def fit(
    model: Any,
    plain: Head,
    text: Text,
    *,
    settings: Settings,
    candidates: Sequence[Candidate] = (),
    directory: Path | None = None,
    progress: Progress = lambda stage, share: None,
) -> UpgradeTraining:
    """Train `model.lm_head` and both controls; the head of the best seed on the choosing text stays in it.

    `plain` is the original output layer as a head: `upgrade(original, "softmax").lm_head`. In `directory`
    trainings are kept, and the same call after a crash goes on from there; the caller removes it.
    """
    head: Head = model.lm_head
    record, best = fit_head(
        head,
        plain,
        text,
        settings=settings,
        candidates=candidates,
        tied=_tied(model),
        directory=directory,
        progress=progress,
    )
    best.into(head)
    if record.untied:
        untie(model)
    return record


def fit_head(
    head: Head,
    plain: Head,
    text: Text,
    *,
    settings: Settings,
    candidates: Sequence[Candidate] = (),
    tied: bool = False,
    directory: Path | None = None,
    progress: Progress = lambda stage, share: None,
) -> tuple[UpgradeTraining, trainee.Trainee]:
    """The same without a model: the record, and the best seed's weights."""
    if head.name in CONTROLS:
        raise FullrankError(
            f"{head.name} is what an upgraded head is held against: name another head to train, such as mos"
        )
    started = time.monotonic()
    setting = setting_for(head, plain, text, settings)
    heads: dict[str, Head] = {
        **controls(head, plain),
        head.name: head,
    }
    found: dict[str, list[training.Fitted]] = {}
    seconds: dict[str, float] = {}
    for place, (name, one) in enumerate(heads.items()):
        begun = time.monotonic()

        def report(seed: int, share: float, name: str = name, place: int = place) -> None:
            progress(f"training: {name}", (place + (seed + share) / settings.seeds) / len(heads))

        where = None if directory is None else directory / name
        # Of a control nothing is needed but its losses.
        found[name], weights = train_seeds(
            setting, one, settings, report, directory=where, wanted=name == head.name
        )
        seconds[name] = time.monotonic() - begun
    blocks = text.parts.held_out.blocks.flatten()
    rows = [_row(name, heads[name], setting, found[name], blocks, seconds[name]) for name in heads]
    best = found[head.name]
    # Whichever control did better where it counts: a head must beat both.
    control = min(
        CONTROLS,
        key=lambda name: sum(float(one.losses.double().mean()) for one in found[name]),
    )
    differences = [other.losses - one.losses for other, one in zip(found[control], best, strict=True)]
    saved = min(range(len(best)), key=lambda seed: best[seed].choose_loss)
    record = UpgradeTraining(
        text=text.facts,
        unfrozen=False,
        rows=setting.rows,
        exact=setting.sampled is None,
        seeds=settings.seeds,
        fits=tuple(rows),
        control=control,
        gain=estimates.mean_over_seeds(differences, blocks),
        gain_by_seed=tuple(float(one.double().mean()) for one in differences),
        saved_seed=saved,
        saved_loss=float(best[saved].losses.double().mean()),
        untied=tied and settings.matrix,
        candidates=tuple(candidates),
        seconds=time.monotonic() - started,
    )
    trained = trainee.Trainee(head, setting, settings.seed + saved).to(blocks.device)
    trained.load(weights)
    return record, trained


def worth_it(record: UpgradeTraining) -> bool:
    """Whether the whole interval of the gain over the better control lies above zero."""
    return record.gain.low > 0


def verdict(head: str, record: UpgradeTraining) -> str:
    """The gain in one sentence."""
    gain = record.gain
    figures = f"{gain.value:+.4f} nats per token (95%: {gain.low:+.4f} to {gain.high:+.4f})"
    over = f"over {record.control}, the better control"
    if worth_it(record):
        return f"{head} gained {figures} {over}."
    if gain.high < 0:
        return f"{head} lost against {record.control}, the better control: its gain is {figures}."
    return f"{head} showed no gain {over}: {figures}, an interval with 0 in it."


def untie(model: Any) -> None:
    """Say in the configuration that the output matrix is no longer the input embedding."""
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def _tied(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.lm_head.decoder.weight


def setting_for(head: Head, plain: Head, text: Text, settings: Settings) -> ready.Setting:
    """The text ready to train this head on, and any other that is or is not rows as it is."""
    exact = settings.exact
    if exact is None:
        device = plain.decoder.weight.device
        exact = device.type != "cpu" or plain.vocab <= SMALL_VOCABULARY or not isinstance(head, RowHead)
    return ready.prepare(
        plain,
        text.parts,
        rows=settings.rows,
        exact=exact,
        matrix=settings.matrix,
        # A quarter of the memory for one V-wide buffer, as in a diagnosis.
        limit=settings.memory // 4,
        seed=settings.seed,
        align=settings.align,
    )


def train_seeds(
    setting: ready.Setting,
    head: Head,
    settings: Settings,
    progress: Callable[[int, float], None],
    *,
    directory: Path | None = None,
    wanted: bool = True,
) -> tuple[list[training.Fitted], dict[str, Tensor]]:
    """One training a seed: the first races the learning rates, the others take its choice.

    Also the weights of the best one on the choosing text, which may be missing where they are not `wanted`.
    """
    found: list[training.Fitted] = []
    best: dict[str, Tensor] = {}
    for number in range(settings.seeds):

        def report(share: float, number: int = number) -> None:
            progress(number, share)

        one, weights = training.train(
            setting,
            head,
            rates=settings.rates if number == 0 else (found[0].rate,),
            epochs=settings.epochs,
            patience=settings.patience,
            seed=settings.seed + number,
            file=None if directory is None else directory / f"seed{settings.seed + number}.safetensors",
            wanted=wanted,
            progress=report,
        )
        if not found or one.choose_loss < min(other.choose_loss for other in found):
            best = weights
        found.append(one)
    return found, best


def _row(
    name: str,
    head: Head,
    setting: ready.Setting,
    found: Sequence[training.Fitted],
    blocks: Tensor,
    seconds: float,
) -> TrainedHead:
    held_out = setting.parts.held_out
    with torch.no_grad():
        before = trainee.Trainee(head, setting, 0).to(held_out.targets.device).exact_losses(held_out)
    mean = torch.stack([one.losses for one in found]).mean(dim=0)
    return TrainedHead(
        head=name,
        parameters=size(head),
        trained=found[0].trained,
        before=estimates.mean(before, blocks),
        before_error=estimates.mean_and_error(before, blocks)[1],
        after=estimates.mean_over_seeds([one.losses for one in found], blocks),
        after_error=estimates.mean_and_error(mean, blocks)[1],
        choose_loss=sum(one.choose_loss for one in found) / len(found),
        after_by_seed=tuple(float(one.losses.double().mean()) for one in found),
        rate=found[0].rate,
        steps=tuple(one.steps for one in found),
        seconds=seconds,
    )
