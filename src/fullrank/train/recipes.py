"""Recipes: functions that return a training config.

awd-lstm-ptb, awd-lstm-wt2   as published with the mixture of softmaxes (Yang et al. 2018, 1711.03953) or, for
                             the plain head, with AWD-LSTM (Merity et al. 2017, 1708.02182): NT-ASGD for up
                             to 1000 epochs, then a finetune stage
awd-lstm                     ours: the same family of body, AdamW, a larger batch, far fewer epochs
pythia-{14m,...,410m}        GPT-NeoX with Pythia's widths, depths, spreads and rates (Biderman et al. 2023,
                             2304.01373): lr, betas 0.9 and 0.95, weight decay 0.1, clip 1, 1% of warm-up,
                             cosine to a tenth are those of EleutherAI/pythia, models/SIZE/pythia-SIZE.yml.
                             Its tokeniser has 50,277 entries, which make V = 50,304. The batch is ours: 64
                             sequences of 512 tokens in place of 1,024 of 2,048
llama-{tiny,14m,60m,...}     the same settings on a Llama body; sizes from 60m on as GaLore has them (Zhao et
                             al. 2024, 2403.03507, configs/llama_SIZE.json of jiaweizzhao/GaLore), V = 32,000
transformer-{tiny,14m,...}   tiny is ours, a pythia-14m of two layers for two cores and a few minutes; the
                             others are Pythia's with a vocabulary of 16,384

With --set body.hidden another width: spreads follow it, and so do the rates of hidden matrices
(`model.width_factors`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace as replaced
from functools import partial
from typing import Any, Literal, NamedTuple

from fullrank.errors import FullrankError
from fullrank.heads.registry import find as find_head
from fullrank.train.config import BodyConfig, Config, DataConfig, HeadConfig, OptimiserConfig


def awd_lstm_ptb(head: str) -> Config:
    """Penn Treebank as published."""
    published = OptimiserConfig(
        name="nt-asgd", lr=30.0, weight_decay=1.2e-6, clip=0.25, schedule="constant", warmup=0.0,
        nonmonotone=5, finetune_epochs=1000, finetune_lr=30.0,
    )  # fmt: skip
    config = Config(
        recipe="awd-lstm-ptb",
        data=DataConfig(level="words", vocabulary_from="all"),
        body=BodyConfig(
            layers=3, hidden=1150, last=400, dropout=0.4, dropout_embedding=0.1, dropout_input=0.4,
            dropout_hidden=0.25, weight_drop=0.5,
        ),
        head=HeadConfig(name=head, width=400, unigram=False, as_published=True),
        optimiser=published, batch=20, length=70, jitter=True, jitter_longer=40, epochs=1000.0,
        activation=2.0,
        temporal=1.0, evaluate_batch=10,
    )  # fmt: skip
    return _as_published(config, lr=20.0, finetune_lr=25.0)


def awd_lstm_wt2(head: str) -> Config:
    """WikiText-2 as published."""
    plain = awd_lstm_ptb("softmax")
    config = replaced(
        plain,
        recipe="awd-lstm-wt2",
        batch=80,
        jitter_longer=20,
        body=replaced(plain.body, dropout_input=0.65, dropout_hidden=0.2),
        head=replaced(plain.head, name=head),
    )
    return _as_published(config, lr=15.0, finetune_lr=20.0)


def _as_published(config: Config, *, lr: float, finetune_lr: float) -> Config:
    """With a head that has published settings: the body's with mixtures, where they differ from AWD-LSTM's,
    and the head's own."""
    published = find_head(config.head.name).published
    if published is None:
        return config
    ptb = config.recipe.endswith("ptb")
    return replaced(
        config,
        batch=12 if ptb else 15,
        body=replaced(
            config.body,
            hidden=960 if ptb else 1150,
            last=620 if ptb else 650,
            dropout_input=0.4 if ptb else 0.55,
            dropout_hidden=0.225 if ptb else 0.2,
        ),
        head=replaced(config.head, width=280 if ptb else 300, **published),
        optimiser=replaced(config.optimiser, lr=lr, finetune_lr=finetune_lr),
    )


