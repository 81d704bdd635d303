from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

import fullrank.report
from fullrank.errors import FullrankError
from fullrank.report.charts.theme import DARK, MODEL_COLOURS
from fullrank.report.pages.questions import WORDS
from fullrank.results import QUESTIONS, Diagnosis, Ladder, Provenance
from fullrank.results.diagnosis import Answered, UnreachableToken

Read = Callable[[str], Any]


@pytest.fixture(scope="module")
def html(diagnosis: Diagnosis, made: Provenance) -> str:
    return fullrank.report.render(diagnosis, made)


@pytest.fixture(scope="module")
def hostile(diagnosis: Diagnosis, odd_diagnosis: Diagnosis, hostile_text: str, made: Provenance) -> str:
    """Hostile names with figures that can be drawn, so that the names stand in pictures too."""
    assert diagnosis.unreachable is not None
    assert diagnosis.better_head is not None
    token = UnreachableToken(id=7, text=hostile_text + "y" * 10_000, depth=0.1)
    fits = tuple(dataclasses.replace(fit, head=hostile_text) for fit in diagnosis.better_head.fits)
    record = dataclasses.replace(
        odd_diagnosis,
        **{
            **{name: getattr(diagnosis, name) for name in QUESTIONS},
            "better_head": dataclasses.replace(diagnosis.better_head, fits=fits, best=hostile_text),
            "unreachable": dataclasses.replace(diagnosis.unreachable, never=(token,) * 250),
        },
    )
    return fullrank.report.render_comparison([record, record], [made, made])


@pytest.fixture(scope="module")
def comparison(diagnosis: Diagnosis, other: Diagnosis, partial: Diagnosis, made: Provenance) -> str:
    return fullrank.report.render_comparison([diagnosis, other, partial], [made, made, made])


def sections(html: str) -> dict[str, str]:
    """The source of each section that has a name, in the order of the page."""
    parts = re.split(r'<section id="([a-z_]+)">', html)[1:]
    return {name: part.split("</section>")[0] for name, part in zip(parts[::2], parts[1::2], strict=True)}


def test_a_section_a_question_in_order(html: str) -> None:
    found = sections(html)
    assert list(found) == ["flagged", *QUESTIONS, "reference", "measured"]
    for name in QUESTIONS:
        part = found[name]
        assert WORDS[name].title in part
        assert part.count('role="img"') == 2
        assert part.count("<summary>Definition</summary>") == 1
        assert "It does not" in part
        assert "<table>" in part


def test_every_question_has_words() -> None:
    assert tuple(WORDS) == QUESTIONS


def test_page_opens_with_the_answer(html: str) -> None:
    start, end = html.index('class="answers"'), html.index('id="flagged"')
    for words in (">301 ", ">0.014 ", "1.4% of the perplexity", "95% interval 250 to 380"):
        assert start < html.index(words) < end


def test_the_debate_is_stated(html: str) -> None:
    part = sections(html)["gradient"]
    for words in ("2603.10145", "2608.16671", "dispute", "width 96"):
        assert words in part


def test_figures_stand_in_the_tables(html: str, diagnosis: Diagnosis, read_page: Read) -> None:
    read = read_page(html)
    exact = {attributes["value"] for tag, attributes in read.elements if tag == "data"}
    assert diagnosis.loss is not None
    assert diagnosis.anisotropy is not None
    assert diagnosis.rank_needed is not None
    assert diagnosis.better_head is not None
    assert diagnosis.gradient is not None
    values: list[float] = [
        diagnosis.loss.nats_per_token.value,
        diagnosis.rank_needed.knee.value,
        diagnosis.better_head.best_gain.value,
        diagnosis.gradient.null_norm,
        *(part.nats.value for part in diagnosis.loss.by_position),
        *(layer.cosine.value for layer in diagnosis.anisotropy.layers),
        *(point.truncated.value for point in diagnosis.rank_needed.points),
        *(fit.gain.value for fit in diagnosis.better_head.fits),
        *diagnosis.gradient.quantiles,
        *diagnosis.seconds.values(),
        diagnosis.model.parameters,
        diagnosis.text.tokens,
    ]
    assert {str(value) for value in values} <= exact
    assert "3.203 to 3.277" in read.cells


@pytest.mark.usefixtures("blank_pictures")
def test_tokens_are_listed_up_to_a_limit(diagnosis: Diagnosis, made: Provenance) -> None:
    assert diagnosis.unreachable is not None
    never = tuple(UnreachableToken(id=place, text=f"token {place}", depth=0.1) for place in range(1234))
    record = dataclasses.replace(
        diagnosis, unreachable=dataclasses.replace(diagnosis.unreachable, never=never)
    )
    part = sections(fullrank.report.render(record, made))["unreachable"]
    assert part.count("“token ") == 200
    assert "1,034 more are in results.json" in part
    assert "1,234" in part


