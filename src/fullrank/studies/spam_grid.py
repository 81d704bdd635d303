"""`fullrank study spam`: a language of one repeated symbol, over vocabularies: who learns it, how fast?

Godey and Artzi (2026, 2603.10145) say that this becomes unlearnable at large V because a softmax of width D
keeps only a share of its gradient, near sqrt(D / V) for a random matrix; Murugan (2608.16671) that at equal
tokens a large V has few sequences a symbol, and that the kept share predicts nothing. So V is varied both
ways (`spam_language.py` makes the text):

    equal a symbol    8 sequences of every symbol, whatever V
    equal in all      as many sequences for every V, and so fewer of a symbol the larger it is

Rates fall to 0 over a run: at constant ones all runs of one V stopped at one level. And Adam must remember a
symbol from one of its sequences to the next, V / BATCH steps later. With the recipe's beta2 of 0.95 it has
forgotten after some twenty; then no head learnt this at V = 131,072, nor softmax at 8,192 with as many steps
in between. So beta2 is 0.999 for all, and `softmax_short` has 0.95.

A head that has fewer tokens for the same operations is held against a softmax of its own for the same tokens,
too.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from fullrank.results.grid import GridAnswer, GridRun, Statement
from fullrank.studies.grid import Study
from fullrank.studies.grid_plan import (
    Done,
    Extent,
    Spec,
    Text,
    check_heads,
    compared,
    seeded,
    transformer,
    tuned,
    whole_flops,
    within,
)
from fullrank.studies.spam_language import LENGTH, language

STATEMENT = Statement(
    question="Which heads learn a language of one repeated symbol at a vocabulary of 8,192 to 131,072, how "
    "fast, and is that as the kept gradient says?",
    hypothesis="With 8 sequences of every symbol and an Adam that remembers them (beta2 of 0.999) softmax of "
    "width 64 learns it at every vocabulary, although it keeps less of the gradient the larger V is; with a "
    "beta2 of 0.95 it does not at 131,072. Mixtures learn it no faster for the same operations.",
    comparison="Heads against softmax of the same seed for the same operations, and against one that is "
    "given as many tokens as the head had; softmax at one V against the smallest, as a share of log V; "
    "softmax with a beta2 of 0.95 against 0.999. Rates fall to 0 and are tuned for each on a quarter of a "
    "run, three seeds.",
    smallest=0.1,
    rule="Better or worse where the 95% interval over seeds has one sign and the mean is at least the "
    "smallest effect; no difference of interest where it lies within it on both sides; else undecided. Of "
    "vocabularies the smallest effect is 0.05 of log V. A run has learnt where its validation loss is at "
    "most a tenth of log V above the least that there can be, which is log V over the length of a sequence.",
)

HEADS: Mapping[str, tuple[str, int, float]] = {
    "softmax": ("softmax", 1, 0.999), "softmax_short": ("softmax", 1, 0.95),
    "sigsoftmax": ("sigsoftmax", 1, 0.999), "plif": ("plif", 1, 0.999), "mos2": ("mos", 2, 0.999),
    "mos4": ("mos", 4, 0.999), "trunk10": ("trunk", 10, 0.999),
}  # fmt: skip
"""Each head's name, components and Adam's beta2."""
USED = ("softmax", "softmax_short", "sigsoftmax", "plif", "mos4", "trunk10")
SMALL_USED = ("softmax", "mos2")
CELLS = ((8192, 8), (32768, 8), (131072, 8), (8192, 32), (131072, 2))
"""V and sequences of a symbol: three with equally many of each, and three with equally many in all."""
SMALL_CELLS = ((256, 8), (512, 8), (256, 16))
WIDTH, SMALL_WIDTH = 64, 16
BATCH, SMALL_BATCH = 256, 16
LEARNT, OF_LOG = 1 / LENGTH + 0.1, 0.05
"""Shares of log V: the loss of a run that has learnt, and the smallest effect between vocabularies."""
FEW = 0.02
"""Share of tokens by which two runs may differ and still have equally many."""
AS_MANY = "softmax for as many tokens as "
RATES = (4.0, 8.0, 16.0)


def texts(folder: Path, extent: Extent) -> tuple[Text, ...]:
    return tuple(language(folder, *cell) for cell in (SMALL_CELLS if extent.small else CELLS))


def study(heads: Sequence[str] = ()) -> Study:
    """Of some heads, or of all."""
    check_heads(heads, HEADS)

    def plan(done: Done, extent: Extent) -> list[Spec]:
        used = heads or (SMALL_USED if extent.small else USED)
        return _plan([label for label in HEADS if label in used], done, extent)

    return Study(name="spam", statement=STATEMENT, plan=plan, answers=answers, texts=texts)


def _plan(heads: Sequence[str], done: Done, extent: Extent) -> list[Spec]:
    specs: list[Spec] = []
    for text in extent.texts:
        budget = ""
        plain: tuple[str, ...] = ()
        for label in heads:
            own = within(_of(text, label, extent), budget)
            best, trials = tuned(done, own, RATES)
            specs += trials
            if best is None:
                if label == "softmax":
                    break
                continue
            if not budget:
                budget = f"flops={whole_flops(done, own, trials):.6g}"
                own = within(own, budget)
            plain = plain or best
            whole = seeded(own, extent.seeds, *best)
            specs += whole
            if label != "softmax":
                specs += _as_many_tokens(text, label, whole, plain, done, extent)
    return specs


def _as_many_tokens(
    text: Text, label: str, whole: Sequence[Spec], rate: tuple[str, ...], done: Done, extent: Extent
) -> list[Spec]:
    """Softmax for the tokens of every run of a head that is done and had fewer than softmax has."""
    own = _of(text, "softmax", extent)
    own = dataclasses.replace(own, factors={**own.factors, "head": f"{AS_MANY}{label}"})
    specs = []
    for spec in whole:
        run, plain = done.get(spec.name), done.get(f"{own.name}-seed{spec.seed}")
        if run is None or plain is None or run.failure or run.tokens >= (1 - FEW) * plain.tokens:
            continue
        shorter = within(own, f"tokens={run.tokens}")
        shorter = dataclasses.replace(shorter, name=f"{own.name}_as_{label}")
        specs.append(seeded(shorter, extent.seeds, *rate)[spec.seed])
    return specs


def _of(text: Text, label: str, extent: Extent) -> Spec:
    head, components, beta2 = HEADS[label]
    batch = SMALL_BATCH if extent.small else BATCH
    # Once over all sequences.
    steps = int(text.facts["vocabulary"]) * int(text.facts["copies"]) // batch
    width = SMALL_WIDTH if extent.small else WIDTH
    recipe, settings = transformer(width, extent, steps=steps, small_steps=steps, evaluations=8)
    return Spec(
        name=f"{text.name}-{label}", recipe=recipe, head=head, text=text,
        settings=(
            *settings, f"batch={batch}", f"length={LENGTH}", "body.layers=2", "head.tie=false",
            f"head.components={components}", "optimiser.schedule=cosine", "optimiser.final=0",
            f"optimiser.beta2={beta2}",
            # Ten evaluations, whatever a budget makes of the steps.
            "evaluate_every=0", *(("evaluate_tokens=2048", "final_tokens=8192") if extent.small else ()),
        ),
        factors={**text.facts, "head": label, "width": str(width)},
    )  # fmt: skip


def answers(runs: Sequence[GridRun]) -> tuple[GridAnswer, ...]:
    groups: dict[tuple[int, int, str], dict[int, GridRun]] = {}
    for run in runs:
        if "trial" not in run.factors and not run.failure and run.curve:
            arm = int(run.factors["vocabulary"]), int(run.factors["copies"]), run.factors["head"]
            groups.setdefault(arm, {})[run.seed] = run
    found = []
    for (size, copies, head), mine in groups.items():
        where, words = f"V {size}, {copies} sequences a symbol", learnt(list(mine.values()))
        if head.startswith(AS_MANY):
            continue
        if head != "softmax":
            ways = {"operations": "softmax", "tokens": f"{AS_MANY}{head}"}
            for way, control in ways.items():
                plain = groups.get((size, copies, control), {})
                pairs = [
                    run.curve[-1].loss - plain[seed].curve[-1].loss
                    for seed, run in mine.items()
                    if seed in plain
                ]
                if pairs:
                    label = f"{head} for the same {way}: {where}"
                    found.append(_with(compared(label, pairs, STATEMENT.smallest), words))
            continue
        # Against the smallest V with as many sequences of a symbol, and with as many in all.
        softmax = [arm for arm in groups if arm[2] == head]
        for alike in (
            [arm for arm in softmax if arm[1] == copies],
            [arm for arm in softmax if arm[0] * arm[1] == size * copies],
        ):
            first = min(alike)
            if first != (size, copies, head):
                label = f"softmax: {where} against V {first[0]}, {first[1]}"
                pairs = [
                    _share(mine[seed]) - _share(groups[first][seed])
                    for seed in mine.keys() & groups[first].keys()
                ]
                found.append(_with(compared(label, pairs, OF_LOG, unit="of log V"), words))
    return tuple(found)


def _share(run: GridRun) -> float:
    return run.curve[-1].loss / math.log(int(run.factors["vocabulary"]))


def learnt(runs: Sequence[GridRun]) -> str:
    """How many have learnt, from when on, and what they kept of the gradient at first."""
    bound = LEARNT * math.log(int(runs[0].factors["vocabulary"]))
    tokens = [next((point.tokens for point in run.curve if point.loss <= bound), None) for run in runs]
    when = [count for count in tokens if count is not None]
    words = f"learnt by {len(when)} of {len(runs)}"
    if when:
        words += f", after {statistics.fmean(when):.3g} tokens"
    kept = [run.curve[0].monitors.get("gradient_kept", math.nan) for run in runs]
    null = math.sqrt(int(runs[0].factors["width"]) / int(runs[0].factors["vocabulary"]))
    return f"{words}; {statistics.fmean(kept):.3f} of the gradient's norm kept at first, {null:.3f} at random"


def _with(answer: GridAnswer, words: str) -> GridAnswer:
    return dataclasses.replace(answer, sentence=f"{answer.sentence}; {words}")
