"""Ranks and accuracies by hand, and the memory alone against the head that has one."""

from typing import Any

import torch

from fullrank.heads.cache import CacheHead
from fullrank.studies import template_task
from fullrank.studies.templates import Prompt


def test_ranks_take_the_likelier_piece() -> None:
    log_probs = torch.tensor([[0.4, 0.3, 0.2, 0.07, 0.03, 0.0]]).log()
    # Answers with pieces (1, 3) and (2, 4), distractors (0, 0) and one that is impossible.
    pieces = torch.tensor([[[3, 1], [2, 4], [0, 0], [5, 5]]])
    assert template_task.ranks(log_probs, pieces).tolist() == [[2, 3, 1, 7]]


def test_accuracy_counts_both_answers() -> None:
    found = torch.tensor([[1, 2, 3, 4], [1, 5, 2, 9], [9, 10, 30, 40], [26, 1, 27, 27]])
    assert template_task.accuracy(found) == {
        "2": 0.25, "5": 0.5, "10": 0.75, "25": 0.75, "distracted": 0.25
    }  # fmt: skip


def test_the_memory_alone_is_that_of_the_head() -> None:
    torch.manual_seed(0)
    head = CacheHead("softmax", hidden=8, vocab=20, temperature=2.0).double()
    states, ids = torch.randn(3, 7, 8, dtype=torch.float64), torch.randint(20, (3, 7))
    ids[:, 3] = ids[:, 5]
    expected = head.cache_only(states, context=ids)[:, -1]
    found = template_task.memory_log_probs(states, ids, 20, 2.0)
    torch.testing.assert_close(found, expected.detach())
    assert torch.isneginf(found).any()


def test_a_prompt_as_ids(word_tokenizer: Any) -> None:
    prompt = Prompt(
        text="They went to Rome or to Japan, and then to",
        answers=("Rome", "Japan"),
        distractors=("Italy", "Tokyo"),
        relation="capitals",
    )
    found = template_task.encode(word_tokenizer, prompt)
    assert found is not None
    assert word_tokenizer.decode(found.ids) == prompt.text
    assert [word_tokenizer.decode([first]) for first in found.answers] == [" Rome", " Japan"]
    assert word_tokenizer.decode([found.pieces[1][1]])[0] == "J"
    assert set(found.answers) <= set(found.ids)


def test_words_that_begin_alike_are_left_out(word_tokenizer: Any) -> None:
    prompt = Prompt(text="a or b:", answers=("qzq", "qxq"), distractors=("c", "d"), relation="")
    assert template_task.encode(word_tokenizer, prompt) is None


def test_nothing_is_padded() -> None:
    encoded = [
        template_task.Encoded(ids=tuple(range(length)), pieces=((1, 1), (2, 2), (3, 3), (4, 4)))
        for length in (5, 3, 5)
    ]
    groups = template_task.by_length(encoded)
    assert [tuple(ids.shape) for ids, _ in groups] == [(1, 3), (2, 5)]
    assert [tuple(pieces.shape) for _, pieces in groups] == [(1, 4, 2), (2, 4, 2)]
