"""Training of the whole model: it learns, its controls do, and a killed run ends with the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.errors import FullrankError
from fullrank.fit import checkpoints, loop
from fullrank.fit import comparison as fit
from fullrank.fit.collect import Windows
from fullrank.upgrade import whole
from fullrank.upgrade.upgrade import upgrade

SETTINGS = fit.Settings(seeds=1, epochs=3)


@pytest.fixture
def windows() -> Windows:
    """A text in which each token is mostly followed by the next number: easy to learn."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(2, 101, (42, 1), generator=generator)
    ids = 2 + (start - 2 + torch.arange(24)) % 99
    noise = torch.rand(ids.shape, generator=generator) < 0.1
    ids = torch.where(noise, torch.randint(2, 101, ids.shape, generator=generator), ids)
    return Windows(ids=ids, sizes=torch.ones(42, 23), sources=("made up",), sha256="", starts_with_bos=False)


def make(tiny_model: Callable[..., Any], family: str, head: str) -> tuple[Any, Any]:
    original = tiny_model(family)
    return upgrade(original, head), upgrade(original, "softmax").lm_head


@pytest.mark.parametrize(
    ("family", "head"),
    [("llama", "mos"), pytest.param("gpt_neox", "doc", marks=pytest.mark.slow(reason="a second training"))],
)
def test_the_whole_model_learns(
    family: str, head: str, tiny_model: Callable[..., Any], windows: Windows, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(whole, "RATES", (2e-3,))
    monkeypatch.setattr(whole, "ADDED", 2.0)
    model, plain = make(tiny_model, family, head)
    tied = model.get_input_embeddings().weight is model.lm_head.decoder.weight
    before = {name: value.detach().clone() for name, value in model.model.named_parameters()}
    record = whole.fit_whole(model, plain, windows, settings=SETTINGS, directory=tmp_path)
    assert record.unfrozen
    assert [one.head for one in record.fits] == ["softmax", "softmax_equal", head]
    for one in record.fits:
        assert one.before.value == pytest.approx(record.fits[0].before.value, abs=1e-4)
        assert one.after.value < one.before.value - 0.1
    assert any(not torch.equal(before[name], value) for name, value in model.model.named_parameters())
    # What stays in the model is what was judged, tied as it was.
    assert (model.get_input_embeddings().weight is model.lm_head.decoder.weight) == tied
    held_out = windows.ids[30:]
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=held_out, labels=held_out).loss
    assert loss.item() == pytest.approx(record.saved_loss, abs=1e-4)


@pytest.mark.slow(reason="three trainings, six seconds; a killed run of `train` is in the default tier")
def test_a_killed_run_ends_with_the_same_numbers(
    tiny_model: Callable[..., Any], windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "RATES", (2e-3,))
    monkeypatch.setattr(whole, "ADDED", 2.0)
    # A checkpoint at every look, however quick they follow each other.
    monkeypatch.setattr(loop, "EVERY", 0.0)
    monkeypatch.setattr(loop, "DEAREST", math.inf)

    def run(directory: Path) -> tuple[Any, Any]:
        model, plain = make(tiny_model, "llama", "mos")
        record = whole.fit_whole(model, plain, windows, settings=SETTINGS, directory=directory)
        return record, model

    straight, first = run(tmp_path / "straight")
    kept, calls = checkpoints.keep, 0

    def killed(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        kept(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "killed")
    again, second = run(tmp_path / "killed")
    assert again.gain_by_seed == straight.gain_by_seed
    assert [one.after_by_seed for one in again.fits] == [one.after_by_seed for one in straight.fits]
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    # Nothing is left of a training that is done but what may be asked for.
    sizes = {path.parent.name: path.stat().st_size for path in (tmp_path / "killed").rglob("*.safetensors")}
    assert max(sizes["softmax"], sizes["softmax_equal"]) < 4096 < sizes["mos"]
    assert sizes["mos"] < 1.5 * 4 * sum(parameter.numel() for parameter in first.parameters())
    # A file that is cut counts as none.
    files = sorted((tmp_path / "killed").rglob("*.safetensors"))
    files[0].write_bytes(files[0].read_bytes()[:100])
    assert run(tmp_path / "killed")[0].gain_by_seed == straight.gain_by_seed


def test_what_cannot_be_trained_is_refused(
    tiny_model: Callable[..., Any], windows: Windows, tmp_path: Path
) -> None:
    model, plain = make(tiny_model, "llama", "softmax")
    with pytest.raises(FullrankError, match="held against"):
        whole.fit_whole(model, plain, windows, settings=SETTINGS, directory=tmp_path)
    with pytest.raises(FullrankError, match="too few"):
        whole._split(windows.ids[:2])
