"""Train the head of an upgraded model on the states of its frozen body, against its controls.

The body runs once over the text; its states are kept in files (`fit.states`). Then heads and controls are
fitted on them as a diagnosis fits them (`fit.comparison`), so that both give one answer. Of several heads the
best on the text for choosing is taken. The gain is what the head buys this body, frozen, on this text; not
what a body trained with the head would reach. With a teacher (`teaching`) heads and controls are trained on
KL(teacher || head), and the gain in that is recorded beside the gain in loss.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullrank.errors import FullrankError
from fullrank.fit import collect as windows_of
from fullrank.fit import comparison, estimates, states
from fullrank.fit.comparison import Comparison, Progress, Settings
from fullrank.fit.controls import CONTROLS, size
from fullrank.heads import Head
from fullrank.models.anatomy import longest
from fullrank.results import Estimate
from fullrank.results.upgrade import Candidate, TrainedHead, TrainingText, UpgradeTraining
from fullrank.upgrade.teaching import TeacherModel, distance

NOTHING = 5e-5
"""Nats per token that are printed as 0: rounding, where head and control are the same."""


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
    models: Mapping[str, Any],
    plain: Head,
    text: Text,
    *,
    settings: Settings,
    refused: Mapping[str, str] | None = None,
    directory: Path | None = None,
    teacher: TeacherModel | None = None,
    progress: Progress = lambda stage, share: None,
) -> tuple[str, UpgradeTraining]:
    """Train the heads of some models over one body; the name of the best, whose trained head stays in its
    model, and the record.

    `plain` is the original output layer as a head: `upgrade(original, "softmax").lm_head`. `refused` are
    heads that could not be tried, with the reason. In `directory` trainings are kept, and the same call after
    a crash goes on from there; the caller removes it.
    """
    heads = {name: model.lm_head for name, model in models.items()}
    known = [name for name in heads if name in CONTROLS]
    if known:
        raise FullrankError(
            f"{known[0]} is what an upgraded head is held against: name another head to train, such as mos"
        )
    started = time.monotonic()
    setting = comparison.setting_for(list(heads.values()), plain, text.parts, settings, teacher)
    found = comparison.compare(setting, heads, settings=settings, directory=directory, progress=progress)
    name = found.best
    model = models[name]
    best, gained = found.fits[name], found.gain_over_best(name, found.losses)
    tried = _candidates(found, refused or {}) if len(heads) > 1 else ()
    saved = min(range(len(best)), key=lambda seed: best[seed].choose_loss)
    record = UpgradeTraining(
        text=text.facts,
        unfrozen=False,
        rows=found.setting.rows,
        exact=found.setting.sampled is None,
        seeds=settings.seeds,
        fits=tuple(_row(found, one) for one in (*CONTROLS, name)),
        control=gained.control,
        gain=gained.mean,
        gain_by_seed=gained.by_seed,
        saved_seed=saved,
        saved_loss=float(best[saved].losses.double().mean()),
        untied=_tied(model) and settings.matrix,
        candidates=tried,
        seconds=time.monotonic() - started,
        teacher=None if teacher is None else teacher.record(found.gain_over_best(name), setting.limit),
    )
    with torch.no_grad():
        found.fitted(name).into(model.lm_head)
    if record.untied:
        untie(model)
    return name, record


def _candidates(found: Comparison, refused: Mapping[str, str]) -> tuple[Candidate, ...]:
    control = min(found.fits[name][0].choose_loss for name in CONTROLS)
    tried = [
        Candidate(
            head=name, choose_loss=fits[0].choose_loss, control_loss=control, seconds=found.seconds[name],
            reason="",
        )
        for name, fits in found.fits.items()
        if name not in CONTROLS
    ]  # fmt: skip
    left = [
        Candidate(head=name, choose_loss=math.nan, control_loss=math.nan, seconds=0.0, reason=reason)
        for name, reason in refused.items()
    ]
    return (*tried, *left)


def worth_it(record: UpgradeTraining) -> bool:
    """Whether the whole interval of the gain over the better control, in what was trained on, lies above
    zero."""
    gain = record.gain if record.teacher is None else record.teacher.gain
    return gain.low > 0 and abs(gain.value) >= NOTHING


def verdict(head: str, record: UpgradeTraining) -> str:
    """The gain in one sentence; with a teacher the gain in KL, and then the gain in loss."""
    plain = _sentence(head, record.gain, record.control)
    taught = record.teacher
    if taught is None:
        return plain
    near = f"In KL from {taught.model.name}, {_sentence(head, taught.gain, taught.control)}"
    return f"{near} In loss on the text, {plain}"


def _sentence(head: str, gain: Estimate, control: str) -> str:
    figures = f"{gain.value:+.4f} nats per token (95%: {gain.low:+.4f} to {gain.high:+.4f})"
    over = f"over {control}, the better control"
    if abs(gain.value) < NOTHING:
        return f"{head} showed no gain {over}: {figures}."
    if gain.low > 0:
        return f"{head} gained {figures} {over}."
    if gain.high < 0:
        return f"{head} lost against {control}, the better control: its gain is {figures}."
    return f"{head} showed no gain {over}: {figures}, an interval with 0 in it."


def untie(model: Any) -> None:
    """Say in the configuration that the output matrix is no longer the input embedding."""
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def _tied(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.lm_head.decoder.weight


def _row(found: Comparison, name: str) -> TrainedHead:
    fits, blocks = found.fits[name], found.blocks
    mean = torch.stack([one.losses for one in fits]).mean(dim=0)
    return TrainedHead(
        head=name,
        parameters=size(found.heads[name]),
        trained=fits[0].trained,
        before=estimates.mean(found.original, blocks),
        before_error=estimates.mean_and_error(found.original, blocks)[1],
        after=estimates.mean_over_seeds([one.losses for one in fits], blocks),
        after_error=estimates.mean_and_error(mean, blocks)[1],
        choose_loss=sum(one.choose_loss for one in fits) / len(fits),
        after_by_seed=tuple(float(one.losses.double().mean()) for one in fits),
        rate=fits[0].rate,
        steps=tuple(one.steps for one in fits),
        seconds=found.seconds[name],
        distance=distance(found.original_divergences, found.divergences(name), blocks),
    )
