"""Grids of trainings: declared before they run, within a budget, several at once, resumed anywhere.

A study is a file with a `Statement` (the hypothesis, the comparison, the smallest effect of interest, the
rule that decides), a plan of runs and a function that applies the rule. The plan may look at runs that are
done, as where rates are tuned first; it says the same for the same runs.

    run       trains what the plan has and the record lacks, each with the engine of `fullrank train` under
              `out`/runs, and writes results.json after every run
    budget    after `seconds` no run begins. What is in `out`/results.json is not run again, on whatever
              machine: that file alone has to travel. A run that was cut off goes on where its directory
              is, and one that branches from another is made where that other's directory is. Of a run that
              is over its best weights and its snapshots stay
    changed   a study whose file is not what it was when its first run began marks its further runs as made
              after looking

With several processes each trains one run after another, on one device: small models do not fill a GPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fullrank.errors import FullrankError
from fullrank.results import Grid, Provenance, Training, load, provenance, read_log, save
from fullrank.results.grid import GridAnswer, GridPoint, GridRun, Statement
from fullrank.studies.grid_plan import Done, Extent, Spec, Text
from fullrank.studies.grid_workers import Place, trainer_of
from fullrank.text import elsewhere, store

if TYPE_CHECKING:
    from fullrank.train.config import Config

Progress = Callable[[str, float], None]

MONITORS = (
    "head_effective_rank_share", "head_singular_entropy", "anisotropy", "state_norm", "state_outlier",
    "logprob_effective_rank", "prior_entropy_share", "dead_components", "component_divergence",
    "gradient_kept", "attention_effective_tokens", "attention_first", "attention_sensitivity",
    "attention_sum", "attention_zeros",
)  # fmt: skip
"""What a record keeps of an evaluation, beside the gradient's norm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    name: str
    statement: Statement
    plan: Callable[[Done, Extent], Sequence[Spec]]
    answers: Callable[[Sequence[GridRun]], tuple[GridAnswer, ...]]
    texts: Callable[[Path, Extent], tuple[Text, ...]] | None = None
    """Makes what a study of made-up languages trains on, in a directory; the same at every call."""

    @property
    def digest(self) -> str:
        """Of the file that declares it."""
        file = inspect.getsourcefile(self.plan)
        assert file is not None
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()


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
    if study.texts is not None:
        extent = dataclasses.replace(extent, texts=study.texts(place.out / "texts", extent))
    _require_their_texts(study.plan({one.name: one for one in record.runs}, extent), record, place, progress)
    with trainer_of(place, train) as trainer:
        while True:
            done = {one.name: one for one in record.runs}
            plan = study.plan(done, extent)
            _check(plan)
            waiting = [spec for spec in plan if spec.name not in done]
            ready = [spec for spec in waiting if _can_begin(spec, done, place)]
            record = dataclasses.replace(record, missing=tuple(spec.name for spec in waiting))
            busy = len(trainer.running)
            if time.monotonic() - begun < place.seconds:
                for spec in ready:
                    if spec.name not in trainer.running and len(trainer.running) < place.processes:
                        say(f"{spec.name}: training")
                        trainer.start(dataclasses.replace(spec, digest=_read_before(spec, record)))
            if not trainer.running:
                break
            progress(f"{len(done)} of {len(plan)} runs, {busy} at work", len(done) / max(1, len(plan)))
            for one in trainer.finished():
                marked = dataclasses.replace(one, after_looking=study.digest != record.declared)
                left = tuple(name for name in record.missing if name != one.name)
                # What is answered with runs missing is answered anew at the end.
                record = dataclasses.replace(record, runs=(*record.runs, marked), missing=left, answers=())
                save(record, place.out / "results.json", _made(place))
                _lighten(place.out / "runs" / one.name)
                say(f"{one.name}: {one.failure or f'{one.valid:.4f} nats per token'}")
    return dataclasses.replace(record, answers=study.answers(record.runs))


def _begun(study: Study, place: Place, extent: Extent) -> Grid:
    file = place.out / "results.json"
    if file.exists():
        record, _ = load(file)
        if not isinstance(record, Grid) or record.name != study.name or record.small != extent.small:
            raise FullrankError(f"{file} is not of this study: choose another --out")
        if record.settings != extent.settings:
            was = " ".join(f"--set {one}" for one in record.settings) or "no --set"
            raise FullrankError(f"{file} has runs with {was}: give the same, or choose another --out")
        if record.scale != extent.scale:
            raise FullrankError(
                f"{file} has runs of --scale {record.scale:g}, not {extent.scale:g}: choose another --out"
            )
        return record
    return Grid(
        name=study.name, statement=study.statement, declared=study.digest, small=extent.small,
        runs=(), missing=(), answers=(), scale=extent.scale, settings=extent.settings,
    )  # fmt: skip


def _lighten(run: Path) -> None:
    """Without what only a run that is not over needs: of hundreds it would fill a disk."""
    from fullrank.train import checkpoint, folder

    kept = run / folder.CHECKPOINTS
    # The best weights that the last checkpoint names are the run's.
    checkpoint.prune(kept, 1)
    checkpoint.drop(kept, "step", after=-1)


