"""Text from a model, through `generate` of transformers: with its cache, or the state of an LSTM.

log p / temperature; the `top_k` most probable stay; of these the fewest whose probabilities reach `top_p` in
sum. Temperature 0 takes the most probable token. Never drawn: rows of the matrix that no token names, and the
unknown word unless it is allowed. A prompt begins as the tokenizer begins texts.

A body whose context is full goes on with the later half of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.models.anatomy import longest
from fullrank.models.loading import Loaded, quiet


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
    check(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    model: Any = loaded.model
    ids = _prompt(loaded, prompt)
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if temperature else {}
    settings = {
        "do_sample": temperature > 0,
        **drawn,
        "suppress_tokens": _never(loaded, allow_unknown) or None,
        "pad_token_id": 0,
    }
    devices = [model.device] if model.device.type == "cuda" else []
    context, ends = longest(model), _ends(model)
    with torch.random.fork_rng(devices=devices), torch.no_grad(), quiet():
        torch.manual_seed(seed)
        left, ended = tokens, False
        while left and not ended:
            read = ids if context is None or ids.shape[1] < context else ids[:, -(context // 2) :]
            room = left if context is None else context - read.shape[1]
            more = _generate(model, read, min(left, room), settings)
            ids = torch.cat([ids, more], dim=1)
            left -= more.shape[1]
            ended = int(ids[0, -1]) in ends
    return _text(loaded, ids[0], ends)


def _generate(model: Any, ids: Tensor, count: int, settings: dict[str, Any]) -> Tensor:
    """The tokens [1, n] after ids [1, time]."""
    try:
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise FullrankError(
            "the model gives no token a probability (NaN or all zero): use another checkpoint"
        ) from error
    return found[:, ids.shape[1] :]


def _prompt(loaded: Loaded, prompt: str) -> Tensor:
    tokenizer: Any = loaded.tokenizer
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
    return torch.tensor([ids], device=loaded.model.device)


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


def _text(loaded: Loaded, ids: Tensor, ends: set[int]) -> str:
    """One decoding of all: a character of several byte tokens may begin in the prompt."""
    tokenizer: Any = loaded.tokenizer
    shown = ids.tolist()
    if shown and shown[0] == tokenizer.bos_token_id:
        shown = shown[1:]
    # Where nothing ends a text, the special token is the end of a line, and is text.
    return tokenizer.decode(shown, skip_special_tokens=bool(ends))


def check(*, tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    """Raise for settings that no sampling can have."""
    if tokens < 1:
        raise FullrankError(f"tokens={tokens} is impossible: expected at least 1")
    if not 0 <= temperature < math.inf:
        raise FullrankError(f"temperature={temperature} is impossible: expected 0 (greedy) or more")
    if top_k < 0:
        raise FullrankError(f"top_k={top_k} is impossible: expected at least 1, or 0 for all tokens")
    if not 0 < top_p <= 1:
        raise FullrankError(f"top_p={top_p} is impossible: expected 0 < top_p <= 1")


__all__ = ["check", "sample"]
