"""Which head to give a model: short trainings of several, each against its controls.

The one with the largest gain on the text for choosing is named. Whether it is worth it is then judged by a
full training, on text that no choice has seen.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

from fullrank.errors import FullrankError
from fullrank.fit import comparison as fit
from fullrank.fit import controls
from fullrank.heads import HEADS, Head
from fullrank.results.upgrade import Candidate


def candidates() -> tuple[str, ...]:
    """What `--head auto` tries: heads that are worth it and rows over one matrix."""
    return tuple(name for name, head in HEADS.items() if head.worth_trying and head.splits)


def choose_head(
    heads: dict[str, Head],
    plain: Head,
    text: fit.Text,
    *,
    settings: fit.Settings,
    refused: dict[str, str] | None = None,
    directory: Path | None = None,
    progress: fit.Progress = lambda stage, share: None,
) -> tuple[str, tuple[Candidate, ...]]:
    """The head furthest below the better of its controls on the text for choosing, after short trainings.

    `heads` are rows over one matrix, `refused` others with the reason why they are not tried. What is kept in
    `directory` lets the same call go on after a crash.
    """
    if not heads:
        raise FullrankError("there is no head to choose from: name one with --head")
    short = dataclasses.replace(settings, epochs=max(1, settings.epochs // 2), seeds=1)
    setting = fit.setting_for(next(iter(heads.values())), plain, text, short)
    tried = []
    # The original's own head is a control of every head, and trained once.
    known: dict[tuple[int, bool], float] = {}
    for place, (name, head) in enumerate(heads.items()):
        begun = time.monotonic()
        found: dict[str, float] = {}
        for number, (label, one) in enumerate({**controls.controls(head, plain), name: head}.items()):

            def report(seed: int, share: float, name: str = name, done: float = place + number / 3) -> None:
                progress(f"choosing: {name}", (done + share / 3) / len(heads))

            kind = (controls.size(one), one.decoder.bias is not None)
            if label in controls.CONTROLS and kind in known:
                found[label] = known[kind]
                continue
            if directory is None:
                where = None
            elif label in controls.CONTROLS:
                where = directory / f"softmax-{kind[0]}{'-bias' if kind[1] else ''}"
            else:
                where = directory / name
            fitted, _ = fit.train_seeds(setting, one, short, report, directory=where, wanted=False)
            found[label] = fitted[0].choose_loss
            if label in controls.CONTROLS:
                known[kind] = found[label]
        tried.append(
            Candidate(
                head=name,
                choose_loss=found[name],
                control_loss=min(found[control] for control in controls.CONTROLS),
                seconds=time.monotonic() - begun,
                reason="",
            )
        )
    best = max(tried, key=lambda one: one.control_loss - one.choose_loss).head
    left = [
        Candidate(head=name, choose_loss=math.nan, control_loss=math.nan, seconds=0.0, reason=reason)
        for name, reason in (refused or {}).items()
    ]
    return best, (*tried, *left)
