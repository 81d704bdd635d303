"""The study of bodies: what it plans, and what it says of runs whose outcome is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullrank.results.grid import GridRun
from fullrank.studies.body_grid import BODIES
from fullrank.studies.grid_plan import Extent, Text
from tests.studies.made_runs import decisions, followed, made_by_hand, plain_end


@pytest.mark.parametrize("small", [False, True])
def test_the_plan_gives_all_runs_the_operations_of_one_and_shapes_equal_parameters(small: bool) -> None:
    extent = Extent(small=small, seeds=2)
    assert {spec.factors["trial"] for spec in BODIES.plan({}, extent)} == {"2", "4", "8"}
    made = followed(BODIES, extent, plain_end)
    whole = [spec for spec in made.values() if "trial" not in spec.factors]
    budgets = {one for spec in whole for one in spec.settings if one.startswith("budget=")}
    assert len(budgets) == 1
    # Both weights of the vocabulary, and the layers.
    sizes = {
        2 * int(one["vocabulary"]) * int(one["width"]) + 12 * int(one["layers"]) * int(one["width"]) ** 2
        for one in (spec.factors for spec in whole)
        if one["vocabulary"] == whole[0].factors["vocabulary"]
    }
    assert len(sizes) == 3
    assert max(sizes) / min(sizes) < (1.2 if small else 1.03)


def test_directories_of_tokens_bring_their_own_vocabularies() -> None:
    texts = tuple(
        Text(name=f"v{size}", tokens=Path(f"v{size}"), facts={"vocabulary": str(size)})
        for size in (300, 700, 4000)
    )
    made = followed(BODIES, Extent(small=True, seeds=1, texts=texts), plain_end)
    assert {spec.factors["vocabulary"] for spec in made.values()} == {"300", "700", "4000"}
    for spec in made.values():
        assert spec.text is not None
        assert spec.text.facts["vocabulary"] == spec.factors["vocabulary"]
        assert not any(one.startswith("data.bpe_size") for one in spec.settings)


def run(
    seed: int, loss: float, *, vocabulary: str = "8192", head: str = "softmax", body: str = "neox",
    shape: str = "middle", per_byte: float | None = None,
) -> GridRun:  # fmt: skip
    return made_by_hand(
        "x", loss, seed=seed, per_byte=per_byte, vocabulary=vocabulary, head=head, body=body, shape=shape
    )


def test_what_is_known_is_found() -> None:
    runs = []
    for seed, noise in enumerate((0.0, 0.001, -0.001)):
        runs += [
            run(seed, 4.0, per_byte=1.0),
            run(seed, 3.9 + noise, head="mos4"),
            # Too small to be of interest, and too unsure to say.
            run(seed, 4.0 + noise, body="llama"),
            run(seed, 4.0 + 100 * noise, shape="deep"),
            run(seed, 5.0, vocabulary="65536", per_byte=1.01 + noise / 10),
            run(seed, 5.0 + noise, vocabulary="65536", head="mos4"),
        ]
    # In whatever order processes have ended them.
    found = BODIES.answers(tuple(runs[::-1]))
    assert decisions(found) == {
        "mos4 against softmax: neox, middle, V 8192": "better",
        "llama, middle against neox, middle: softmax, V 8192": "no difference of interest",
        "neox, deep against neox, middle: softmax, V 8192": "undecided",
        "V 65536 against 8192: softmax": "worse",
        "mos4 against softmax: neox, middle, V 65536": "no difference of interest",
    }
    assert next(one.unit for one in found if one.label.startswith("V 65536")) == "nats per byte"
    assert BODIES.answers(()) == ()
