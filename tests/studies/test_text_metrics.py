"""Metrics with known answers."""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.models import loading
from fullrank.studies import article_prompts, text_metrics


def test_overlap_is_sacrebleus() -> None:
    sacrebleu = importlib.import_module("sacrebleu")
    texts = ["The Mill is a pub near the river.", "Cotto is cheap and good."]
    references = [["The Mill is a pub by the river.", "A pub near the river."], ["Cotto is cheap and good."]]
    bleu, chrf = text_metrics.overlap(texts, references)
    streams = [[one[0] for one in references], [references[0][1], None]]
    assert bleu == pytest.approx(sacrebleu.corpus_bleu(texts, streams).score)
    assert chrf == pytest.approx(sacrebleu.corpus_chrf(texts, streams).score)
    assert text_metrics.overlap(["a b c d e"], [["x", "a b c d e"]]) == pytest.approx((100.0, 100.0))


def test_overlap_without_sacrebleu_or_references(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FullrankError, match="with a reference each"):
        text_metrics.overlap(["a"], [[]])
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(FullrankError, match=r"pip install 'fullrank\[generation\]'"):
        text_metrics.overlap(["a"], [["a"]])


def test_table_precision_by_hand() -> None:
    # 3/4 of the words, 2/3 of the pairs and triples, 3/4 of the four: "serves" is nobody's.
    found = text_metrics.table_precision("The Mill serves Thai", ["The Mill", "Thai"], ["The Mill is Thai"])
    assert found == pytest.approx((3 / 4 * 2 / 3 * 2 / 3 * 3 / 4) ** 0.25)
    assert text_metrics.table_precision("The Mill is Thai", [], ["no", "The Mill is Thai"]) == pytest.approx(
        1.0
    )
    assert text_metrics.table_precision("Mill", ["The Mill"], []) == pytest.approx(1.0)
    # A word that the reference has once and the text twice counts once.
    assert text_metrics.table_precision("a a", [], ["a"]) == pytest.approx(0.0)
    assert text_metrics.table_precision("a", [], ["b"]) == 0.0
    assert text_metrics.table_precision("", ["a"], ["a"]) == 0.0


def test_repetition_by_hand() -> None:
    assert text_metrics.repetition("a b a b", 1) == pytest.approx(1 / 2)
    assert text_metrics.repetition("a b a b", 2) == pytest.approx(1 / 3)
    assert text_metrics.repetition("a", 2) == 0.0
    assert text_metrics.distinct(["a b", "b c"], 1) == pytest.approx(3 / 4)
    assert text_metrics.distinct(["a b", "a b"], 2) == pytest.approx(1 / 2)
    assert text_metrics.distinct([], 2) == 0.0


def test_telling_words_come_back() -> None:
    counts = Counter({"the": 90_000, "ship": 50, "sailed": 80, "japan": 70, "under": 99, "frigate": 3})
    prompt = "The frigate sailed to Japan . Under <unk> the Ōsumi sailed to The Ship ."
    assert text_metrics.telling(prompt, counts) == {"frigate", "japan", "ōsumi", "ship"}
    assert text_metrics.returned(prompt, "A FRIGATE of Ōsumi", counts) == pytest.approx(2 / 4)
    assert text_metrics.returned("The ship sailed.", "anything", counts) is None


@torch.no_grad()
def test_judged_loss_is_that_of_the_tokens_behind_the_prompt(word_model: Path) -> None:
    judge = loading.load(word_model)
    texts = {"Paris is in": " France and", "Paris": "", "They spent it": " in Japan", "In": " France" * 400}
    found = text_metrics.judged_losses(judge, list(texts), list(texts.values()))
    assert found[1] is None
    assert found[3] is not None
    assert math.isfinite(found[3])
    for prompt, loss in (("Paris is in", found[0]), ("They spent it", found[2])):
        before = judge.tokenizer(prompt)["input_ids"]
        after = judge.tokenizer(texts[prompt], add_special_tokens=False)["input_ids"]
        log_probs = judge.model(torch.tensor([before + after])).logits[0].log_softmax(-1)
        losses = [-float(log_probs[len(before) - 1 + place, token]) for place, token in enumerate(after)]
        assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_articles(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(
        " \n = A = \n The cat 's cat @-@ like hat .\n = B = \n A\n", encoding="utf8"
    )
    (tmp_path / "test.txt").write_text(
        " \n = First Thing = \n\n One two , three @-@ four .\n = = Part = = \n five ( six ) seven eight\n"
        " = Short = \n\n one two\n",
        encoding="utf8",
    )
    found = article_prompts.read(tmp_path, prompt=4, continuation=5)
    (one,) = found.test
    assert one.prompt == "First Thing\nOne two, three"
    assert found.counts["cat"] == 2
    assert found.train == ("A\nThe cat's cat-like hat.", "B\nA")
    with pytest.raises(FullrankError, match="no article of 60 words"):
        article_prompts.read(tmp_path, prompt=30, continuation=30)
    with pytest.raises(FullrankError, match=r"train\.txt cannot be read"):
        article_prompts.read(tmp_path / "none")