def awd_lstm(head: str) -> Config:
    """Ours for word-level text of a few million tokens; heads of nearly equal parameters on WikiText-2."""
    size: dict[str, Any] = {"components": 10, **find_head(head).equal_size(384)}
    return Config(
        recipe="awd-lstm",
        data=DataConfig(level="words", vocabulary_from="all"),
        body=BodyConfig(
            layers=2, hidden=960, last=640, dropout=0.3, dropout_embedding=0.05, dropout_input=0.3,
            dropout_hidden=0.2, weight_drop=0.3,
        ),
        # Beside a map that is learned from states to rows, free contexts gain more (docs/heads.md).
        head=HeadConfig(name=head, centred=False, **size),
        optimiser=OptimiserConfig(lr=8e-3, weight_decay=0.02, warmup=0.03),
        batch=64, length=70, epochs=6.0, evaluate_batch=64, activation=1.0, temporal=0.5,
    )  # fmt: skip


class Size(NamedTuple):
    """Of a transformer; the width inside follows from the hidden one."""

    layers: int
    hidden: int
    heads: int
    lr: float


TINY = Size(layers=2, hidden=128, heads=4, lr=2e-3)
PYTHIA = {
    "14m": Size(layers=6, hidden=128, heads=4, lr=1e-3),
    "31m": Size(layers=6, hidden=256, heads=8, lr=1e-3),
    "70m": Size(layers=6, hidden=512, heads=8, lr=1e-3),
    "160m": Size(layers=12, hidden=768, heads=12, lr=6e-4),
    "410m": Size(layers=24, hidden=1024, heads=16, lr=3e-4),
}
LLAMA = {
    "tiny": TINY,
    "14m": Size(layers=6, hidden=128, heads=4, lr=1e-3),
    "60m": Size(layers=8, hidden=512, heads=8, lr=1e-3),
    "130m": Size(layers=12, hidden=768, heads=12, lr=6e-4),
    "350m": Size(layers=24, hidden=1024, heads=16, lr=3e-4),
}


def transformer(name: str, kind: Literal["neox", "llama"], size: Size, entries: int, head: str) -> Config:
    """A transformer on byte-level BPE of at most so many entries."""
    layers, hidden, heads, lr = size
    config = Config(
        recipe=name,
        data=DataConfig(level="bpe", bpe_size=entries),
        body=BodyConfig(
            kind=kind, layers=layers, hidden=hidden, heads=heads, rate_width=hidden,
            vocabulary_multiple=128,
        ),
        head=HeadConfig(name=head, components=4, bias=False, tie=False),
        optimiser=OptimiserConfig(lr=lr, weight_decay=0.1, beta2=0.95, clip=1.0, warmup=0.01, final=0.1),
        batch=64, length=512, epochs=1.0, evaluate_batch=16, evaluate_tokens=-1,
    )  # fmt: skip
    if size is not TINY:
        return config
    return replaced(
        config, data=replaced(config.data, bpe_size=4096), head=replaced(config.head, tie=True),
        optimiser=replaced(config.optimiser, warmup=0.03), batch=8, length=128, steps=400, evaluate_every=50,
        evaluate_tokens=8192, final_tokens=32768,
    )  # fmt: skip


def _family(
    prefix: str, kind: Literal["neox", "llama"], sizes: dict[str, Size], entries: int
) -> dict[str, Callable[[str], Config]]:
    return {
        f"{prefix}-{name}": partial(transformer, f"{prefix}-{name}", kind, size, entries)
        for name, size in sizes.items()
    }


RECIPES: dict[str, Callable[[str], Config]] = {
    "awd-lstm-ptb": awd_lstm_ptb,
    "awd-lstm-wt2": awd_lstm_wt2,
    "awd-lstm": awd_lstm,
    **_family("pythia", "neox", PYTHIA, 50_277),
    **_family("llama", "llama", LLAMA, 32_000),
    **_family("transformer", "neox", {"tiny": TINY, **PYTHIA}, 16_384),
}


def recipe(name: str, head: str = "softmax") -> Config:
    """The config of a recipe for a head; raises FullrankError for an unknown one."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise FullrankError(f"no recipe is called {name!r}: expected one of {', '.join(RECIPES)}{hint}")
    find_head(head)
    return RECIPES[name](head)
