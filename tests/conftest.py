"""Settings of all tests, and training runs that nobody trained."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from tests.suite_rules import ProcessorClock, SuiteRules

# Before torch is imported: workers share the cores, and threads beyond them wait for each other.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))
# Threads that wait for work leave the core to the other worker.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Before anything imports Triton: without a GPU its kernels run in its interpreter.
if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine makes no test fail by the clock, and CI tries the same examples every time.
settings.register_profile("fullrank", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fullrank")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorClock(), "processor-clock")
    # Reports of workers arrive in the process that started them.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SuiteRules(), "suite-rules")


@pytest.fixture(autouse=True)
def _threads_are_restored() -> Iterator[None]:
    """Workers share the cores: more threads after one test would slow down all that follow."""
    import torch

    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _pictures_are_drawn_once() -> Iterator[None]:
    """Many tests write the page of the same figures, and a picture takes a tenth of a second."""
    try:
        import vl_convert
    except ImportError:
        yield
        return
    draw, known = vl_convert.vegalite_to_svg, {}

    def remembered(specification: dict[str, Any], **options: Any) -> str:
        key = json.dumps([specification, options])
        if key not in known:
            known[key] = draw(specification, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(vl_convert, "vegalite_to_svg", remembered)
        yield


@pytest.fixture(scope="session", autouse=True)
def _seeds_write_no_stacks() -> Iterator[None]:
    """Without a GPU `torch.manual_seed` writes down the stack for three kinds of device that may come later,
    and under pytest stacks are deep: five milliseconds a seed, a quarter of what a small fit takes."""
    import torch.cuda
    import torch.mtia
    import torch.xpu

    silent = SimpleNamespace(format_stack=list)
    with pytest.MonkeyPatch.context() as patched:
        for device in (torch.cuda, torch.xpu, torch.mtia):
            patched.setattr(device, "traceback", silent)
        yield


@pytest.fixture(scope="session", autouse=True)
def _logs_are_caught_at_the_root() -> Iterator[None]:
    """Six times a test pytest looks through all loggers, of which transformers has thousands, for those whose
    lines do not reach the root: three milliseconds a test. Ours reach it."""
    from _pytest.logging import catching_logs

    def enter(self: Any) -> Any:
        root = logging.getLogger()
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(root.level, self.level))
        return self.handler

    with pytest.MonkeyPatch.context() as patched:
        if "attached_loggers" in catching_logs.__slots__:
            patched.setattr(catching_logs, "__enter__", enter)
        yield


@pytest.fixture(scope="session", autouse=True)
def _disks_keep_their_power() -> Iterator[None]:
    """Only a loss of power undoes what was written and not synced, and no test has one; thousands of times it
    was milliseconds of waiting. What is killed is a process of its own, and it does sync."""
    with pytest.MonkeyPatch.context() as patched:
        # A descriptor that is none stays an error.
        patched.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session")
def run_lines() -> Callable[..., list[dict[str, Any]]]:
    """The log of a run that looks like a real one: start, training lines, evaluations, alarms, end."""

    def lines(
        *, head: str = "mos", components: int = 4, evaluations: int = 12, width: int = 64, seed: int = 0,
        finished: bool = True, turns: bool = False, dead_from: int = 99, gain: float = 0.0,
    ) -> list[dict[str, Any]]:  # fmt: skip
        draw = random.Random(seed)
        config = {
            "recipe": "transformer-tiny", "data": {"level": "words"}, "body": {"layers": 2},
            "head": {"name": head, "components": components, "bias": True, "contexts": [2, 1]},
            "optimiser": {"lr": 0.002}, "seed": seed,
        }  # fmt: skip
        clock = 1.7e9
        found: list[dict[str, Any]] = [
            {
                "event": "start", "step": 0, "time": clock, "resumed": False, "config": config,
                "parameters": 4_321_000, "vocabulary": 33_278, "device": "cpu", "processes": 1, "steps": 2400,
            }
        ]  # fmt: skip
        for number in range(evaluations + 1):
            step = 200 * number
            for at in range(step - 150, step + 1, 50) if number else ():
                clock += 2.0
                found.append({
                    "event": "train", "step": at, "time": clock, "epoch": at / 800, "tokens": at * 2048,
                    "loss": 4.4 + 5.6 * math.exp(-at / 220) + draw.gauss(0, 0.03),
                    "lr": 0.002 * min(1.0, at / 100) * (0.51 + 0.49 * math.cos(math.pi * at / 2500)),
                    "gradient_norm": 0.4 + 3 * math.exp(-at / 90) + abs(draw.gauss(0, 0.05)),
                    "tokens_per_second": 51_000 + draw.gauss(0, 900),
                })  # fmt: skip
            clock += 1.5
            loss = 4.55 - gain + 5.8 * math.exp(-step / 260) + draw.gauss(0, 0.008)
            loss += 0.0004 * max(0, step - 1200) if turns else 0.0
            share = 0.55 + 0.4 * math.exp(-step / 900)
            monitors: dict[str, Any] = {
                "head_singular_entropy": -math.log(share), "head_effective_rank": width * share,
                "head_effective_rank_share": share, "head_condition": 3 + step / 100,
                "head_weight_norm_mean": 0.2 + step / 9000, "head_weight_norm_spread": 0.1 + step / 20_000,
                "anisotropy": 0.05 + 0.2 * (1 - math.exp(-step / 700)), "anisotropy_centred": 0.01,
                "state_norm": 8.0 - step / 4000, "logprob_rank": float(width if not number else width + 48),
                "logprob_rank_ceiling": float(width + 48), "logprob_effective_rank": width * share * 1.1,
            }  # fmt: skip
            dead = int(number >= dead_from)
            if components > 1:
                weights = [math.exp(0.3 * k * math.sin(step / 900 + k)) for k in range(components)]
                if dead:
                    weights[1] = 0.0
                shares = [weight / sum(weights) for weight in weights]
                entropy = -sum(one * math.log(one) for one in shares if one)
                monitors |= {
                    "prior_entropy": entropy, "prior_entropy_share": entropy / math.log(components),
                    "component_shares": shares, "dead_components": float(dead),
                    "component_divergence": 0.002 * step / 10,
                }  # fmt: skip
            evaluation = {
                "event": "evaluate", "step": step, "time": clock, "epoch": step / 800, "tokens": step * 2048,
                "split": "valid", "loss": loss, "standard_error": 0.012, "perplexity": math.exp(loss),
                "bits_per_byte": loss / math.log(2) / 5.1, "counted": 217_646, "averaged": False,
                "monitors": monitors, "monitor_seconds": 0.05, "evaluate_seconds": 1.4,
            }  # fmt: skip
            found.append(evaluation)
            if dead and number == dead_from:
                found.append({
                    "event": "alarm", "step": step, "time": clock, "kind": "dead_components",
                    "message": f"1 of {components} components (number 1, counted from 0) is dead, 0 before",
                })  # fmt: skip
            if turns and number == 11:
                found.append({
                    "event": "alarm", "step": step, "time": clock, "kind": "curve_turned",
                    "message": "the validation loss is above its best",
                })  # fmt: skip
        if finished:
            test = {**found[-1 if found[-1]["event"] == "evaluate" else -2], "split": "test"}
            best = min(line["loss"] for line in found if line["event"] == "evaluate")
            found.append({**test, "loss": best - 0.05, "monitors": {}, "time": clock + 2})
            final = {"loss": best, "standard_error": 0.012, "seconds": 0.4}
            found.append({
                "event": "end", "step": test["step"], "time": clock + 2, "reason": "finished",
                "valid": final, "test": {**final, "loss": best - 0.05},
            })  # fmt: skip
        return found

    return lines


@pytest.fixture
def write_run(tmp_path: Path, run_lines: Callable[..., list[dict[str, Any]]]) -> Callable[..., Path]:
    """Write a run directory as `fullrank train` leaves it, under tmp_path."""

    def write(name: str = "run", *, lines: list[dict[str, Any]] | None = None, **options: Any) -> Path:
        run = tmp_path / name
        run.mkdir()
        lines = run_lines(**options) if lines is None else lines
        document = {"version": 1, "config": lines[0].get("config", {}), "data": "0f1e2d"}
        (run / "run.json").write_text(json.dumps(document))
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    return write


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the graph of a step was replayed, in a list of one."""
    from fullrank.fit.captured import CapturedStep

    replay, seen = CapturedStep.__call__, [0]

    def counted(captured: CapturedStep, *inputs: Any) -> Any:
        seen[0] += 1
        return replay(captured, *inputs)

    monkeypatch.setattr(CapturedStep, "__call__", counted)
    return seen
