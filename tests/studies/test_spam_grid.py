"""The study of one repeated symbol: its language, its plan, and runs whose outcome is known."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from fullrank.errors import FullrankError
from fullrank.results.grid import GridRun
from fullrank.studies.grid_plan import Extent, Spec, Text
from fullrank.studies.spam_grid import CELLS, SMALL_CELLS, study
from fullrank.studies.spam_language import LENGTH, language
from tests.studies.made_runs import decisions, followed, made_by_hand, plain_end


def test_the_language_is_one_symbol_a_sequence_each_equally_often_and_the_same_again(tmp_path: Path) -> None:
    text = language(tmp_path / "one", 50, 3)
    assert text.tokens is not None
    tokens = np.fromfile(text.tokens / "train.bin", dtype="<u4").reshape(-1, LENGTH)
    assert (tokens == tokens[:, :1]).all()
    symbols, counts = np.unique(tokens[:, 0], return_counts=True)
    assert symbols.tolist() == list(range(1, 50))
    assert set(counts.tolist()) == {3}
    again = language(tmp_path / "two", 50, 3)
    assert again.tokens is not None
    for name in ("train.bin", "valid.bin", "test.bin", "tokens.json"):
        assert (text.tokens / name).read_bytes() == (again.tokens / name).read_bytes()


@pytest.mark.parametrize("small", [False, True])
def test_the_plan_gives_all_heads_of_a_cell_the_operations_of_softmax(small: bool) -> None:
    cells = SMALL_CELLS if small else CELLS
    texts = tuple(
        Text(name=f"v{size}x{copies}", facts={"vocabulary": str(size), "copies": str(copies)})
        for size, copies in cells
    )
    made = followed(study(), Extent(small=small, seeds=2, texts=texts), plain_end)
    whole = [spec for spec in made.values() if "trial" not in spec.factors]
    for text in texts:
        own = [spec for spec in whole if spec.text == text]
        assert len({one for spec in own for one in spec.settings if one.startswith("budget=")}) == 1
        assert len({spec.factors["head"] for spec in own}) > 1
        # Rates of the others are chosen on a quarter of that, not of softmax's steps.
        for spec in made.values():
            if spec.text == text and "trial" in spec.factors and spec.factors["head"] != "softmax":
                assert 4 * _flops(spec) == pytest.approx(_flops(own[0]), rel=1e-5)
    # As many in all as another vocabulary has of each.
    assert len({size * copies for size, copies in cells}) < len(cells)


def _flops(spec: Spec) -> float:
    """The last budget counts."""
    return [float(one.rpartition("=")[2]) for one in spec.settings if one.startswith("budget=flops=")][-1]


def test_softmax_alone_forgets_and_has_another_name_then() -> None:
    text = Text(name="v256x8", facts={"vocabulary": "256", "copies": "8"})
    made = followed(study(), Extent(seeds=1, texts=(text,)), plain_end)
    forgets = {spec.factors["head"] for spec in made.values() if "optimiser.beta2=0.95" in spec.settings}
    remembers = {spec.factors["head"] for spec in made.values() if "optimiser.beta2=0.999" in spec.settings}
    assert forgets == {"softmax_short"}
    assert remembers == {spec.factors["head"] for spec in made.values()} - forgets


def test_some_heads_are_chosen_with_softmax_among_them() -> None:
    text = Text(name="v256x8", facts={"vocabulary": "256", "copies": "8"})
    made = followed(study(("mos4", "softmax")), Extent(seeds=2, texts=(text,)), plain_end)
    assert {spec.factors["head"] for spec in made.values()} == {"softmax", "mos4"}
    for wrong in (("mos4",), ("softmax", "mos5")):
        with pytest.raises(FullrankError, match="expected softmax and any of"):
            study(wrong)


def test_a_dearer_head_is_held_against_softmax_of_as_many_tokens() -> None:
    def end(spec: Spec) -> GridRun:
        whole = spec.head == "mos" and "trial" not in spec.factors
        return dataclasses.replace(plain_end(spec), **({"tokens": 50} if whole else {}))

    text = Text(name="v256x8", facts={"vocabulary": "256", "copies": "8"})
    made = followed(study(("softmax", "sigsoftmax", "mos4")), Extent(seeds=2, texts=(text,)), end)
    shorter = {name: spec for name, spec in made.items() if "_as_" in name}
    assert sorted(shorter) == ["v256x8-softmax_as_mos4-seed0", "v256x8-softmax_as_mos4-seed1"]
    for spec in shorter.values():
        assert spec.head == "softmax"
        assert [one for one in spec.settings if one.startswith("budget=")] == ["budget=tokens=50"]


def run(
    seed: int, head: str, losses: tuple[float, ...], *, vocabulary: int = 256, copies: int = 8,
    tokens: int = 100,
) -> GridRun:  # fmt: skip
    return made_by_hand(
        "x", losses[-1], seed=seed, losses=losses, tokens=tokens, monitors={"gradient_kept": 0.2},
        vocabulary=str(vocabulary), copies=str(copies), head=head, width="16",
    )  # fmt: skip


def test_what_is_known_is_found() -> None:
    runs = []
    for seed, noise in enumerate((0.0, 0.01, -0.01)):
        runs += [
            run(seed, "softmax", (5.0, 3.0, 1.0, 0.2)),
            # Half of the tokens for the same operations: as fast a token, and so behind at the end.
            run(seed, "mos2", (5.0 + noise, 3.0 + noise)),
            run(seed, "softmax for as many tokens as mos2", (5.0, 3.0)),
            run(seed, "plif", (5.0, 5.0, 5.0, 0.2 + 20 * noise)),
            # Not learnt, with as many sequences of each, and with as many in all.
            run(seed, "softmax", (6.0, 5.0 + noise), vocabulary=1024),
            run(seed, "softmax", (5.0, 0.2 + noise), copies=32),
        ]
    found = study().answers(tuple(runs))
    assert decisions(found) == {
        "mos2 for the same operations: V 256, 8 sequences a symbol": "worse",
        "mos2 for the same tokens: V 256, 8 sequences a symbol": "no difference of interest",
        "plif for the same operations: V 256, 8 sequences a symbol": "undecided",
        "softmax: V 1024, 8 sequences a symbol against V 256, 8": "worse",
        "softmax: V 1024, 8 sequences a symbol against V 256, 32": "worse",
    }
    by_label = {one.label: one for one in found}
    far = by_label["softmax: V 1024, 8 sequences a symbol against V 256, 8"]
    assert far.effect is not None
    assert far.effect.value == pytest.approx(5.0 / math.log(1024) - 0.2 / math.log(256))
    assert far.unit == "of log V"
    assert "learnt by 0 of 3; 0.200 of the gradient's norm kept at first, 0.125 at random" in far.sentence
    assert study().answers(()) == ()
