"""Prompts that either of two words completes, where the two lie across a parallelogram from two others.

Wan et al. 2023 (HistAlign, 2305.04782), after Chang and McCallum 2022: two pairs a:b and c:d of one relation
are four words whose output vectors stand near the corners of a parallelogram, w_a - w_b = w_c - w_d. A prompt
names the ends of one diagonal, (a, d) or (b, c), in either order:

    They could spend the summer in Paris or in Japan, and in the end they spent it in

A softmax that gives a and d equal scores gives the ends of the other diagonal the same sum, and so cannot put
a and d alone on top. The words and sentences are ours (`facts`).

Pairs are split in two halves before prompts are made; pairs that share a word, in whatever relation, stay
together. So a prompt has

    train         both pairs of the first half
    one overlap   one pair of each half: one of the two answers was never seen in training
    no overlap    both pairs of the second half: none of its four words was

All splits use the same sentences, and every relation has an equal share of each.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

from fullrank.errors import FullrankError
from fullrank.studies.facts import RELATIONS, Relation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A sentence up to the word that is asked for."""

    text: str
    answers: tuple[str, str]
    """Either is right; in the sentence's order."""
    distractors: tuple[str, str]
    """The other diagonal: the answers' partners, in the answers' order."""
    relation: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    train: tuple[Prompt, ...]
    one_overlap: tuple[Prompt, ...]
    no_overlap: tuple[Prompt, ...]


def splits(
    *,
    train: int,
    held_out: int,
    seed: int,
    relations: Sequence[Relation] = RELATIONS,
    keep: Callable[[Prompt], bool] = lambda prompt: True,
) -> Splits:
    """`train` prompts to train on and `held_out` of each other split, drawn without repeats by a seed.

    `keep` says which prompts a tokenizer can serve; the split of the pairs does not depend on it.
    """
    if train < 1 or held_out < 1:
        raise FullrankError(
            f"{train} prompts to train on and {held_out} held out are impossible: expected 1 or more of each"
        )
    draw = random.Random(f"templates {seed}")
    first = _first_half(relations, draw)
    pools: dict[str, list[list[Prompt]]] = {"train": [], "one": [], "none": []}
    for relation in relations:
        mine: dict[str, list[tuple[tuple[str, str], tuple[str, str], int]]] = {name: [] for name in pools}
        for one, other in itertools.combinations(relation.pairs, 2):
            known = (one in first) + (other in first)
            each = mine[("none", "one", "train")[known]]
            each += [(one, other, variant) for variant in range(4 * len(relation.sentences))]
        for name, found in mine.items():
            draw.shuffle(found)
            made = (_prompt(relation, *which) for which in found)
            # Only as many as can be needed are made: a tokenizer takes its time over each.
            needed = train if name == "train" else held_out
            pools[name].append(list(itertools.islice(filter(keep, made), needed)))
    return Splits(
        train=_share(pools["train"], train, draw),
        one_overlap=_share(pools["one"], held_out, draw),
        no_overlap=_share(pools["none"], held_out, draw),
    )


def prompts(relation: Relation, one: tuple[str, str], other: tuple[str, str]) -> list[Prompt]:
    """All sentences over both diagonals of two pairs, in both orders."""
    return [_prompt(relation, one, other, variant) for variant in range(4 * len(relation.sentences))]


def _prompt(relation: Relation, one: tuple[str, str], other: tuple[str, str], variant: int) -> Prompt:
    (a, b), (c, d) = one, other
    diagonal, turned, sentence = variant & 1, variant & 2, variant >> 2
    answers, distractors = ((b, c), (a, d)) if diagonal else ((a, d), (b, c))
    if turned:
        answers, distractors = answers[::-1], distractors[::-1]
    return Prompt(
        text=relation.sentences[sentence].format(*answers),
        answers=answers,
        distractors=distractors,
        relation=relation.name,
    )


def _first_half(relations: Sequence[Relation], draw: random.Random) -> set[tuple[str, str]]:
    """Pairs of the first half: groups that share words are drawn whole, in turn for each half."""
    group: dict[str, set[tuple[str, str]]] = {}
    for relation in relations:
        for pair in relation.pairs:
            joined = {pair}.union(*(group.get(word, set()) for word in pair))
            for word in {word for member in joined for word in member}:
                group[word] = joined
    for relation in relations:
        words = [word for pair in relation.pairs for word in pair]
        if len(set(words)) < len(words) or len(relation.pairs) < 4:
            raise FullrankError(
                f"{relation.name} has {len(relation.pairs)} pairs of {len(set(words))} words: expected 4 "
                "pairs or more, and no word twice"
            )
    found: set[tuple[str, str]] = set()
    done: set[tuple[str, str]] = set()
    for relation in relations:
        order = [pair for pair in relation.pairs if pair not in done]
        draw.shuffle(order)
        # What is settled already by another relation counts, so that each half has about as many.
        balance = sum(1 if pair in found else -1 for pair in relation.pairs if pair in done)
        for pair in order:
            if pair in done:
                continue
            members = group[pair[0]]
            done |= members
            if balance < 0 or (balance == 0 and draw.random() < 0.5):
                found |= members
            balance += sum(1 if member in found else -1 for member in members if member in relation.pairs)
    return found


def _share(pools: Sequence[Sequence[Prompt]], count: int, draw: random.Random) -> tuple[Prompt, ...]:
    """An equal number of each pool, as far as it reaches, in a drawn order."""
    available = sum(map(len, pools))
    if available < count:
        raise FullrankError(f"{count} prompts were asked for, and this split has {available}: ask for fewer")
    taken = [0] * len(pools)
    while sum(taken) < count:
        for place, pool in enumerate(pools):
            if taken[place] < len(pool) and sum(taken) < count:
                taken[place] += 1
    chosen = [prompt for pool, number in zip(pools, taken, strict=True) for prompt in pool[:number]]
    draw.shuffle(chosen)
    return tuple(chosen)
