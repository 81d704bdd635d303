"""A run or a model over training: curves of every metric, saturation, and the scaling law.

The curves come from a CSV file (`curves.py`), or from checkpoints, each of which is diagnosed with the cheap
questions (`checkpoint_curves.py`). Then `saturation.py` tests each curve of the primary metric, and
`scaling.py` holds the final checkpoints of models of several sizes against a law. Needs no torch where the
curves come from a file. Directories of training runs are read by `runs.py`.

What is found is what the curves show. Why a curve turned is another matter: low rank of the output layer
comes with late degradation (Godey et al. 2024, arXiv:2404.07647), but in 108 controlled runs batch size and
weight decay drove it, not rank (Kulkarni et al. 2026, arXiv:2602.20433). Models of one size that differ in
one thing are therefore put side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from fullrank.diagnose.series import curves as reading
from fullrank.diagnose.series import scaling as law
from fullrank.diagnose.series.checkpoint_curves import Progress, diagnosed
from fullrank.diagnose.series.saturation import LEVEL, MATERIAL_PERCENT, saturation
from fullrank.errors import FullrankError
from fullrank.results.diagnosis import Diagnosis
from fullrank.results.series import Curve, Saturation, Scaling, Series


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
        table = diagnosed(sources, text=text, revisions=revisions, diagnose=diagnose, progress=progress)
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
