"""The card of a model: its front matter, its figures, and strings that try to be more than strings."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fullrank.report import card
from fullrank.results import Collapse, Estimate, Provenance, Training, Upgrade, read_log
from fullrank.results.files import to_plain
from fullrank.results.upgrade import (
    Distance,
    Preserved,
    Teaching,
    TrainedHead,
    TrainingText,
    UpgradedModel,
    UpgradeTraining,
)

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


def nats(value: float, spread: float = 0.01) -> Estimate:
    return Estimate(value=value, low=value - spread, high=value + spread)


def text(*sources: str) -> TrainingText:
    return TrainingText(
        sources=sources or ("book.txt",), sha256="", window=64, fit_tokens=1200, choose_tokens=300,
        held_out_tokens=600,
    )  # fmt: skip


def fitted(head: str, before: float, after: float) -> TrainedHead:
    return TrainedHead(
        head=head, parameters=4321, trained=5000, before=nats(before), before_error=0.1, after=nats(after),
        after_error=0.1, choose_loss=after, after_by_seed=(after,), rate=0.1, steps=(7,), seconds=1.0,
    )  # fmt: skip


def model(name: str = "someone/small-model", source: str = "hub") -> UpgradedModel:
    return UpgradedModel(
        name=name, source=source, architecture="LlamaForCausalLM", fingerprint="", parameters=100_000,
        width=16, vocabulary=256, tied=True,
    )  # fmt: skip


def training(**changes: Any) -> UpgradeTraining:
    found = UpgradeTraining(
        text=text(), unfrozen=False, rows=9, exact=True, seeds=2, control="softmax_equal", gain=nats(0.0312),
        fits=(fitted("softmax", 3.1, 2.9), fitted("softmax_equal", 3.1, 2.8), fitted("mos", 3.1, 2.7688)),
        gain_by_seed=(0.03, 0.0324), saved_seed=1, saved_loss=2.7654, untied=True, candidates=(), seconds=1.0,
    )  # fmt: skip
    return dataclasses.replace(found, **changes)


def upgraded(**changes: Any) -> Upgrade:
    record = Upgrade(
        model=model(), asked="mos", head="mos", options={"components": "4"}, parameters=123_456, saved=True,
        preserved=Preserved(tokens=508, kl=nats(0.0), largest=1e-6), training=training(),
        verdict="mos gained +0.0312 nats per token (95%: +0.0212 to +0.0412).", notes=("/home/secret",),
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


def collapsed(**changes: Any) -> Collapse:
    record = Collapse(
        model="secret", head="mos", architecture="LlamaForCausalLM", text=text(), rows=9, start=nats(0.2),
        cost=nats(0.0213, 0.002), upgraded_loss=nats(2.5), plain_loss=nats(2.6), steps=3, seconds=1.0,
        notes=(),
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


def tokens(rendered: str) -> list[Any]:
    """What a reader of markdown makes of a card, without its front matter."""
    parsed = MarkdownIt("commonmark", {"html": True}).enable("table").parse(ModelCard(rendered).text)
    return [one for token in parsed for one in (token, *(token.children or ()))]


def outline(rendered: str) -> list[tuple[str, str]]:
    """All that has a shape: blocks, links and HTML, without the words of paragraphs and cells."""
    told = ("html_block", "html_inline", "fence")
    return [
        (one.type, one.content if one.type in told else one.attrGet("href") or one.tag)
        for one in tokens(rendered)
        if one.type not in ("text", "code_inline", "inline", "softbreak") and "sha256" not in one.content
    ]


def test_the_hub_reads_the_front_matter() -> None:
    data = ModelCard(card.render(upgraded(), MADE, license="apache-2.0")).data
    assert data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["fullrank", "mos"],
        "base_model": "someone/small-model", "license": "apache-2.0",
    }  # fmt: skip
    assert not {"base_model", "license"} & ModelCard(card.render(collapsed(), MADE)).data.to_dict().keys()
    plain = ModelCard(card.render(collapsed(base_model="someone/small-model"), MADE)).data
    assert plain.base_model == "someone/small-model"


def test_a_card_says_what_the_record_says() -> None:
    record = upgraded()
    said = card.render(record, MADE, flags="--components 4")
    assert record.verdict in said
    for one in record.training.fits:  # type: ignore[union-attr]
        (row,) = [line for line in said.splitlines() if line.startswith(f"| `{one.head}`")]
        figures = [float(word) for word in re.findall(r"\d+\.\d{4}", row)]
        stored = to_plain(one)
        assert figures == [
            round(stored[when][end], 4) for when in ("before", "after") for end in stored[when]
        ]
        assert ("(control)" in row) == (one.head != "mos")
    for words in (
        "nats per token", "`components=4`", "D = 16", "V = 256", "123,456, +23,456 on the original",
        "`book.txt`", "1,200 tokens to train on", "600 held out", "import fullrank", "fullrank collapse",
        "`9.8.7`", "`fullrank upgrade --components 4`", "https://huggingface.co/someone/small-model",
    ):  # fmt: skip
        assert words in said
    untrained = card.render(upgraded(training=None, verdict="The model has not been trained."), MADE)
    assert "not been trained" in untrained
    assert "control" not in untrained


def test_a_collapse_says_what_it_costs_and_needs_no_fullrank() -> None:
    said = card.render(collapsed(), MADE)
    assert "It costs 0.0213 (0.0193 to 0.0233) nats per token" in said
    assert "import fullrank" not in said


@pytest.mark.parametrize("source", ["directory", "gguf", "object"])
def test_what_has_no_name_on_the_hub_is_named_by_class_and_size(source: str) -> None:
    local = model("secret", source)
    teacher = Teaching(
        model=model("In", "directory"), loss=nats(2.5), control="softmax", gain=nats(0.02),
        gain_by_seed=(0.02,),
    )  # fmt: skip
    far = Distance(before=nats(0.5), before_error=0.1, after=nats(0.4), after_error=0.1, after_by_seed=(0.4,))
    fits = tuple(dataclasses.replace(one, distance=far) for one in training().fits)
    record = upgraded(
        model=local,
        training=training(text=text("/home/somebody/secret/book.txt"), teacher=teacher, fits=fits),
        verdict="In KL from In, mos gained +0.02. In loss on the text, mos showed no gain.",
    )
    for said in (card.render(record, MADE), card.render(collapsed(), MADE)):
        assert "LlamaForCausalLM" in said
        for leak in ("secret", "somebody", "/home", "base_model:"):
            assert leak not in said
    said = card.render(record, MADE)
    assert "a `LlamaForCausalLM` of 100,000 parameters" in said
    assert "In KL from the teacher, mos gained +0.02. In loss" in said
    assert "| KL after |" in said


def test_datasets_keep_their_names_and_long_lists_are_counted() -> None:
    names = ("Salesforce/wikitext:wikitext-2-raw-v1:train", "deep/down/a.txt", "and 3 more")
    said = card.render(collapsed(text=text(*names)), MADE)
    assert "`Salesforce/wikitext:wikitext-2-raw-v1:train`, `a.txt`, and 3 more: 1,200 tokens" in said
    assert "`19.txt`, and 5 more" in card.render(
        collapsed(text=text(*(f"{place}.txt" for place in range(25)))), MADE
    )


@settings(max_examples=20)
@given(st.text())
@pytest.mark.parametrize("where", ["text", "architecture", "name", "option", "flags", "license", "base"])
@example("".join(HOSTILE))
def test_no_string_becomes_more_than_a_string(where: str, hostile: str) -> None:
    for words in (hostile, *(HOSTILE if hostile == "".join(HOSTILE) else ())):
        record: Any = upgraded()
        expected = card.render(record, MADE, flags="x")
        options = {"flags": words, "license": words} if where in ("flags", "license") else {"flags": "x"}
        if where == "text":
            record = upgraded(training=training(text=text(words)))
        elif where == "architecture":
            record = upgraded(model=dataclasses.replace(model(), architecture=words))
        elif where == "name":
            record = upgraded(model=model(words))
            expected = card.render(upgraded(model=model("", "object")), MADE, flags="x")
        elif where == "option":
            record = upgraded(options={"x": words})
        elif where == "base":
            record, expected = collapsed(base_model=words), card.render(collapsed(), MADE, flags="x")
        if where in ("name", "base") and re.fullmatch(r"[A-Za-z0-9][\w./-]*", words, re.ASCII):
            continue
        said = card.render(record, MADE, **options)
        said.encode()
        front, plain = ModelCard(said).data.to_dict(), ModelCard(expected).data.to_dict()
        assert {key: value for key, value in front.items() if key != "license"} == plain
        assert re.fullmatch(r"[a-z0-9.+-]+", str(front.get("license", "x")))
        assert outline(said) == outline(expected)


def test_a_name_comes_back_as_it_is() -> None:
    for words in ("a`b``c", "| a | b |", "<b>x</b>", "[x](y)", "\\`"):
        said = tokens(card.render(upgraded(model=dataclasses.replace(model(), architecture=words)), MADE))
        assert words in [one.content for one in said if one.type == "code_inline"]


def test_only_a_card_that_nobody_changed_is_replaced(tmp_path: Path) -> None:
    path, first, second = tmp_path / card.NAME, *(card.render(one, MADE) for one in (upgraded(), collapsed()))
    assert card.write(tmp_path, first)
    assert card.write(tmp_path, second)
    assert path.read_text() == second
    for other in ("mine", "", second + "\nmine", second.replace("plain", "PLAIN"), "\n\n" + second):
        path.write_text(other)
        assert not card.write(tmp_path, first)
        assert path.read_text() == other
    path.write_bytes(b"\xff\xfe")
    assert not card.write(tmp_path, first)
    assert [one.name for one in tmp_path.iterdir()] == [card.NAME]


def test_a_run_has_a_card(write_run: Any) -> None:
    record = read_log(write_run())
    assert isinstance(record, Training)
    record = dataclasses.replace(
        record, data={"sources.0.name": "x/train.txt", "sources.0.bytes": "7", "splits.train.tokens": "2000"}
    )
    said = card.render(record, MADE, flags="transformer-tiny", options={"components": 4})
    assert ModelCard(said).data.to_dict()["tags"] == ["fullrank", record.head]
    valid = record.valid
    assert valid is not None
    assert f"| validation | {valid.value:.4f} ({valid.low:.4f} to {valid.high:.4f}) |" in said
    for words in (
        "`components=4`",
        "`train.txt`",
        "of 2,000 tokens",
        "No control",
        "`fullrank train transformer-tiny`",
    ):
        assert words in said
    assert json.dumps(record.name) not in said
