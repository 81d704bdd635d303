"""Recipes: every one builds with every head, and the published numbers are those of the papers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fullrank
from fullrank.errors import FullrankError
from fullrank.heads.registry import HEADS
from fullrank.models import FullrankForCausalLM
from fullrank.train import batches
from fullrank.train.config import Config, override
from fullrank.train.model import build, configuration
from fullrank.train.objective import Objective
from fullrank.train.recipes import PYTHIA, RECIPES, recipe

V = 11


def narrow(config: Config) -> Config:
    """The same kinds of parts with few parameters."""
    settings = ["body.hidden=16", "body.last=12", "body.heads=2", "body.inner=24", "length=8"]
    settings += ["body.layers=2", "body.vocabulary_multiple=1"]
    if config.head.width:
        settings.append("head.width=8")
    if config.head.private:
        settings.append("head.private=4")
    return override(config, settings)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *(
            (name, head)
            for name in ("awd-lstm-ptb", "awd-lstm", "pythia-14m", "llama-tiny")
            for head in HEADS
        ),
        *((name, "mos") for name in RECIPES),
    ],
)
def test_recipes_build_with_every_head(name: str, head: str) -> None:
    config = recipe(name, head)
    assert (config.recipe, config.head.name) == (name, head)
    model = build(narrow(config), V)
    ids = torch.arange(12).view(2, 6) % V
    out = Objective(model)(ids, (ids + 1) % V)
    out.value.backward()
    assert torch.isfinite(out.nll)
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not idle, f"no gradient reaches {idle}"


def test_building_is_a_function_of_the_seed() -> None:
    def weights(seed: int) -> FullrankForCausalLM:
        return build(narrow(dataclasses.replace(recipe("awd-lstm", "mos"), seed=seed)), V)

    before = torch.random.get_rng_state()
    one, same, other = weights(1), weights(1), weights(2)
    assert torch.equal(before, torch.random.get_rng_state())
    pairs = zip(one.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert not all(
        torch.equal(left, right) for left, right in zip(one.parameters(), other.parameters(), strict=True)
    )


def published(config: Config) -> dict[str, object]:
    body, head, optimiser = config.body, config.head, config.optimiser
    return {
        "emsize": head.width if head.tie and not body.embedding else body.embedding,
        "nhid": body.hidden,
        "nhidlast": body.last,
        "layers": body.layers,
        "lr": optimiser.lr,
        "batch": config.batch,
        "dropouts": (
            body.dropout_input, body.dropout_hidden, head.dropout, body.dropout, body.dropout_embedding,
            body.weight_drop,
        ),
        "longer": config.jitter_longer,
        "finetune_lr": optimiser.finetune_lr,
    }  # fmt: skip


# Yang et al. 2018, the command lines of the authors' code; dropouts are i, h, l, output, e and of weights.
MOS = {
    "awd-lstm-ptb": {
        "emsize": 280, "nhid": 960, "nhidlast": 620, "layers": 3, "lr": 20.0, "batch": 12,
        "dropouts": (0.4, 0.225, 0.29, 0.4, 0.1, 0.5), "longer": 40, "finetune_lr": 25.0,
    },
    "awd-lstm-wt2": {
        "emsize": 300, "nhid": 1150, "nhidlast": 650, "layers": 3, "lr": 15.0, "batch": 15,
        "dropouts": (0.55, 0.2, 0.29, 0.4, 0.1, 0.5), "longer": 20, "finetune_lr": 20.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MOS)
def test_the_mixtures_numbers_are_the_published_ones(name: str) -> None:
    config = recipe(name, "mos")
    assert published(config) == MOS[name]
    assert config.head.components == 15
    assert config.head.as_published


@pytest.mark.parametrize("name", MOS)
@pytest.mark.parametrize("head", ["softmax", "mos"])
def test_what_both_published_recipes_share(name: str, head: str) -> None:
    config = recipe(name, head)
    optimiser = config.optimiser
    assert (config.length, config.jitter, config.epochs) == (70, True, 1000)
    assert (config.activation, config.temporal) == (2.0, 1.0)
    assert (optimiser.name, optimiser.schedule, optimiser.warmup) == ("nt-asgd", "constant", 0.0)
    assert (optimiser.clip, optimiser.weight_decay, optimiser.nonmonotone) == (0.25, 1.2e-6, 5)
    assert optimiser.finetune_epochs == 1000
    assert (config.data.level, config.data.vocabulary_from) == ("words", "all")
    assert config.head.tie


def test_the_plain_numbers_are_awd_lstms() -> None:
    # Merity et al. 2017 and the authors' code.
    ptb, wt2 = recipe("awd-lstm-ptb"), recipe("awd-lstm-wt2")
    for config in (ptb, wt2):
        body = config.body
        assert (config.head.width, body.hidden, body.last, body.layers) == (400, 1150, 400, 3)
        assert (body.dropout, body.dropout_embedding, body.weight_drop) == (0.4, 0.1, 0.5)
        assert config.optimiser.lr == 30.0
        assert not config.head.dropout
    assert (ptb.batch, ptb.body.dropout_input, ptb.body.dropout_hidden) == (20, 0.4, 0.25)
    assert (wt2.batch, wt2.body.dropout_input, wt2.body.dropout_hidden) == (80, 0.65, 0.2)


@pytest.mark.parametrize("name", MOS)
def test_the_longest_sequence_reaches_the_batches(name: str) -> None:
    config = recipe(name, "mos")
    made = batches.for_training(config, torch.zeros(15 * 70 + 20, dtype=torch.int16).numpy())
    assert isinstance(made, batches.Streams)
    assert made.longer == config.jitter_longer


# Layers, width, attention heads and rate in models/SIZE/pythia-SIZE.yml of EleutherAI/pythia.
PUBLISHED = {
    "14m": (6, 128, 4, 1e-3),
    "31m": (6, 256, 8, 1e-3),
    "70m": (6, 512, 8, 1e-3),
    "160m": (12, 768, 12, 6e-4),
    "410m": (24, 1024, 16, 3e-4),
}
# Parameters, as the model cards of EleutherAI on the hub have them.
PARAMETERS = {"70m": 70_426_624, "160m": 162_322_944, "410m": 405_334_016}


@pytest.mark.parametrize("size", PUBLISHED)
def test_pythia_has_pythias_settings_and_its_number_of_parameters(size: str) -> None:
    config = recipe(f"pythia-{size}")
    layers, width, heads, rate = PUBLISHED[size]
    body, optimiser = config.body, config.optimiser
    assert (body.layers, body.hidden, body.heads, optimiser.lr) == (layers, width, heads, rate)
    assert (optimiser.beta1, optimiser.beta2, optimiser.weight_decay) == (0.9, 0.95, 0.1)
    assert (optimiser.clip, optimiser.warmup, optimiser.final) == (1.0, 0.01, 0.1)
    assert (optimiser.name, optimiser.schedule, body.dropout) == ("adamw", "cosine", 0.0)
    with torch.device("meta"):
        model = FullrankForCausalLM(configuration(config, config.data.bpe_size))
    # Two embeddings; a layer has 12 d^2 and its biases (3 + 1 + 4 + 1) d and two norms; the last norm.
    vocab = 50_304
    expected = 2 * vocab * width + layers * (12 * width**2 + (9 + 4) * width) + 2 * width
    assert model.num_parameters() == expected == PARAMETERS.get(size, expected)
    assert model.config.vocab_size == vocab


@pytest.mark.parametrize(("size", "inner"), [("60m", 1376), ("130m", 2048), ("350m", 2736)])
def test_llama_has_galores_widths(size: str, inner: int) -> None:
    config = recipe(f"llama-{size}")
    made = configuration(config, config.data.bpe_size)
    assert (made.model_type, made.body.model_type) == ("fullrank", "llama")
    assert (made.body.intermediate_size, made.vocab_size) == (inner, 32_000)


def test_a_transformer_is_a_pythia_with_a_smaller_vocabulary() -> None:
    for size in PYTHIA:
        one, two = recipe(f"pythia-{size}"), recipe(f"transformer-{size}")
        data = dataclasses.replace(one.data, bpe_size=16_384)
        assert dataclasses.replace(one, recipe=two.recipe, data=data) == two


def test_mixtures_have_room_for_their_projections() -> None:
    # A mixture's projections are parameters too: its matrix is narrower than the plain head's.
    plain = recipe("awd-lstm", "softmax").head.width
    published = {"mos": 320, "moss": 320, "moc": 320, "doc": 320, "mixtape": 320, "trunk": 368}
    assert {head: recipe("awd-lstm", head).head.width for head in published} == published
    assert all(recipe("awd-lstm", head).head.width == plain == 384 for head in set(HEADS) - set(published))
    assert recipe("awd-lstm", "trunk").head.private == 80


def test_mixtapes_components_are_a_power_of_two() -> None:
    assert all(recipe(name, "mixtape").head.components == 4 for name in RECIPES)


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [
        ("awd-lstmm", "softmax", "did you mean 'awd-lstm'?"),
        ("zzz", "softmax", "expected one of awd-lstm-ptb"),
        ("awd-lstm", "moz", "did you mean 'mos'?"),
        ("awd-lstm", "", "expected one of cache, doc"),
    ],
)
def test_unknown_names(name: str, head: str, expected: str) -> None:
    with pytest.raises(FullrankError) as caught:
        recipe(name, head)
    assert expected in str(caught.value)


def test_a_run_from_python_needs_no_name_below_the_room() -> None:
    for name in fullrank.train.__all__:
        assert getattr(fullrank.train, name).__name__ == name
    assert fullrank.train.recipe is recipe
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        fullrank.train.trian  # type: ignore[attr-defined]  # noqa: B018
