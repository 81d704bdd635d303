"""The CUDA benchmark with tiny sizes on a processor: every part runs, all peers compute one thing."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.nn import functional

ROOT = Path(__file__).parents[2]

# torch tells of slow bf16 on some processors, and the benchmark lets it.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are not installed: they run from the source tree."""
    monkeypatch.syspath_prepend(str(ROOT))


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def fake_peers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Peers with the signatures of their releases, in plain torch; returns the options that they got."""
    calls: list[dict[str, Any]] = []

    def cut(e: Any, c: Any, targets: Any, *, reduction: str = "mean", filter_eps: Any = "high") -> Any:
        assert e.shape[:-1] == targets.shape
        calls.append({"filter_eps": filter_eps})
        return functional.cross_entropy((e @ c.t()).float(), targets, reduction=reduction)

    def liger(
        input: Any, weight: Any, target: Any, *, reduction: str = "mean", chunk_mem_const: int = 1
    ) -> Any:
        assert input.ndim == 2
        calls.append({"chunk_mem_const": chunk_mem_const})
        return functional.cross_entropy((input @ weight.t()).float(), target, reduction=reduction)

    cce = types.ModuleType("cut_cross_entropy")
    cce.linear_cross_entropy = cut  # type: ignore[attr-defined]
    made = types.ModuleType("liger_kernel.transformers.functional")
    made.liger_fused_linear_cross_entropy = liger  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", cce)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", made)
    return calls


def test_exact_gradients_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, peers = module("exact"), module("peers")
    # Pieces of two tokens, the last one short.
    monkeypatch.setattr(exact, "PIECE_BYTES", 2 * 8 * 3 * 23)
    inputs = peers.draw_inputs(N=5, K=3, D=4, V=23, dtype=torch.float64, device="cpu", seed=1)
    log_prior = inputs.log_prior.detach().double().requires_grad_()
    joint = (inputs.rows @ inputs.weight.t()).log_softmax(-1) + log_prior[:, :, None]
    functional.nll_loss(joint.logsumexp(1), inputs.targets).backward()
    found = exact.exact_gradients(inputs.rows, log_prior, inputs.weight, inputs.targets)
    assert exact.relative_error(inputs.rows.grad, found.rows) < 1e-13
    assert exact.relative_error(inputs.weight.grad, found.weight) < 1e-13
    assert exact.relative_error(log_prior.grad, found.log_prior) < 1e-13
    assert exact.relative_error(None, found.rows) is None
    assert float((found.share.sum(1) - 1.0).abs().max()) < 1e-14


def test_layer_compares_the_same_gradients_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, suite, peers = module("gpu_settings"), module("gpu_suite"), module("peers")
    calls = fake_peers(monkeypatch)

    def broken(inputs: Any, compiler: str) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setitem(peers.IMPLEMENTATIONS, "broken", broken)
    out = tmp_path / "figures.json"
    document = suite.run_suite(settings.tiny(out=out, only=("layer",)), say=lambda words: None)
    assert json.loads(out.read_text()) == json.loads(json.dumps(document))
    rows = [row for row in document["rows"] if row["part"] == "peers"]
    fields = {"implementation", "head", "components", "width", "vocab", *suite.FIGURES}
    assert all(fields <= set(row) for row in document["rows"])
    assert {row["missing"] for row in rows if row["implementation"] == "broken"} == {"out of memory"}
    measured = {(row["implementation"], row["components"]): row for row in rows if "missing" not in row}
    for name, K in [("fullrank", 1), ("compiled", 3), ("eager", 3), ("cce", 3),
                    ("cce exact", 1), ("liger", 3), ("liger 16x", 1)]:  # fmt: skip
        assert 0.0 < measured[name, K]["gradient_error"] < 1e-5, name
    for row in measured.values():
        assert row["time_over_products"] == pytest.approx(row["milliseconds"] / row["products_milliseconds"])
    assert {"filter_eps": None} in calls
    assert {"filter_eps": "auto"} in calls
    assert {"chunk_mem_const": 16} in calls
    heads = {(row["head"], row["implementation"]): row for row in document["rows"] if row["part"] == "heads"}
    assert heads["trunk", "fullrank"]["gradient_error"] < 1e-5
    assert min(row["time_over_softmax"] for row in heads.values() if row["head"] == "softmax") == 1.0

    chart = module("performance_chart")
    drawn = tmp_path / "chart.svg"
    assert chart.run(chart.Config(source=out, out=drawn)) == 0
    assert "fullrank" in "".join(ElementTree.parse(drawn).getroot().itertext())


@pytest.mark.slow(reason="all parts of a benchmark, three seconds; its main one is above")
def test_other_parts_run_and_the_file_keeps_what_was_not_run(tmp_path: Path) -> None:
    settings, suite, table = module("gpu_settings"), module("gpu_suite"), module("gpu_table")
    out = tmp_path / "figures.json"
    first = suite.run_suite(settings.tiny(out=out, only=("stages", "decode")), say=lambda words: None)
    stages = first["stages"][-1]["stages"]
    assert all(stages[name] > 0 for name in ("score product", "rows product", "weight product"))
    greedy = [row for row in first["decoding"] if row["call"] == "greedy" and row["batch"] == 3]
    assert {row["head"] for row in greedy} == {"softmax", "mos", "trunk"}
    assert not any("missing" in row for row in first["decoding"])
    short = dataclasses.replace(settings.tiny(out=out, only=("step",)), bodies=("eager",))
    both = suite.run_suite(short, say=lambda words: None)
    assert both["decoding"] == json.loads(json.dumps(first["decoding"]))
    assert both["parts"]["decode"]["complete"]
    steps = {(row["head"], row["implementation"]): row for row in both["steps"] if "missing" not in row}
    assert {("softmax", "fullrank"), ("softmax", "eager"), ("mos", "fullrank")} <= set(steps)
    plain = {name: row for (head, name), row in steps.items() if head == "softmax"}
    assert min(row["time_over_softmax"] for row in plain.values()) == 1.0
    # What is ours is no peer.
    assert min(row["time_over_peer"] for name, row in plain.items() if name != "fullrank") == 1.0
    shown = table.tables(both)
    assert "Training step" in shown
    assert "trunk" in shown
    assert len(shown) < 6000


def test_the_command_leaves_figures_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, out = module("output_layer"), tmp_path / "figures.json"
    assert command.run(command.Config(device="cpu", tiny=True, only=("stages",), out=out)) == 0
    assert json.loads(out.read_text())["stages"]
    shown = out.with_suffix(".txt").read_text()
    assert "Stages of our call, ms" in shown
    assert shown in capsys.readouterr().out


@pytest.mark.slow(reason="a benchmark's deadline, two seconds")
def test_a_spent_budget_is_a_reason(tmp_path: Path) -> None:
    settings, suite = module("gpu_settings"), module("gpu_suite")
    late = dataclasses.replace(settings.tiny(out=tmp_path / "figures.json"), deadline=-1.0)
    document = suite.run_suite(late, say=lambda words: None)
    lists = [document[name] for name in ("rows", "stages", "steps", "decoding")]
    assert all(rows and all(row["missing"].startswith("not run") for row in rows) for rows in lists)


def test_shapes_are_read_or_refused() -> None:
    settings = module("gpu_settings")
    assert settings.parse_shapes(("768x50304",)) == ((768, 50304),)
    assert settings.parse_shapes(()) == settings.SHAPES
    with pytest.raises(SystemExit, match="expected DxV"):
        settings.parse_shapes(("768",))
