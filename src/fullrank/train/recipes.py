"""Recipes: functions that return a training config.

awd-lstm-ptb, awd-lstm-wt2   as published with the mixture of softmaxes (Yang et al. 2018, 1711.03953) or, for
                             the plain head, with AWD-LSTM (Merity et al. 2017, 1708.02182): NT-ASGD for up
                             to 1000 epochs, then a finetune stage
awd-lstm                     ours: the same family of body, AdamW, a larger batch, far fewer epochs
transformer-{tiny,14m,...}   Pythia's widths and depths (Biderman et al. 2023, 2304.01373) on byte-level BPE
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace as replaced
from functools import partial
from typing import Any

from fullrank.errors import FullrankError
from fullrank.heads.registry import find as find_head
from fullrank.models.build import PYTHIA
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
        head=HeadConfig(name=head, **size),
        optimiser=OptimiserConfig(lr=8e-3, weight_decay=0.02, warmup=0.03),
        batch=64, length=70, epochs=6.0, evaluate_batch=64, activation=1.0, temporal=0.5,
    )  # fmt: skip


def transformer(size: str, head: str) -> Config:
    """A Pythia of some size; `tiny` is ours, for two cores and a few minutes."""
    layers, hidden, heads, inner = PYTHIA[size]
    tiny = size == "tiny"
    return Config(
        recipe=f"transformer-{size}",
        data=DataConfig(level="bpe", bpe_size=4096 if tiny else 16384),
        body=BodyConfig(kind="transformer", layers=layers, hidden=hidden, heads=heads, inner=inner),
        head=HeadConfig(name=head, components=4, bias=False, tie=tiny),
        optimiser=OptimiserConfig(
            lr=2e-3 if tiny else 1e-3, weight_decay=0.1, beta2=0.95, clip=1.0, warmup=0.03, final=0.1
        ),
        batch=8 if tiny else 64, length=128 if tiny else 512, epochs=1.0, steps=400 if tiny else 0,
        evaluate_every=50 if tiny else 0, evaluate_tokens=8192 if tiny else 0,
        final_tokens=32768 if tiny else 0, evaluate_batch=16,
    )  # fmt: skip


RECIPES: dict[str, Callable[[str], Config]] = {
    "awd-lstm-ptb": awd_lstm_ptb,
    "awd-lstm-wt2": awd_lstm_wt2,
    "awd-lstm": awd_lstm,
    **{f"transformer-{size}": partial(transformer, size) for size in PYTHIA},
}


def recipe(name: str, head: str = "softmax") -> Config:
    """The config of a recipe for a head; raises FullrankError for an unknown one."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise FullrankError(f"no recipe is called {name!r}: expected one of {', '.join(RECIPES)}{hint}")
    find_head(head)
    return RECIPES[name](head)
