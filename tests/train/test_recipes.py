"""Recipes: every one builds with every head, and the published numbers are those of the papers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.heads.registry import HEADS
from fullrank.models import LanguageModel
from fullrank.models.build import PYTHIA
from fullrank.train import batches
from fullrank.train.build import build
from fullrank.train.config import Config, override
from fullrank.train.recipes import RECIPES, recipe

V = 11


def narrow(config: Config) -> Config:
    """The same kinds of parts with few parameters."""
    settings = ["body.hidden=16", "body.last=12", "body.heads=2", "body.inner=24", "length=8"]
    if config.head.width:
        settings.append("head.width=8")
    if config.head.private:
        settings.append("head.private=4")
    return override(config, settings)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("head", HEADS)
def test_every_recipe_builds_with_every_head(name: str, head: str) -> None:
    config = recipe(name, head)
    assert (config.recipe, config.head.name) == (name, head)
    model = build(narrow(config), V)
    ids = torch.arange(12).view(2, 6) % V
    out = model(ids, (ids + 1) % V)
    out.value.backward()
    assert torch.isfinite(out.nll)
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not idle, f"no gradient reaches {idle}"


def test_building_is_a_function_of_the_seed() -> None:
    def weights(seed: int) -> LanguageModel:
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


@pytest.mark.parametrize("size", PYTHIA)
def test_transformers_have_pythias_shape(size: str) -> None:
    config = recipe(f"transformer-{size}")
    body = config.body
    assert body.kind == "transformer"
    # Pythia's feed-forward is four times as wide, and its attention heads divide the width.
    assert body.inner == 4 * body.hidden
    assert body.hidden % body.heads == 0
    expected = {"14m": (6, 128), "31m": (6, 256), "70m": (6, 512), "160m": (12, 768)}
    assert (body.layers, body.hidden) == expected.get(size, (2, 128))


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
