"""Runs of a study made by hand, whose outcome a test knows, and plans followed to their end with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest

from fullrank.results import Provenance
from fullrank.results.grid import GridAnswer, GridPoint, GridRun
from fullrank.studies.grid import Study
from fullrank.studies.grid_plan import Extent, Spec
from fullrank.train.config import override
from fullrank.train.recipes import recipe

# `provenance()` starts git twice, and a plan has hundreds of runs.
MADE = Provenance(command="", commit="", time="", device="cpu", seed=None, versions={})


def made_by_hand(
    name: str,
    valid: float | None,
    *,
    seed: int = 0,
    monitors: Mapping[str, float] | None = None,
    per_byte: float | None = None,
    losses: tuple[float, ...] = (4.0, 3.0),
    tokens: int = 100,
    **factors: str,
) -> GridRun:
    """A run that ended so; `tokens` stand between two evaluations."""
    curve = tuple(
        GridPoint(
            step=step, tokens=tokens * step, loss=loss, standard_error=0.01, monitors=dict(monitors or {})
        )
        for step, loss in enumerate(losses, start=1)
    )
    return GridRun(
        name=name, factors=factors, seed=seed, settings=(), recipe="transformer-tiny", parameters=1,
        tokens=tokens * len(losses), flops=1e4 * tokens * len(losses), seconds=1.0, curve=curve, valid=valid,
        test=valid, last=losses[-1], failure="", after_looking=False,
        made=MADE, per_byte=per_byte,
    )  # fmt: skip


def followed(study: Study, extent: Extent, end: Callable[[Spec], GridRun]) -> dict[str, Spec]:
    """Every run of a plan that comes to its end, with settings that exist; `end` makes each."""
    done: dict[str, GridRun] = {}
    made: dict[str, Spec] = {}
    for _ in range(20):
        specs = study.plan(done, extent)
        assert len({spec.name for spec in specs}) == len(specs)
        new = [spec for spec in specs if spec.name not in done]
        if not new:
            answers = study.answers(tuple(done.values()))
            assert answers
            assert all(answer.sentence for answer in answers)
            return made
        for spec in new:
            override(recipe(spec.recipe, spec.head), spec.settings)
            assert not spec.branch or spec.branch.partition("@")[0] in done
            made[spec.name] = spec
            done[spec.name] = dataclasses.replace(end(spec), name=spec.name, seed=spec.seed)
    pytest.fail("the plan grows for ever")


def plain_end(spec: Spec) -> GridRun:
    """A run on which nothing depends."""
    return made_by_hand(spec.name, 4.0 + 0.01 * (len(spec.name) % 7), **spec.factors)


def decisions(answers: tuple[GridAnswer, ...]) -> dict[str, str]:
    return {answer.label: answer.decision for answer in answers}
