"""How much work a diagnosis does: three budgets, and what follows from them for a model."""

from __future__ import annotations

import dataclasses

import torch

LEAST_TOKENS = 3072
"""Tokens that a model of any size is run on, where they are not given."""


LARGEST_BUFFER = 1 << 29
"""Bytes of V-wide scores at a time: more are no faster."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How much work a diagnosis does. The defaults take SmolLM2-135M under six minutes on two cores."""

    tokens: int | None = None
    """Tokens of text to run the model on; None: as many as `body_work` pays for."""
    body_work: float = 2.6e12
    """Multiplications that running the body may take, where tokens are not given."""
    most_tokens: int = 1 << 18
    """However small the model is."""
    window: int = 512
    """Tokens a window: the longest context."""
    memory: int = 0
    """Bytes that states, buffers and copies of the output matrix may take, beside the model and one copy of
    its output matrix in fp32; 0 is 2 GiB, ten copies and six of the states."""
    heads: tuple[str, ...] = ()
    """None: mos, and trunk as well where a pass over the vocabulary is cheap."""
    components: int | None = None
    """Components of the mixtures; None: by the split of the rows."""
    seeds: int = 1
    """Fits of the best head and its control."""
    fit_work: float = 5e12
    """Multiplications that one fit may take on a processor; a GPU does a thousand times that."""
    power: bool = True
    """Whether a gain is planted, to see what the fits would have seen."""
    search_seconds: float = 20.0
    """Time for the search for unreachable tokens and the capacity."""
    gradient_tokens: int = 512
    attention_loss_tokens: int = 1024
    """Tokens on which attention is changed, one change after the other; its other figures use all tokens."""
    seed: int = 0


USUAL = Settings()

QUICK = Settings(
    body_work=1e12,
    most_tokens=1 << 15,
    heads=("mos",),
    seeds=1,
    fit_work=3e11,
    power=False,
    search_seconds=4.0,
    gradient_tokens=256,
    attention_loss_tokens=512,
)
"""A first look in ninety seconds: fewer tokens, one mixture, short fits, nothing planted."""

THOROUGH = Settings(
    body_work=1e15,
    most_tokens=1 << 20,
    heads=("mos", "trunk", "sigsoftmax"),
    search_seconds=12.0,
)
"""For a GPU: a million tokens and more heads, in three minutes for a model of 135 million parameters."""


def tokens_for(settings: Settings, parameters: int, weight: torch.Tensor) -> int:
    """How many tokens to run a model with this output matrix on: as given, or as its size allows, and on a
    processor the fits of a mixture that score the whole vocabulary."""
    from fullrank.diagnose.questions.better_head import MOST_COMPONENTS
    from fullrank.fit.comparison import SMALL_VOCABULARY, affordable
    from fullrank.fit.states import SHARES

    if settings.tokens is not None:
        return settings.tokens
    tokens = min(settings.most_tokens, int(settings.body_work / (2 * parameters)))
    vocab, width = weight.shape
    if weight.device.type == "cpu" and vocab <= SMALL_VOCABULARY:
        fitted = affordable(vocab, width, settings.components or MOST_COMPONENTS, settings.fit_work)
        tokens = min(tokens, fitted * sum(SHARES) // SHARES[0])
    return max(LEAST_TOKENS, tokens)


def default_memory(tokens: int, weight: torch.Tensor) -> int:
    """Bytes, where they are not given: no question needs more."""
    return (2 << 30) + 4 * (10 * weight.numel() + 6 * tokens * weight.shape[1])
