"""`fullrank study heads`: which head for the same compute, from scratch and swapped in late.

scratch   every head at two widths, rates tuned alike, trained for the same floating-point operations (each
          head by its own formula) and, in a second arm, for the same tokens. Where a head has more
          parameters, a third arm holds it against softmax over a body whose inner layers are wider by as
          many, for the same tokens
swap      where the second half of a softmax run is best a mixture takes its place (which starts as that
          softmax) for half a run more, against a run that goes on with softmax. Both start their optimisers
          anew, at the rate that so long a run would have there
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from fullrank.errors import FullrankError
from fullrank.results.grid import GridAnswer, GridRun, Statement
from fullrank.studies.grid import Study
from fullrank.studies.grid_plan import Done, Extent, Spec, check_heads, compared, steps_of, transformer, tuned

STATEMENT = Statement(
    question="Does a head of high rank make a small transformer better at equal compute, trained from "
    "scratch or swapped in where softmax has stopped gaining?",
    hypothesis="At widths of 64 and 128 over 16,384 tokens mixtures gain at equal tokens, less at equal "
    "compute, and more the narrower the body is.",
    comparison="Each head against softmax of the same seed, rates tuned alike for both; floating-point "
    "operations, tokens, or tokens and parameters equal. Swapped in: against a control that goes on with "
    "softmax from the same step.",
    smallest=0.01,
    rule="Better or worse where the 95% interval over seeds has one sign and the mean is at least the "
    "smallest effect; no difference of interest where the interval lies within it on both sides; else "
    "undecided.",
)

HEADS: Mapping[str, tuple[str, int]] = {
    "softmax": ("softmax", 1),
    "sigsoftmax": ("sigsoftmax", 1),
    "mos2": ("mos", 2),
    "mos4": ("mos", 4),
    "mos16": ("mos", 16),
    "trunk10": ("trunk", 10),
    "doc4": ("doc", 4),
    "plif": ("plif", 1),
}
"""The last has no kernels and is the dearest."""
SMALL_HEADS = ("softmax", "mos2")
WIDTHS, SMALL_WIDTHS = (64, 128), (16,)
RATES = (1.0, 2.0, 4.0)
FEW = 0.005
"""Share of parameters by which two runs may differ and still have equally many."""
SWAPPED, SMALL_SWAPPED = ("softmax", "mos4", "trunk10"), ("softmax", "mos2")


def study(widths: Sequence[int] = (), heads: Sequence[str] = ()) -> Study:
    """Of some widths and heads, or of all."""
    check_heads(heads, HEADS)
    if any(width < 1 for width in widths):
        raise FullrankError(f"--widths {' '.join(map(str, widths))}: expected widths of 1 or more")

    def plan(done: Done, extent: Extent) -> list[Spec]:
        specs: list[Spec] = []
        for width in widths or (SMALL_WIDTHS if extent.small else WIDTHS):
            specs += _of_width(width, heads or (SMALL_HEADS if extent.small else tuple(HEADS)), done, extent)
        return specs

    return Study(name="heads", statement=STATEMENT, plan=plan, answers=answers)


def _of_width(width: int, heads: Sequence[str], done: Done, extent: Extent) -> list[Spec]:
    specs: list[Spec] = []
    rates: dict[str, tuple[str, ...]] = {}
    for label in (label for label in HEADS if label in heads):
        own = _of(width, label, extent)
        best, trials = tuned(done, own, RATES)
        specs += trials
        if best is None:
            continue
        rates[label] = best
        for seed in range(extent.seeds):
            specs.append(_whole(own, best, "tokens", seed))
            reference = done.get(f"width{width}-softmax-tokens-seed{seed}")
            if label == "softmax":
                continue
            if reference is not None and not reference.failure:
                # As much as softmax of that seed took.
                budget = f"budget=flops={reference.flops:.6g}"
                specs.append(_whole(own, (*best, "steps=0", budget), "flops", seed))
                if (wider := _as_large(done.get(f"{own.name}-tokens-seed{seed}"), reference)) is not None:
                    plain = dataclasses.replace(_of(width, "softmax", extent), factors=own.factors)
                    plain = dataclasses.replace(plain, name=f"{plain.name}_as_{label}")
                    specs.append(_whole(plain, (*rates["softmax"], wider), "parameters", seed))
    specs += _swaps(width, rates, done, extent)
    return specs


def _of(width: int, label: str, extent: Extent) -> Spec:
    head, components = HEADS[label]
    recipe, settings = transformer(width, extent, steps=1500, evaluations=8)
    return Spec(
        name=f"width{width}-{label}", recipe=recipe, head=head,
        settings=(*settings, f"head.components={components}"),
        factors={"width": str(width), "head": label},
    )  # fmt: skip


def _whole(own: Spec, more: tuple[str, ...], budget: str, seed: int) -> Spec:
    settings = (*own.settings, *more)
    if own.head == "softmax":
        # What swaps begin with.
        settings = (*settings, f"snapshot_every={_between_snapshots(own)}")
    return Spec(
        name=f"{own.name}-{budget}-seed{seed}", recipe=own.recipe, head=own.head, settings=settings,
        factors={**own.factors, "equal": budget}, seed=seed,
    )  # fmt: skip


def _between_snapshots(own: Spec) -> int:
    return max(1, steps_of(own.settings) // 8)


def _as_large(run: GridRun | None, plain: GridRun) -> str | None:
    """The setting with which softmax has as many parameters as a run; None where it has about as many."""
    if run is None or run.failure or run.parameters <= (1 + FEW) * plain.parameters:
        return None
    from fullrank.train.config import override
    from fullrank.train.recipes import recipe

    body = override(recipe(plain.recipe, "softmax"), plain.settings).body
    # A unit reads a state and writes one, and has a bias, in every layer.
    units = (run.parameters - plain.parameters) / (body.layers * (2 * body.hidden + 1))
    return f"body.inner={4 * body.hidden + round(units)}"


def _swaps(width: int, rates: Mapping[str, tuple[str, ...]], done: Done, extent: Extent) -> list[Spec]:
    """From the best evaluation of softmax in the second half of its run that has a snapshot."""
    specs = []
    for seed in range(extent.seeds):
        parent = done.get(f"width{width}-softmax-tokens-seed{seed}")
        if parent is None or parent.failure or "softmax" not in rates:
            continue
        own = _of(width, "softmax", extent)
        whole, every = steps_of(own.settings), _between_snapshots(own)
        late = [point for point in parent.curve if 2 * point.step >= whole and point.step % every == 0]
        if not late:
            continue
        at = min(late, key=lambda point: point.loss).step
        for label in SMALL_SWAPPED if extent.small else SWAPPED:
            if label not in rates:
                continue
            own = _of(width, label, extent)
            # The rate that softmax wanted, for all alike, on a schedule that ends half a run later.
            specs.append(
                Spec(
                    name=f"width{width}-swap-{label}-seed{seed}", recipe=own.recipe, head=own.head,
                    settings=(*own.settings, *rates["softmax"], f"steps={at + whole // 2}"),
                    factors={**own.factors, "equal": "swap"}, seed=seed, branch=f"{parent.name}@{at}",
                )
            )  # fmt: skip
    return specs


def answers(runs: Sequence[GridRun]) -> tuple[GridAnswer, ...]:
    ends = {
        (run.factors["width"], run.factors["head"], run.factors["equal"], run.seed): run.valid
        for run in runs
        if "equal" in run.factors and run.valid is not None
    }
    words = {
        "tokens": "equal tokens",
        "flops": "equal compute",
        "parameters": "equal tokens and parameters",
        "swap": "swapped in, against softmax going on",
    }
    found = []
    arms = {key[:3] for key in ends if key[1] != "softmax"}
    ways, labels = list(words), list(HEADS)
    order = sorted(arms, key=lambda arm: (int(arm[0]), ways.index(arm[2]), labels.index(arm[1])))
    for width, head, equal in order:
        # Of equal parameters the run that stands under the head's name is softmax's.
        own = "tokens" if equal == "parameters" else equal
        base = {"parameters": (head, equal), "swap": ("softmax", equal)}.get(equal, ("softmax", "tokens"))
        differences = [
            loss - ends[width, *base, seed]
            for (one, label, kind, seed), loss in ends.items()
            if (one, label, kind) == (width, head, own) and (width, *base, seed) in ends
        ]
        if differences:
            found.append(
                compared(f"{head} at width {width}, {words[equal]}", differences, STATEMENT.smallest)
            )
    return tuple(found)


HEAD = study()
