"""The training loop: steps, evaluations, checkpoints, and nothing lost between them.

A run is a function of its config and data. Batches are a function of a cursor, the randomness of a step of
the seed and the step's number, and a checkpoint holds all else: weights, average, optimiser, carried state,
cursor, and what evaluation has decided. So a run that was killed and run again ends, on a CPU, with the bits
of one that was never stopped.

    step    seed, batch, loss and gradients, clip, update, average
    every so many steps     evaluate (fp32, every token once), monitors, alarms, best weights, checkpoint
    end     test split with the best weights, results.json, report.html
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads.vocab_parallel import VocabParallelHead, clip_gradients, ignored_parameters, shard
from fullrank.models import LanguageModel
from fullrank.models.body import Carried
from fullrank.train import batches, checkpoint, data, evaluate, folder, monitor, optimiser, weights
from fullrank.train.alarms import Alarms
from fullrank.train.build import build, start_at_unigram
from fullrank.train.config import Config, to_json
from fullrank.train.log import Log, Trackers, available, finished
from fullrank.train.processes import Stop, accelerator, joined, one_voice, require_same, seed_step

LOG_LINES = 10
"""Lines about training from one evaluation to the next."""
AGREE_EVERY = 8
"""Steps between two looks at whether another process was told to stop, on devices, which a look holds up."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where and how a config is run; none of it changes what is learnt."""

    data: tuple[Path, ...]
    out: Path
    cache: Path
    """Where token files are built, once for all runs."""
    device: str = "auto"
    trackers: tuple[str, ...] = ("tensorboard",)
    monitors: bool = True
    vocab_parallel: bool = False
    fsdp: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call of `train` ended."""

    reason: str
    """finished, or stopped by a signal."""
    step: int
    steps: int
    signal: int | None = None
    fresh: bool = True
    """False where the run had already finished before."""


@dataclass
class State:
    """What a checkpoint holds besides tensors."""

    step: int = 0
    cursor: batches.Cursor = dataclasses.field(default_factory=batches.Cursor)
    epoch: float = 0.0
    tokens: int = 0
    stage: str = "train"
    stage_step: int = 0
    """The step at which the stage began."""
    history: list[float] = dataclasses.field(default_factory=list)
    """Validation losses of this stage."""
    averaged: int = 0
    """Iterates in the average; 0 where there is none."""
    best_loss: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    ended: str = ""
    """Why training is over; "" while it is not."""
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    """Sums since the last line about training: loss, norm, steps, tokens, seconds."""

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "cursor": self.cursor.to_json()}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> State:
        try:
            return cls(**{**plain, "cursor": batches.Cursor.from_json(plain["cursor"])})
        except (TypeError, KeyError) as error:
            raise FullrankError(
                f"a checkpoint of another version cannot be continued ({error}): continue with the fullrank "
                "that wrote it"
            ) from error


class Show:
    """What a terminal may want to hear; the default is silence."""

    def say(self, message: str) -> None: ...
    def reading(self, label: str, share: float) -> None: ...
    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None: ...
    def evaluation(self, line: dict[str, Any], steps: int) -> None: ...


def train(config: Config, options: Options, show: Show | None = None) -> Outcome:
    """Run a config to its end, or continue it, in `options.out`."""
    with one_voice(), joined():
        return _train(config, options, show or Show())


def _train(config: Config, options: Options, show: Show) -> Outcome:
    trackers = available(options.trackers, show.say)
    machine = accelerator(options.device, trackers, str(options.out), fsdp=options.fsdp)
    main = machine.is_main_process
    with folder.locked(options.out) if main else contextlib.nullcontext(), Stop() as stop:
        with machine.main_process_first():
            corpus = data.prepare(options.data, config.data, options.cache, show.reading, show.say)
        folder.check(options.out, config, corpus.digest)
        with machine.main_process_first():
            if main:
                folder.clean(options.out)
            # The main process sets damaged ones aside before any other looks.
            stored = checkpoint.newest(options.out / folder.CHECKPOINTS, show.say)
        require_same(
            machine, config=config, data=corpus.digest, checkpoints=None if stored is None else stored.step
        )
        session = Session(config, options, corpus, machine, stored, show)
        if main:
            # Only now is anything written: all that can be wrong with the settings has been tried.
            folder.claim(options.out, config, corpus.digest)
            link_tokens(corpus.folder, options.out / folder.TOKENS)
            checkpoint.drop_best(options.out / folder.CHECKPOINTS, after=session.state.step)
        try:
            return session.run(stop, trackers)
        finally:
            session.close()


def link_tokens(built: Path, into: Path) -> None:
    """Make the token files part of the run without a second copy on disk, where the file system can."""
    there = into / built.name
    there.mkdir(parents=True, exist_ok=True)
    for file in built.iterdir():
        own, temporary = there / file.name, there / f".{file.name}"
        if own.exists() and own.samefile(file):
            continue
        temporary.unlink(missing_ok=True)
        try:
            os.link(file, temporary)
        except OSError:
            shutil.copyfile(file, temporary)
        os.replace(temporary, own)


class Session:
    """One process's part of one run."""

    def __init__(
        self,
        config: Config,
        options: Options,
        corpus: data.Corpus,
        machine: Any,
        stored: checkpoint.Stored | None,
        show: Show,
    ) -> None:
        self.config, self.options, self.corpus, self.machine, self.show = (
            config,
            options,
            corpus,
            machine,
            show,
        )
        self.main = machine.is_main_process
        self.rank, self.processes = machine.process_index, machine.num_processes
        self.checkpoints = options.out / folder.CHECKPOINTS
        self.rows = self._rows()
        self.batches = batches.for_training(config, corpus.splits["train"].tokens)
        self.steps, self.stage_steps = self._totals()
        self.evaluate_every = config.evaluate_every or min(self.batches.steps(0), max(1, self.steps // 10))
        self.log_every = max(1, self.evaluate_every // LOG_LINES)
        # A launcher waits half a minute before it kills: slow steps must not come before the look.
        self.agree_every = 1 if self.processes == 1 or machine.device.type == "cpu" else AGREE_EVERY
        self.state = State() if stored is None else State.from_json(stored.state)
        self.resumed = stored is not None
        self.model = build(config, corpus.vocabulary.size)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        if stored is not None:
            folder.restore(self.model, stored.groups["model"], stored.path)
        elif config.head.unigram:
            tokens = corpus.splits["train"].tokens
            start_at_unigram(self.model.head, evaluate.token_counts(tokens, corpus.vocabulary.size))
        self.bare = self.model
        self._spread()
        self._restore(stored)
        self.log: Log | None = None
        self._saved = self.state.step if self.resumed else -1
        self._watched: dict[int, batches.Cursor] = {}
        """Where in the data the steps since the last look at their losses were."""

    def _rows(self) -> slice:
        """This process's rows of a batch."""
        share, rest = divmod(self.config.batch, self.processes * self.config.accumulate)
        if rest:
            raise FullrankError(
                f"batch={self.config.batch} cannot be shared by {self.processes} processes in "
                f"{self.config.accumulate} parts each: choose a multiple of "
                f"{self.processes * self.config.accumulate}"
            )
        size = share * self.config.accumulate
        return slice(self.rank * size, (self.rank + 1) * size)

    def _totals(self) -> tuple[int, int]:
        """Steps of the whole run at most, and of its first stage."""
        config = self.config
        whole = int(config.epochs)
        # Lengths differ from epoch to epoch only with jitter, and then by little: sum some, not all.
        some = [self.batches.steps(epoch) for epoch in range(min(whole + 1, 4))]
        mean = sum(some) / len(some)
        first = max(1, sum(some[:whole]) + round(mean * (config.epochs - min(whole, len(some)))))
        finetune = round(mean * config.optimiser.finetune_epochs)
        steps = config.steps or first + finetune
        # Without a second stage the first one, and its schedule, is as long as the run.
        return steps, min(first, steps) if finetune else steps

    def _spread(self) -> None:
        """Put the model on its device and between the processes."""
        config = self.config
        if self.options.vocab_parallel and self.options.fsdp:
            raise FullrankError("--vocab-parallel and --fsdp both shard the head's matrix: pass one of them")
        if self.options.vocab_parallel:
            if config.head.tie:
                raise FullrankError(
                    "--vocab-parallel splits W between processes, and a tied embedding needs it whole: pass "
                    "--set head.tie=false"
                )
            self.bare.to(self.machine.device)
            self.bare.head = shard(self.bare.head)
            ignored_parameters(self.bare)
        # FSDP2 gathers the weights of one of these after another.
        self.bare._no_split_modules = sorted(  # type: ignore[assignment]
            {
                type(layer).__name__
                for layers in self.bare.body.modules()
                if isinstance(layers, torch.nn.ModuleList)
                for layer in layers
            }
        )
        self.optimiser = optimiser.make(self.bare, config.optimiser, self.machine.device)
        self.model, self.optimiser = self.machine.prepare(self.bare, self.optimiser)
        self.bare = self.machine.unwrap_model(self.model)
        self.plain: LanguageModel | None = None
        self.sharded = self.options.vocab_parallel or self.options.fsdp
        if self.sharded and self.main:
            # Sharded weights cannot be evaluated or measured by one process: a whole copy is.
            self.plain = build(config, self.corpus.vocabulary.size).to(self.machine.device)
        self.average: optimiser.Average | None = None

    def _restore(self, stored: checkpoint.Stored | None) -> None:
        """Optimiser, average and carried state of a checkpoint."""
        self.carried: Carried = ()
        if stored is None:
            return
        weights.scatter_optimiser(self.bare, self.inner_optimiser, stored.groups["optimiser"])
        # An average that has begun may have no iterate yet.
        if "average" in stored.groups:
            self.average = optimiser.Average(self.bare)
            self.average.count = self.state.averaged
            self.average.mean = {
                name: weights.part(
                    self.bare, name, parameter, stored.groups["average"][weights.plain_name(name)]
                ).clone()
                for name, parameter in self.bare.named_parameters()
            }
        carried = stored.groups["carried"]
        self.carried = tuple(
            carried[name][self.rows].to(self.machine.device) for name in sorted(carried, key=int)
        )

    @property
    def inner_optimiser(self) -> torch.optim.Optimizer:
        return getattr(self.optimiser, "optimizer", self.optimiser)

    def run(self, stop: Stop, trackers: tuple[str, ...]) -> Outcome:
        if self.state.ended and finished(self.options.out / folder.LOG):
            return Outcome(reason="finished", step=self.state.step, steps=self.steps, fresh=False)
        self._open(trackers)
        self.model.train()
        self._count = self._fresh_counters() | self._stored_counters()
        every = self.config.checkpoint_every
        while not self.state.ended:
            self._stage()
            self._step()
            step = self.state.step
            last = step >= self.steps
            due = last or step % self.evaluate_every == 0
            if due or step % self.log_every == 0:
                self._log_training()
            if due:
                self._evaluate()
            if last:
                self.state.ended = "finished"
            if self.state.ended or (step % every == 0 if every else due):
                self._checkpoint()
            if step % self.agree_every == 0 and stop.agreed(self.machine):
                self._checkpoint()
                self._write("end", reason="stopped")
                return Outcome(reason="stopped", step=step, steps=self.steps, signal=stop.received)
        stop.release()
        self._finish()
        return Outcome(reason="finished", step=self.state.step, steps=self.steps)

    def _open(self, trackers: tuple[str, ...]) -> None:
        self.alarms = Alarms()
        self.trackers = Trackers(self.machine, trackers, self.options.out, folder.flat(to_json(self.config)))
        if self.main:
            self.log = Log(self.options.out / folder.LOG, step=self.state.step)
            self.alarms = Alarms(self.log.evaluations)
            device = self.machine.device
            self._write(
                "start",
                resumed=self.resumed,
                config=to_json(self.config),
                parameters=self.parameters,
                vocabulary=self.corpus.vocabulary.size,
                data=self.corpus.describe(),
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                processes=self.processes,
                steps=self.steps,
            )
        self._ids = self._monitor_ids()

    def _fresh_counters(self) -> dict[str, Any]:
        zero = torch.zeros((), device=self.machine.device, dtype=torch.float64)
        return {"loss": zero.clone(), "norm": zero.clone(), "steps": 0, "tokens": 0, "seconds": 0.0,
                "bad": torch.full((), -1, device=self.machine.device, dtype=torch.int64)}  # fmt: skip

    def _stored_counters(self) -> dict[str, Any]:
        """What a checkpoint between two lines about training has counted."""
        counts: dict[str, Any] = dict(self.state.counts)
        for name in ("loss", "norm"):
            if name in counts:
                counts[name] = torch.tensor(counts[name], device=self.machine.device, dtype=torch.float64)
        return counts

    def _stage(self) -> None:
        """Enter the finetune stage where the first one is over: averaged at once, from the best weights."""
        state = self.state
        if (
            state.stage == "train"
            and state.step >= self.stage_steps
            and self.config.optimiser.finetune_epochs
        ):
            if state.best_step is not None:
                # The main process may still be writing it.
                self.machine.wait_for_everyone()
                weights.scatter(self.bare, folder.weights_of(self._best()))
            state.stage, state.stage_step, state.history = "finetune", state.step, []
            self._begin_average()
            self.carried = ()

    def _best(self) -> checkpoint.Stored:
        """The best weights; where these are damaged, those of the newest checkpoint, with a warning."""
        try:
            return checkpoint.read(checkpoint.path_of(self.checkpoints, "best", self.state.best_step or 0))
        except checkpoint.Damaged as error:
            kept = checkpoint.found(self.checkpoints, "step")
            if not kept:
                raise
            self.show.say(f"{error}; {kept[-1].name} is used in place of the best weights")
            return checkpoint.read(kept[-1])

    def _begin_average(self) -> None:
        self.average = optimiser.Average(self.bare)
        self.state.averaged = 0

    def _step(self) -> None:
        config, state = self.config, self.state
        started = time.perf_counter()
        batch = self.batches.take(state.cursor, self.rows)
        seed_step(config.seed, state.step, self.rank)
        device = self.machine.device
        ids, targets = batch.ids.to(device, non_blocking=True), batch.targets.to(device, non_blocking=True)
        if batch.fresh:
            self.carried = ()
        rate = optimiser.rate(
            config, state.step - state.stage_step, self.stage_steps, length_scale=batch.length_scale,
            finetune=state.stage == "finetune",
        )  # fmt: skip
        optimiser.set_rate(self.inner_optimiser, rate)
        self.rate = rate
        nll = self._gradients(ids, targets)
        norm = self._clip()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.bare)
            state.averaged = self.average.count
        counts = self._count
        counts["loss"] += nll
        counts["norm"] += norm
        bad = ~(torch.isfinite(nll) & torch.isfinite(norm))
        counts["bad"] = torch.where((counts["bad"] < 0) & bad, state.step, counts["bad"])
        counts["steps"] += 1
        counts["tokens"] += batch.tokens
        self._watched[state.step] = self._taken = state.cursor
        state.step += 1
        state.cursor, state.epoch = batch.next, batch.epoch
        state.tokens += batch.tokens
        if device.type == "cpu":
            # On a device a look would stop it; there it is every log line that looks.
            self._check()
        counts["seconds"] += time.perf_counter() - started

    def _gradients(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the batch's mean loss; returns that loss without penalties."""
        parts = self.config.accumulate
        device = self.machine.device.type
        half = self.config.precision == "bf16"
        total, carried = ids.new_zeros((), dtype=torch.float64), []
        size = ids.shape[0] // parts
        for number in range(parts):
            some = slice(number * size, (number + 1) * size)
            last = number + 1 == parts
            quiet = contextlib.nullcontext() if last else self.machine.no_sync(self.model)
            with quiet:
                before = tuple(tensor[some] for tensor in self.carried)
                with torch.autocast(device, torch.bfloat16, enabled=half):
                    out = self.model(ids[some], targets[some], before)
                self.machine.backward(out.value / parts)
            total += out.nll / parts
            carried.append(out.carried)
        self.carried = tuple(torch.cat(tensors) for tensors in zip(*carried, strict=True))
        return total

    def _clip(self) -> Tensor:
        most = self.config.optimiser.clip or math.inf
        if isinstance(self.bare.head, VocabParallelHead):
            return clip_gradients(self.bare, most)
        norm = torch.nn.utils.clip_grad_norm_(self.bare.parameters(), most)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _check(self) -> None:
        """Stop at the first step whose loss or gradient was no number."""
        step = int(self._count["bad"])
        if step < 0:
            self._watched.clear()
            return
        raise self._not_finite("the loss or its gradient is not finite at", step + 1, self._watched[step])

    def _not_finite(self, what: str, step: int, cursor: batches.Cursor) -> FullrankError:
        kept = checkpoint.found(self.checkpoints, "step")
        last = f"{kept[-1]} is the last good checkpoint" if kept else "no checkpoint was written yet"
        message = (
            f"{what} step {step} (epoch {cursor.epoch}, position {cursor.position} of the data); {last}: "
            "lower the rate with --set optimiser.lr, or clip more with --set optimiser.clip, in another --out"
        )
        self._write("alarm", kind="nan", message=message)
        self._write("end", reason="nan")
        return FullrankError(message)

    def _write(self, event: str, **fields: Any) -> dict[str, Any]:
        return self.log.write(event, self.state.step, **fields) if self.log is not None else {}

    def _log_training(self) -> None:
        self._check()
        counts, state = self._count, self.state
        loss, norm = (total / max(1, counts["steps"]) for total in self._totals_so_far())
        speed = counts["tokens"] / max(counts["seconds"], 1e-9)
        state.seconds += counts["seconds"]
        if self.main:
            line = self._write(
                "train", epoch=state.epoch, tokens=state.tokens, loss=loss, lr=self.rate, gradient_norm=norm,
                tokens_per_second=speed,
            )  # fmt: skip
            names = ("loss", "lr", "gradient_norm", "tokens_per_second")
            self.trackers.write(state.step, {f"train/{name}": line[name] for name in names})
            self.show.step(state.step, self.steps, loss, speed)
        self._count = self._fresh_counters()

    def _totals_so_far(self) -> list[float]:
        """Loss and gradient norm summed since the last line about training, mean over the processes."""
        values = torch.stack([self._count["loss"], self._count["norm"]])
        if self.processes > 1:
            values = self.machine.reduce(values, "mean")
        return values.tolist()

    def _monitor_ids(self) -> Tensor:
        """Validation tokens that monitors look at: rows from all over the split."""
        tokens = self.corpus.splits["valid"].tokens
        length = min(self.config.length, len(tokens))
        wanted = monitor.contexts_wanted(self.bare.head)
        rows = max(1, min(-(-wanted // length) + 1, len(tokens) // length))
        starts = [round(row * (len(tokens) - length) / max(1, rows - 1)) for row in range(rows)]
        return torch.stack(
            [torch.from_numpy(tokens[start : start + length].astype("int64")) for start in starts]
        )

    @contextlib.contextmanager
    def _evaluated(self) -> Any:
        """The model to evaluate on this process: averaged where there is an average, whole where sharded."""
        with self.average.swapped_in(self.bare) if self.average is not None else contextlib.nullcontext():
            every = weights.gather(self.bare) if self.sharded else {}
            if self.plain is not None:
                weights.scatter(self.plain, every)
            yield self.bare if self.plain is None else self.plain

    def _score(self, model: LanguageModel, split: str, limit: int) -> evaluate.Evaluation:
        config = self.config
        return evaluate.evaluate(
            model, self.corpus.splits[split], eos=self.corpus.vocabulary.eos, batch=config.evaluate_batch,
            length=config.length, limit=limit, device=self.machine.device,
        )  # fmt: skip

    def _evaluate(self) -> None:
        """Validation loss, monitors, alarms; decides what is best and whether averaging begins."""
        self._check()
        state, config = self.state, self.config
        with self._evaluated() as model:
            loss = math.nan
            if self.main:
                scored = self._score(model, "valid", config.evaluate_tokens)
                loss, found, started = scored.loss, {}, time.perf_counter()
                if self.options.monitors and math.isfinite(loss):
                    found = self._measured(model)
                seconds, averaged = time.perf_counter() - started, self.average is not None
                line = self._report("valid", scored, found, seconds, averaged=averaged)
                for alarm in self.alarms.check(state.step, line):
                    self._write("alarm", kind=alarm.kind, message=alarm.message)
                    self.show.say(f"alarm at step {alarm.step}: {alarm.message}")
            loss = self._agreed(loss)
            if not math.isfinite(loss):
                raise self._not_finite("the validation loss is not finite after", state.step, self._taken)
            state.history.append(loss)
            if state.best_loss is None or loss < state.best_loss:
                state.best_loss, state.best_step = loss, state.step
                if self.main:
                    best = {"model": weights.gather(model)}
                    about = {"loss": loss, "averaged": self.average is not None}
                    checkpoint.write(self.checkpoints, "best", state.step, best, about)
        self._decide()

    def _measured(self, model: LanguageModel) -> dict[str, Any]:
        """The monitors; a model too strange to be measured trains on, and may recover."""
        try:
            return monitor.measure(model, self._ids.to(self.machine.device), seed=self.config.seed)
        except (FullrankError, torch.linalg.LinAlgError) as error:
            self.show.say(f"nothing could be measured at step {self.state.step}: {error}")
            return {}

    def _agreed(self, loss: float) -> float:
        """The main process's number on every process: decisions must not differ in a last bit."""
        if self.processes == 1:
            return loss
        value = torch.tensor(loss, dtype=torch.float64, device=self.machine.device)
        torch.distributed.broadcast(value, 0)
        return float(value)

    def _report(
        self,
        split: str,
        scored: evaluate.Evaluation,
        found: dict[str, Any],
        seconds: float,
        *,
        averaged: bool,
    ) -> dict[str, Any]:
        state = self.state
        line = self._write(
            "evaluate", epoch=state.epoch, tokens=state.tokens, split=split, loss=scored.loss,
            standard_error=scored.standard_error, perplexity=scored.perplexity,
            bits_per_byte=scored.bits_per_byte, counted=scored.counted, averaged=averaged,
            monitors=found, monitor_seconds=seconds, evaluate_seconds=scored.seconds,
        )  # fmt: skip
        names = ("loss", "perplexity", "bits_per_byte")
        values: dict[str, Any] = {f"{split}/{name}": line[name] for name in names}
        self.trackers.write(state.step, values | {f"monitor/{name}": value for name, value in found.items()})
        self.show.evaluation(line, self.steps)
        return line

    def _decide(self) -> None:
        """NT-ASGD: begin to average, or end a finetune stage, once validation stops improving."""
        state, settings = self.state, self.config.optimiser
        if settings.name != "nt-asgd" or not optimiser.stopped_improving(state.history, settings.nonmonotone):
            return
        if state.stage == "finetune":
            state.ended = "finished"
        elif self.average is None:
            self._begin_average()

    def _checkpoint(self) -> None:
        self._check()
        if self._saved == self.state.step:
            return
        groups = {
            "model": weights.gather(self.bare),
            "optimiser": weights.gather_optimiser(self.bare, self.inner_optimiser),
            "carried": self._gathered_carried(),
        }
        if self.average is not None:
            groups["average"] = weights.gather(self.bare, self.average.mean)
        if not all(bool(torch.isfinite(one).all()) for one in groups["model"].values()):
            # A finite gradient times a large rate: no loss has seen these weights yet.
            raise self._not_finite("the weights are not finite after", self.state.step, self._taken)
        loss, norm = self._totals_so_far()
        counted = {name: self._count[name] for name in ("steps", "tokens", "seconds")}
        self.state.counts = {"loss": loss, "norm": norm, **counted}
        if self.main:
            if self.log is not None:
                self.log.sync()
            checkpoint.write(self.checkpoints, "step", self.state.step, groups, self.state.to_json())
            # Not before: the checkpoint just written is the first that names the new best.
            checkpoint.prune(self.checkpoints, self.config.keep)
        self._saved = self.state.step
        self.machine.wait_for_everyone()

    def _gathered_carried(self) -> dict[str, Tensor]:
        """The carried state of all rows of the batch, in their order."""
        tensors = [tensor.contiguous() for tensor in self.carried]
        if self.processes > 1:
            tensors = [self.machine.gather(tensor) for tensor in tensors]
        return {str(number): tensor.to("cpu", copy=True) for number, tensor in enumerate(tensors)}

    def _finish(self) -> None:
        """Validation and test with the best weights."""
        if self.main:
            model = build(self.config, self.corpus.vocabulary.size)
            best = self._best()
            folder.load_weights(model, best)
            model.to(self.machine.device)
            limit = self.config.final_tokens
            valid, test = self._score(model, "valid", limit), self._score(model, "test", limit)
            averaged = bool(best.state.get("averaged"))
            self._report("test", test, {}, 0.0, averaged=averaged)
            self._write(
                "end", reason=self.state.ended, best_step=best.step, seconds=self.state.seconds,
                valid=dataclasses.asdict(valid), test=dataclasses.asdict(test),
            )  # fmt: skip
        self.machine.wait_for_everyone()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        if hasattr(self, "trackers"):
            self.trackers.close()
