"""The page of trained normalisers: every figure, careful words, nothing but text, and odd records."""

from __future__ import annotations

import dataclasses
import math
import re
from html import unescape

from fullrank import report
from fullrank.report.charts.theme import DARK, NARROW, WIDE
from fullrank.report.pages.attention_study_page import attention_study_page, differences, label, verdict
from fullrank.results import AttentionStudy, Estimate, Provenance
from fullrank.results.attention_study import AttentionLayer, AttentionRun

PAYLOAD = "</script><script>alert(1)</script>"
LOSSES = {"softmax": (5.0, 5.5, 6.0), "sparsemax": (5.31, 5.79, 6.3), "entmax15": (5.01, 5.4, 6.11),
          "sink": (4.9, 5.38, 5.92)}  # fmt: skip


def run(name: str, seed: int, loss: float) -> AttentionRun:
    learnt = (0.125, -0.75) if name == "sink" else ()
    layer = AttentionLayer(
        effective_tokens=21.75, first_mass=0.0625, mass=0.875, zeros=0.03125, separable=0.71875,
        separable_random=0.09375, learnt=learnt,
    )  # fmt: skip
    between = Estimate(value=loss, low=loss - 0.04, high=loss + 0.04)
    return AttentionRun(
        normaliser=name, seed=seed, parameters=921_088, steps=(100, 200), losses=(6.125, 5.75), valid=between,
        test=between, seconds=123.5, layers=(layer, layer), failure="",
    )  # fmt: skip


def record(**changes: object) -> AttentionStudy:
    made = AttentionStudy(
        recipe="transformer-tiny", config={"steps": "200", "optimiser.lr": "0.002"}, data={}, vocabulary=4096,
        context=128, training_steps=200, training_tokens=204_800, evaluated_tokens=32_768, queries=1024,
        set_size=16, device="cpu",
        runs=tuple(run(name, seed, loss) for name, some in LOSSES.items() for seed, loss in enumerate(some)),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def text(page: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", page)))


def test_words_follow_the_intervals() -> None:
    words = {row.normaliser: verdict(row) for row in record().compared()}
    assert words == {
        "softmax": "reference",
        "sparsemax": "worse",
        "entmax15": "not told apart",
        "sink": "better",
    }
    alone = record(runs=(run("softmax", 0, 5.0), run("sink", 0, 4.0)))
    assert [verdict(row) for row in alone.compared()] == ["reference", "not compared"]


def test_the_page_holds_every_figure(made: Provenance) -> None:
    page = text(report.render(record(), made))
    for words in (
        "softmax with a sink", "1.5-entmax", "21.75", "0.0625", "0.7188", "0.09375", "204,800",
        "0.125, -0.750", "6.125, 5.750", "optimiser.lr", "921,088", "1,024 queries",
        "no proof that both are equal",
    ):  # fmt: skip
        assert words in page, words
    assert "did not finish" not in page


def test_the_picture_has_a_row_each_and_page_colours_only() -> None:
    picture = differences(record())
    assert picture.rows == ("sparsemax", "1.5-entmax", "softmax with a sink")
    assert len(picture.marks) == 3 * 4
    for width in (WIDE, NARROW):
        drawn = str(picture.specification(width=width))
        colours = set(re.findall(r"#[0-9a-f]{6}", drawn))
        assert colours <= DARK.keys()


def test_odd_records_have_a_page(made: Provenance) -> None:
    failed = dataclasses.replace(
        run("sigmoid", 0, 5.0), valid=None, test=None, layers=(), failure=f"not finite {PAYLOAD}", losses=()
    )
    odd = record(recipe=PAYLOAD, runs=(run("softmax", 0, math.nan), failed))
    page = report.render(odd, made)
    assert PAYLOAD not in page
    assert "did not finish: not finite" in text(page)
    assert label(PAYLOAD) != ""
    assert attention_study_page(record(runs=(run("softmax", 0, 5.0),))).warnings == ()
