"""The study of causes: what it plans, and what it says of runs whose outcome is known."""

from __future__ import annotations

import pytest

from fullrank.results.grid import GridRun
from fullrank.studies.cause_grid import CAUSE
from fullrank.studies.grid_plan import Extent
from tests.studies.made_runs import decisions, followed, made_by_hand, plain_end


@pytest.mark.parametrize("small", [False, True])
def test_the_plan_has_a_control_of_weight_zero(small: bool) -> None:
    made = followed(CAUSE, Extent(small=small, seeds=2), plain_end)
    controls = [spec for spec in made.values() if spec.factors["penalty"] == "none"]
    assert controls
    assert all("penalty.spectrum_weight=0" in spec.settings for spec in controls)
    assert {spec.factors["penalty"] for spec in made.values()} == {
        "none", "flat", "decay", "steep", "white", "together",
    }  # fmt: skip


def run(
    seed: int, penalty: str, loss: float, rank: float, cosine: float, outlier: float = 2.0
) -> GridRun:  # fmt: skip
    monitors = {"head_effective_rank_share": rank, "anisotropy": cosine, "state_outlier": outlier}
    weight = "0" if penalty == "none" else "1"
    return made_by_hand("x", loss, seed=seed, monitors=monitors, width="64", penalty=penalty, weight=weight)


def test_what_is_known_is_found() -> None:
    runs = []
    for seed, noise in enumerate((0.0, 0.001, -0.001)):
        runs += [
            run(seed, "none", 4.0, 0.7, 0.3),
            # Moves what it is on, costs loss, and brings the other with it.
            run(seed, "together", 4.1 + noise, 0.4 + noise, 0.9 + noise, 2.0 + noise),
            # Moves what it is on, and nothing else.
            run(seed, "flat", 4.0 + noise, 0.99 + noise, 0.3 + noise),
            # Moves nothing: whatever else has moved is not its doing.
            run(seed, "decay", 4.0 + noise, 0.7 + noise, 0.9 + noise),
        ]
    found = decisions(CAUSE.answers(tuple(runs)))
    tail = ", weight 1, width 64"
    assert {name.removesuffix(tail): said for name, said in found.items()} == {
        "loss: together": "worse",
        "head_effective_rank_share: together": "falls",
        "anisotropy: together": "rises",
        "state_outlier: together": "no difference of interest",
        "loss: flat": "no difference of interest",
        "head_effective_rank_share: flat": "rises",
        "anisotropy: flat": "no difference of interest",
        "state_outlier: flat": "no difference of interest",
        "loss: decay": "no difference of interest",
        "head_effective_rank_share: decay": "no difference of interest",
        "anisotropy: decay": "undecided",
        "state_outlier: decay": "undecided",
    }
    one = [each for each in runs if each.seed == 0]
    assert set(decisions(CAUSE.answers(one)).values()) == {"undecided"}
    assert CAUSE.answers(()) == ()
