"""The attention sections of a page, from records that are whole, partial, strange and hostile."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

import fullrank.report
from fullrank.report.charts.heat import MOST_TOLD, Cell, Map, Maps
from fullrank.report.charts.theme import DARK
from fullrank.results import QUESTIONS, Diagnosis, Estimate, Provenance
from fullrank.results import attention as parts


def around(value: float, half: float = 0.01) -> Estimate:
    return Estimate(value=value, low=value - half, high=value + half)


def measured(layers: int = 3, heads: int = 4) -> parts.Attention:
    lengths, sizes = (32, 64), (1, 2, 16)
    return parts.Attention(
        weights="eager",
        scores="queries and keys",
        difference=3.1e-7,
        eager_difference=4.2e-7,
        eager_positions=64,
        layers=layers,
        heads=layers * heads,
        sliding_layers=(1,),
        windows=12,
        queries=2,
        reference_size=16,
        level=0.01,
        false_share=0.05,
        tests=4,
        step=1e-3,
        by_length=tuple(
            parts.AttentionLength(
                length=length,
                visible=length - 0.5,
                entropy=around(1.9),
                effective_tokens=around(0.13 * length, 0.4),
                first_mass=around(0.3123),
                log_largest=3.25,
                log_smallest=-7.5,
                score_range=10.75,
                exponent=71.3,
                envelope_says=0.0,
                sensitivity=around(0.213),
                critical=(
                    parts.AttentionCritical(
                        statistic="f",
                        sizes=(2, 16),
                        p=(1e-9, 0.4),
                        critical=16 if length == 64 else None,
                        heads_told=(11, 7),
                        heads=12,
                    ),
                    parts.AttentionCritical(
                        statistic="distance",
                        sizes=(2, 16),
                        p=(1e-12, 1e-10),
                        critical=None,
                        heads_told=(12, 12),
                        heads=12,
                    ),
                ),
            )
            for length in lengths
        ),
        by_size=tuple(
            parts.AttentionSets(
                length=length,
                size=size,
                separable=around(0.637),
                separable_random=around(0.0712),
                precision=around(0.21),
                precision_random=around(0.04),
                f=around(0.24),
                f_random=around(0.045),
                mass=0.82,
                mass_random=0.03,
                distance=1054.8,
                distance_random=62.8,
                bound=3650.9,
                bound_random=174.9,
                exceeded=0,
            )
            for length in lengths
            for size in sizes
        ),
        by_temperature=tuple(
            parts.AttentionTemperature(
                temperature=temperature,
                exact=0.2 / temperature,
                exact_largest=0.48 / temperature,
                bound=0.5 / temperature,
                estimated=0.01 / temperature,
                estimated_largest=0.02 / temperature,
                above_quarter=0.3259,
            )
            for temperature in (0.1, 1.0, 4.0)
        ),
        by_head=tuple(
            parts.AttentionHead(
                layer=layer,
                head=head,
                key_head=head // 2,
                visible=63.5,
                entropy=1.2,
                effective_tokens=1.0 + layer + head,
                first_mass=0.1 * head,
                largest=0.4,
                sensitivity=0.21,
                separable=0.5 + 0.1 * head,
                separable_random=0.07,
                f=0.3,
                f_random=0.05,
                critical_f=None if head else 2,
                critical_distance=None,
            )
            for layer in range(layers)
            for head in range(heads)
        ),
        loss=around(3.1212),
        loss_tokens=1536,
        normalisers=(
            parts.AttentionNormaliser(
                name="softmax", label="softmax", effective_tokens=8.3, first_mass=0.31, zeros=0.0, total=1.0,
                separable=0.637, separable_random=0.07, loss=around(3.1212), change=None, reason="",
            ),
            parts.AttentionNormaliser(
                name="sparsemax", label="sparsemax", effective_tokens=1.7, first_mass=0.43, zeros=0.99,
                total=1.0, separable=0.11, separable_random=0.01, loss=None, change=None,
                reason="sparsemax and entmax15 need the entmax package",
            ),
            parts.AttentionNormaliser(
                name="sink", label="softmax with a sink", effective_tokens=8.3, first_mass=0.3, zeros=0.0,
                total=0.98, separable=0.637, separable_random=0.07, loss=around(3.3),
                change=around(0.1788, 0.02), reason="",
            ),
        ),
        kept=(parts.AttentionKept(size=16, change=around(0.7), relative=0.23),
              parts.AttentionKept(size=64, change=around(0.01), relative=0.004)),
        tolerance=0.01,
        effective_size=64,
        notes=("Queries are grouped: several heads share their keys and values.",),
    )  # fmt: skip


@pytest.fixture(scope="module")
def record(diagnosis: Diagnosis) -> Diagnosis:
    return dataclasses.replace(diagnosis, attention=measured())


@pytest.fixture(scope="module")
def alone(record: Diagnosis) -> Diagnosis:
    """Nothing but attention was asked."""
    return dataclasses.replace(record, **dict.fromkeys(QUESTIONS), findings=())


def sections(html: str) -> dict[str, str]:
    pieces = re.split(r'<section id="([a-z_]+)">', html)[1:]
    return {name: part.split("</section>")[0] for name, part in zip(pieces[::2], pieces[1::2], strict=True)}


@pytest.fixture(scope="module")
def page(alone: Diagnosis, made: Provenance) -> str:
    return fullrank.report.render(alone, made)


NAMES = ["attention", "attention_sets", "attention_sensitivity", "attention_what_if"]


@pytest.mark.slow
def test_attention_stands_behind_the_questions(record: Diagnosis, made: Provenance) -> None:
    found = sections(fullrank.report.render(record, made))
    assert list(found) == ["flagged", *QUESTIONS, *NAMES, "reference", "measured"]


def test_every_section_has_its_words_table_and_picture(page: str) -> None:
    found = sections(page)
    for name in NAMES:
        assert "It does not" in found[name] or "does not show" in found[name]
        assert "<table>" in found[name]
    assert [found[name].count('role="img"') for name in NAMES] == [2, 2, 2, 0]


def test_a_page_of_attention_alone(page: str) -> None:
    assert "<h1>Attention of SmolLM2-135M</h1>" in page
    assert list(sections(page)) == [*NAMES, "measured"]
    assert 'class="tile"' not in page


def test_every_head_is_a_square_with_its_figures(page: str) -> None:
    part = sections(page)["attention"]
    for words in (
        "layer 2, head 3: 6 effective tokens of 64",
        "layer 0, head 1: 10.0% on the first position",
        "layer 1, head 2: 70.0% of the top 16 separable",
        "layer 1, head 2: 7.0% of 16 random positions separable",
    ):
        assert part.count(words) >= 2, words
    assert "differ by at most 3.1e-07" in part
    assert "for 100.0% of the queries" in part


def test_published_figures_stand_beside_the_control(page: str) -> None:
    part = sections(page)["attention_sets"]
    for words in ("0.70 to 0.85", "GPT-2 (124M)", "without a control", "0.071", "0.637"):
        assert words in part, words
    assert "from N = 16 at a context of 64 on" in part
    assert "By the cumulative distance the top set is told from a random one at every N" in part


def test_what_if_says_that_nothing_was_retrained(page: str) -> None:
    part = sections(page)["attention_what_if"]
    assert "Nothing was retrained" in part
    assert "need the entmax package" in part
    assert "With 64 of the largest weights" in part


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(replaced(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: replaced(getattr(value, one.name), change) for one in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return change(value)


STRANGE = (math.inf, -math.inf, 0.0, 1e308, -1.0)


@pytest.mark.parametrize(
    "number", [math.nan, None, *(pytest.param(one, marks=pytest.mark.slow) for one in STRANGE)]
)
def test_strange_figures_make_a_page(alone: Diagnosis, made: Provenance, number: float | None) -> None:
    found = alone.attention
    assert found is not None

    def change(value: Any) -> Any:
        return (math.nan if number is None else number) if isinstance(value, float) else value

    strange = replaced(found, change)
    if number is None:
        bare = ("separable", "separable_random", "f", "f_random", "critical_f", "critical_distance")
        heads = tuple(dataclasses.replace(one, **dict.fromkeys(bare)) for one in found.by_head)
        strange = dataclasses.replace(
            found, by_head=heads, by_size=(), reference_size=0, loss=None, kept=(), weights="outputs"
        )
    page = fullrank.report.render(dataclasses.replace(alone, attention=strange), made)
    assert "</html>" in page


def test_a_record_without_anything_makes_a_page(alone: Diagnosis, made: Provenance) -> None:
    found = alone.attention
    assert found is not None
    empty = dataclasses.replace(
        found, by_length=(), by_size=(), by_temperature=(), by_head=(), normalisers=(), kept=(), notes=()
    )
    page = fullrank.report.render(dataclasses.replace(alone, attention=empty), made)
    assert "There is nothing to draw" in page


def test_hostile_text_stays_text(alone: Diagnosis, made: Provenance, hostile_text: str) -> None:
    found = replaced(alone.attention, lambda value: hostile_text if isinstance(value, str) else value)
    page = fullrank.report.render(dataclasses.replace(alone, attention=found), made)
    assert "<script" not in page
    assert "<img" not in page


@pytest.mark.slow
def test_several_models_have_their_own_sections(
    record: Diagnosis, alone: Diagnosis, made: Provenance
) -> None:
    page = fullrank.report.render_comparison([record, alone], [made, made])
    assert "SmolLM2-135M: What does softmax let its attention select?" in page
    assert "SmolLM2-135M (2): What does softmax let its attention select?" in page


def test_maps_use_colours_that_dark_pages_swap() -> None:
    cells = tuple(Cell(column=place % 5, row=place // 5, shade=place / 20) for place in range(20))
    specification = Maps(
        maps=(Map(title="one", cells=cells),), column_title="layer", row_title="head"
    ).specification(width=760)
    colours = set(re.findall("#[0-9a-f]{6}", str(specification)))
    assert colours <= set(DARK)


def test_large_grids_tell_less_or_are_left_out() -> None:
    def grid(columns: int, rows: int) -> Maps:
        cells = tuple(
            Cell(column=column, row=row, shade=0.5, summary="told")
            for column in range(columns)
            for row in range(rows)
        )
        return Maps(maps=(Map(title="one", cells=cells),), column_title="layer", row_title="head")

    assert "told" in str(grid(10, 10).specification(width=350))
    assert MOST_TOLD < 60 * 40
    assert "told" not in str(grid(60, 40).specification(width=350))
    assert grid(60, 40).drawable()
    assert not grid(200, 2).drawable()


@pytest.mark.slow
def test_nothing_runs_out_of_its_picture(page: str, measure: Callable[..., Any]) -> None:
    for found in measure(page, 1280, 390):
        assert found["pictures"] == 3
        assert found["outside"] == []
        assert found["overlapping"] == []
        assert found["overflow"] == 0
