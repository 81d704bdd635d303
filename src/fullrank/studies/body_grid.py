"""`fullrank study bodies`: where does a head of high rank pay, over bodies, shapes and vocabularies?

body          NeoX against Llama
shape         deeper and narrower, or wider and shallower, with the parameters of the middle one: with a
              width w of H the depth is what embedding, head and layers, 2 V w + 12 L w², leave
vocabulary    2,048 to 65,536 tokens at one width: BPE of these sizes on --data, or as many --tokens

Every one of these with softmax and with mixtures, all for the floating-point operations of one run: softmax
on the middle shape of NeoX at the middle vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

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
    whole_flops,
    within,
)

STATEMENT = Statement(
    question="Where does a mixture or a trunk gain over softmax: on NeoX or Llama, deep or wide, at which "
    "vocabulary? And how does the loss at one width move with the vocabulary?",
    hypothesis="Mixtures gain more the narrower the body and the larger the vocabulary, on NeoX and Llama "
    "alike; at width 128 the loss per byte stops falling before 65,536 tokens.",
    comparison="Each head against softmax of the same body and seed; Llama, the deep and the wide shape "
    "against NeoX of the middle shape; vocabularies against the middle one. The same floating-point "
    "operations for all, rates tuned for each on a quarter of a run, three seeds.",
    smallest=0.01,
    rule="Better or worse where the 95% interval over seeds has one sign and the mean is at least the "
    "smallest effect; no difference of interest where the interval lies within it on both sides; else "
    "undecided. Vocabularies are compared in nats per byte of test text, with a quarter of that effect.",
)

HEADS: Mapping[str, tuple[str, int]] = {
    "softmax": ("softmax", 1), "mos2": ("mos", 2), "mos4": ("mos", 4), "trunk10": ("trunk", 10),
}  # fmt: skip
USED, SMALL_USED = ("softmax", "mos4", "trunk10"), ("softmax", "mos2")
VOCABULARIES, SMALL_VOCABULARIES = (2048, 8192, 32768, 65536), (512, 1024)
MIDDLE, SMALL_MIDDLE = 8192, 512
WIDTH, SMALL_WIDTH = 128, 16
LAYERS, SMALL_LAYERS = 6, 2
SHAPES = {"deep": 0.75, "wide": 1.25}
"""Widths, of the middle one."""
RATES = (2.0, 4.0, 8.0)
PER_BYTE = 0.25
"""Of the smallest effect: a token is about four bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cell:
    """What a head stands on."""

    body: str
    shape: str
    width: int
    layers: int
    vocabulary: int
    text: Text | None


def plan(done: Done, extent: Extent) -> list[Spec]:
    specs: list[Spec] = []
    budget = ""
    for cell in _cells(extent):
        for label in SMALL_USED if extent.small else USED:
            own = within(_of(cell, label, extent), budget)
            best, trials = tuned(done, own, RATES)
            specs += trials
            if best is None:
                if not budget:
                    break
                continue
            if not budget:
                # Softmax on the first: its operations are what all are given.
                budget = f"flops={whole_flops(done, own, trials):.6g}"
                own = within(own, budget)
            specs += seeded(own, extent.seeds, *best)
        if not budget:
            break
    return specs


def _cells(extent: Extent) -> Iterator[_Cell]:
    """The middle of all first."""
    width, layers = (SMALL_WIDTH, SMALL_LAYERS) if extent.small else (WIDTH, LAYERS)
    sizes: dict[int, Text | None] = dict.fromkeys(SMALL_VOCABULARIES if extent.small else VOCABULARIES)
    if extent.texts:
        sizes = {int(text.facts["vocabulary"]): text for text in extent.texts}
    wanted = SMALL_MIDDLE if extent.small else MIDDLE
    middle = min(sizes, key=lambda size: abs(size - wanted))

    def cell(body: str, shape: str, size: int) -> _Cell:
        own = round(width * SHAPES.get(shape, 1.0))
        left = 2 * size * (width - own) + 12 * layers * width**2
        depth = max(1, round(left / (12 * own**2)))
        return _Cell(body=body, shape=shape, width=own, layers=depth, vocabulary=size, text=sizes[size])

    yield cell("neox", "middle", middle)
    yield cell("llama", "middle", middle)
    yield from (cell("neox", shape, middle) for shape in SHAPES)
    yield from (cell("neox", "middle", size) for size in sizes if size != middle)


def _of(cell: _Cell, label: str, extent: Extent) -> Spec:
    head, components = HEADS[label]
    recipe, settings = transformer(cell.width, extent, steps=1500, evaluations=8)
    settings = (
        *settings, f"body.kind={cell.body}", f"body.layers={cell.layers}", "head.tie=false",
        f"head.components={components}",
    )  # fmt: skip
    if cell.text is None:
        settings = (*settings, f"data.bpe_size={cell.vocabulary}")
    return Spec(
        name=f"{cell.body}-{cell.shape}-{cell.vocabulary}-{label}", recipe=recipe, head=head,
        settings=settings, text=cell.text,
        factors={
            "vocabulary": str(cell.vocabulary), "head": label, "body": cell.body, "shape": cell.shape,
            "width": str(cell.width), "layers": str(cell.layers),
        },
    )  # fmt: skip


def answers(runs: Sequence[GridRun]) -> tuple[GridAnswer, ...]:
    whole = [run for run in runs if "trial" not in run.factors and run.valid is not None]
    if not whole:
        return ()
    ends: Ends = {(*_arm(run), run.seed): run.valid for run in whole if run.valid is not None}
    bytewise: Ends = {(*_arm(run), run.seed): run.per_byte for run in whole if run.per_byte is not None}
    # Other bodies and shapes are at the middle vocabulary.
    sizes = [_arm(run)[0] for run in runs if _arm(run)[2:] != ("neox", "middle")]
    middle = (sizes[0] if sizes else "", "softmax", "neox", "middle")
    found = []
    for arm in dict.fromkeys(_arm(run) for run in whole):
        size, head, body, shape = arm
        if head != "softmax":
            label = f"{head} against softmax: {body}, {shape}, V {size}"
            plain = (size, "softmax", body, shape)
            found.append(compared(label, differences(ends, arm, plain), STATEMENT.smallest))
        elif size != middle[0] and sizes:
            label, pairs = f"V {size} against {middle[0]}: softmax", differences(bytewise, arm, middle)
            found.append(compared(label, pairs, PER_BYTE * STATEMENT.smallest, unit="nats per byte"))
        elif arm != middle and sizes:
            label = f"{body}, {shape} against {middle[2]}, {middle[3]}: softmax, V {size}"
            found.append(compared(label, differences(ends, arm, middle), STATEMENT.smallest))
    return tuple(found)


def _arm(run: GridRun) -> tuple[str, str, str, str]:
    vocabulary, head, body, shape = (run.factors[name] for name in ("vocabulary", "head", "body", "shape"))
    return vocabulary, head, body, shape


BODIES = Study(name="bodies", statement=STATEMENT, plan=plan, answers=answers)
