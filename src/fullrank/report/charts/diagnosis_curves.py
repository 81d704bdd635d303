"""The pictures of a diagnosis that are curves: losses, spectra, and geometry by layer.

Every function takes the models that have the section, one or several, and returns a picture. One model uses
a second colour for its second curve; several keep one colour each, and dashes tell the curves apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from fullrank.report.charts.axis import Axis
from fullrank.report.charts.curves import Curves, Point, Reference, Trace
from fullrank.report.charts.theme import HIGH_RANK_COLOUR, INK, MUTED, REFERENCE, Key
from fullrank.report.figures import figure, number, whole, whole_interval, with_interval
from fullrank.report.subject import Subject
from fullrank.results import Estimate

# Losses this far above the lowest are left out of the picture of ranks, so that the tolerance can be seen.
TALLEST = 0.5
# A noise line further than this below the smallest singular value would squeeze the curve into a stripe.
FARTHEST_NOISE = 1e-3
LOSS_AXIS = Axis(title="held-out loss, nats per token")


def loss(subjects: Sequence[Subject]) -> Curves:
    """Loss by position in the window."""
    return Curves(
        x=Axis(title="position in the window, from 1 (log scale)", log=True, powers_of_two=True),
        y=Axis(title="loss, nats per token"),
        traces=tuple(
            Trace(
                colour=one.colour,
                points=tuple(
                    Point(
                        x=math.sqrt((part.first + 1.0) * (part.last + 1.0)) if part.first >= 0 else math.nan,
                        y=part.nats,
                        summary=(
                            f"{one.name}, positions {part.first + 1} to {part.last + 1}: "
                            f"{with_interval(part.nats)} nats per token"
                        ),
                    )
                    for part in one.record.loss.by_position
                ),
            )
            for one in subjects
            if one.record.loss is not None
        ),
        legend=_models(subjects, Key(label="95% interval", colour=_second(subjects, INK, 0), mark="band")),
    )


def spectrum(subjects: Sequence[Subject]) -> Curves:
    """Singular values of the output matrix."""
    several = len(subjects) > 1
    traces, lines, notes, keys = [], [], [], []
    for one in subjects:
        section = one.record.spectrum
        if section is None:
            continue
        values = section.singular_values
        count = len(values)
        traces.append(
            Trace(
                colour=one.colour,
                points=tuple(Point(x=(place + 1) / count, y=value) for place, value in enumerate(values)),
                dots=count <= 48,
            )
        )
        least = min((value for value in values if value > 0), default=math.nan)
        if section.noise >= FARTHEST_NOISE * least:
            lines.append(Reference(value=section.noise, colour=one.colour if several else REFERENCE))
            keys.append(f"storage noise {number(section.noise)}")
        else:
            notes.append(
                f"{one.name + ': the' if several else 'The'} storage noise, {number(section.noise)}, lies "
                "below the picture."
            )
        if any(value <= 0 for value in values):
            notes.append("Singular values of 0 have no place on a log scale and are left out.")
    noise = (
        [Key(label="storage noise" if several else keys[0], colour=REFERENCE, mark="dashed")] if keys else []
    )
    return Curves(
        x=Axis(title="index of the singular value, as a share of their number", low=0.0, high=1.0),
        y=Axis(title="singular value (log scale)", log=True),
        traces=tuple(traces),
        horizontal=tuple(lines),
        legend=_models(subjects, *noise, alone="singular values"),
        notes=tuple(dict.fromkeys(notes)),
    )


def anisotropy(subjects: Sequence[Subject]) -> Curves:
    """Mean cosine by layer, as it is and with the mean removed."""
    traces = []
    for one in subjects:
        if one.record.anisotropy is None:
            continue
        layers = one.record.anisotropy.layers
        for centred in (False, True):
            traces.append(
                Trace(
                    colour=_second(subjects, one.colour) if centred else one.colour,
                    style="dashed" if centred else "line",
                    points=tuple(
                        Point(
                            x=float(layer.layer),
                            y=layer.cosine_centred if centred else layer.cosine,
                            summary=(
                                f"{one.name}, layer {layer.layer}: cosine {with_interval(layer.cosine)}, "
                                f"mean removed {with_interval(layer.cosine_centred)}"
                            ),
                        )
                        for layer in layers
                    ),
                )
            )
    return Curves(
        x=Axis(title="layer (0 is the embedding)"),
        y=Axis(title="mean cosine of two states"),
        traces=tuple(traces),
        horizontal=(Reference(value=0.0, colour=REFERENCE, style="line"),),
        legend=_models(
            subjects,
            Key(label="mean state removed", colour=_second(subjects, INK), mark="dashed"),
            alone="as it is",
        ),
    )


def logprob_rank(subjects: Sequence[Subject]) -> Curves:
    """Singular values of the centred log-probabilities, with floor, ceiling and least rank."""
    several = len(subjects) > 1
    traces, floors, ceilings, marked, keys = [], [], [], [], []
    for one in subjects:
        section = one.record.logprob_rank
        if section is None:
            continue
        values = section.singular_values
        points = tuple(Point(x=place + 1.0, y=value) for place, value in enumerate(values))
        traces.append(Trace(colour=one.colour, points=points, dots=len(values) <= 48))
        colour = one.colour if several else REFERENCE
        floors.append(Reference(value=section.noise_floor, colour=colour))
        ceilings.append(Reference(value=float(section.ceiling), colour=colour, style="dotted"))
        if 0 < section.least_rank <= len(values):
            at = Point(
                x=float(section.least_rank),
                y=values[section.least_rank - 1],
                summary=f"{one.name}: least rank {section.least_rank} of at most {section.ceiling}",
            )
            marked.append(Trace(colour=_second(subjects, one.colour), points=(at,)))
        keys = [
            Key(label=f"least rank {section.least_rank:,}", colour=_second(subjects, INK), mark="diamond"),
            Key(label=f"ceiling {section.ceiling:,}", colour=REFERENCE, mark="dotted"),
            Key(label=f"noise floor {number(section.noise_floor)}", colour=REFERENCE, mark="dashed"),
        ]
    if several:
        keys = [
            Key(label=words, colour=INK, mark=mark)
            for words, mark in (("least rank", "diamond"), ("ceiling", "dotted"), ("noise floor", "dashed"))
        ]
    return Curves(
        x=Axis(title="index of the singular value", low=0.0),
        y=Axis(title="singular value (log scale)", log=True),
        traces=tuple(traces),
        horizontal=tuple(floors),
        vertical=tuple(ceilings),
        marked=tuple(marked),
        legend=_models(subjects, *keys, alone="singular values"),
    )


def rank_needed(subjects: Sequence[Subject]) -> Curves:
    """Held-out loss by the rank of the output matrix, cut down and refitted, with the knee."""
    several = len(subjects) > 1
    traces, lines, knees, ranges, keys = [], [], [], [], []
    lowest, highest = math.inf, -math.inf
    measured: list[tuple[float, float]] = []
    for one in subjects:
        section = one.record.rank_needed
        if section is None:
            continue
        refitted = [(point.rank, point.refitted) for point in section.points if point.refitted is not None]
        truncated = [(point.rank, point.truncated) for point in section.points]
        for points, style, colour in (
            (refitted, "line", one.colour),
            (truncated, "dashed", _second(subjects, one.colour)),
        ):
            what = "refitted" if style == "line" else "cut down"
            traces.append(
                Trace(
                    colour=colour,
                    style=style,
                    points=tuple(
                        Point(
                            x=float(rank),
                            y=value,
                            summary=f"{one.name}, rank {rank} {what}: {with_interval(value)} nats per token",
                        )
                        for rank, value in points
                    ),
                )
            )
        finite = [value.value for _, value in (*refitted, *truncated) if LOSS_AXIS.holds(value.value)]
        lowest, highest = min([lowest, *finite]), max([highest, *finite])
        measured += [(float(rank), value.value) for rank, value in (*refitted, *truncated)]
        reference = refitted[-1][1].value if refitted else math.nan
        colour = one.colour if several else REFERENCE
        lines.append(Reference(value=reference + section.tolerance, colour=colour, style="dotted"))
        if not several:
            lines.append(Reference(value=section.original.value, colour=colour, style="line"))
        knees.append(Reference(value=section.knee.value, colour=colour, style="dashed"))
        ranges.append(Reference(value=section.knee.low, until=section.knee.high, colour=colour))
        keys = [
            Key(label="cut down", colour=_second(subjects, INK), mark="dashed"),
            Key(label=f"matrix as it came, {figure(section.original)}", colour=REFERENCE, mark="line"),
            Key(
                label=f"full-rank refit + tolerance of {number(section.tolerance)}",
                colour=REFERENCE,
                mark="dotted",
            ),
            Key(label=f"rank needed, {_knee(section.knee)}", colour=REFERENCE, mark="band"),
        ]
    if several:
        keys = [
            Key(label=words, colour=INK, mark=mark)
            for words, mark in (
                ("refitted", "line"),
                ("cut down", "dashed"),
                ("full-rank refit + tolerance", "dotted"),
                ("rank needed", "band"),
            )
        ]
    notes = []
    top = None
    if highest - lowest > TALLEST:
        top = lowest + TALLEST
        # From the last rank that is out of sight on: what lies before it would be empty.
        first = min(rank for rank, loss in measured if loss <= top)
        left = max((rank for rank, _ in measured if rank < first), default=first)
        traces = [
            dataclasses.replace(trace, points=tuple(point for point in trace.points if point.x >= left))
            for trace in traces
        ]
        notes.append(
            f"Losses more than {number(TALLEST)} nats above the lowest run out of the picture at the top; "
            "the table has them all."
        )
    return Curves(
        x=Axis(title="rank of the output matrix (log scale)", log=True, powers_of_two=True),
        y=dataclasses.replace(LOSS_AXIS, high=top),
        traces=tuple(traces),
        horizontal=tuple(lines),
        vertical=tuple(knees),
        ranges=tuple(ranges),
        legend=_models(subjects, *keys, alone="refitted"),
        notes=tuple(notes),
    )


def _knee(knee: Estimate) -> str:
    if not math.isfinite(knee.value):
        return "not found"
    between = whole_interval(knee)
    return f"{whole(knee.value)} ({between})" if between else whole(knee.value)


def _second(subjects: Sequence[Subject], colour: str, place: int = 1) -> str:
    """The colour of one model's second curve; with several models, the one that was passed."""
    return (subjects[0].colour, HIGH_RANK_COLOUR)[place] if len(subjects) == 1 else colour


def _models(subjects: Sequence[Subject], *keys: Key, alone: str = "loss") -> tuple[Key, ...]:
    if len(subjects) == 1:
        return (Key(label=alone, colour=subjects[0].colour, mark="line"), *keys)
    named = [Key(label=one.name, colour=one.colour, mark="line") for one in subjects]
    return (*named, *(Key(label=key.label, colour=MUTED, mark=key.mark) for key in keys))
