"""Text from a model, through `generate` of transformers: with its cache, or the state of an LSTM.

log p / temperature; the `top_k` most probable stay; of these the fewest whose probabilities reach `top_p` in
sum. Temperature 0 takes the most probable token, or with `beams` looks for the text of the highest mean
log-probability. Never drawn: rows of the matrix that no token names, and the unknown word unless it is
allowed. A prompt begins as the tokenizer begins texts, an empty one with that token alone. An end of a text
inside it is a token like any other.

Prompts are read together, padded on the left; a body that reads every token, an LSTM or RWKV, reads those of
one length together. A body whose context is full goes on with the later half of it, of beams with the best.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from fullrank.errors import FullrankError
from fullrank.models.anatomy import longest
from fullrank.models.loading import Loaded, quiet
from fullrank.models.randomness import restored_randomness, seed_generators
from fullrank.text.documents import valid_unicode


def sample(
    loaded: Loaded,
    prompt: str = "",
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    allow_unknown: bool = False,
) -> str:
    """The prompt and at most `tokens` tokens after it, fewer where the model ends the text.

    Equal seeds give equal text, and the caller's random state stays as it was. top_k=0 and top_p=1 leave all
    tokens in.
    """
    return sample_each(
        loaded,
        [prompt],
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        allow_unknown=allow_unknown,
    )[0]


def sample_each(
    loaded: Loaded,
    prompts: Sequence[str],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    beams: int = 1,
    seed: int = 0,
    allow_unknown: bool = False,
) -> list[str]:
    """As `sample`, of all prompts at once; a prompt's draws depend on those beside it."""
    return [
        text(loaded, ids)
        for ids in continue_each(
            loaded,
            [prompt_ids(loaded, prompt) for prompt in prompts],
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            beams=beams,
            seed=seed,
            allow_unknown=allow_unknown,
        )
    ]


def continue_each(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    beams: int = 1,
    seed: int = 0,
    allow_unknown: bool = False,
) -> list[list[int]]:
    """Ids of each prompt, of one token or more, and of at most `tokens` after it."""
    check(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, beams=beams)
    model: Any = loaded.model
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if temperature else {}
    settings = {
        "do_sample": temperature > 0,
        **drawn,
        "num_beams": beams,
        "suppress_tokens": _never(loaded, allow_unknown) or None,
        "pad_token_id": 0,
    }
    context, ends = longest(model), _ends(model)
    texts = [_Text(list(prompt), tokens) for prompt in prompts]
    with restored_randomness(model.device), torch.no_grad(), quiet():
        seed_generators(seed, model.device)
        while going := [one for one in texts if one.left]:
            for one in going:
                one.move(context)
            for together in _together(going, context, padding=_pads(model), beams=beams):
                room = min(one.room(context) for one in together)
                found = _generate(model, [one.read for one in together], room, settings)
                for one, more in zip(together, found, strict=True):
                    one.add(more, ends)
    return [one.ids for one in texts]


