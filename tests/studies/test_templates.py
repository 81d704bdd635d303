"""The ambiguous templates: what a prompt is, and that splits keep words apart."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.studies import templates
from fullrank.studies.facts import RELATIONS, Relation

LETTERS = Relation(
    name="letters", pairs=tuple((f"a{n}", f"b{n}") for n in range(6)), sentences=("{0} or {1}:",)
)
# Shares the words a0 .. a3 with the letters.
NUMBERS = Relation(
    name="numbers", pairs=tuple((f"a{n}", f"c{n}") for n in range(4)), sentences=("{1} not {0}:",)
)


def words(prompts: tuple[templates.Prompt, ...]) -> set[str]:
    return {word for prompt in prompts for word in (*prompt.answers, *prompt.distractors)}


def test_a_prompt_names_one_diagonal() -> None:
    found = list(templates.prompts(LETTERS, ("a", "b"), ("c", "d")))
    assert {frozenset(prompt.answers) for prompt in found} == {frozenset("ad"), frozenset("bc")}
    assert [prompt.text for prompt in found] == ["a or d:", "b or c:", "d or a:", "c or b:"]
    partner = {"a": "b", "b": "a", "c": "d", "d": "c"}
    for prompt in found:
        assert prompt.distractors == tuple(partner[word] for word in prompt.answers)


@given(seed=st.integers(0, 10_000))
def test_splits_keep_words_apart(seed: int) -> None:
    everything = len(list(itertools.chain.from_iterable(
        templates.prompts(relation, one, other)
        for relation in (LETTERS, NUMBERS)
        for one, other in itertools.combinations(relation.pairs, 2)
    )))  # fmt: skip
    found = templates.splits(train=4, held_out=4, seed=seed, relations=(LETTERS, NUMBERS))
    seen = words(found.train)
    assert not seen & words(found.no_overlap)
    assert everything > 12
    for prompt in found.one_overlap:
        pairs = list(zip(prompt.answers, prompt.distractors, strict=True))
        # One pair may be in training, the other is not.
        assert sum(bool(set(pair) & seen) for pair in pairs) <= 1
        assert any(not set(pair) & seen for pair in pairs)
    texts = [
        (prompt.text, prompt.relation)
        for part in (found.train, found.one_overlap, found.no_overlap)
        for prompt in part
    ]
    assert len(set(texts)) == len(texts) == 12


def test_a_seed_decides_and_relations_share_alike() -> None:
    first, again, other = (templates.splits(train=60, held_out=36, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.train != other.train
    for part in (first.one_overlap, first.no_overlap):
        assert {sum(prompt.relation == relation.name for prompt in part) for relation in RELATIONS} == {6}


def test_halves_are_about_equal() -> None:
    # Every relation must serve every split, whatever the seed.
    for seed in range(3):
        found = templates.splits(train=600, held_out=300, seed=seed)
        for relation in RELATIONS:
            assert sum(prompt.relation == relation.name for prompt in found.train) == 100
            assert sum(prompt.relation == relation.name for prompt in found.no_overlap) == 50


def test_sentences_use_no_word_of_their_own_relation() -> None:
    for relation in RELATIONS:
        known = {word.lower() for pair in relation.pairs for word in pair}
        for sentence in relation.sentences:
            assert sentence.count("{0}") == sentence.count("{1}") == 1
            assert sentence[-1].isalpha()
            assert not known & set(re.findall(r"[a-z]+", sentence.lower())), sentence


def test_what_is_kept_is_asked_for() -> None:
    found = templates.splits(train=10, held_out=5, seed=0, keep=lambda prompt: "Paris" not in prompt.text)
    assert not any("Paris" in prompt.text for prompt in found.train)


def test_bad_input() -> None:
    with pytest.raises(FullrankError, match="expected 1 or more"):
        templates.splits(train=0, held_out=1, seed=0)
    with pytest.raises(FullrankError, match="ask for fewer"):
        templates.splits(train=1000, held_out=1, seed=0, relations=(LETTERS,))
    twice = Relation(name="twice", pairs=(("a", "b"), ("c", "a"), ("d", "e"), ("f", "g")), sentences=("",))
    with pytest.raises(FullrankError, match="no word twice"):
        templates.splits(train=1, held_out=1, seed=0, relations=(twice,))
