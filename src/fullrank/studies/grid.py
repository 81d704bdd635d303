"""Grids of trainings: declared before they run, within a budget, several at once, resumed anywhere.

A study is a file with a `Statement` (the hypothesis, the comparison, the smallest effect of interest, the
rule that decides), a plan of runs and a function that applies the rule. The plan may look at runs that are
done, as where rates are tuned first; it says the same for the same runs.

    run       trains what the plan has and the record lacks, each with the engine of `fullrank train` under
              `out`/runs, and writes results.json after every run
    budget    after `seconds` no run begins. What is in `out`/results.json is not run again, on whatever
              machine: that file alone has to travel. A run that was cut off goes on where its directory is
    changed   a study whose file is not what it was when its first run began marks its further runs as made
              after looking

With several processes each trains one run after another, on one device: small models do not fill a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import math
import multiprocessing
import os
import queue
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullrank.errors import FullrankError
from fullrank.results import Estimate, Grid, Provenance, load, provenance, read_log, save
from fullrank.results.grid import GridAnswer, GridPoint, GridRun, Statement
from fullrank.results.series import Curve

Progress = Callable[[str, float], None]
Done = Mapping[str, GridRun]

MONITORS = (
    "head_effective_rank_share", "head_singular_entropy", "anisotropy", "state_norm", "state_outlier",
    "logprob_effective_rank", "prior_entropy_share", "dead_components", "component_divergence",
)  # fmt: skip
"""What a record keeps of an evaluation."""
GROWTH = 3
"""How often a grid of rates may grow."""
POLL = 0.5
"""Seconds between two looks at the processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One run to be made."""

    name: str
    recipe: str
    head: str = "softmax"
    settings: tuple[str, ...] = ()
    factors: dict[str, str]
    seed: int = 0
    branch: str = ""
    """NAME@STEP of a run that this one goes on from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """How large a study is made."""

    small: bool = False
    seeds: int = 3
    scale: float = 1.0
    """Of the length of all runs."""

    def steps(self, full: int) -> int:
        return max(8, round(self.scale * full))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    name: str
    statement: Statement
    plan: Callable[[Done, Extent], Sequence[Spec]]
    answers: Callable[[Sequence[GridRun]], tuple[GridAnswer, ...]]

    @property
    def digest(self) -> str:
        """Of the file that declares it."""
        file = inspect.getsourcefile(self.plan)
        assert file is not None
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a study runs and what it reads."""

    out: Path
    cache: Path
    data: tuple[Path, ...] = ()
    tokens: Path | None = None
    device: str = "auto"
    processes: int = 1
    seconds: float = math.inf


class Stopped(Exception):  # noqa: N818 - it is no error
    """A signal came; what was running is saved."""


def run(
    study: Study,
    place: Place,
    extent: Extent,
    *,
    progress: Progress = lambda stage, share: None,
    say: Callable[[str], None] = lambda line: None,
) -> Grid:
    """Train what is missing and answer; raises Stopped where a signal came."""
    begun = time.monotonic()
    record = _begun(study, place, extent)
    with _trainer(place) as trainer:
        while True:
            done = {one.name: one for one in record.runs}
            plan = study.plan(done, extent)
            _check(plan)
            waiting = [spec for spec in plan if spec.name not in done]
            ready = [spec for spec in waiting if not spec.branch or spec.branch.partition("@")[0] in done]
            record = dataclasses.replace(record, missing=tuple(spec.name for spec in waiting))
            busy = len(trainer.running)
            if time.monotonic() - begun < place.seconds:
                for spec in ready:
                    if spec.name not in trainer.running and len(trainer.running) < place.processes:
                        say(f"{spec.name}: training")
                        trainer.start(spec)
            if not trainer.running:
                break
            progress(f"{len(done)} of {len(plan)} runs, {busy} at work", len(done) / max(1, len(plan)))
            for one in trainer.finished():
                marked = dataclasses.replace(one, after_looking=study.digest != record.declared)
                left = tuple(name for name in record.missing if name != one.name)
                # What is answered with runs missing is answered anew at the end.
                record = dataclasses.replace(record, runs=(*record.runs, marked), missing=left, answers=())
                save(record, place.out / "results.json", _made(place))
                say(f"{one.name}: {one.failure or f'{one.valid:.4f} nats per token'}")
    return dataclasses.replace(record, answers=study.answers(record.runs))


def _begun(study: Study, place: Place, extent: Extent) -> Grid:
    file = place.out / "results.json"
    if file.exists():
        record, _ = load(file)
        if not isinstance(record, Grid) or record.name != study.name or record.small != extent.small:
            raise FullrankError(f"{file} is not of this study: choose another --out")
        return record
    return Grid(
        name=study.name, statement=study.statement, declared=study.digest, small=extent.small,
        text="", runs=(), missing=(), answers=(),
    )  # fmt: skip


def _check(plan: Sequence[Spec]) -> None:
    names = [spec.name for spec in plan]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise FullrankError(f"the plan has {', '.join(sorted(twice))} twice: each run needs its own name")


def _made(place: Place) -> Provenance:
    return provenance(seed=None, device=place.device)


def train(spec: Spec, place: Place) -> GridRun | None:
    """One run, from its start or its last checkpoint; None where a signal stopped it."""
    from fullrank.train.branch import parent_of
    from fullrank.train.config import override
    from fullrank.train.loop import Options
    from fullrank.train.loop import train as fit
    from fullrank.train.recipes import recipe

    out = place.out / "runs" / spec.name
    config = override(recipe(spec.recipe, spec.head), (*spec.settings, f"seed={spec.seed}"))
    parent = None
    if spec.branch:
        name, _, step = spec.branch.partition("@")
        parent = parent_of(f"{place.out / 'runs' / name}@{step}")
    options = Options(
        data=place.data, tokens=place.tokens, out=out, cache=place.cache, device=place.device, trackers=(),
        parent=parent,
    )  # fmt: skip
    failure = ""
    try:
        if fit(config, options).reason == "stopped":
            return None
    except FullrankError as error:
        if not (out / "log.jsonl").exists() or read_log(out).reason != "nan":
            raise
        failure = str(error)
    return record_of(spec, out, place, failure)


def record_of(spec: Spec, out: Path, place: Place, failure: str = "") -> GridRun:
    """What the log of a run has."""
    log = read_log(out)
    curve = tuple(
        GridPoint(
            step=one.step, tokens=one.tokens, loss=one.loss, standard_error=one.standard_error,
            monitors={name: value for name, value in one.monitors.items() if name in MONITORS},
        )
        for one in log.validation()
    )  # fmt: skip
    tokens = max((point.tokens for point in log.points), default=0)
    return GridRun(
        name=spec.name, factors=spec.factors, seed=spec.seed, settings=spec.settings, recipe=spec.recipe,
        parameters=log.parameters, tokens=tokens, flops=tokens * log.flops_per_token,
        seconds=log.seconds_training, curve=curve,
        valid=None if failure or log.valid is None else log.valid.value,
        test=None if failure or log.test is None else log.test.value,
        last=curve[-1].loss if curve and not failure else None,
        failure=failure, after_looking=False, made=_made(place),
    )  # fmt: skip


class _Here:
    """Trains in this process."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.running: dict[str, Spec] = {}

    def start(self, spec: Spec) -> None:
        self.running[spec.name] = spec

    def finished(self) -> Iterator[GridRun]:
        for name, spec in list(self.running.items()):
            found = train(spec, self.place)
            del self.running[name]
            if found is None:
                raise Stopped
            yield found

    def close(self) -> None:
        pass