class _Text:
    """A text that grows, and where in it the body's context begins."""

    def __init__(self, ids: list[int], left: int) -> None:
        self.ids, self.left, self.first = ids, left, 0

    @property
    def read(self) -> list[int]:
        return self.ids[self.first :]

    def move(self, context: int | None) -> None:
        if context is not None and len(self.read) >= context:
            self.first = len(self.ids) - max(1, context // 2)

    def room(self, context: int | None) -> int:
        """Tokens that may follow."""
        return self.left if context is None else min(self.left, context - len(self.read))

    def add(self, more: Sequence[int], ends: set[int]) -> None:
        """What was generated, up to its end; what stands behind an end is padding."""
        stop = next((place for place, token in enumerate(more) if token in ends), None)
        kept = more if stop is None else more[: stop + 1]
        self.ids += kept
        self.left = self.left - len(kept) if stop is None else 0


def _together(texts: Sequence[_Text], context: int | None, *, padding: bool, beams: int) -> list[list[_Text]]:
    """Texts that are read in one batch."""
    groups: dict[tuple[int, int], list[_Text]] = defaultdict(list)
    for one in texts:
        # A search that stopped for another text's sake would go on with one beam.
        groups[0 if padding else len(one.read), one.room(context) if beams > 1 else 0].append(one)
    return list(groups.values())


def _pads(model: Any) -> bool:
    """Whether padding can be kept from the body; a state that has read it is another state."""
    return not getattr(model, "carries_state", "state" in inspect.signature(model.forward).parameters)


def _generate(
    model: Any, texts: Sequence[list[int]], count: int, settings: dict[str, Any]
) -> list[list[int]]:
    """At most `count` tokens after each text."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts], device=model.device)
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts], device=model.device)
    try:
        found = model.generate(ids, attention_mask=mask, max_new_tokens=count, **settings)
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise FullrankError(
            "the model gives no token a probability (NaN or all zero): use another checkpoint"
        ) from error
    return found[:, width:].tolist()


def prompt_ids(loaded: Loaded, prompt: str) -> list[int]:
    """The ids of a prompt, one at least; bytes of a command line that are not UTF-8 become U+FFFD."""
    tokenizer: Any = loaded.tokenizer
    prompt, _ = valid_unicode(prompt)
    try:
        ids = tokenizer(prompt, verbose=False)["input_ids"]
    except Exception as error:  # the library's own, as for a word that a vocabulary without <unk> lacks
        raise FullrankError(
            f"the prompt cannot be put into tokens of {loaded.name} ({error}): use words that it has"
        ) from error
    if not ids:
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if begin is None:
            raise FullrankError(f"{loaded.name} has no token that begins a text: give a --prompt")
        ids = [begin]
    return list(ids)


def _never(loaded: Loaded, allow_unknown: bool) -> list[int]:
    """Ids that are not drawn."""
    tokenizer: Any = loaded.tokenizer
    named = set(tokenizer.get_vocab().values())
    rows = loaded.model.get_output_embeddings().weight.shape[0]
    never = [index for index in range(rows) if index not in named]
    unknown = getattr(tokenizer, "unk_token_id", None)
    # In some tokenizers the end of a text is the unknown word too, and must be drawn.
    if unknown is not None and not allow_unknown and unknown != tokenizer.eos_token_id:
        never.append(unknown)
    return never


def _ends(model: Any) -> set[int]:
    """Tokens that end a text."""
    end = getattr(model.generation_config, "eos_token_id", None)
    return set() if end is None else set(end) if isinstance(end, list) else {int(end)}


def text(loaded: Loaded, ids: Sequence[int]) -> str:
    """One decoding of all: a character of several byte tokens may begin in the prompt."""
    tokenizer: Any = loaded.tokenizer
    shown = list(ids)
    if shown and shown[0] == tokenizer.bos_token_id:
        shown = shown[1:]
    # Where nothing ends a text, the special token is the end of a line, and is text.
    return tokenizer.decode(shown, skip_special_tokens=bool(_ends(loaded.model)))


def check(*, tokens: int, temperature: float, top_k: int, top_p: float, beams: int = 1) -> None:
    """Raise for settings that no sampling can have."""
    if tokens < 1:
        raise FullrankError(f"tokens={tokens} is impossible: expected at least 1")
    if not 0 <= temperature < math.inf:
        raise FullrankError(f"temperature={temperature} is impossible: expected 0 (greedy) or more")
    if top_k < 0:
        raise FullrankError(f"top_k={top_k} is impossible: expected at least 1, or 0 for all tokens")
    if not 0 < top_p <= 1:
        raise FullrankError(f"top_p={top_p} is impossible: expected 0 < top_p <= 1")
    if beams < 1:
        raise FullrankError(f"beams={beams} is impossible: expected at least 1")
    if beams > 1 and temperature:
        raise FullrankError(
            f"beams={beams} look for the most probable text, and temperature={temperature} draws one: set "
            "the temperature to 0, or leave the beams out"
        )


__all__ = ["check", "continue_each", "prompt_ids", "sample", "sample_each", "text"]
