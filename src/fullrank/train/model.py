"""A config's model: which widths follow from which, what each head is given, and where its bias starts.

    head width D        as set, else the width of the state that it reads
    embedding width     of an LSTM: as set, else D where head and embedding share one matrix, else the hidden
                        width; of a transformer the hidden width
    V                   the tokeniser's size, padded to a multiple of `body.vocabulary_multiple`: 128 makes
                        50,304 of Pythia's 50,277

A head takes from the settings what it has options for, and for a body's widths what it makes of them
(`Head.options_for`).
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullrank.errors import FullrankError
from fullrank.fit.optimiser import hidden_matrices
from fullrank.heads.base import Head, require_positive
from fullrank.heads.registry import find as find_head
from fullrank.models import AwdLstmConfig, FullrankConfig, FullrankForCausalLM, bodies, sizes
from fullrank.models.anatomy import longest
from fullrank.models.loading import quiet
from fullrank.models.tokenizer import as_tokenizer
from fullrank.text.vocabulary import Vocabulary
from fullrank.train.config import BodyConfig, Config


def build(config: Config, vocabulary: int) -> FullrankForCausalLM:
    """A fresh model, the same for one config wherever it is built; the random state stays as it was."""
    made = configuration(config, vocabulary)
    sizes.require_room(made, "the model of these settings")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        model = FullrankForCausalLM(made)
    bodies.draw(model, config.seed)
    return model


def configuration(config: Config, vocabulary: int) -> FullrankConfig:
    """What transformers stores of the model for a tokeniser of this size."""
    body, head = config.body, config.head
    counts = ("layers", "hidden", "last", "vocabulary_multiple")
    require_positive(vocabulary=vocabulary, **{f"body.{name}": getattr(body, name) for name in counts})
    vocab = -(-vocabulary // body.vocabulary_multiple) * body.vocabulary_multiple
    widths = state_widths(body)
    width = head.width or widths[0]
    own = body.embedding if body.kind == "awd_lstm" else body.hidden
    embedding = own or (width if head.tie else body.hidden)
    if head.tie and embedding != width:
        raise FullrankError(
            f"an embedding of width {embedding} cannot be tied to a head of width {width}: set head.width="
            f"{embedding}, body.embedding=0, or head.tie=false"
        )
    settings: dict[str, Any] = {
        "components": head.components,
        "width": width,
        "dropout": head.dropout,
        "shared_dropout": head.shared_dropout,
        "bias": head.bias,
        "as_published": head.as_published,
        "centred": head.centred,
    }
    # 0 leaves these to the head.
    settings |= {name: value for name in ("private", "rank", "contexts") if (value := getattr(head, name))}
    options = find_head(head.name).options_for(settings, widths)
    return FullrankConfig(
        body=_body(config, vocab, embedding),
        head={"name": head.name, "hidden": widths[0], **options},
        vocab_size=vocab,
        tie_word_embeddings=head.tie,
        normaliser=body.normaliser,
        attention_temperature=body.attention_temperature,
    )


def state_widths(body: BodyConfig) -> tuple[int, ...]:
    """Of the states that a head may read, the last layer first."""
    if body.kind == "awd_lstm":
        return (body.last, *[body.hidden] * (body.layers - 1))
    return (body.hidden,) * body.layers


def _body(config: Config, vocab: int, embedding: int) -> Any:
    body = config.body
    if body.kind != "awd_lstm":
        return bodies.transformer(
            body.kind, vocab=vocab, hidden=body.hidden, layers=body.layers, heads=body.heads,
            inner=body.inner, context=config.length, dropout=body.dropout,
        )  # fmt: skip
    if body.normaliser != "softmax":
        raise FullrankError(
            f"an LSTM has no attention that {body.normaliser} could normalise: leave "
            "body.normaliser=softmax, or train a transformer"
        )
    if body.attention_temperature != 1.0:
        raise FullrankError(
            f"an LSTM has no attention with a temperature of {body.attention_temperature:g}: leave "
            "body.attention_temperature=1, or train a transformer"
        )
    return AwdLstmConfig(
        vocab_size=vocab,
        embedding_size=embedding,
        inner_size=body.hidden,
        hidden_size=body.last,
        num_hidden_layers=body.layers,
        dropout=body.dropout,
        dropout_embedding=body.dropout_embedding,
        dropout_input=body.dropout_input,
        dropout_hidden=body.dropout_hidden,
        weight_drop=body.weight_drop,
    )


def model_files(model: FullrankForCausalLM, vocabulary: Vocabulary) -> dict[str, str]:
    """What stands beside the weights in a directory of transformers: configuration, generation, tokenizer."""
    from transformers import GenerationConfig

    # A line's end is no text's end.
    end = None if vocabulary.level == "words" else vocabulary.eos
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    generation = GenerationConfig(bos_token_id=vocabulary.eos, eos_token_id=end, pad_token_id=vocabulary.eos)
    with tempfile.TemporaryDirectory() as place, quiet():
        for part in (config, generation, as_tokenizer(vocabulary, longest=longest(model))):
            part.save_pretrained(place)
        return {file.name: file.read_text(encoding="utf8") for file in sorted(Path(place).iterdir())}


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


def width_factors(model: FullrankForCausalLM, config: BodyConfig) -> dict[torch.nn.Parameter, float]:
    """Factors on the rates of hidden matrices, so that they follow the width: `rate_width` / hidden;
    embeddings, biases, norms and heads keep theirs.

    Adam's steps have the size of the rate whatever the gradient's, and a matrix sums over its width: so a
    rate that was right at one width stays right at another (Yang et al. 2022, 2203.03466, for Adam).
    """
    if config.kind == "awd_lstm" or not config.rate_width or config.rate_width == config.hidden:
        return {}
    named = dict(model.named_parameters())
    return {named[name]: config.rate_width / config.hidden for name in hidden_matrices(model)}