class _Beside:
    """Trains in processes beside this one, each run after run."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.running: dict[str, Spec] = {}
        self.context = multiprocessing.get_context("spawn")
        self.given: Any = self.context.Queue()
        self.back: Any = self.context.Queue()
        self.processes: list[Any] = []
        self.told = False
        self.before = {
            number: signal.signal(number, self._tell) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def _tell(self, number: int, frame: Any) -> None:
        self.told = True

    def start(self, spec: Spec) -> None:
        self.running[spec.name] = spec
        alive = [one for one in self.processes if one.is_alive()]
        if len(alive) < min(self.place.processes, len(self.running)):
            process = self.context.Process(target=_work, args=(self.given, self.back, self.place))
            process.start()
            alive.append(process)
        self.processes = alive
        self.given.put(spec)

    def finished(self) -> Iterator[GridRun]:
        while self.running:
            if self.told:
                self.close()
                raise Stopped
            try:
                name, found, error = self.back.get(timeout=POLL)
            except queue.Empty:
                if not any(one.is_alive() for one in self.processes):
                    raise FullrankError(
                        f"the processes that train {', '.join(self.running)} have ended without a word, as "
                        "when memory runs out: try fewer --processes"
                    ) from None
                continue
            del self.running[name]
            if error:
                self.close()
                raise FullrankError(f"{name}: {error}")
            yield found
            return

    def close(self) -> None:
        for one in self.processes:
            if one.is_alive():
                # The engine saves and leaves.
                os.kill(one.pid, signal.SIGTERM)
        for one in self.processes:
            one.join()
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before.clear()


def _work(given: Any, back: Any, place: Place) -> None:
    """What a process beside does: runs, one after another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.processes))
    while True:
        spec = given.get()
        try:
            found = train(spec, place)
        except Exception as error:
            back.put((spec.name, None, str(error) or type(error).__name__))
        else:
            if found is None:
                return
            back.put((spec.name, found, ""))


