"""Penalties on the spectrum of W and on the states: by hand, their gradients, what they do, and off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.results import read_log
from fullrank.train import penalty
from fullrank.train.config import PenaltyConfig, from_json, override, to_json
from fullrank.train.objective import Objective
from fullrank.train.penalty import Penalties, sampled, spectrum, spread
from fullrank.train.recipes import recipe
from tests import small_models


def matrix(values: list[float], rows: int = 12) -> torch.Tensor:
    """With these eigenvalues of its Gram matrix."""
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))
    return left * torch.tensor(values, dtype=torch.float64).sqrt() @ right


def test_by_hand_and_blind_to_scale() -> None:
    flat, decay = matrix([1.0] * 3), matrix([6.0, 3.0, 2.0])
    for scale in (1.0, 30.0):
        assert float(spectrum(scale * flat, "flat")) == pytest.approx(0.0, abs=1e-12)
        assert float(spectrum(scale * decay, "decay")) == pytest.approx(0.0, abs=1e-12)
        assert float(spectrum(scale * matrix([36.0, 9.0, 4.0]), "steep")) == pytest.approx(0.0, abs=1e-12)
    # Eigenvalues 18/11, 9/11 and 6/11 of mean one.
    values = torch.tensor([18.0, 9.0, 6.0]) / 11
    assert float(spectrum(decay, "flat")) == pytest.approx(float((values - 1).square().mean()))
    expected = (values - 1).square().sum() / values.square().sum()
    assert float(spectrum(flat, "decay")) == pytest.approx(float(expected))
    # Of two states (1, 0) and (3, 0): the mean has 4 of 5, and what is left lies in one of two directions.
    states = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    assert float(spread(states, "together")) == pytest.approx(1 - 4 / 5)
    assert float(spread(states, "white")) == pytest.approx(1.0 + 4 / 5)
    square = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert float(spread(square, "white")) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("aim", ["flat", "decay", "steep", "white", "together"])
def test_gradients(aim: str) -> None:
    torch.manual_seed(1)
    values = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    of = spectrum if aim in ("flat", "decay", "steep") else spread
    assert torch.autograd.gradcheck(lambda given: of(given, aim), values)
    # Some steps down the gradient come nearer to the aim.
    optimiser = torch.optim.Adam([values], lr=0.05)
    first = float(of(values, aim).detach())
    for _ in range(60):
        optimiser.zero_grad()
        of(values, aim).backward()
        optimiser.step()
    assert float(of(values, aim).detach()) < 0.3 * first
    # Equal eigenvalues have no order, and a gradient all the same.
    start = matrix([1.0] * 4).requires_grad_()
    (slope,) = torch.autograd.grad(of(start, aim), start)
    assert bool(torch.isfinite(slope).all())


def test_the_sample_is_from_all_over_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalty, "SAMPLE", 8)
    states = torch.arange(20.0).view(4, 5, 1)
    assert sampled(states).flatten().tolist() == [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0]
    assert len(sampled(states[:1])) == 5


def test_off_or_weightless_there_is_none() -> None:
    assert Penalties.of(PenaltyConfig()) is None
    assert Penalties.of(PenaltyConfig(spectrum="flat", states="white")) is None
    assert Penalties.of(PenaltyConfig(spectrum_weight=1.0)) is None


def test_the_objective_adds_them_to_the_loss_and_not_to_the_nll() -> None:
    torch.manual_seed(0)
    model = small_models.lstm("softmax", vocab=19, tie=False, options={"bias": True}).double().eval()
    ids = torch.randint(19, (3, 8))
    made = Penalties.of(PenaltyConfig(spectrum="decay", spectrum_weight=0.5, states="white", states_weight=2))
    assert made is not None
    plain = Objective(model)(ids[:, :-1], ids[:, 1:])
    found = Objective(model, penalties=made)(ids[:, :-1], ids[:, 1:])
    own = spectrum(model.lm_head.decoder.weight, "decay")
    other = spread(model.head_inputs(ids[:, :-1]).states[0].flatten(0, 1), "white")
    torch.testing.assert_close(found.value, plain.value + 0.5 * own + 2 * other)
    torch.testing.assert_close(found.nll, plain.nll)
    assert set(made.last) == {"spectrum", "states"}
    assert float(made.last["states"]) == pytest.approx(float(other.detach()))


def test_settings_are_kept_and_checked() -> None:
    config = override(recipe("transformer-tiny"), ["penalty.states=white", "penalty.states_weight=0.1"])
    assert from_json(to_json(config)) == config
    # A run of before there were any.
    old: dict[str, Any] = to_json(recipe("transformer-tiny"))
    del old["penalty"]
    assert from_json(old) == recipe("transformer-tiny")
    with pytest.raises(FullrankError, match="one of none, flat, decay, steep"):
        override(config, ["penalty.spectrum=steeper"])
    with pytest.raises(FullrankError, match="at least 0"):
        override(config, ["penalty.spectrum_weight=-1"])


def test_a_run_logs_them_and_moves_what_it_holds(tmp_path: Path) -> None:
    from fullrank.train.loop import Options, train

    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the {word} of a {word} is no {word}s" for word in range(300)))
    settings = [
        "body.hidden=16", "body.heads=2", "body.layers=1", "steps=30", "batch=2", "length=16",
        "evaluate_every=30", "evaluate_tokens=64", "final_tokens=64", "data.bpe_size=300", "head.tie=false",
        "optimiser.lr=0.02", "penalty.states=together",
    ]  # fmt: skip
    ends = {}
    for weight in ("0", "3"):
        out = tmp_path / weight
        config = override(recipe("transformer-tiny"), [*settings, f"penalty.states_weight={weight}"])
        options = Options(
            data=(text,), out=out, cache=tmp_path / "cache", device="cpu", trackers=()
        )  # fmt: skip
        train(config, options)
        ends[weight] = read_log(out).validation()[-1].monitors["anisotropy"]
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        logged = [line.get("penalties") for line in lines if line["event"] == "train"]
        assert all(one is None for one in logged) if weight == "0" else logged[-1]["states"] < 0.5
    assert ends["3"] > ends["0"] + 0.2
