"""A run or a model over training: curves of every metric, saturation, and the scaling law.

The curves come from a CSV file (`curves.py`), or from checkpoints, each of which is diagnosed with the cheap
questions. Then `saturation.py` tests each curve of the primary metric, and `scaling.py` holds the final
checkpoints of models of several sizes against a law. Needs no torch where the curves come from a file.
Directories of training runs are read from their logs (`trainings`), and their validation losses tested.

What is found is what the curves show. Why a curve turned is another matter: low rank of the output layer
comes with late degradation (Godey et al. 2024, arXiv:2404.07647), but in 108 controlled runs batch size and
weight decay drove it, not rank (Kulkarni et al. 2026, arXiv:2602.20433). Models of one size that differ in
one thing are therefore put side by side.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fullrank.diagnose import curves as reading
from fullrank.diagnose import scaling as law
from fullrank.diagnose.saturation import LEVEL, MATERIAL_PERCENT, saturation
from fullrank.errors import FullrankError
from fullrank.results.diagnosis import Diagnosis
from fullrank.results.series import Curve, Saturation, Scaling, Series
from fullrank.results.training import Training, Trainings
from fullrank.results.training_log import is_run, read_log

Progress = Callable[[str, float], None]

QUESTIONS = ("loss", "spectrum", "anisotropy", "logprob_rank")
"""What a checkpoint is asked: everything that trains nothing."""
CHECKPOINT_METRIC = "nats_per_token"
_STEP = re.compile(r"(?:global[-_]?step|step|checkpoint|ckpt|iter)[-_=]?(\d+)", re.IGNORECASE)


def run(
    sources: Sequence[str | Path],
    *,
    metric: str | None = None,
    text: Sequence[Path] = (),
    revisions: Sequence[str] = (),
    tokens_per_step: float | None = None,
    fit_from: float = law.FIT_FROM,
    diagnose: Callable[..., Diagnosis] | None = None,
    progress: Progress = lambda label, share: None,
    seed: int = 0,
) -> Series:
    """Analyse a CSV file of curves, directories of checkpoints, or revisions of a hub model."""
    if tokens_per_step is not None and not (math.isfinite(tokens_per_step) and tokens_per_step > 0):
        raise FullrankError(f"--tokens-per-step {tokens_per_step} is impossible: expected a positive number")
    if not sources:
        raise FullrankError(
            "nothing to read: pass a CSV file, checkpoint directories, or a model with --revisions"
        )
    files = [source for source in sources if str(source).lower().endswith(".csv")]
    if files:
        if len(sources) > 1:
            raise FullrankError("a CSV file stands alone: pass one CSV file, or only checkpoints")
        if revisions or text:
            raise FullrankError("--revisions and --text are for checkpoints: leave them out with a CSV file")
        table = reading.read(Path(files[0]))
    else:
        table = _diagnosed(sources, text=text, revisions=revisions, diagnose=diagnose, progress=progress)
    primary = reading.primary(table.metrics, metric)
    notes = list(table.notes)
    curves = table.curves
    if reading.lower_is_better(primary) is None:
        curves = tuple(_as_loss(one) if one.metric == primary else one for one in curves)
        notes.append(f"lower {primary} was taken to be better, because its name does not tell")
    tested = [one for one in curves if one.metric == primary]
    found = []
    for place, one in enumerate(tested):
        progress(f"testing {one.model}", place / len(tested))
        found.append(saturation(one, seed=seed))
    scaling, reason = _scaling(
        tested, table, tokens_per_step=tokens_per_step, fit_from=fit_from, metric=primary, seed=seed
    )
    progress("done", 1.0)
    return Series(
        source=", ".join(map(str, sources)),
        metric=primary,
        curves=curves,
        saturation=tuple(found),
        level=LEVEL,
        material_percent=MATERIAL_PERCENT,
        scaling=scaling,
        scaling_reason=reason,
        controls=tuple(controls(found)),
        notes=tuple(notes),
    )


def are_runs(sources: Sequence[str | Path]) -> bool:
    """Whether all sources are directories of training runs; raises where only some are."""
    runs = [source for source in sources if is_run(Path(source))]
    if runs and len(runs) < len(sources):
        other = next(source for source in sources if source not in runs)
        raise FullrankError(
            f"{runs[0]} is a training run and {other} is none: pass runs alone, or the other inputs alone"
        )
    return bool(runs)


def trainings(
    sources: Sequence[str | Path],
    *,
    progress: Progress = lambda label, share: None,
    seed: int = 0,
) -> Training | Trainings:
    """The records of training runs from their logs, each with the test of its validation loss."""
    found = []
    for place, source in enumerate(sources):
        progress(f"reading {Path(source).name}", place / len(sources))
        found.append(judged(read_log(Path(source)), seed=seed))
    progress("done", 1.0)
    return found[0] if len(found) == 1 else Trainings(runs=tuple(found))


def judged(run: Training, *, seed: int = 0) -> Training:
    """The run with what the saturation test says of its validation loss."""
    curve = reading.validation(run)
    return dataclasses.replace(run, saturation=saturation(curve, seed=seed) if curve.steps else None)


def _as_loss(one: Curve) -> Curve:
    """A curve whose name tells no direction, read as a loss: lower is better."""
    kept = [place for place, value in enumerate(one.values) if value > 0]
    errors = one.standard_errors
    return Curve(
        model=one.model,
        shots=one.shots,
        metric=one.metric,
        unit=one.unit,
        lower_is_better=True,
        steps=tuple(one.steps[place] for place in kept),
        values=tuple(one.values[place] for place in kept),
        standard_errors=None if errors is None else tuple(errors[place] for place in kept),
        dropped=one.dropped + len(one.values) - len(kept),
    )


def step_of(name: str) -> int | None:
    """The step in a name such as step1000, checkpoint-500 or global_step10; None where there is none."""
    found = _STEP.findall(name)
    return int(found[-1]) if found else None


def _diagnosed(
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
    for place, (model, step, source, revision) in enumerate(jobs):
        label = f"{Path(str(source)).name}{f' {revision}' if revision else ''}"
        progress(f"diagnosing {label}", place / len(jobs))
        record = diagnose(source, text=tuple(text), only=QUESTIONS, revision=revision)
        parameters[model] = float(record.model.parameters)
        for metric, value, error in _figures(record):
            points.setdefault((metric, model), []).append((step, value, error))
        notes += [f"{label}: no {missing.question} ({missing.reason})" for missing in record.missing
                  if missing.question in QUESTIONS]  # fmt: skip
    drawn = tuple(
        reading.curve(model=model, shots=None, metric=metric, points=part)
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


METRICS = (CHECKPOINT_METRIC, "effective_rank", "singular_entropy", "last_layer_cosine", "least_rank")


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


def _scaling(
    tested: Sequence[Curve],
    table: reading.Table,
    *,
    tokens_per_step: float | None,
    fit_from: float,
    metric: str,
    seed: int,
) -> tuple[Scaling | None, str]:
    """The fit over final checkpoints, or why there is none."""
    if not (math.isfinite(fit_from) and fit_from > 0):
        raise FullrankError(f"--fit-from {fit_from} is impossible: expected a positive number of parameters")
    shots = min((one.shots for one in tested if one.shots is not None), default=None)
    finals = [one for one in tested if one.shots == shots and one.steps]
    if not finals or not finals[0].lower_is_better:
        return None, f"the law describes losses, and {metric} is none: choose a loss with --metric"
    notes = []
    named = [one.model for one in finals if one.model not in table.parameters]
    sizes = {one.model: table.parameters.get(one.model) or law.parameters_of(one.model) for one in finals}
    unknown = [model for model, count in sizes.items() if count is None]
    if len(unknown) == len(sizes):
        return None, "parameter counts are neither in a column nor in the names: add a column parameters"
    if unknown:
        notes.append(f"left out, because the number of parameters is not known: {', '.join(unknown)}")
    if set(named) - set(unknown):
        notes.append("parameter counts were read from the names")
    models = []
    perplexity = reading.is_perplexity(metric)
    for one in finals:
        count = sizes[one.model]
        if count is None:
            continue
        tokens = table.tokens.get((one.model, one.steps[-1]))
        if tokens is None:
            batch = law.batch_of(one.model) if tokens_per_step is not None else None
            if batch is not None:
                notes.append(f"the batch of {one.model}, {batch:,.0f} tokens a step, was read from its name")
            each = batch or tokens_per_step
            if each is None:
                return (
                    None,
                    "the number of training tokens is not known: pass --tokens-per-step or a column tokens",
                )
            tokens = each * one.steps[-1]
        if tokens <= 0:
            return None, f"the last checkpoint of {one.model} is step 0: give checkpoints of a trained model"
        final, best = one.values[-1], min(one.values)
        error = one.standard_errors[-1] / final if one.standard_errors is not None else 0.0
        if perplexity:
            final, best = math.log(final), math.log(best)
            error = error / final if final > 0 else 0.0
        models.append(
            law.Model(
                name=one.model, parameters=count, tokens=tokens, final=final, best=best, relative_error=error
            )
        )
    if shots is not None and len({one.shots for one in tested}) > 1:
        notes.append(f"over the {shots}-shot curves")
    published = not perplexity and finals[0].unit in ("nats", "nats per token")
    unit = f"nats, the logarithm of {metric}" if perplexity else finals[0].unit
    try:
        fitted = law.fit(
            models,
            metric=metric,
            unit=unit,
            shots=shots,
            published=published,
            fit_from=fit_from,
            notes=notes,
            seed=seed,
        )
    except law.NoFitError as error:
        return None, str(error)
    return fitted, ""


def controls(found: Sequence[Saturation]) -> list[str]:
    """A sentence or two for every model beside a variant of the same size: what differs, and what turned."""
    families: dict[tuple[str, int | None], list[Saturation]] = {}
    for one in found:
        base = _family(one.model)
        if base is not None and one.points:
            families.setdefault((base, one.shots), []).append(one)
    sentences = []
    for (base, shots), members in families.items():
        first, *others = sorted(members, key=lambda one: (len(one.model), one.model))
        for other in others:
            with_shots = "" if shots is None else f" ({shots}-shot)"
            named = " and ".join(f"{one.model[len(base) :].lstrip('-_') or 'none'}" for one in (first, other))
            sentences.append(
                f"{first.model} and {other.model}{with_shots} share the size in their names and differ "
                f"in the suffix ({named}): {_verdict(first)}; {_verdict(other)}. {_comparison(first, other)}"
            )
    return sentences


def _family(model: str) -> str | None:
    """The name up to and with its size: variants of one size share it."""
    part = law.size(model)
    return None if part is None else model[: model.index(part) + len(part)]


def _verdict(one: Saturation) -> str:
    low, high = one.interval
    between = "" if math.isnan(low) else f" ({low:.0f} to {high:.0f}%)"
    if one.reason:
        return f"{one.model} could not be tested ({one.reason})"
    if one.saturated:
        return f"{one.model} turned after step {one.best_step:,} and lost {one.lost_percent:.1f}%{between}"
    return f"{one.model} shows no turn, with {one.lost_percent:.1f}%{between} from best to last"


def _comparison(first: Saturation, other: Saturation) -> str:
    if first.reason or other.reason:
        return "Nothing follows from the pair."
    if first.saturated != other.saturated:
        return (
            "Same size and so, as models of one family go, the same width: width alone does not explain the "
            "difference. What does, one pair cannot show."
        )
    if not first.saturated:
        return "Neither turned."
    apart = first.interval[0] > other.interval[1] or other.interval[0] > first.interval[1]
    if apart:
        return (
            "Both turned, by different amounts at the same size and so, as models of one family go, the same "
            "width: width alone does not explain how much."
        )
    return "Both turned, and their losses agree within the intervals."
