"""Samples text from a trained model, one token after the other.

From the normalised log-probabilities log p in fp32: banned tokens leave; log p / temperature; the `top_k`
most probable stay; of these the fewest whose probabilities reach `top_p` in sum; they are normalised again
and one is drawn. Temperature 0 takes the most probable token. A prompt follows an <eos>, as texts do.

A recurrent body carries its state. A body with a context reads its last `context` tokens again for every
token. So does a recurrent one under a head that points at earlier tokens: it sees the last POINTED of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.models import FullrankForCausalLM
from fullrank.models.anatomy import longest
from fullrank.text.vocabulary import Vocabulary
from fullrank.train.evaluate import in_eval_mode
from fullrank.train.objective import Carried

POINTED = 256
"""Tokens that a pointing head sees over a recurrent body."""


def generate(
    model: FullrankForCausalLM,
    vocabulary: Vocabulary,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    allow_unknown: bool = False,
    device: torch.device | str = "cpu",
) -> str:
    """The prompt and `tokens` sampled tokens after it, as text; equal seeds give equal text.

    top_k=0 and top_p=1 leave all tokens in. The unknown word is never sampled unless allowed. Words of the
    prompt that the vocabulary lacks become its unknown word; where it has none, FullrankError.
    """
    check(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    device = torch.device(device)
    # On the CPU always: generators of different devices draw different numbers.
    generator = torch.Generator().manual_seed(seed)
    banned = None if allow_unknown else vocabulary.unknown
    pieces = vocabulary.stream([prompt], end=False, name="the prompt")
    ids = [vocabulary.eos, *(int(token) for piece in pieces for token in piece.ids)]
    window = _window(model)
    carried: Carried = ()
    unread = ids
    with in_eval_mode(model), torch.no_grad():
        for _ in range(tokens):
            read = unread if window is None else ids[-window:]
            log_probs, carried = _next(model, torch.tensor([read], device=device), carried)
            chosen = choose(
                log_probs.cpu(),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                banned=banned,
                generator=generator,
            )
            ids.append(chosen)
            unread = [chosen]
    # One decoding of all: a character of several byte tokens may begin in the prompt.
    return vocabulary.decode(ids[1:])


def choose(
    log_probs: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    banned: int | None,
    generator: torch.Generator,
) -> int:
    """One token of log-probabilities [V]."""
    scores = log_probs.float().clone()
    if banned is not None:
        scores[banned] = -torch.inf
    if not torch.isfinite(scores).any():
        raise FullrankError(
            "the model gives no token a probability (NaN or all zero): use another checkpoint"
        )
    if temperature == 0:
        return int(scores.argmax())
    scores = scores / temperature
    order = scores.argsort(descending=True, stable=True)
    if top_k:
        order = order[:top_k]
    shares = scores[order].softmax(0)
    # Kept: those before which less than top_p has come, so at least the first.
    kept = int((shares.double().cumsum(0) - shares < top_p).sum()) if top_p < 1 else len(shares)
    drawn = torch.multinomial(shares[: max(1, kept)], 1, generator=generator)
    return int(order[drawn])


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


def _window(model: FullrankForCausalLM) -> int | None:
    """Tokens that are read again for every token; None where a state is carried."""
    if model.carries_state:
        return POINTED if model.lm_head.needs_context else None
    return longest(model)


def _next(model: FullrankForCausalLM, ids: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
    """Log-probabilities [V] after ids [1, time], and what is carried on where a state is carried."""
    states, context, output = model.head_inputs(ids, state=carried or None)
    if context is not None:
        return model.lm_head(states, context=context)[0, -1], ()
    # Log-probabilities at the last place only: a long prompt times V would be a large tensor.
    last = [state[:, -1:].contiguous() for state in states]
    return model.lm_head(last)[0, -1], tuple(output.state or ()) if model.carries_state else ()


__all__ = ["choose", "generate"]
