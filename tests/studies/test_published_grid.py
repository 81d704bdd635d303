"""The study of published perplexities: its plan, and runs whose outcome is known."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fullrank.errors import FullrankError
from fullrank.fit.budget import Budget
from fullrank.studies.grid_plan import Extent
from fullrank.studies.published_grid import REFERENCES, SECONDS, SHARE, Name, study
from fullrank.train.config import override
from fullrank.train.recipes import recipe
from tests.studies.made_runs import decisions, followed, made_by_hand, plain_end


@pytest.mark.parametrize("reference", [*REFERENCES])
def test_the_plan_gives_all_the_same_seconds_and_trials_their_share(reference: Name) -> None:
    made = followed(study(reference), Extent(seeds=2, scale=0.5), plain_end)
    for spec in made.values():
        config = override(recipe(spec.recipe, spec.head), spec.settings)
        share = SHARE if "trial" in spec.factors else 1.0
        assert Budget.parse(config.budget) == Budget("seconds", pytest.approx(0.5 * SECONDS * share))
        # What was published is the sizes, but for a few entries, and the dropouts.
        published = recipe(REFERENCES[reference].recipe, spec.head)
        for part, key in (("body", "hidden"), ("body", "last"), ("head", "width")):
            ours, theirs = getattr(getattr(config, part), key), getattr(getattr(published, part), key)
            assert ours % 16 == 0
            assert 0 <= ours - theirs < 16
        body = {"hidden": published.body.hidden, "last": published.body.last}
        if spec.head == "mos":
            # The two that its search chose, with one mask.
            assert config.head.shared_dropout
            assert config.head.dropout > published.head.dropout
            assert config.body.dropout_hidden > published.body.dropout_hidden
            body["dropout_hidden"] = published.body.dropout_hidden
        else:
            assert config.head == dataclasses.replace(
                published.head, as_published=False, unigram=True, centred=False
            )
        assert dataclasses.replace(config.body, **body) == published.body
        assert not config.jitter
    assert {name for name, spec in made.items() if "trial" not in spec.factors} == {
        "softmax-seed0", "softmax-seed1", "mos-seed0", "mos-seed1",
    }  # fmt: skip


def test_one_rate_is_taken_untried() -> None:
    made = followed(study(rates=(0.5,)), Extent(seeds=1), plain_end)
    assert set(made) == {"softmax-seed0", "mos-seed0"}
    for spec in made.values():
        assert override(recipe(spec.recipe, spec.head), spec.settings).optimiser.lr == 2.5e-3
    for wrong in ((0.0,), (1.0, math.nan)):
        with pytest.raises(FullrankError, match="--rates"):
            study(rates=wrong)


def test_a_small_plan_has_steps_and_tiny_bodies() -> None:
    made = followed(study(), Extent(small=True, seeds=1), plain_end)
    for spec in made.values():
        config = override(recipe(spec.recipe, spec.head), spec.settings)
        assert not config.budget
        assert config.steps == (15 if "trial" in spec.factors else 60)
        assert config.body.hidden < 32


def test_what_is_known_is_found() -> None:
    runs = []
    for seed, noise in enumerate((0.0, 0.002, -0.002)):
        runs += [
            made_by_hand("x", math.log(70.0) + noise, seed=seed, head="softmax"),
            made_by_hand("x", math.log(60.0) - noise, seed=seed, head="mos"),
            made_by_hand("x", 1.0, seed=seed, head="mos", trial="1"),
        ]
    found = study().answers(tuple(runs))
    assert decisions(found) == {
        "mos against softmax": "better",
        "softmax against 65.8 as published": "above",
        "mos against 61.45 as published": "below",
    }
    by_label = {one.label: one for one in found}
    effect = by_label["mos against softmax"].effect
    assert effect is not None
    assert effect.value == pytest.approx(math.log(60 / 70))
    assert "test perplexity 60.00 a word" in by_label["mos against 61.45 as published"].sentence
    of_ptb = decisions(study("ptb").answers(tuple(runs)))
    assert of_ptb["mos against 54.44 as published"] == "above"
    assert study().answers(()) == ()
