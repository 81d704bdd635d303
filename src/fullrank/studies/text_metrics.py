"""What generated texts are measured by.

    BLEU, chrF            by sacrebleu, over several references a text (`pip install 'fullrank[generation]'`)
    table precision       PARENT's entailed precision (Dhingra et al. 2019, 1906.01081): an n-gram counts as
                          far as a reference has it, and beyond that by the share of its words that the table
                          has; the geometric mean over n = 1 to 4, of the best reference. Its recall is left
                          out: how much of the table is said is counted by slots (`slot_forms`)
    rep-n                 1 - distinct / all n-grams of a text (Welleck et al. 2019, 1908.04319)
    distinct-n            distinct / all n-grams of all texts (Li et al. 2016, 1510.03055)
    returned              share of a prompt's names and rare words that come back in what follows it
    judged loss           nats per token of what follows a prompt, under another model

Words are runs of letters and digits, in lower case but where names are looked for.
"""

from __future__ import annotations

import importlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.models import anatomy, loading

ORDERS = 4
RARE = 10
"""Occurrences in the text to train on up to which a word is rare."""
COMMON, OFTEN = 1e-3, 1000
"""Share of that text, and occurrences in it, beyond which a word is no name, as "The" in a title."""
LEAST_LETTERS = 3
TOGETHER = 16
"""Texts that are judged at once."""
_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def grams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1))


def overlap(texts: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[float, float]:
    """BLEU and chrF of all texts, each against its own references, 0 to 100."""
    try:
        sacrebleu: Any = importlib.import_module("sacrebleu")
    except ImportError as error:
        raise FullrankError(
            "BLEU and chrF need sacrebleu: pip install 'fullrank[generation]', or leave the task out"
        ) from error
    if not texts or len(texts) != len(references) or not all(references):
        raise FullrankError(
            f"{len(texts)} texts have references for {sum(map(bool, references))}: expected some texts, "
            "with a reference each"
        )
    streams = [
        [one[place] if place < len(one) else None for one in references]
        for place in range(max(map(len, references)))
    ]
    texts = list(texts)
    return sacrebleu.corpus_bleu(texts, streams).score, sacrebleu.corpus_chrf(texts, streams).score


def table_precision(text: str, table: Iterable[str], references: Sequence[str]) -> float:
    """0 to 1, of the reference that it is largest for; 0 for a text without words."""
    tokens = words(text)
    entailed = {word for value in table for word in words(value)}
    return max((_entailed(tokens, entailed, words(one)) for one in references or [""]), default=0.0)


def _entailed(tokens: Sequence[str], entailed: set[str], reference: Sequence[str]) -> float:
    logs = []
    for n in range(1, min(ORDERS, len(tokens)) + 1):
        found, theirs = grams(tokens, n), grams(reference, n)
        credit = 0.0
        for gram, count in found.items():
            held = min(count, theirs[gram]) / count
            share = sum(word in entailed for word in gram) / n
            credit += count * (held + (1 - held) * share)
        if not credit:
            return 0.0
        logs.append(math.log(credit / found.total()))
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def repetition(text: str, n: int) -> float:
    """rep-n of a text; 0 for one of fewer than n words."""
    found = grams(words(text), n)
    return 1 - len(found) / found.total() if found else 0.0


def distinct(texts: Iterable[str], n: int) -> float:
    """distinct-n of all texts together; 0 where no text has n words."""
    found: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        found.update(grams(words(text), n))
    return len(found) / found.total() if found else 0.0


def telling(prompt: str, counts: Mapping[str, int]) -> set[str]:
    """Names and rare words of a prompt, in lower case; `counts` of words in the text to train on.

    A name begins with a capital, though no sentence begins with it, and is no common word. Words of fewer
    than three letters, numbers and the unknown word are neither.
    """
    found, common = set(), max(OFTEN, COMMON * sum(counts.values()))
    for match in _WORD.finditer(prompt):
        word = match[0]
        lower = word.lower()
        if len(word) < LEAST_LETTERS or not word.isalpha() or lower == "unk":
            continue
        before = prompt[: match.start()].rstrip(" \"'“(")
        begins = not before or before[-1] in ".!?:;=\n"
        count = counts.get(lower, 0)
        if (word[0].isupper() and not begins and count <= common) or count <= RARE:
            found.add(lower)
    return found


def returned(prompt: str, text: str, counts: Mapping[str, int]) -> float | None:
    """Share of the prompt's telling words that `text` has; None where the prompt has none."""
    looked_for = telling(prompt, counts)
    return len(looked_for & set(words(text))) / len(looked_for) if looked_for else None


@torch.no_grad()
def judged_losses(judge: loading.Loaded, prompts: Sequence[str], texts: Sequence[str]) -> list[float | None]:
    """Nats per token of each text behind its prompt under another model; None where it has no token.

    Of a text that is longer than the judge's context the end is read.
    """
    tokenizer, model = cast(Any, judge.tokenizer), cast(Any, judge.model)
    context = anatomy.longest(judge.model)
    rows: list[tuple[Tensor, int]] = []
    """Ids, and how many at their end count."""
    for prompt, text in zip(prompts, texts, strict=True):
        before = list(tokenizer(prompt, verbose=False)["input_ids"])
        after = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        ids = (before + after)[-context:] if context else before + after
        rows.append((torch.tensor(ids), min(len(after), len(ids) - 1)))
    found: list[float | None] = [None] * len(rows)
    # Those of about one length at once, padded at the end, which nothing before it sees.
    order = sorted(
        (place for place, (_, counted) in enumerate(rows) if counted > 0),
        key=lambda place: len(rows[place][0]),
    )
    for start in range(0, len(order), TOGETHER):
        some = order[start : start + TOGETHER]
        padded = nn.utils.rnn.pad_sequence([rows[place][0] for place in some], batch_first=True)
        scores = model(input_ids=padded[:, :-1].to(model.device)).logits
        for row, place in enumerate(some):
            read, counted = rows[place]
            last = slice(len(read) - 1 - counted, len(read) - 1)
            found[place] = float(
                nn.functional.cross_entropy(scores[row, last].float(), read[-counted:].to(scores.device))
            )
    return found
