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
from fullrank.diagnose.series.saturation import LEVEL, MATERIAL_PERCENT, Tested, difference, holm, saturations
from fullrank.errors import FullrankError
from fullrank.results.diagnosis import Diagnosis
from fullrank.results.series import TURNED, UNDECIDED, Curve, Saturation, Scaling, Series


def run(
    sources: Sequence[str | Path],
    *,
    metric: str | None = None,
    text: Sequence[Path] = (),
    revisions: Sequence[str] = (),
    tokens_per_step: float | None = None,
    fit_from: float = law.FIT_FROM,
    web_text: bool = False,
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
    chosen = [one for one in curves if one.metric == primary]
    progress(f"testing {len(chosen)} curves", 0.5)
    found = saturations(chosen, seed=seed)
    scaling, reason = _scaling(
        chosen, table, tokens_per_step=tokens_per_step, fit_from=fit_from, metric=primary, web_text=web_text
    )
    progress("done", 1.0)
    return Series(
        source=", ".join(map(str, sources)),
        metric=primary,
        curves=curves,
        saturation=tuple(one.record for one in found),
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
    return Curve(
        model=one.model,
        shots=one.shots,
        metric=one.metric,
        unit=one.unit,
        lower_is_better=True,
        steps=tuple(one.steps[place] for place in kept),
        values=tuple(one.values[place] for place in kept),
        standard_errors=_at(kept, one.standard_errors),
        paired_errors=_at(kept, one.paired_errors),
        dropped=one.dropped + len(one.values) - len(kept),
    )


def _at(places: Sequence[int], values: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(values[place] for place in places)


def _scaling(
    tested: Sequence[Curve],
    table: reading.Table,
    *,
    tokens_per_step: float | None,
    fit_from: float,
    metric: str,
    web_text: bool,
) -> tuple[Scaling | None, str]:
    """The fit over final checkpoints, or why there is none."""
    if not (math.isfinite(fit_from) and fit_from > 0):
        raise FullrankError(f"--fit-from {fit_from} is impossible: expected a positive number of parameters")
    perplexity = reading.is_perplexity(metric)
    if web_text and (perplexity or reading.unit(metric) not in ("nats", "nats per token")):
        raise FullrankError(
            f"--web-text is for losses in nats per token, and {metric} is none: leave out --web-text"
        )
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
        if perplexity:
            final, best = math.log(final), math.log(best)
        models.append(law.Model(name=one.model, parameters=count, tokens=tokens, final=final, best=best))
    if shots is not None and len({one.shots for one in tested}) > 1:
        notes.append(f"over the {shots}-shot curves")
    unit = f"nats, the logarithm of {metric}" if perplexity else finals[0].unit
    try:
        fitted = law.fit(
            models,
            metric=metric,
            unit=unit,
            shots=shots,
            published=web_text,
            fit_from=fit_from,
            notes=notes,
        )
    except law.NoFitError as error:
        return None, str(error)
    return fitted, ""


def controls(found: Sequence[Tested]) -> list[str]:
    """A few sentences for every model beside a variant of the same size: what differs, and a test of it."""
    families: dict[tuple[str, int | None], list[Tested]] = {}
    for one in found:
        base = _family(one.record.model)
        if base is not None and one.record.points:
            families.setdefault((base, one.record.shots), []).append(one)
    pairs = []
    for (base, shots), members in families.items():
        first, *others = sorted(members, key=lambda one: (len(one.record.model), one.record.model))
        pairs += [(base, shots, first, other) for other in others]
    # Pairs are read one by one as well, so one false difference among all of them must be rare.
    gaps = [difference(first, other) if len(first.losses) and len(other.losses) else None
            for _, _, first, other in pairs]  # fmt: skip
    adjusted = iter(holm([gap[2] for gap in gaps if gap is not None]))
    sentences = []
    for (base, shots, first, other), gap in zip(pairs, gaps, strict=True):
        models = [one.record.model for one in (first, other)]
        suffixes = " and ".join(model[len(base) :].lstrip("-_") or "none" for model in models)
        with_shots = "" if shots is None else f" ({shots}-shot)"
        sentences.append(
            f"{' and '.join(models)}{with_shots} share the size in their names and differ in the suffix "
            f"({suffixes}): {_verdict(first.record)}; {_verdict(other.record)}. "
            + (
                "Nothing follows from the pair."
                if gap is None
                else _comparison(first, other, gap, next(adjusted))
            )
        )
    return sentences


def _family(model: str) -> str | None:
    """The name up to and with its size: variants of one size share it."""
    part = law.size(model)
    return None if part is None else model[: model.index(part) + len(part)]


def _verdict(one: Saturation) -> str:
    low, high = one.interval
    if one.reason:
        return f"{one.model} could not be tested ({one.reason})"
    lost = f"{one.lost_percent:.1f}% ({low:.0f} to {high:.0f}%)"
    if one.outcome == TURNED:
        return f"{one.model} turned after step {one.best_step:,} and lost {lost}"
    if one.outcome == UNDECIDED:
        return f"{one.model} is undecided, with {lost} from best to last"
    return f"{one.model} did not turn, with {lost} from best to last"


def _comparison(first: Tested, other: Tested, gap: tuple[float, float, float], p_value: float) -> str:
    """What a test of the difference says; two intervals or two verdicts would say nothing of it."""
    points = first.record.lost_percent - other.record.lost_percent
    tail = f"{points:+.1f} points ({gap[0]:+.0f} to {gap[1]:+.0f}, p = {p_value:.2g} over all pairs)"
    if p_value >= LEVEL:
        return f"Noise can have made the difference of {tail}: nothing follows from the pair."
    return (
        f"They differ by {tail} at the same size and so, as models of one family go, the same width: width "
        "alone does not explain the difference. What does, one pair cannot show."
    )