def _can_begin(spec: Spec, done: Done, place: Place) -> bool:
    """A branch needs the snapshots of its parent, which stay on the machine that trained it."""
    parent = spec.branch.partition("@")[0]
    return not parent or (parent in done and (place.out / "runs" / parent).is_dir())


def _check(plan: Sequence[Spec]) -> None:
    names = [spec.name for spec in plan]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise FullrankError(f"the plan has {', '.join(sorted(twice))} twice: each run needs its own name")


def _require_their_texts(plan: Sequence[Spec], record: Grid, place: Place, progress: Progress) -> None:
    """Raise where runs of the record have read another text than there is now: also where none is left to be
    made, so that nobody takes the answers of one text for those of another."""
    read = {(_name(spec), *_cut(spec.settings)): spec for spec in plan if _read_before(spec, record)}
    for spec in read.values():
        config = _config(spec).data
        text, tokens = _source(spec, place)
        corpus = (
            store.prepare(text, config, place.cache, progress)
            if tokens is None
            else elsewhere.prepare(tokens, config, place.cache, progress)
        )
        corpus.require(_read_before(spec, record))


def _config(spec: Spec) -> Config:
    from fullrank.train.config import override
    from fullrank.train.recipes import recipe

    return override(recipe(spec.recipe, spec.head), (*spec.settings, f"seed={spec.seed}"))


def _name(spec: Spec) -> str:
    """Of its text; empty for the study's own."""
    return "" if spec.text is None else spec.text.name


def _source(spec: Spec, place: Place) -> tuple[tuple[Path, ...], Path | None]:
    """Text, or tokens in its place."""
    return (place.data, place.tokens) if spec.text is None else (spec.text.data, spec.text.tokens)


def _read_before(spec: Spec, record: Grid) -> str:
    """The digest of the tokens that runs of the record on the same text have read; empty where none says."""
    alike = (
        run for run in record.runs if run.text == _name(spec) and _cut(run.settings) == _cut(spec.settings)
    )
    return next((run.data for run in alike if run.data), "")


def _cut(settings: Sequence[str]) -> list[str]:
    """How a text is made tokens."""
    return [one for one in settings if one.startswith("data.")]


def _made(place: Place) -> Provenance:
    return provenance(seed=None, device=place.device)


def train(spec: Spec, place: Place) -> GridRun | None:
    """One run, from its start or its last checkpoint; None where a signal stopped it."""
    from fullrank.train.branch import parent_of
    from fullrank.train.loop import Options
    from fullrank.train.loop import train as fit

    out = place.out / "runs" / spec.name
    config, (text, tokens) = _config(spec), _source(spec, place)
    parent = None
    if spec.branch:
        name, _, step = spec.branch.partition("@")
        parent = parent_of(f"{place.out / 'runs' / name}@{step}")
    options = Options(
        data=text, tokens=tokens, out=out, cache=place.cache, device=place.device, trackers=(), parent=parent,
        digest=spec.digest,
    )  # fmt: skip
    failure = ""
    try:
        if fit(config, options).reason == "stopped":
            return None
    except FullrankError as error:
        if not _diverged(out):
            raise
        failure = str(error)
    return record_of(spec, out, place, failure)


def _diverged(out: Path) -> bool:
    """Whether a run ended because its steps were no numbers; anything else that ends one is an error."""
    try:
        return read_log(out).reason == "nan"
    except (FullrankError, OSError):
        return False


def record_of(spec: Spec, out: Path, place: Place, failure: str = "") -> GridRun:
    """What the log of a run has."""
    from fullrank.train.folder import digest_of

    log = read_log(out)
    curve = tuple(
        GridPoint(
            step=one.step, tokens=one.tokens, loss=one.loss, standard_error=one.standard_error,
            monitors={name: value for name, value in one.monitors.items() if name in MONITORS} | steps,
        )
        for one, steps in zip(log.validation(), _between(log), strict=True)
    )  # fmt: skip
    tokens = max((point.tokens for point in log.points), default=0)
    bits = [one.bits_per_byte for one in log.evaluations if one.split == "test"]
    return GridRun(
        name=spec.name, factors=spec.factors, seed=spec.seed, settings=spec.settings, recipe=spec.recipe,
        text=_name(spec),
        parameters=log.parameters, tokens=tokens, flops=tokens * log.flops_per_token,
        seconds=log.seconds_training, curve=curve,
        valid=None if failure or log.valid is None else log.valid.value,
        test=None if failure or log.test is None else log.test.value,
        last=curve[-1].loss if curve and not failure else None,
        failure=failure, after_looking=False, made=_made(place),
        per_byte=bits[-1] * math.log(2) if bits and math.isfinite(bits[-1]) and not failure else None,
        data=digest_of(out),
    )  # fmt: skip


def _between(log: Training) -> Iterator[dict[str, float]]:
    """The gradient's mean norm before clipping since the evaluation before; nothing where no line has it."""
    before = -1
    for one in log.validation():
        norms = [line.gradient_norm for line in log.points if before < line.step <= one.step]
        before = one.step
        yield {"gradient_norm": sum(norms) / len(norms)} if norms else {}
