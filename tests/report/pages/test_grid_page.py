"""The page of a study: effects of one unit share an axis, those of another have their own."""

import dataclasses
import math

import pytest

from fullrank.report.pages.grid_page import effects, grid_page, over_minutes
from fullrank.results.estimate import Estimate
from fullrank.results.grid import NATS, Grid, GridAnswer, Statement
from tests.studies.made_runs import made_by_hand

STATEMENT = Statement(
    question="Does it?",
    hypothesis="It does.",
    comparison="One against another.",
    smallest=0.01,
    rule="By sign.",
)


def answer(label: str, unit: str, low: float = -0.3) -> GridAnswer:
    return GridAnswer(
        label=label, effect=Estimate(value=-0.2, low=low, high=-0.1), seeds=3, seen=0.1, decision="falls",
        sentence=f"{label} falls", unit=unit,
    )  # fmt: skip


def grid(*answers: GridAnswer) -> Grid:
    return Grid(
        name="made", statement=STATEMENT, declared="", small=False, runs=(), missing=(), answers=answers
    )


def test_each_unit_has_its_axis_and_the_statements_comes_first() -> None:
    record = grid(answer("rank", "share of the width"), answer("end", NATS), answer("lost", NATS, -math.inf))
    first, second = effects(record)
    assert (first.x.title, first.rows, first.lines) == (NATS, ("end",), (-0.01, 0.0, 0.01))
    assert (second.x.title, second.rows, second.lines) == ("share of the width", ("rank",), (0.0,))
    assert not list(effects(record, lambda one: one.label == "lost"))
    titles = [section.title for section in grid_page(record).sections if section.chart is not None]
    assert titles == ["What the rule decides", "Effects in share of the width"]


def test_many_sentences_are_a_table_and_a_few_are_read() -> None:
    told = dataclasses.replace(answer("a", NATS), sentence="a: -0.2 nats: falls; learnt by 3 of 3")
    few, many = grid(told), grid(told, *(answer(str(number), NATS) for number in range(20)))
    for record in (few, many):
        (decided,) = [one for one in grid_page(record).sections if one.identity == "decided"]
        assert decided.table is not None
        # What only the sentence says is not lost with it.
        assert decided.table.rows[0][-1] == "falls; learnt by 3 of 3"
        assert len(decided.table.rows) == len(record.answers)
        assert len(decided.items) == (1 if record is few else 0)
    assert decided.text == ("21 comparisons: 21 falls. The pictures and the table have all of them.",)


def test_a_study_without_answers_has_a_page() -> None:
    assert all(section.chart is None for section in grid_page(grid()).sections)


def test_published_perplexities_are_drawn_over_the_minutes_of_their_runs() -> None:
    run = made_by_hand("mos-seed0", 4.0, losses=(6.0, 5.0, 4.0), head="mos")
    trial = made_by_hand("mos-rate1", 5.0, head="mos", trial="1")
    record = dataclasses.replace(
        grid(), name="published", runs=(dataclasses.replace(run, seconds=1800.0), trial)
    )
    (trace,) = over_minutes(record).traces
    assert [point.x for point in trace.points] == [10.0, 20.0, 30.0]
    assert [point.y for point in trace.points] == pytest.approx([math.exp(loss) for loss in (6.0, 5.0, 4.0)])
    assert "Perplexity over minutes" in [section.title for section in grid_page(record).sections]
    other = dataclasses.replace(record, name="heads")
    assert "Perplexity over minutes" not in [section.title for section in grid_page(other).sections]


def test_costs_of_width_stand_over_the_ranks_of_texts() -> None:
    losses = {
        ("a", 8): (2.5, 2.7),
        ("a", 32): (2.0, 2.0),
        ("b", 8): (3.1,),
        ("b", 32): (3.0, 2.0),
        ("c", 8): (1.0,),
    }
    ranks = {"a": "40", "b": "10", "c": "20"}
    runs = tuple(
        made_by_hand(f"{name}{width}", loss, seed=seed, domain=name, width=str(width), frequent=ranks[name])
        for (name, width), ends in losses.items()
        for seed, loss in enumerate(ends)
    )
    trial = made_by_hand("trial", 9.0, domain="a", width="8", frequent="40", trial="2")
    record = dataclasses.replace(grid(), name="domains", runs=(*runs, trial))
    (section,) = [one for one in grid_page(record).sections if one.identity == "domains"]
    assert section.chart is not None
    assert section.table is not None
    # By rank; c has no wide body, and the seed of b that has no partner is left out.
    assert [row[0] for row in section.table.rows] == ["b", "a"]
    cost = section.table.rows[1][-1]
    assert isinstance(cost, Estimate)
    assert (cost.value, cost.low, cost.high) == pytest.approx((0.6, 0.5, 0.7))
    assert section.table.rows[0][1:3] == (10.0, None)
