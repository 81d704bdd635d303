"""A config's model, and where its head's bias starts."""

from __future__ import annotations

import numpy as np
import torch

from fullrank.heads.base import Head
from fullrank.models import LanguageModel
from fullrank.models.build import build_model
from fullrank.train.config import Config


def build(config: Config, vocab: int) -> LanguageModel:
    """A fresh model, the same for one config wherever it is built; the random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        return build_model(
            config.body,
            config.head,
            vocab=vocab,
            length=config.length,
            activation=config.activation,
            temporal=config.temporal,
        )


@torch.no_grad()
def start_at_unigram(head: Head, counts: np.ndarray, *, lift: float = 0.0) -> None:
    """Let the bias give every token its frequency in training, counted [V], one added to each.

    Adam moves a bias by about the rate a step, and log-frequencies lie up to ten nats apart: from zero, the
    first thousand steps would go into learning them.

    Softmax does not see a constant added to all scores; a head that does is moved along its curve by `lift`.
    """
    if head.decoder.bias is None:
        return
    frequency = torch.from_numpy((counts + 1.0) / (counts.sum() + len(counts)))
    head.decoder.bias.copy_(head.bias_for(frequency, lift))
