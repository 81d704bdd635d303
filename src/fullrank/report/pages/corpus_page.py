"""The page of corpora: how many dimensions their tables of next-token distributions need.

One corpus has the page to itself; several share its pictures, one picture a construction of the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from fullrank.report.charts import corpus_charts as charts
from fullrank.report.charts.corpus_charts import TITLES, Look
from fullrank.report.charts.training_charts import grid
from fullrank.report.figures import Cell, figure, number, percent, whole, whole_interval
from fullrank.report.page import Answer, Column, Page, Section, Table, Tile, chart_of, draw
from fullrank.report.text import shown
from fullrank.results.corpus import Corpora, Corpus, CorpusCurve

WORDS = {
    "probability": (
        "Each context that occurs is one row: how often each token followed it, divided by the context’s "
        "count. Every context counts the same, whether it was seen once or ten thousand times. This is the "
        "table of Godey et al. (2024, arXiv:2404.07647). Most contexts were seen once, and the row of such a "
        "context has a single entry."
    ),
    "weighted": (
        "The same rows, each times the square root of its context’s count, so that every token of the text "
        "counts the same and a context seen once weighs little."
    ),
    "frequent": "The rows of the first table, but only of contexts that were seen at least {least} times.",
    "log": (
        "Logarithms of smoothed probabilities, each row less its mean: the table whose rank the theory of "
        "the "
        "softmax bottleneck speaks of (a softmax of width D gives log-probabilities of rank D, up to a shift "
        "of each row). What no count tells comes from the smoothing: the corpus’s own token frequencies, "
        "with the weight of {prior} tokens, the weight that predicts left-out tokens best."
    ),
}
PUBLISHED = (
    "Grey ranges: Godey et al. report, for IMDb, WikiText and the Pile with the tokenisers of Llama 2 and "
    "Pythia, "
    "that the error had halved at 1,000 to 2,000 dimensions and was negligible only beyond 10,000 to "
    "15,000. They "
    "had other corpora, other sizes and other vocabularies, so the ranges are a comparison and no target."
)
DEFINITION = (
    "Relative error at d dimensions: the root of the sum of squared singular values beyond the d-th, "
    "divided by "
    "the root of the sum of all. No table of rank d comes nearer, in squared difference.",
    "The dimensions for 50, 90 and 99% are the smallest d whose relative error is at most 50, 10 and 1%.",
    "Intervals are of 95% over blocks of text: the table is made again without each block in turn "
    "(jackknife). "
    "They say how far other documents of the same kind would move the figure at this amount of text. They "
    "do not "
    "say how it grows with more text.",
    "Shuffled: the same contexts with the same counts, and the tokens that followed dealt out anew among "
    "contexts "
    "that were seen about equally often (once, 2 to 3 times, 4 to 7 times, and so on). It is what token "
    "frequencies and context counts alone give.",
    "Limits of the method are given where the table was too large for all of its singular values: each "
    "figure lies "
    "within its limits with a probability of 99.9%.",
)
CAUTION = (
    "A dimension here is one of a table of counts, not of a language. The table knows nothing of what was "
    "not seen, "
    "so its rank grows with the text, and a context seen once looks certain of its token. A language model "
    "generalises over contexts and may need fewer dimensions, or use them better.",
    "Figures of different constructions are about different tables and do not compare. Nor do figures of "
    "different "
    "vocabularies or amounts of text: a table with V columns has at most V dimensions.",
)


def corpus_page(record: Corpus) -> Page:
    """The page of one corpus."""
    drawn = charts.looks([record])
    return Page(
        title=f"Dimensions of {drawn[0].name}",
        lead=(
            f"{record.tokens:,} tokens ({shown(record.tokenizer, 60)}, vocabulary V = "
            f"{record.vocabulary:,}), "
            f"{record.contexts:,} distinct contexts of {record.order - 1} tokens, "
            f"{percent(record.single / record.contexts) if record.contexts else 'none'} of which were "
            "followed "
            "by one token only."
        ),
        answers=(_answer(drawn[0], alone=True),),
        sections=(*_sections(drawn), _facts(drawn), *_notes(record.notes)),
    )


def corpora_page(record: Corpora) -> Page:
    """The page of several corpora side by side; where they are many, those of one tokeniser at a time, and of
    these as many as a picture can tell apart."""
    notes = _notes((*record.notes, *(f"{one.name}: {note}" for one in record.corpora for note in one.notes)))
    title = shown(record.title, 100) or "Corpora side by side"
    lead = f"{len(record.corpora)} corpora, measured in the same way."
    if len(record.corpora) <= charts.MOST:
        drawn = charts.looks(record.corpora)
        return Page(
            title=title,
            lead=lead,
            warnings=_warnings(record.corpora),
            answers=tuple(_answer(look, alone=False) for look in drawn) if len(drawn) <= 3 else (),
            sections=(*_sections(drawn), _facts(drawn), *notes),
        )
    sections = []
    for label, records in _pictures(record.corpora):
        drawn = charts.looks(records)
        sections += [
            dataclasses.replace(_construction(drawn, name), title=f"{label}: {TITLES[name].lower()}")
            for name in TITLES
            if any(look.curve(name) is not None for look in drawn)
        ]
    reading = Section(title="How to read this", text=CAUTION, definition=DEFINITION)
    return Page(
        title=title, lead=lead, warnings=_warnings(record.corpora), answers=(),
        sections=(*sections, reading, _many_facts(record.corpora), *notes),
    )  # fmt: skip


def _pictures(records: Sequence[Corpus]) -> Iterator[tuple[str, list[Corpus]]]:
    """What each picture is called and shows."""
    groups: dict[str, list[Corpus]] = {}
    for one in records:
        groups.setdefault(one.tokenizer, []).append(one)
    for tokenizer, group in groups.items():
        label, number = shown(tokenizer, 40), math.ceil(len(group) / charts.MOST)
        bounds = [len(group) * place // number for place in range(number + 1)]
        for low, high in itertools.pairwise(bounds):
            yield label if number == 1 else f"{label}, {low + 1} to {high}", group[low:high]


def _warnings(records: Sequence[Corpus]) -> tuple[str, ...]:
    found = []
    if len({one.vocabulary for one in records}) > 1:
        found.append("The vocabularies differ in size, and with them the most that a dimension can be.")
    counts = [one.tokens for one in records]
    if max(counts) > 1.05 * min(counts):
        found.append(
            f"The amounts of text differ, from {min(counts):,} to {max(counts):,} tokens: dimensions grow "
            "with "
            "text, so compare at equal amounts."
        )
    if len({one.order for one in records}) > 1:
        found.append("The contexts differ in length.")
    return tuple(found)


def _answer(look: Look, *, alone: bool) -> Answer:
    curve = look.curve("probability") or next(iter(look.record.curves), None)
    if curve is None:
        return Answer(name="" if alone else look.name, colour=look.colour, sentences=(), tiles=())
    fifty, ninety, most = (_with_interval(curve, name) for name in ("50", "90", "99"))
    sentences = [
        f"The table of {_title(curve)} needs {fifty} dimensions to halve its error, {ninety} to bring it to "
        f"10%, and {most} of at most "
        f"{min(curve.vocabulary, curve.contexts):,} to bring it to 1%."
    ]
    if curve.null is not None:
        sentences.append(
            "With next tokens shuffled among contexts that were seen equally often, it needs "
            f"{curve.null.dimensions.get('50', 0):,}, {curve.null.dimensions.get('90', 0):,} and "
            f"{curve.null.dimensions.get('99', 0):,}."
        )
    return Answer(
        name="" if alone else look.name,
        colour=look.colour,
        sentences=tuple(sentences),
        tiles=tuple(
            _tile(curve, name, words) for name, words in (("50", "50%"), ("90", "10%"), ("99", "1%"))
        ),
    )


def _tile(curve: CorpusCurve, name: str, error: str) -> Tile:
    interval = (curve.dimension_intervals or {}).get(name)
    between = whole_interval(interval) if interval is not None else ""
    low, high = curve.dimension_limits.get(name, (0, 0))
    remarks = [f"95% interval {between}"] if between else []
    if low != high:
        remarks.append(f"limits {low:,} to {high:,}")
    return Tile(
        question=f"Error at most {error}",
        value=figure(curve.dimensions.get(name)),
        unit="dimensions",
        remarks=tuple(remarks),
    )


def _with_interval(curve: CorpusCurve, name: str) -> str:
    interval = (curve.dimension_intervals or {}).get(name)
    between = whole_interval(interval) if interval is not None else ""
    return figure(curve.dimensions.get(name)) + (f" ({between})" if between else "")


def _sections(drawn: Sequence[Look]) -> tuple[Section, ...]:
    present = [name for name in TITLES if any(look.curve(name) is not None for look in drawn)]
    sections = [_construction(drawn, name) for name in present]
    panels = charts.singular_values(drawn, present)
    if panels:
        sections.append(
            Section(
                title="Singular values",
                text=("The leading singular values of every table, divided by its norm.",),
                chart=draw(
                    lambda *, width: grid(panels, width=width),
                    name="Leading singular values by number",
                    description="One picture a table; results.json holds the figures.",
                    legend=tuple(
                        (charts.Key(label=look.name, colour=look.colour, mark=look.style) for look in drawn)
                        if len(drawn) > 1
                        else ()
                    ),
                ),
            )
        )
    sections.append(Section(title="How to read this", text=CAUTION, definition=DEFINITION))
    return tuple(sections)


def _title(curve: CorpusCurve) -> str:
    return TITLES.get(curve.construction, shown(curve.construction)).lower()


def _construction(drawn: Sequence[Look], construction: str) -> Section:
    members = [(look, curve) for look in drawn if (curve := look.curve(construction)) is not None]
    picture = charts.errors(drawn, construction)
    first = members[0][1]
    values = {"least": f"{first.least or 1:,}", "prior": number(first.prior or 0.0)}
    text = [WORDS[construction].format(**values)]
    if len({(one.least, one.prior) for _, one in members}) > 1 and construction == "log":
        text[0] = text[0].replace(f"{values['prior']} tokens", "a few tokens")
    if construction == "log":
        text.append(
            "The first dimension is close to the token frequencies, which a bias of the output layer can "
            "hold. The "
            "second table counts what is left after it."
        )
    tables = [_dimensions(members, first=False)]
    if construction == "log":
        tables.append(_dimensions(members, first=True))
    return Section(
        title=TITLES[construction],
        text=tuple(text),
        chart=chart_of(
            picture,
            name=f"Relative error against dimension, {TITLES[construction].lower()}",
            description="Dotted lines: errors of 50, 10 and 1%. The table below holds the dimensions.",
        ),
        notes=(PUBLISHED,) if construction == "probability" else (),
        table=tables[0],
        more_tables=tuple(tables[1:]),
    )


def _dimensions(members: Sequence[tuple[Look, CorpusCurve]], *, first: bool) -> Table:
    names = ("50", "90", "99")
    nulls = not first and any(curve.null is not None for _, curve in members)
    rows = []
    for look, curve in members:
        values = curve.beyond_first if first else curve.dimensions
        limits = curve.beyond_first_limits if first else curve.dimension_limits
        cells: list[Cell] = [look.name, curve.contexts]
        for name in names:
            interval = None if first else (curve.dimension_intervals or {}).get(name)
            low, high = limits.get(name, (0, 0))
            text = figure(values.get(name))
            if interval is not None and whole_interval(interval):
                text += f" ({whole_interval(interval)})"
            elif low != high:
                text += f" [{low:,} to {high:,}]"
            cells.append(text if not text.replace(",", "").isdigit() else values.get(name))
        if nulls:
            null = curve.null
            cells.append(
                None if null is None else " / ".join(figure(null.dimensions.get(name)) for name in names)
            )
        cells.append(shown(curve.method))
        rows.append(tuple(cells))
    caption = "Dimensions for 50, 90 and 99%" + (", of what the first dimension leaves" if first else "")
    return Table(
        caption=caption
        + ". In round brackets 95% intervals over blocks of text, in square ones limits of the method.",
        columns=(
            Column(name="corpus"),
            Column(name="contexts"),
            *(Column(name=f"{name}%", unit="dimensions") for name in names),
            *((Column(name="shuffled", unit="50 / 90 / 99%"),) if nulls else ()),
            Column(name="method"),
        ),
        rows=tuple(rows),
    )


def _facts(drawn: Sequence[Look]) -> Section:
    quantities: tuple[tuple[str, list[Cell]], ...] = (
        ("text", [shown(", ".join(one.record.sources), 60) for one in drawn]),
        ("tokeniser", [shown(one.record.tokenizer, 40) for one in drawn]),
        ("tokens before a token, with it: the order", [one.record.order for one in drawn]),
        ("documents", [one.record.documents for one in drawn]),
        ("bytes", [one.record.bytes for one in drawn]),
        ("bytes that were no UTF-8, replaced", [one.record.replaced for one in drawn]),
        ("tokens", [one.record.tokens for one in drawn]),
        ("tokens with a whole context", [one.record.pairs for one in drawn]),
        ("distinct contexts", [one.record.contexts for one in drawn]),
        ("of them followed by one token only", [one.record.single for one in drawn]),
        ("distinct pairs of context and token", [one.record.entries for one in drawn]),
        ("vocabulary V", [one.record.vocabulary for one in drawn]),
        ("tokens of it that occur", [one.record.used for one in drawn]),
        ("engine", [shown(one.record.engine, 40) for one in drawn]),
        ("seconds in all", [whole(sum(one.record.seconds.values())) for one in drawn]),
    )
    bounds = [
        f"{look.name}, {_title(one)}: {shown(one.bound, 400)}" for look in drawn for one in look.record.curves
    ]
    return Section(
        title="The text and the tables",
        table=Table(
            caption="What was counted.",
            columns=(Column(name="quantity"), *(Column(name=one.name) for one in drawn)),
            rows=tuple((name, *cells) for name, cells in quantities),
        ),
        items=tuple(bounds),
    )


def _many_facts(records: Sequence[Corpus]) -> Section:
    """What was counted, one row a corpus."""
    return Section(
        title="The texts",
        table=Table(
            caption="What was counted. Single: contexts that one token followed. Used: tokens that occur.",
            columns=tuple(
                Column(name=name)
                for name in ("corpus", "documents", "tokens", "contexts", "single", "pairs", "V", "used")
            ),
            rows=tuple(
                (
                    shown(one.name, 60), one.documents, one.tokens, one.contexts, one.single, one.entries,
                    one.vocabulary, one.used,
                )
                for one in records
            ),
        ),
    )  # fmt: skip


def _notes(notes: tuple[str, ...]) -> tuple[Section, ...]:
    return (Section(title="Notes", items=tuple(shown(note, 400) for note in notes)),) if notes else ()