@pytest.mark.usefixtures("blank_pictures")
def test_findings_or_none(html: str, diagnosis: Diagnosis, made: Provenance) -> None:
    for finding in diagnosis.findings:
        assert finding.sentence in sections(html)["flagged"]
    quiet = fullrank.report.render(dataclasses.replace(diagnosis, findings=()), made)
    assert "Nothing was flagged" in sections(quiet)["flagged"]


def test_unanswered_questions_say_so(partial: Diagnosis, made: Provenance) -> None:
    found = sections(fullrank.report.render(partial, made))
    assert "This was not measured: interrupted after 3 of 9 ranks." in found["rank_needed"]
    assert "This was not measured." in found["spectrum"]
    assert "svg" not in found["rank_needed"]
    assert found["missing"].count("<li>") == len(partial.missing)
    assert "too few tokens" in found["missing"]


def test_strange_records_have_a_page(strange: Diagnosis, made: Provenance, read_page: Read) -> None:
    for page in (
        fullrank.report.render(strange, made),
        fullrank.report.render_comparison([strange, strange], [made, made]),
    ):
        read = read_page(page)
        assert list(sections(page))[1:9] == list(QUESTIONS)
        drawn = [
            value for _, attributes in read.elements for name, value in attributes.items() if name == "d"
        ]
        assert not [path for path in drawn if "NaN" in path or "Infinity" in path]


def test_every_colour_has_its_dark_partner(html: str, comparison: str) -> None:
    for page in (html, comparison):
        body = page.split("</style>")[1]
        colours = set(re.findall(r'(?:fill|stroke)="([^"]*)"', body)) - {"none", "transparent"}
        assert colours <= DARK.keys()


def test_text_stays_text(hostile: str, read_page: Read) -> None:
    read = read_page(hostile)
    assert not {"script", "img", "iframe", "object", "link", "a"} & {tag for tag, _ in read.elements}
    assert not any(name.startswith("on") for _, attributes in read.elements for name in attributes)
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\u2028\x00\x1b\ud800\ufffd]", hostile)
    assert "\\u202egnp.exe\\u2066\\x00" in hostile
    assert "y" * 600 not in hostile
    # 2 models, 200 tokens each, cut.
    assert read.cells.count(next(cell for cell in read.cells if cell.startswith("“"))) == 400
    assert len(hostile) < 1_500_000


def test_page_loads_nothing(html: str, hostile: str, comparison: str, read_page: Read) -> None:
    for page in (html, hostile, comparison):
        read = read_page(page)
        names = {name for _, attributes in read.elements for name in attributes}
        assert not {"src", "srcset", "href", "xlink:href", "action", "data", "poster", "style"} & names
        assert "http://" not in page
        assert "https://" not in page


def test_comparison_names_every_model_everywhere(comparison: str, read_page: Read) -> None:
    names = ("SmolLM2-135M", "Pythia-160M", "SmolLM2-135M (2)")
    read = read_page(comparison)
    assert comparison.count('class="tile"') == 2 * len(names)
    for name in names:
        assert name in read.cells
        assert f"</svg>{name}</h2>" in comparison
    found = sections(comparison)
    assert list(found) == ["flagged", *QUESTIONS, "reference", "missing", "measured"]
    for question in ("loss", "anisotropy", "logprob_rank", "unreachable"):
        for name, colour in zip(names, MODEL_COLOURS, strict=False):
            assert name in found[question]
            # Legend, wide and narrow.
            assert found[question].count(f'"{colour}"') >= 3
    # The third model lacks these four.
    for question in ("spectrum", "rank_needed", "better_head", "gradient"):
        assert f'"{MODEL_COLOURS[1]}"' in found[question]
        assert f'"{MODEL_COLOURS[2]}"' not in found[question]
        assert "SmolLM2-135M (2): This was not measured" in found[question]


def test_one_model_alone_among_several_is_still_named(
    diagnosis: Diagnosis, partial: Diagnosis, made: Provenance
) -> None:
    found = sections(fullrank.report.render_comparison([partial, diagnosis], [made, made]))
    assert "SmolLM2-135M (2)" in found["better_head"]


@pytest.mark.usefixtures("blank_pictures")
def test_warnings_where_losses_are_not_comparable(
    diagnosis: Diagnosis, other: Diagnosis, made: Provenance
) -> None:
    def warned(**changes: Any) -> str:
        record = dataclasses.replace(diagnosis, text=dataclasses.replace(diagnosis.text, **changes))
        page = fullrank.report.render_comparison([diagnosis, record], [made, made])
        return " ".join(re.findall(r'<p class="warning">(.*?)</p>', page))

    assert warned() == ""
    assert "different texts" in warned(sha256="other")
    assert "windows of different length" in warned(window=512)
    page = fullrank.report.render_comparison([diagnosis, other], [made, made])
    assert "different vocabularies" in page
    assert "bits per byte" in page