@contextlib.contextmanager
def _trainer(place: Place) -> Iterator[_Here | _Beside]:
    trainer = _Here(place) if place.processes == 1 else _Beside(place)
    try:
        yield trainer
    finally:
        trainer.close()


def transformer(
    width: int, extent: Extent, *, steps: int, small_steps: int = 80, evaluations: int
) -> tuple[str, tuple[str, ...]]:
    """The recipe of a body of some width and its settings: a pythia-14m of another width, or the tiny one."""
    count = extent.steps(small_steps if extent.small else steps)
    settings = (
        f"body.hidden={width}", f"body.heads={max(1, width // 32)}", f"steps={count}",
        f"evaluate_every={max(1, count // evaluations)}",
    )  # fmt: skip
    if extent.small:
        return "transformer-tiny", settings
    return "transformer-14m", (*settings, "evaluate_tokens=65536", "final_tokens=262144")


def steps_of(settings: Sequence[str]) -> int:
    return next(int(one.partition("=")[2]) for one in settings if one.startswith("steps="))


def loss_curve(run: GridRun) -> Curve:
    """A run's validation loss, as the tests of series take it."""
    return Curve(
        model=run.name, shots=None, metric="loss", unit="nats per token", lower_is_better=True,
        steps=tuple(point.step for point in run.curve), values=tuple(point.loss for point in run.curve),
        standard_errors=tuple(point.standard_error for point in run.curve), dropped=0,
    )  # fmt: skip


def tuned(done: Done, own: Spec, factors: Sequence[float]) -> tuple[tuple[str, ...] | None, list[Spec]]:
    """The learning rate that a run wants, as a setting: trials of a quarter of its length at factors of the
    recipe's rate, and further ones while the best stands at an end. None while trials are missing."""
    from fullrank.train.config import override
    from fullrank.train.recipes import recipe

    config = override(recipe(own.recipe, own.head), own.settings)
    steps = max(4, config.steps // 4)
    grid = sorted(factors)
    for _ in range(GROWTH + 1):
        trials = [
            dataclasses.replace(
                own,
                name=f"{own.name}-rate{factor:g}",
                settings=(
                    *own.settings, f"steps={steps}", f"evaluate_every={steps}",
                    f"optimiser.lr={config.optimiser.lr * factor:g}",
                ),
                factors={**own.factors, "trial": f"{factor:g}"},
            )
            for factor in grid
        ]  # fmt: skip
        if any(trial.name not in done for trial in trials):
            return None, trials
        losses = [done[trial.name].valid for trial in trials]
        finite = [math.inf if loss is None else loss for loss in losses]
        best = finite.index(min(finite))
        if 0 < best < len(grid) - 1:
            break
        grid = sorted([*grid, grid[0] / 2 if best == 0 else grid[-1] * 2])
    return (f"optimiser.lr={config.optimiser.lr * grid[best]:g}",), trials


def compared(label: str, differences: Sequence[float], smallest: float, of: str = "seeds") -> GridAnswer:
    """An effect over seeds, or over other pairs: each a difference of two runs that share it.

    By the usual rule: better or worse where the interval has one sign and the effect is of interest, no
    difference of interest where the interval lies within the smallest effect on both sides, undecided else.
    """
    count = len(differences)
    if count < 2:
        words = f"{label}: {count} {of}, too few to say"
        value = differences[0] if differences else math.nan
        effect = Estimate(value=value, low=-math.inf, high=math.inf) if differences else None
        return GridAnswer(
            label=label, effect=effect, seeds=count, seen=math.inf, decision="undecided", sentence=words
        )
    from scipy import stats

    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(count)
    reach = float(stats.t.ppf(0.975, count - 1)) * error
    effect = Estimate(value=mean, low=mean - reach, high=mean + reach)
    seen = float(stats.t.ppf(0.975, count - 1) + stats.t.ppf(0.8, count - 1)) * error
    if effect.high < 0 and mean <= -smallest:
        decision = "better"
    elif effect.low > 0 and mean >= smallest:
        decision = "worse"
    elif -smallest < effect.low and effect.high < smallest:
        decision = "no difference of interest"
    else:
        decision = "undecided"
    sentence = (
        f"{label}: {mean:+.4f} nats per token (95%: {effect.low:+.4f} to {effect.high:+.4f} over {count} "
        f"{of}; {seen:.4f} would have been seen): {decision}"
    )
    return GridAnswer(
        label=label, effect=effect, seeds=count, seen=seen, decision=decision, sentence=sentence
    )
