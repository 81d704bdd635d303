"""The page of `fullrank study histalign --task`: what texts keep of their prompts, and the texts."""

from __future__ import annotations

import math
import statistics

from fullrank.report.figures import Cell
from fullrank.report.page import Column, Page, Section, Table, Writings
from fullrank.report.text import shown
from fullrank.results.generation import Generation, GenerationMethod

LABELS = {
    "base": "not trained",
    "softmax": "softmax, trained",
    "trime": "TRIME",
    "histalign": "HistAlign",
    "mos": "mixture of softmaxes",
    "trunk_cache": "trunk mixture with memory",
    "histalign_cosine": "HistAlign, by cosines",
}
"""What a reader sees."""
TASKS = {
    "restaurants": "Descriptions of restaurants from tables",
    "articles": "Continuations of articles",
}
MEASURES = {
    "slots said": "Share of the table’s slots that a text says, by a small table of surface forms.",
    "slots made up": "Values or places a text has that its table has not, by the same table; a count a text.",
    "BLEU": "sacrebleu’s, over all references, 0 to 100.",
    "chrF": "sacrebleu’s, over all references, 0 to 100.",
    "table precision": "PARENT’s entailed precision: n-grams that a reference or the table has, 0 to 1.",
    "telling words back": "Share of the prompt’s names and rare words that come back.",
    "rep-2": "1 minus distinct over all pairs of words of a text.",
    "rep-4": "1 minus distinct over all runs of four words of a text.",
    "distinct-2": "Distinct over all pairs of words of all texts.",
    "judge's loss": "Nats per token of the texts behind their prompts under another model.",
}
LONGEST = 4000


def generation_page(record: Generation) -> Page:
    """The page of the study."""
    return Page(
        title=f"{TASKS.get(record.task, shown(record.task))} by {shown(record.model)}",
        lead=(
            f"The last {record.layers} layers are trained under several output layers with "
            f"{len(record.seeds)} {'seed' if len(record.seeds) == 1 else 'seeds'}, and write greedily behind "
            f"{record.prompts} prompts that nothing was trained on."
        ),
        sections=(_measures(record), _texts(record), _setting(record)),
    )


def _measures(record: Generation) -> Section:
    names = list(dict.fromkeys(name for method in record.methods for name in method.scores))
    people: tuple[Cell, ...] = ("people", None, None, *(record.people.get(name) for name in names))
    return Section(
        title="Measures",
        text=(
            "What training alone does is what softmax, trained, shows. A text that copies everything is not "
            "yet a good one: read some below.",
        ),
        table=Table(
            caption="Means over seeds, with the least and the largest seed’s where they differ.",
            columns=(
                Column(name="method"),
                Column(name="loss of people’s texts", unit="nats per token"),
                Column(name="loss of ordinary text", unit="nats per token"),
                *(Column(name=shown(name)) for name in names),
            ),
            rows=(
                *(
                    (
                        LABELS.get(one.method, shown(one.method)),
                        _spread(one.losses),
                        _spread(one.ordinary),
                        *(_spread(one.scores.get(name, ())) for name in names),
                    )
                    for one in record.methods
                ),
                people,
            ),
        ),
        definition=tuple(f"{shown(name)}: {MEASURES[name]}" for name in names if name in MEASURES),
        notes=tuple(shown(note, 400) for note in record.notes),
    )


def _spread(values: tuple[float, ...]) -> str | None:
    found = [value for value in values if math.isfinite(value)]
    if not found:
        return None
    low, high, mean = min(found), max(found), statistics.fmean(found)
    return f"{mean:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{mean:.3g} ({low:.3g} to {high:.3g})"


def _texts(record: Generation) -> Section:
    count = max((len(one.texts) for one in record.methods), default=0)
    return Section(
        title="Texts",
        text=(
            "The first prompts of the test and what each method wrote, with the first seed. Underlined: the "
            "prompt says so. Wavy and slanted: made up, as far as the measures above can tell.",
        ),
        writings=tuple(_writings(record.methods, place) for place in range(count)),
    )


def _writings(methods: tuple[GenerationMethod, ...], place: int) -> Writings:
    there = [one for one in methods if place < len(one.texts)]
    return Writings(
        prompt=shown(there[0].texts[place].prompt, LONGEST),
        answers=tuple(
            (
                LABELS.get(one.method, shown(one.method)),
                tuple((shown(piece.text, LONGEST), piece.kind) for piece in one.texts[place].pieces),
            )
            for one in there
        ),
    )


def _setting(record: Generation) -> Section:
    return Section(
        title="The training",
        table=Table(
            caption="The same for all methods.",
            columns=(Column(name="quantity"), Column(name="value")),
            rows=(
                ("layers trained", f"the last {record.layers}, {record.trained:,} parameters"),
                ("steps", record.steps),
                ("texts a step", record.batch),
                ("tokens generated, at most", record.new_tokens),
                ("temperature of the memory", record.temperature),
                ("log weight of the memory at the start", record.memory_start),
                ("data", shown(record.data)),
                ("ordinary text", shown("; ".join(record.text)) or "none"),
                ("judge", shown(record.judge) or "none"),
            ),
        ),
        more_tables=(
            Table(
                caption="Rates are tried with the first seed, and the least development loss is kept.",
                columns=(
                    Column(name="method"),
                    Column(name="rate"),
                    Column(name="development loss by rate", unit="nats per token"),
                    Column(name="log weight of the memory", unit="nats"),
                    Column(name="parameters added"),
                    Column(name="processor time", unit="seconds"),
                ),
                rows=tuple(
                    (
                        LABELS.get(one.method, shown(one.method)),
                        "none" if one.rate is None else f"{one.rate:g}",
                        ", ".join(f"{shown(rate)}: {loss:.3f}" for rate, loss in one.tried.items()) or None,
                        ", ".join(f"{weight:.2f}" for weight in one.memory_weight) or None,
                        one.added,
                        ", ".join(f"{seconds:.0f}" for seconds in one.seconds),
                    )
                    for one in record.methods
                ),
            ),
        ),
    )
