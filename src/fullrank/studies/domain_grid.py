"""`fullrank study domains`: does a text whose table needs more dimensions cost a narrow body more?

Every domain, a language or code, has a record of `fullrank corpus dimension`. Narrow and wide bodies are
trained on it for the same tokens; what the narrow one loses against the wide one of the same seed is its
cost. Costs are then held against ranks, over domains. Few domains see only strong relations, and the record
says which: with four no test can say anything at 5%.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullrank.errors import FullrankError
from fullrank.results import Corpora, Corpus, load
from fullrank.results.grid import GridAnswer, GridRun, Statement
from fullrank.studies.grid import Study
from fullrank.studies.grid_plan import (
    Done,
    Ends,
    Extent,
    Spec,
    Text,
    compared,
    differences,
    seeded,
    transformer,
    tuned,
)
from fullrank.studies.rank_correlation import UNIT, related

STATEMENT = Statement(
    question="Does a narrow body lose more on texts whose table of next tokens needs more dimensions?",
    hypothesis="Over languages and code the cost of a width of 32 or 64 against 256 rises with the rank of "
    "the text's table (open question 3 of Godey et al., 2404.07647).",
    comparison="Over domains: the rank of frequent contexts and of plain probabilities (dimensions for 90%) "
    "against the loss of the narrow body minus that of the wide one of the same seed, on the same text, for "
    "the same tokens, rates tuned for each width and domain on a quarter of a run; three seeds.",
    smallest=0.5,
    unit=UNIT,
    rule="Costs rise (fall) with rank where Spearman's correlation has a two-sided permutation p of at most "
    "0.05, halved for two measures of rank, and a bootstrap interval over domains and seeds of one sign. No "
    "relation of interest where that interval lies within the smallest effect on both sides; else undecided.",
)

MEASURES = ("frequent", "probability")
"""Tables of `fullrank corpus dimension`, the first with what theory speaks of, the second as published."""
NARROW, WIDE = (32, 64), 256
SMALL_NARROW, SMALL_WIDE = (8,), 32
RATES = (2.0, 4.0, 8.0)
COST = 0.01
"""The smallest cost of interest, nats per token."""


def domains(data: Sequence[Path], tokens: Sequence[Path], records: Sequence[Path]) -> tuple[Text, ...]:
    """Texts or directories of tokens with their records of `fullrank corpus dimension`, in the same order."""
    corpora: list[Corpus] = []
    for file in records:
        record, _ = load(file)
        if not isinstance(record, Corpus | Corpora):
            raise FullrankError(f"{file} is no record of a corpus: pass one of `fullrank corpus dimension`")
        corpora += record.corpora if isinstance(record, Corpora) else [record]
    places = [*data, *tokens]
    if len(corpora) != len(places):
        raise FullrankError(
            f"{len(places)} domains and {len(corpora)} records of corpora: pass --corpus with one for each, "
            "in the same order, as `fullrank corpus dimension TEXT ... --each` writes them"
        )
    names = [place.stem or place.name for place in places]
    found = []
    for name, place, corpus in zip(names, places, corpora, strict=True):
        needed = {curve.construction: curve.dimensions["90"] for curve in corpus.curves}
        if names.count(name) > 1 or not set(MEASURES) <= set(needed):
            raise FullrankError(
                f"{name}: expected names that differ, and a record of the tables {' and '.join(MEASURES)}"
            )
        facts = {one: str(needed[one]) for one in MEASURES} | {
            "corpus": corpus.name, "vocabulary": str(corpus.vocabulary)
        }  # fmt: skip
        own = {"data": (place,)} if data else {"tokens": place}
        found.append(Text(name=name, facts=facts, **own))
    return tuple(found)


def plan(done: Done, extent: Extent) -> list[Spec]:
    specs: list[Spec] = []
    for text in extent.texts:
        for width in (*SMALL_NARROW, SMALL_WIDE) if extent.small else (*NARROW, WIDE):
            own = _of(width, text, extent)
            best, trials = tuned(done, own, RATES)
            specs += trials
            if best is None:
                continue
            specs += seeded(own, extent.seeds, *best)
    return specs


def _of(width: int, text: Text, extent: Extent) -> Spec:
    recipe, settings = transformer(width, extent, steps=1000, evaluations=8)
    if text.tokens is None:
        # The vocabulary that its rank was measured with.
        settings = (*settings, f"data.bpe_size={text.facts['vocabulary']}")
    return Spec(
        name=f"{text.name}-width{width}", recipe=recipe, settings=settings, text=text,
        factors={"domain": text.name, "width": str(width), **text.facts},
    )  # fmt: skip


def answers(runs: Sequence[GridRun]) -> tuple[GridAnswer, ...]:
    whole = [run for run in runs if "trial" not in run.factors and run.valid is not None]
    ends: Ends = {
        (run.factors["domain"], run.factors["width"], run.seed): run.valid
        for run in whole
        if run.valid is not None
    }
    *narrow, wide = sorted({run.factors["width"] for run in whole}, key=int) or [""]
    domains = {run.factors["domain"]: run.factors for run in whole}
    found = []
    for width in narrow:
        costs = {name: differences(ends, (name, width), (name, wide)) for name in domains}
        costs = {name: values for name, values in costs.items() if values}
        for measure in MEASURES:
            ranks = {name: float(domains[name][measure]) for name in costs}
            label = f"{measure} rank and the cost of width {width}"
            found.append(
                related(label, ranks, costs, level=0.05 / len(MEASURES), smallest=STATEMENT.smallest)
            )
        found += [
            compared(f"{name}: width {width} against {wide}", values, COST) for name, values in costs.items()
        ]
    return tuple(found)


DOMAINS = Study(name="domains", statement=STATEMENT, plan=plan, answers=answers)