def answered(made: Provenance, **settings: str) -> Answered:
    return Answered(made=made, settings=settings, text="173c")


@pytest.mark.usefixtures("blank_pictures")
def test_warnings_where_questions_were_asked_otherwise(diagnosis: Diagnosis, made: Provenance) -> None:
    def warned(*records: Diagnosis) -> str:
        page = fullrank.report.render_comparison(records, [made] * len(records))
        return " ".join(re.findall(r'<p class="warning">(.*?)</p>', page))

    def asked(**settings: str) -> Diagnosis:
        return dataclasses.replace(diagnosis, answered={"better_head": answered(made, **settings)})

    two, four = asked(seeds="2", rates="0.1"), asked(seeds="4", rates="0.1")
    assert warned(two, two) == warned(diagnosis, diagnosis) == ""
    assert warned(two, four) == (
        "What would a better head buy? This was asked with different settings: seeds 2, 4."
    )
    assert "seeds 2, not recorded" in warned(two, diagnosis)
    assert "seeds" not in warned(two, dataclasses.replace(four, better_head=None, answered={}))
    half = dataclasses.replace(diagnosis, model=dataclasses.replace(diagnosis.model, dtype="bfloat16"))
    assert "different precision" in warned(diagnosis, half)


@pytest.mark.usefixtures("blank_pictures")
def test_answers_of_several_commands_are_told_apart(diagnosis: Diagnosis, made: Provenance) -> None:
    later = dataclasses.replace(made, command="fullrank diagnose --only <loss>", device="Another GPU")
    one = dataclasses.replace(diagnosis, answered={"loss": answered(made), "spectrum": answered(made)})
    two = dataclasses.replace(
        diagnosis, answered={"loss": answered(made), "gradient": answered(later, n="9")}
    )
    assert "How each answer was made" not in fullrank.report.render(one, made)
    page = fullrank.report.render(two, made)
    assert "How each answer was made" in page
    assert "fullrank diagnose --only &lt;loss&gt;" in page
    assert "Another GPU" in page
    assert "n 9" in page


def test_only_diagnoses_stand_side_by_side(diagnosis: Diagnosis, ladder: Ladder, made: Provenance) -> None:
    with pytest.raises(FullrankError, match=r"only diagnoses.*'ladder'"):
        fullrank.report.render_comparison([diagnosis, ladder], [made, made])


def test_too_many_models_are_an_error(diagnosis: Diagnosis, made: Provenance) -> None:
    with pytest.raises(FullrankError, match=r"7 models.*colours for 6"):
        fullrank.report.render_comparison([diagnosis] * 7, [made] * 7)


# The hostile page has two models and the longest names; a browser takes two seconds for a page.
@pytest.mark.parametrize(
    "which",
    [
        "hostile",
        pytest.param("html", marks=pytest.mark.slow),
        pytest.param("comparison", marks=pytest.mark.slow),
    ],
)
def test_nothing_runs_out_of_its_picture(
    which: str, measure: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    widths = (1280, 390)
    for width, found in zip(widths, measure(request.getfixturevalue(which), *widths), strict=True):
        assert found == {
            "pictures": len(QUESTIONS),
            "outside": [],
            "overlapping": [],
            "overflow": 0,
            "width": width,
            "foreign": 0,
            "requests": 0,
        }


def test_the_policy_holds_in_a_browser(hostile: str, browse: Callable[..., str]) -> None:
    # As it is, with its policy: the browser would complain to the console about anything it blocks.
    assert browse(hostile, "--dump-dom").count('role="img"') == 2 * len(QUESTIONS)


@pytest.mark.slow(reason="two starts of a browser for rules of a style sheet that all pages share")
def test_paper_shows_what_is_folded_away(html: str, browse: Callable[..., str]) -> None:
    # The same rules on a screen, because only a screen can be measured.
    script = """<script>
    const shown = [...document.querySelectorAll("details")]
      .map(fold => fold.lastElementChild.checkVisibility({contentVisibilityAuto: true}));
    const result = document.createElement("output");
    result.textContent = shown.every(Boolean) + " " + shown.length;
    document.body.append(result);
    </script></body>"""
    folds = html.count("<details>")
    for media, visible in (("@media print", "false"), ("@media all", "true")):
        page = html.replace("@media print", media).replace("Content-Security-Policy", "")
        document = browse(page.replace("</body>", script), "--dump-dom")
        assert f"<output>{visible} {folds}</output>" in document
