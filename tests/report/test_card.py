"""The card of a model: compared whole with golden/card_*.md, without private names, inert where hostile."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fullrank.report import card
from fullrank.results import Collapse, Provenance, Upgrade, read_log
from tests.report import records

MADE = Provenance(
    command="fullrank upgrade /home/somebody/secret --out /home/somebody/secret/out", commit="", time="",
    device="cpu", seed=0, versions={"fullrank": "9.8.7"},
)  # fmt: skip
HOSTILE = (
    "a`b``c", "``", "`", " ", "", "x\n---\nlicense: mit\n---\n# y", "| a | b |", "<script>alert(1)</script>",
    "[x](javascript:alert(1))", "![x](https://example.org/x.png)", "**bold** _x_ ~~y~~", "{{ x }}",
    "\u202egnp", "&lt;b&gt;", "https://example.org", "<!-- x", "\\", "\\`", "$x$", "\ud800", "a" * 5000,
    "%s {} {0}",
)  # fmt: skip


def upgraded(*, training: dict[str, Any] | None = None, model: Any = None, **changes: Any) -> Upgrade:
    if training is not None:
        changes["training"] = dataclasses.replace(records.TRAINING, **training)
    return dataclasses.replace(records.UPGRADE, **({"model": model} if model else {}), **changes)


def collapsed(**changes: Any) -> Collapse:
    return dataclasses.replace(records.COLLAPSE, **changes)


def tokens(rendered: str) -> list[Any]:
    """The parsed markdown of a card, without its front matter."""
    parsed = MarkdownIt("commonmark", {"html": True}).enable("table").parse(ModelCard(rendered).text)
    return [child for token in parsed for child in (token, *(token.children or ()))]


def outline(rendered: str) -> list[tuple[str, str]]:
    """Blocks, links and HTML of a card, without the words of paragraphs and cells."""
    with_content = ("html_block", "html_inline", "fence")
    return [
        (token.type, token.content if token.type in with_content else token.attrGet("href") or token.tag)
        for token in tokens(rendered)
        if token.type not in ("text", "code_inline", "inline", "softbreak") and "sha256" not in token.content
    ]


def test_cards_are_as_stored(same_as_golden: Callable[[str, str], None], write_run: Any) -> None:
    run = dataclasses.replace(
        read_log(write_run()),
        data={"sources.0.name": "x/train.txt", "sources.0.bytes": "7", "splits.train.tokens": "2000"},
    )
    cards = {
        "upgrade": card.render(records.UPGRADE, MADE, license="apache-2.0", flags="--components 4"),
        "untrained": card.render(upgraded(training=None, verdict="It has not been trained."), MADE),
        "taught": card.render(records.TAUGHT, MADE),
        "collapse": card.render(records.COLLAPSE, MADE),
        "training": card.render(run, MADE, flags="transformer-tiny", options={"components": 4}),
    }
    for name, text in cards.items():
        same_as_golden(f"card_{name}.md", text)
    # As the hub reads it.
    assert ModelCard(cards["upgrade"]).data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["fullrank", "mos"],
        "base_model": "someone/small-model", "license": "apache-2.0",
    }  # fmt: skip
    bare = ModelCard(card.render(collapsed(base_model=""), MADE)).data.to_dict()
    assert not {"base_model", "license"} & bare.keys()


@pytest.mark.parametrize("source", ["directory", "gguf", "object"])
def test_a_model_without_a_name_on_the_hub_is_named_by_class_and_size(source: str) -> None:
    text = records.training_text("/home/somebody/secret/book.txt")
    teacher = dataclasses.replace(
        records.TAUGHT.training.teacher,  # type: ignore[union-attr, type-var]
        model=records.upgraded_model("In", "directory"),
    )
    record = upgraded(
        model=records.upgraded_model("secret", source), notes=("/home/secret",),
        training={"text": text, "teacher": teacher, "fits": records.TAUGHT.training.fits},  # type: ignore[union-attr]
        verdict="In KL from In, mos gained +0.02. In loss on the text, mos showed no gain.",
    )  # fmt: skip
    said = card.render(record, MADE)
    for words in (said, card.render(collapsed(base_model="", model="secret", text=text), MADE)):
        assert "LlamaForCausalLM" in words
        for leak in ("secret", "somebody", "/home", "base_model:"):
            assert leak not in words
    assert "a `LlamaForCausalLM` of 100,000 parameters" in said
    assert "In KL from the teacher, mos gained +0.02. In loss" in said


def test_datasets_keep_their_names_and_long_lists_are_counted() -> None:
    names = ("Salesforce/wikitext:wikitext-2-raw-v1:train", "deep/down/a.txt", "and 3 more")
    said = card.render(collapsed(text=records.training_text(*names)), MADE)
    assert "`Salesforce/wikitext:wikitext-2-raw-v1:train`, `a.txt`, and 3 more: 1,200 tokens" in said
    long = records.training_text(*(f"{place}.txt" for place in range(25)))
    assert "`19.txt`, and 5 more" in card.render(collapsed(text=long), MADE)


@settings(max_examples=10)
@given(st.text())
@pytest.mark.parametrize("where", ["text", "architecture", "name", "option", "flags", "license", "base"])
@example("".join(HOSTILE))
def test_no_string_becomes_more_than_a_string(where: str, hostile: str) -> None:
    for words in (hostile, *(HOSTILE if hostile == "".join(HOSTILE) else ())):
        record: Any = upgraded()
        expected = card.render(record, MADE, flags="x")
        options = {"flags": words, "license": words} if where in ("flags", "license") else {"flags": "x"}
        if where == "text":
            record = upgraded(training={"text": records.training_text(words)})
        elif where == "architecture":
            model = dataclasses.replace(records.upgraded_model(), architecture=words)
            record = upgraded(model=model)
        elif where == "name":
            record = upgraded(model=records.upgraded_model(words))
            expected = card.render(upgraded(model=records.upgraded_model("", "object")), MADE, flags="x")
        elif where == "option":
            record = upgraded(options={"x": words})
        elif where == "base":
            record, plain = collapsed(base_model=words), collapsed(base_model="")
            expected = card.render(plain, MADE, flags="x")
        if where in ("name", "base") and re.fullmatch(r"[A-Za-z0-9][\w./-]*", words, re.ASCII):
            continue
        said = card.render(record, MADE, **options)
        said.encode()
        front, wanted = ModelCard(said).data.to_dict(), ModelCard(expected).data.to_dict()
        assert {key: value for key, value in front.items() if key != "license"} == wanted
        assert re.fullmatch(r"[a-z0-9.+-]+", str(front.get("license", "x")))
        assert outline(said) == outline(expected)


def test_a_name_with_markup_is_shown_unmodified() -> None:
    for words in ("a`b``c", "| a | b |", "<b>x</b>", "[x](y)", "\\`"):
        model = dataclasses.replace(records.upgraded_model(), architecture=words)
        said = tokens(card.render(upgraded(model=model), MADE))
        assert words in [token.content for token in said if token.type == "code_inline"]


def test_a_card_that_somebody_edited_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / card.NAME
    first, second = card.render(records.UPGRADE, MADE), card.render(records.COLLAPSE, MADE)
    assert card.write(tmp_path, first)
    assert card.write(tmp_path, second)
    assert path.read_text() == second
    for edited in ("mine", "", second + "\nmine", second.replace("plain", "PLAIN"), "\n\n" + second):
        path.write_text(edited)
        assert not card.write(tmp_path, first)
        assert path.read_text() == edited
    path.write_bytes(b"\xff\xfe")
    assert not card.write(tmp_path, first)
    assert [file.name for file in tmp_path.iterdir()] == [card.NAME]
