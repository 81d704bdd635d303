"""Curves from checkpoints: each is diagnosed with the questions that train nothing, at the step in its name.

A checkpoint is a directory (step1000, checkpoint-500), whose model is the directory around it, or a revision
of a hub model. Where the names do not tell the steps, the order given does.

All checkpoints read the same text. With S_b the difference of their summed losses in block b of n_b tokens, B
blocks and mean difference d, the standard error of the difference of two checkpoints is

    sqrt( B / (B - 1)  Σ (S_b - n_b d)² ) / Σ n_b,

mostly far below the standard error of either loss: the same blocks are hard for both.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fullrank.diagnose.series import curves as reading
from fullrank.errors import FullrankError
from fullrank.results.diagnosis import Diagnosis, Loss
from fullrank.results.series import Curve

Progress = Callable[[str, float], None]

QUESTIONS = ("loss", "spectrum", "anisotropy", "logprob_rank")
"""What a checkpoint is asked: everything that trains nothing."""
CHECKPOINT_METRIC = "nats_per_token"
METRICS = (CHECKPOINT_METRIC, "effective_rank", "singular_entropy", "last_layer_cosine", "least_rank")
_STEP = re.compile(r"(?:global[-_]?step|step|checkpoint|ckpt|iter)[-_=]?(\d+)", re.IGNORECASE)


def diagnosed(
    sources: Sequence[str | Path],
    *,
    text: Sequence[Path],
    revisions: Sequence[str],
    diagnose: Callable[..., Diagnosis] | None,
    progress: Progress,
) -> reading.Table:
    """Curves of checkpoints, each diagnosed in turn."""
    jobs, notes = _jobs(sources, revisions)
    if diagnose is None:
        # Late, so that curves from a file need no torch.
        from fullrank.diagnose.diagnosis import run as diagnose
    assert diagnose is not None
    points: dict[tuple[str, str], list[tuple[int, float, float | None]]] = {}
    parameters: dict[str, float] = {}
    losses: dict[tuple[str, int], Loss] = {}
    for place, (model, step, source, revision) in enumerate(jobs):
        label = f"{Path(str(source)).name}{f' {revision}' if revision else ''}"
        progress(f"diagnosing {label}", place / len(jobs))
        record = diagnose(source, text=tuple(text), only=QUESTIONS, revision=revision)
        parameters[model] = float(record.model.parameters)
        if record.loss is not None:
            losses[model, step] = record.loss
        for metric, value, error in _figures(record):
            points.setdefault((metric, model), []).append((step, value, error))
        notes += [f"{label}: no {missing.question} ({missing.reason})" for missing in record.missing
                  if missing.question in QUESTIONS]  # fmt: skip
    drawn = tuple(
        _paired(reading.curve(model=model, shots=None, metric=metric, points=part), losses)
        for (metric, model), part in sorted(points.items(), key=lambda item: METRICS.index(item[0][0]))
    )
    if not drawn:
        raise FullrankError("no checkpoint gave a figure: run fullrank diagnose on one of them to see why")
    return reading.Table(
        metrics=tuple(dict.fromkeys(one.metric for one in drawn)),
        curves=drawn,
        parameters=parameters,
        tokens={},
        notes=(*notes, *reading.dropped_notes(drawn)),
    )


def _paired(curve: Curve, losses: dict[tuple[str, int], Loss]) -> Curve:
    """A curve of losses with the errors of differences between neighbouring checkpoints."""
    if curve.metric != CHECKPOINT_METRIC or len(curve.steps) < 2:
        return curve
    every = [losses[curve.model, step] for step in curve.steps]
    if len({one.block_tokens for one in every}) > 1 or len(every[0].block_tokens) < 2:
        return curve
    errors = [paired_error(before, after) for before, after in itertools.pairwise(every)]
    return dataclasses.replace(curve, paired_errors=(errors[0], *errors))


def paired_error(first: Loss, other: Loss) -> float:
    """Standard error of the difference of two losses on the same blocks of text."""
    sums = [one - two for one, two in zip(first.block_nats, other.block_nats, strict=True)]
    total, count = sum(first.block_tokens), len(sums)
    mean = sum(sums) / total
    squares = sum((one - size * mean) ** 2 for one, size in zip(sums, first.block_tokens, strict=True))
    return math.sqrt(count / (count - 1) * squares) / total


def _figures(record: Diagnosis) -> list[tuple[str, float, float | None]]:
    """Metric, value and standard error of one checkpoint, for the questions that have an answer."""
    found: list[tuple[str, float, float | None]] = []
    if record.loss is not None:
        found.append((CHECKPOINT_METRIC, record.loss.nats_per_token.value, record.loss.standard_error))
    if record.spectrum is not None:
        found.append(("effective_rank", record.spectrum.effective_rank, None))
        found.append(("singular_entropy", record.spectrum.singular_entropy, None))
    if record.anisotropy is not None and record.anisotropy.layers:
        cosine = record.anisotropy.layers[-1].cosine
        # The 95% interval of a mean is 1.96 standard errors to either side.
        error = (cosine.high - cosine.low) / (2 * 1.96)
        found.append(("last_layer_cosine", cosine.value, error))
    if record.logprob_rank is not None:
        found.append(("least_rank", float(record.logprob_rank.least_rank), None))
    return found


def _jobs(
    sources: Sequence[str | Path], revisions: Sequence[str]
) -> tuple[list[tuple[str, int, str | Path, str | None]], list[str]]:
    """Model, step, source and revision of every checkpoint, and what was assumed."""
    if revisions:
        if len(sources) > 1:
            raise FullrankError(f"--revisions are of one model, {len(sources)} came: pass one model")
        steps, notes = _steps([str(revision) for revision in revisions])
        return [
            (str(sources[0]), step, sources[0], name) for step, name in zip(steps, revisions, strict=True)
        ], notes
    for source in sources:
        if Path(source).is_file():
            raise FullrankError(
                f"{source} is a file: pass a .csv file of curves, checkpoint directories, or a hub model"
            )
        if not Path(source).is_dir() and (
            str(source).startswith((".", "/", "~")) or str(source).count("/") > 1
        ):
            raise FullrankError(f"no checkpoint directory at {source}: correct the path")
    models = [_model_of(source) for source in sources]
    steps_by_model: dict[str, list[int]] = {}
    notes = []
    for model in dict.fromkeys(models):
        names = [Path(source).name for source, owner in zip(sources, models, strict=True) if owner == model]
        steps_by_model[model], assumed = _steps(names)
        notes += assumed
    return [(model, steps_by_model[model].pop(0), source, None)
            for model, source in zip(models, sources, strict=True)], notes  # fmt: skip


def _model_of(source: str | Path) -> str:
    """What a checkpoint is one of: the directory around it, or a hub model itself."""
    path = Path(source)
    if not path.is_dir():
        return str(source)
    return path.resolve().parent.name or str(path)


def _steps(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """The steps in the names or, where one has none or two are equal, the order given."""
    steps = [step_of(name) for name in names]
    if None not in steps and len(set(steps)) == len(steps):
        return [step for step in steps if step is not None], []
    order = list(range(1, len(names) + 1))
    if len(names) == 1:
        return order, []
    return order, [f"steps are the order given, because the names do not tell them all: {', '.join(names)}"]


def step_of(name: str) -> int | None:
    """The step in a name such as step1000, checkpoint-500 or global_step10; None where there is none."""
    found = _STEP.findall(name)
    return int(found[-1]) if found else None
