"""Pictures of corpora: relative error against dimension, and singular values, a line a corpus.

errors            one picture a construction: lines with their bands, nulls dashed, 50, 10 and 1% dotted,
                  and where Godey et al. saw their turning points, in the construction that is theirs
singular_values   one small picture a construction: the leading values, of the table's norm
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fullrank.errors import FullrankError
from fullrank.report.charts.axis import Axis
from fullrank.report.charts.curves import Curves, Point, Reference, Trace
from fullrank.report.charts.theme import MODEL_COLOURS, MUTED, REFERENCE, Key
from fullrank.report.charts.training_charts import Panel
from fullrank.report.figures import number, percent
from fullrank.report.text import shown, unique
from fullrank.results.corpus import Corpus, CorpusCurve
from fullrank.results.diagnosis import Estimate

STYLES = ("line", "dotted")
MOST = len(MODEL_COLOURS) * len(STYLES)
"""Corpora that lines of one picture can tell apart."""
LEAST_ERROR = 0.005
"""Where the axis of errors ends: half of the smallest that is asked for."""
PUBLISHED = ((1000.0, 2000.0), (10_000.0, 15_000.0))
"""Dimensions at which the error had halved, and beyond which it was negligible, in 2404.07647."""
MOST_NULLS = 6
"""Corpora beyond which the nulls' lines would hide the others."""
TITLES = {
    "probability": "Plain probabilities",
    "weighted": "Weighted by counts",
    "frequent": "Frequent contexts",
    "log": "Log-probabilities",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """A corpus, the name that it goes by, and how its lines look."""

    record: Corpus
    name: str
    colour: str
    style: str

    def curve(self, construction: str) -> CorpusCurve | None:
        """The curve of a construction, where it was asked for."""
        return next((one for one in self.record.curves if one.construction == construction), None)


def looks(records: Sequence[Corpus]) -> tuple[Look, ...]:
    """How each corpus is drawn; raises where there are more than lines can be told apart."""
    if not 0 < len(records) <= MOST:
        raise FullrankError(
            f"got {len(records)} corpora, a picture can show 1 to {MOST}: compare fewer at a time"
        )
    names = unique([shown(record.name, 40) or "corpus" for record in records])
    return tuple(
        Look(
            record=record,
            name=name,
            colour=MODEL_COLOURS[place % len(MODEL_COLOURS)],
            style=STYLES[place // len(MODEL_COLOURS)],
        )
        for place, (record, name) in enumerate(zip(records, names, strict=True))
    )


def errors(drawn: Sequence[Look], construction: str) -> Curves:
    """Relative error against dimension of one construction."""
    traces, keys = [], []
    nulls = len(drawn) <= MOST_NULLS
    dashed = banded = False
    for look in drawn:
        curve = look.curve(construction)
        if curve is None:
            continue
        banded = banded or _band(curve) is not None
        if nulls and curve.null is not None:
            dashed = True
            points = _null(look, curve)
            traces.append(Trace(colour=look.colour, points=points, style="dashed", dots=False))
        traces.append(Trace(colour=look.colour, points=_line(look, curve), style=look.style, dots=False))
        if len(drawn) > 1:
            keys.append(Key(label=look.name, colour=look.colour, mark=look.style))
    if len(drawn) == 1 and traces:
        keys.append(Key(label="relative error", colour=drawn[0].colour, mark="line"))
    if banded:
        keys.append(Key(label="95% interval, or limits of the method", colour=drawn[0].colour, mark="band"))
    if dashed:
        keys.append(Key(label="next tokens shuffled", colour=MUTED, mark="dashed"))
    ranges: tuple[Reference, ...] = ()
    if construction == "probability":
        ranges = tuple(Reference(value=low, until=high, colour=MUTED) for low, high in PUBLISHED)
        keys.append(Key(label="2404.07647, other corpora", colour=MUTED, mark="band"))
    return Curves(
        x=Axis(title="dimensions d (log scale)", log=True),
        y=Axis(title="relative error (log scale)", log=True, low=LEAST_ERROR, high=1.0),
        traces=tuple(traces),
        horizontal=tuple(
            Reference(value=share, colour=REFERENCE, style="dotted") for share in (0.5, 0.1, 0.01)
        ),
        ranges=ranges,
        legend=tuple(keys),
    )


def singular_values(drawn: Sequence[Look], constructions: Sequence[str]) -> list[Panel]:
    """The leading singular values of every construction, as shares of the table's norm."""
    panels = []
    for construction in constructions:
        traces = []
        for look in drawn:
            curve = look.curve(construction)
            if curve is None or not curve.norm > 0:
                continue
            points = tuple(
                Point(
                    x=place,
                    y=value / curve.norm,
                    summary=f"{look.name}, singular value {place:,}: {number(value)}",
                )
                for place, value in enumerate(curve.singular_values, start=1)
            )
            traces.append(Trace(colour=look.colour, points=points, style=look.style, dots=len(points) == 1))
        curves = Curves(
            x=Axis(title="number", log=True), y=Axis(title="of the norm", log=True), traces=tuple(traces)
        )
        if curves.drawable():
            panels.append(
                Panel(title=TITLES[construction], subtitle="of the norm, log scales", curves=curves)
            )
    return panels


def _line(look: Look, curve: CorpusCurve) -> tuple[Point, ...]:
    band = _band(curve)
    points = []
    for place, (dimension, error) in enumerate(zip(curve.grid, curve.relative_error, strict=True)):
        value: Estimate | float = error
        if band is not None:
            # A band that ends at zero would be dropped by a log axis: it leaves the picture instead.
            low = max(band[0][place], LEAST_ERROR / 100)
            value = Estimate(value=error, low=low, high=max(band[1][place], low))
        words = f"{look.name}, {dimension:,} dimensions: {percent(error)}"
        points.append(Point(x=dimension, y=value, summary=words))
    return tuple(points)


def _null(look: Look, curve: CorpusCurve) -> tuple[Point, ...]:
    assert curve.null is not None
    return tuple(
        Point(x=dimension, y=error, summary=f"{look.name}, shuffled, {dimension:,}: {percent(error)}")
        for dimension, error in zip(curve.grid, curve.null.relative_error, strict=True)
    )


def _band(curve: CorpusCurve) -> tuple[tuple[float, ...], ...] | None:
    """Of the documents where there is one, else of the method, where it is not exact."""
    if curve.relative_error_interval is not None:
        return curve.relative_error_interval
    return None if curve.method == "exact" else curve.relative_error_limits
