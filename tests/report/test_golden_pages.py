"""The page of every kind of record, compared whole with its text in golden/.

After a change that should show: `REGENERATE=1 pytest tests/report` writes the texts anew; read their diff.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullrank.diagnose.series.runs import judged
from fullrank.report import render, render_comparison
from fullrank.report.charts.theme import DARK, WIDE
from fullrank.report.registry import _PAGES
from fullrank.results import Corpora, Trainings, read_log
from fullrank.results.diagnosis import Answered, UnreachableToken, Verdict
from tests.report import records
from tests.report.page_text import Canvas, PageReader

pytestmark = pytest.mark.usefixtures("two_references")
Write = Callable[..., Path]
COLOUR = re.compile("#[0-9a-f]{6}")


def render_with(*several: Any) -> str:
    made = dataclasses.replace(records.PROVENANCE, command="fullrank diagnose --only <loss>", device="gpu")
    return render_comparison(several, [records.PROVENANCE, made, records.PROVENANCE][: len(several)])


def diagnosed_twice() -> Any:
    """With a verdict, and questions that two commands answered."""
    later = dataclasses.replace(records.PROVENANCE, command="fullrank diagnose --only <loss>", device="gpu")
    verdict = Verdict(
        outcome="held back", gain=records.near(0.014, 0.008), smallest=0.0042,
        lines=("Held back: it is.", "moss gains much; 0.0042 would have been seen.", "Next: go on."),
        next="go on",
    )  # fmt: skip
    answered = {
        "loss": Answered(made=later, settings={"n": "9"}, text="173c"),
        "better_head": Answered(made=records.PROVENANCE, settings={"seeds": "2"}, text="173c"),
    }
    return dataclasses.replace(records.DIAGNOSIS, verdict=verdict, answered=answered)


def otherwise_asked() -> Any:
    """The wider model, measured in another way: losses that do not compare."""
    text = dataclasses.replace(records.DIAGNOSIS.text, sha256="another", window=512)
    model = records.wider()
    answered = {"better_head": Answered(made=records.PROVENANCE, settings={"seeds": "4"}, text="another")}
    half = dataclasses.replace(model.model, dtype="bfloat16")
    return dataclasses.replace(model, text=text, model=half, answered=answered)


PAGES: dict[str, Callable[[], str]] = {
    "ladder": lambda: render(records.LADDER, records.PROVENANCE),
    "ladder_odd": lambda: render(
        records.ODD_LADDER, dataclasses.replace(records.PROVENANCE, commit="", seed=None)
    ),
    "diagnosis": lambda: render(diagnosed_twice(), records.PROVENANCE),
    "diagnosis_partial": lambda: render(records.PARTIAL, records.PROVENANCE),
    "diagnoses": lambda: render_with(diagnosed_twice(), otherwise_asked(), records.PARTIAL),
    "attention": lambda: render(records.ATTENTION_ALONE, records.PROVENANCE),
    "series": lambda: render(records.SERIES, records.PROVENANCE),
    "upgrade": lambda: render(records.UPGRADE, records.PROVENANCE),
    "upgrade_taught": lambda: render(records.TAUGHT, records.PROVENANCE),
    "collapse": lambda: render(records.COLLAPSE, records.PROVENANCE),
    "corpus": lambda: render(records.corpus("WikiText-2"), records.PROVENANCE),
    "corpora": lambda: render_comparison(
        [records.corpus("English"), records.corpus("German", tokens=999, vocabulary=500)],
        [records.PROVENANCE] * 2,
    ),
    "corpora_of_two_tokenisers": lambda: render(
        Corpora(
            title="Languages", notes=("By hand.",),
            corpora=tuple(
                records.corpus(
                    f"{name}, {kind}", tokenizer=kind, curves=(records.corpus_curve("probability"),)
                )
                for kind in ("bpe:300", "bytes")
                for name in "abcdefg"
            ),
        ),
        records.PROVENANCE,
    ),
    "templates": lambda: render(records.TEMPLATES, records.PROVENANCE),
    "generation": lambda: render(records.GENERATION, records.PROVENANCE),
    **{name: lambda grid=grid: render(grid, records.PROVENANCE) for name, grid in records.GRIDS.items()},
}  # fmt: skip


def check_colours(canvas: Canvas) -> None:
    """Every colour has its partner on dark pages."""
    assert canvas.specifications
    assert set(COLOUR.findall(str(canvas.specifications))) <= set(DARK)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_stored(name: str, canvas: Canvas, same_as_golden: Callable[[str, str], None]) -> None:
    html = PAGES[name]()
    same_as_golden(f"{name}.txt", "\n".join(PageReader(html, canvas).lines) + "\n")
    if name not in ("generation", "collapse"):
        check_colours(canvas)


def training_runs(write_run: Write) -> dict[str, Any]:
    turned = judged(read_log(write_run("planted", turns=True, dead_from=7)))
    attending = dataclasses.replace(
        turned,
        evaluations=tuple(
            dataclasses.replace(
                one,
                monitors={
                    **one.monitors, "attention_effective_tokens": 40.0, "attention_first": 0.1,
                    "attention_sensitivity": 0.7,
                },
            )
            for one in turned.evaluations
        ),
    )  # fmt: skip
    plain = dataclasses.replace(
        read_log(write_run("plain", head="softmax", components=1)),
        unmeasured={"attention": "AwdLstmModel has no attention"}, data={"digest": "else"},
    )  # fmt: skip
    young = judged(read_log(write_run("young", evaluations=2, finished=False, seed=7, gain=0.3)))
    return {
        "training": attending,
        "training_young": young,
        "trainings": Trainings(runs=(turned, plain, young)),
    }


@pytest.mark.parametrize("name", ["training", "training_young", "trainings"])
def test_the_page_of_a_training_is_as_stored(
    name: str, canvas: Canvas, write_run: Write, same_as_golden: Callable[[str, str], None]
) -> None:
    html = render(training_runs(write_run)[name], records.PROVENANCE)
    same_as_golden(f"{name}.txt", "\n".join(PageReader(html, canvas).lines) + "\n")
    check_colours(canvas)


def test_every_kind_has_a_golden_page() -> None:
    assert {kind for kind in _PAGES if kind not in PAGES} == {"training", "trainings"}


def test_a_comparison_of_equals_has_no_warning(canvas: Canvas) -> None:
    asked = diagnosed_twice()
    assert 'class="warning"' not in render_comparison([asked, asked], [records.PROVENANCE] * 2)
    # An answer whose settings are not recorded is not known to be equal; a missing one is no difference.
    quiet = dataclasses.replace(asked, better_head=None, answered={"loss": asked.answered["loss"]})
    assert "seeds 2, not recorded" in render_with(asked, dataclasses.replace(asked, answered={}))
    assert 'class="warning"' not in render_with(asked, quiet)
    assert "Nothing was flagged" in render(dataclasses.replace(asked, findings=()), records.PROVENANCE)


def test_one_answer_among_several_models_is_named(canvas: Canvas) -> None:
    render_with(records.PARTIAL, records.DIAGNOSIS)
    (picture,) = [
        spec for spec in canvas.specifications if "moss, K = 4" in str(spec) and spec["width"] == WIDE
    ]
    assert "SmolLM2-135M (2)" in str(picture)


def test_unreachable_tokens_are_listed_up_to_a_limit(canvas: Canvas) -> None:
    tokens = tuple(UnreachableToken(id=place, text=f"token {place}", depth=0.1) for place in range(1234))
    unreachable = records.DIAGNOSIS.unreachable
    assert unreachable is not None
    record = dataclasses.replace(
        records.DIAGNOSIS, unreachable=dataclasses.replace(unreachable, never=tokens)
    )
    html = render(record, records.PROVENANCE)
    assert html.count("“token ") == 200
    assert "1,034 more are in results.json" in html
