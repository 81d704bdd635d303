"""`fullrank study published`: the published perplexities of softmax and mixture, within minutes of one GPU.

Merity et al. (2017, 1708.02182) and Yang et al. (2018, 1711.03953) trained an AWD-LSTM by NT-ASGD for up to a
thousand epochs, a day and more. Here bodies and heads of their sizes have minutes: Adam with one fall of the
rate, larger batches, our contexts, which start as the plain head, and one mask of their dropout for all
components, with which a mixture bears more of it. Widths are rounded up to what a GPU multiplies fast: rows
of 1,150 numbers begin nowhere that its widest loads can read. Runs have equal seconds, so each must have its
device to itself.

A text is any directory of train, valid and test; what it is held against is named apart.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from fullrank.errors import FullrankError
from fullrank.results.grid import GridAnswer, GridRun, Statement
from fullrank.studies.grid import Study
from fullrank.studies.grid_plan import Done, Ends, Extent, Spec, compared, differences, seeded, tuned
from fullrank.train.config import override, to_json
from fullrank.train.recipes import recipe as recipe_of

STATEMENT = Statement(
    question="How near do softmax and a mixture of softmaxes come to their published perplexities within "
    "25 minutes of one H200, and how far apart are they by the same effort?",
    hypothesis="Both end within 5% of what was published after days (65.8 and 61.45 on the test words of "
    "WikiText-2), and the mixture below softmax by at least half of the published 0.068 nats per word.",
    comparison="The mixture of 15 with its published sizes, rounded up to multiples of 16, and dropouts, two "
    "of them raised after a search (results/published_search.json), against softmax with its own, as "
    "published, of about as many parameters, for the same seconds of training; rates tuned alike on a "
    "sixteenth of them, three seeds; every test word once, with the weights that are best on validation.",
    smallest=0.01,
    rule="The mixture is better or worse where the 95% interval over seeds has one sign and the mean is at "
    "least the smallest effect, with no difference of interest where the interval lies within it on both "
    "sides, else undecided; each head is below or above what was published by the same rule.",
)


class Reference(NamedTuple):
    recipe: str
    """Whose sizes and dropouts are taken."""
    perplexity: Mapping[str, float]
    """Of the test words, as published, without dynamic evaluation."""


Name = Literal["wikitext-2", "ptb"]
REFERENCES: dict[Name, Reference] = {
    "wikitext-2": Reference("awd-lstm-wt2", {"softmax": 65.8, "mos": 61.45}),
    "ptb": Reference("awd-lstm-ptb", {"softmax": 57.3, "mos": 54.44}),
}
HEADS = ("mos", "softmax")
SECONDS = 1500
RATES = (0.5, 1.0, 2.0)
SHARE, SMALL_SHARE = 1 / 16, 1 / 4
"""Of a run: a trial."""
FOR_ALL = (
    "head.as_published=false", "head.unigram=true", "head.centred=false", "optimiser.name=adam",
    "optimiser.lr=5e-3", "optimiser.beta1=0.75", "optimiser.clip=0.12", "optimiser.schedule=cosine",
    "optimiser.warmup=0.08", "optimiser.finetune_epochs=0", "activation=3", "temporal=1.5", "batch=80",
    "jitter=false", "evaluate_batch=10", "evaluate_every=3000", "graph=on", "rotate=true",
)  # fmt: skip
FOR_ONE = {"mos": ("head.shared_dropout=true", "head.dropout=0.45", "body.dropout_hidden=0.3")}
"""What differs from the published recipe. A mixture with a mask for each component learns the training words
and loses on others (results/published_search.json)."""
SMALL = (
    "body.layers=1", "body.hidden=24", "body.last=16", "head.width=16", "head.components=2", "batch=8",
    "length=16", "evaluate_batch=8", "evaluate_every=20", "evaluate_tokens=4096", "final_tokens=4096",
)  # fmt: skip
WIDTHS, MULTIPLE = ("body.hidden", "body.last", "head.width"), 16


def study(reference: Name = "wikitext-2", rates: Sequence[float] = ()) -> Study:
    """Held against what was published of a text; one rate is taken untried."""
    recipe, published = REFERENCES[reference]
    rates = rates or RATES
    if not all(0 < rate < math.inf for rate in rates):
        raise FullrankError(f"--rates {' '.join(map(str, rates))}: expected factors above 0")

    def plan(done: Done, extent: Extent) -> list[Spec]:
        specs: list[Spec] = []
        # Seconds of a small run would differ from machine to machine.
        length = f"steps={extent.steps(60)}" if extent.small else f"budget=seconds={SECONDS * extent.scale:g}"
        for head in HEADS:
            widths = SMALL if extent.small else rounded(recipe, head)
            settings = (*ours(head), *widths, *extent.settings, length)
            own = Spec(name=head, recipe=recipe, head=head, settings=settings, factors={"head": head})
            if len(rates) == 1:
                base = override(recipe_of(recipe, head), settings).optimiser.lr
                best: tuple[str, ...] | None = (f"optimiser.lr={base * rates[0]:g}",)
            else:
                best, trials = tuned(done, own, rates, share=SMALL_SHARE if extent.small else SHARE)
                specs += trials
            if best is not None:
                specs += seeded(own, extent.seeds, *best)
        return specs

    def answers(runs: Sequence[GridRun]) -> tuple[GridAnswer, ...]:
        ends: Ends = {
            (run.factors["head"], run.seed): run.test
            for run in runs
            if "trial" not in run.factors and run.test is not None
        }
        pairs = differences(ends, ["mos"], ["softmax"])
        found = [compared("mos against softmax", pairs, STATEMENT.smallest)] if pairs else []
        for head in HEADS:
            tests = [end for (name, _), end in ends.items() if name == head]
            if tests:
                found.append(_against(head, tests, published[head]))
        return tuple(found)

    return Study(name="published", statement=STATEMENT, plan=plan, answers=answers)


def ours(head: str) -> tuple[str, ...]:
    """Settings in which a head differs from its published recipe, but for the widths."""
    return (*FOR_ALL, *FOR_ONE.get(head, ()))


def rounded(name: str, head: str) -> tuple[str, ...]:
    """The widths of a recipe as settings, each the next multiple."""
    found = to_json(recipe_of(name, head))
    parts = [width.split(".") for width in WIDTHS]
    return tuple(f"{part}.{key}={-(-found[part][key] // MULTIPLE) * MULTIPLE}" for part, key in parts)


def _against(head: str, tests: Sequence[float], published: float) -> GridAnswer:
    found = compared(
        f"{head} against {published:g} as published", [test - math.log(published) for test in tests],
        STATEMENT.smallest, words=("below", "above"),
    )  # fmt: skip
    reached = math.exp(statistics.fmean(tests))
    return dataclasses.replace(found, sentence=f"{found.sentence}; test perplexity {reached:.2f} a word")
