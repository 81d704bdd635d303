"""Settings: overrides of every type, hints, bad values, and the ways out and back in."""

from __future__ import annotations

import dataclasses
import json
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.errors import FullrankError
from fullrank.train.config import Config, from_json, lines, override, paths, to_json
from fullrank.train.recipes import RECIPES, recipe

PLAIN = Config(recipe="mine")


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("steps=120", "steps", 120),
        ("steps=2e3", "steps", 2000),
        ("seed=-4", "seed", -4),
        (" batch = 7 ", "batch", 7),
        ("epochs=0.5", "epochs", 0.5),
        ("optimiser.lr=3e-4", "optimiser.lr", 3e-4),
        ("jitter=true", "jitter", True),
        ("head.tie=0", "head.tie", False),
        ("head.bias=False", "head.bias", False),
        ("precision=bf16", "precision", "bf16"),
        ("optimiser.name=nt-asgd", "optimiser.name", "nt-asgd"),
        ("head.contexts=15,5", "head.contexts", (15, 5)),
        ("head.contexts=", "head.contexts", ()),
        ("data.tokenizer=/a=b/t.json", "data.tokenizer", "/a=b/t.json"),
        ("recipe=other", "recipe", "other"),
    ],
)
def test_an_override_of_every_type(setting: str, path: str, value: object) -> None:
    found: object = override(PLAIN, [setting])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_a_later_override_wins_and_the_rest_stays() -> None:
    changed = override(PLAIN, ["steps=1", "body.hidden=9", "steps=3"])
    assert dataclasses.replace(changed, steps=0, body=PLAIN.body) == PLAIN
    assert (changed.steps, changed.body.hidden) == (3, 9)


def test_settings_that_need_each_other_come_in_any_order() -> None:
    pairs = (["batch=64", "accumulate=16"], ["optimiser.finetune_epochs=2", "optimiser.finetune_lr=0.1"])
    for both in pairs:
        assert override(PLAIN, both) == override(PLAIN, both[::-1])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("stepz=3", "did you mean steps?"),
        ("optimizer.lr=1", "did you mean optimiser.lr?"),
        # A name without its part: the part is what is missing.
        ("finetune_lr=1", "did you mean optimiser.finetune_lr?"),
        ("head=mos", "no setting is called 'head'"),
        ("steps.more=1", "no setting is called 'steps.more'"),
        ("qqqqqq=1", "--print-config"),
        ("=1", "--print-config"),
        ("steps", "name=value"),
        ("steps=1.5", "a whole number"),
        ("steps=many", "a whole number"),
        ("steps=inf", "a whole number"),
        ("steps=nan", "a whole number"),
        ("epochs=long", "a number"),
        ("optimiser.lr=nan", "a number"),
        ("optimiser.clip=inf", "a number"),
        ("jitter=maybe", "true or false"),
        ("precision=fp8", "one of auto, fp32, bf16"),
        ("head.contexts=a,b", "numbers with commas"),
        ("batch=0", "at least 1"),
        ("keep=0", "at least 1"),
        ("steps=-1", "steps >= 0"),
        ("epochs=0", "epochs > 0"),
        ("evaluate_every=-2", "evaluate_every=-2 is impossible"),
        ("evaluate_tokens=-2", "evaluate_tokens=-2 is impossible"),
        ("checkpoint_every=-2", "at least 0"),
        ("jitter_longer=-1", "at least 0"),
        ("optimiser.nonmonotone=-1", "at least 0"),
        ("optimiser.clip=-1", "optimiser.clip=-1.0 is impossible"),
        ("optimiser.lr=0", "above 0"),
        ("optimiser.lr=1e40", "at most 1e9"),
        # The rate of a second stage is 0 until it is given.
        ("optimiser.finetune_epochs=2", "optimiser.finetune_lr"),
        ("accumulate=3", "multiple"),
    ],
)
def test_a_bad_override_is_one_sentence(setting: str, expected: str) -> None:
    with pytest.raises(FullrankError) as caught:
        override(PLAIN, [setting])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", RECIPES)
def test_json_and_back(name: str) -> None:
    config = recipe(name, "doc")
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_printed_can_be_set(name: str) -> None:
    config = override(recipe(name, "doc"), ["optimiser.lr=0.1", "data.tokenizer=a.json", "seed=3"])
    assert override(PLAIN, lines(config)) == config
    assert [line.partition("=")[0] for line in lines(config)] == list(paths())


def test_every_setting_is_a_path() -> None:
    def count(cls: type) -> int:
        hints = typing.get_type_hints(cls).values()
        return sum(count(hint) if dataclasses.is_dataclass(hint) else 1 for hint in hints)

    assert len(set(paths())) == count(Config)


@settings(max_examples=25)
@given(
    lr=st.floats(min_value=1e-12, max_value=1e6),
    epochs=st.floats(min_value=1e-3, max_value=1e4),
    seed=st.integers(-(2**50), 2**50),
    contexts=st.lists(st.integers(0, 99), max_size=4),
)
def test_printed_numbers_lose_nothing(lr: float, epochs: float, seed: int, contexts: list[int]) -> None:
    config = dataclasses.replace(
        PLAIN,
        epochs=epochs,
        seed=seed,
        optimiser=dataclasses.replace(PLAIN.optimiser, lr=lr),
        head=dataclasses.replace(PLAIN.head, contexts=tuple(contexts)),
    )
    assert override(PLAIN, lines(config)) == config
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    "change",
    [
        {"novel": 1},
        {"body": {"novel": 1}},
        {"body": 3},
        {"batch": "many"},
        {"optimiser": None},
    ],
)
def test_json_of_another_version_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(FullrankError, match="no training config of this version"):
        from_json({**to_json(PLAIN), **change})


def test_json_without_its_recipe_is_refused() -> None:
    with pytest.raises(FullrankError, match="no training config"):
        from_json({})
