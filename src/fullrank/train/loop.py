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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.diagnose import monitors
from fullrank.errors import FullrankError
from fullrank.fit import optimiser
from fullrank.fit.budget import Budget
from fullrank.models import FullrankForCausalLM
from fullrank.models.attention import no_attention
from fullrank.models.flops import peak_flops, training_flops
from fullrank.models.glimpse import as_written
from fullrank.text import elsewhere
from fullrank.text import store as data
from fullrank.train import batches, checkpoint, evaluate, folder, monitor, weights
from fullrank.train.branch import Parent, begun
from fullrank.train.config import Config, to_json
from fullrank.train.journal import Journal, Show
from fullrank.train.learner import Learner
from fullrank.train.log import available, finished
from fullrank.train.model import model_files
from fullrank.train.pace import Pace, own_rows
from fullrank.train.processes import Stop, accelerator, joined, one_voice, require_same, seed_step
from fullrank.train.state import State
from fullrank.train.tally import Tally
from fullrank.train.writer import Writer

AT_ONCE, SCORES = 1 << 16, 1 << 25
"""Tokens, and attention scores of a head, of an evaluation on a GPU that windows are put together for."""


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
    tokens: Path | None = None
    """Tokens made elsewhere, in place of data."""
    verify: bool = False
    """Read every byte of the tokens again for its hash."""
    parent: Parent | None = None
    """Where a run that has no checkpoint of its own begins."""
    digest: str = ""
    """Of the tokens that it must read, for runs that are compared; empty is any."""


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
            corpus = _corpus(config, options, show)
        folder.check(options.out, config, corpus.digest)
        corpus.require(options.digest)
        with machine.main_process_first():
            if main:
                folder.clean(options.out)
            # The main process sets damaged ones aside before any other looks.
            stored = checkpoint.newest(options.out / folder.CHECKPOINTS, show.say)
        parent, own = options.parent, stored is not None
        if stored is None and parent is not None:
            stored = begun(parent, config, corpus.vocabulary.size, corpus.digest)
        require_same(
            machine, config=config, data=corpus.digest, checkpoints=None if stored is None else stored.step
        )
        session = Session(config, options, corpus, machine, stored, show)
        if main:
            # Only now is anything written: all that can be wrong with the settings has been tried.
            folder.claim(options.out, config, corpus.digest, None if parent is None else parent.to_json())
            folder.link_tokens(corpus.folder, options.out / folder.TOKENS)
            checkpoint.drop(options.out / folder.CHECKPOINTS, "best", after=session.state.step)
            # Of a run that was begun otherwise before, or of steps that are made again.
            last = session.state.step if own else -1
            checkpoint.drop(options.out / folder.SNAPSHOTS, "step", after=last)
            session.publish()
        try:
            return session.run(stop, trackers)
        except torch.OutOfMemoryError as error:
            said = str(error).splitlines()[0].split(". GPU")[0]
            raise FullrankError(f"{said}: the same command goes on {_in_less_memory(config)}") from error
        finally:
            session.ahead.close()
            session.writer.close()
            session.journal.close()


def _in_less_memory(config: Config) -> str:
    """How a run goes on: in more parts of a batch, where it can be cut further."""
    elsewhere = "where less else runs on the device"
    parts = (n for n in range(config.accumulate + 1, config.batch + 1) if config.batch % n == 0)
    finer = next(parts, None)
    if finer is None:
        return elsewhere
    return f"with --set accumulate={finer}, which cuts a step's batch into parts, or {elsewhere}"


def _corpus(config: Config, options: Options, show: Show) -> data.Corpus:
    hear, verify = (show.reading, show.say), options.verify
    if options.tokens is not None:
        corpus = elsewhere.prepare(options.tokens, config.data, options.cache, *hear, verify=verify)
    else:
        corpus = data.prepare(options.data, config.data, options.cache, *hear, verify=verify)
    if note := corpus.cut_note():
        show.say(note)
    return corpus


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
        self.config, self.options, self.corpus, self.machine = config, options, corpus, machine
        self.show = show
        self.main = machine.is_main_process
        self.checkpoints = options.out / folder.CHECKPOINTS
        self.rows = own_rows(config, machine)
        self.batches = batches.for_training(config, corpus.splits["train"].tokens)
        self.state = State() if stored is None else State.from_json(stored.state)
        self.resumed = stored is not None
        self.learner = Learner(
            config, corpus, machine, stored, rows=self.rows, vocab_parallel=options.vocab_parallel,
            fsdp=options.fsdp,
        )  # fmt: skip
        if self.main and config.graph == "on" and machine.device.type == "cuda" and self.learner.no_graph:
            show.say(f"graph=on is left out, which makes steps slower: {self.learner.no_graph}")
        self.flops = training_flops(self.learner.bare, config.length)
        """Of a token."""
        budget = Budget.parse(config.budget)
        self.seconds = budget.amount if budget is not None and budget.measure == "seconds" else 0.0
        """Of training, where that is the budget, else 0."""
        self.pace = self._paced()
        self.tally = Tally(machine, self.state.counts)
        self._clock = time.perf_counter()
        self.ahead = batches.Ahead(self.batches, self.rows, pinned=machine.device.type == "cuda")
        self.journal = Journal(machine, options.out, self.state, show, steps=self.pace.steps)
        self.writer = Writer()
        self._saved = self.state.step if self.resumed else -1
        self._files = model_files(self.learner.bare, corpus.vocabulary) if self.main else {}

    def _paced(self) -> Pace:
        pace = Pace.of(self.config, self.batches, self.machine, flops=self.flops, horizon=self.state.horizon)
        if self.seconds and self.state.watch.pace:
            end = self.state.watch.end(self.seconds)
            pace = dataclasses.replace(pace, steps=end, stage_steps=end)
        return pace

    def run(self, stop: Stop, trackers: tuple[str, ...]) -> Outcome:
        state, every = self.state, self.config.checkpoint_every
        if state.step < self.pace.steps and state.stage == "train":
            # A run that had come to its end has been given a later one.
            state.ended = ""
        if state.ended and finished(self.options.out / folder.LOG):
            return Outcome(reason="finished", step=state.step, steps=self.pace.steps, fresh=False)
        self._open(trackers)
        self.learner.objective.train()
        self._snapshot()
        self._clock = time.perf_counter()
        while not state.ended:
            self._stage()
            self._step()
            if self.seconds and (state.watch.due(state.step) or state.step >= self.pace.steps):
                # What seemed to be the last step is not, where the pace has risen since.
                with self._aside():
                    self._look()
            step, pace = state.step, self.pace
            last = step >= pace.steps
            due = last or step % pace.evaluate_every == 0
            if due or step % pace.log_every == 0:
                self._log_training()
            if due:
                self._evaluate()
            if last:
                state.ended = "finished"
            if state.ended or (step % every == 0 if every else due):
                self._checkpoint()
            self._snapshot()
            if step % pace.agree_every == 0 and stop.agreed(self.machine):
                self._checkpoint()
                self.writer.wait()
                self.journal.write("end", reason="stopped")
                return Outcome(reason="stopped", step=step, steps=pace.steps, signal=stop.received)
        stop.release()
        self._finish()
        return Outcome(reason="finished", step=state.step, steps=self.pace.steps)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """What is no training: the watch stands still, after all that was launched is done."""
        if self.machine.device.type == "cuda":
            torch.cuda.synchronize(self.machine.device)
        self.tally.seconds += time.perf_counter() - self._clock
        yield
        self._clock = time.perf_counter()

    def _look(self) -> None:
        """Where a budget of seconds ends, and how much of it is gone. Together with the other processes."""
        state = self.state
        state.watch = state.watch.looked(state.step, self._agreed(state.seconds + self.tally.seconds))
        if state.watch.pace:
            state.horizon = state.horizon or state.watch.end(self.seconds)
            self.pace = self._paced()
            self.journal.steps = self.pace.steps

    def _snapshot(self) -> None:
        """A model that stays, as a directory of transformers."""
        step, place = self.state.step, self.options.out / folder.SNAPSHOTS
        if not self.pace.snapshot(step, self.config.snapshot_every):
            return
        with self._aside():
            mean = None if self.learner.average is None else self.learner.average.mean
            weights_now = weights.gather_model(self.learner.bare, mean)
            if self.main:
                groups, state = {"model": weights_now}, self.state.to_json()
                self.writer.hand(partial(self._write, place, "step", step, groups, state))
            self.machine.wait_for_everyone()

    def _open(self, trackers: tuple[str, ...]) -> None:
        self.journal.open(trackers, self.config)
        if self.main:
            device = self.machine.device
            self.journal.write(
                "start",
                resumed=self.resumed,
                **({} if self.options.parent is None else {"from": self.options.parent.to_json()}),
                config=to_json(self.config),
                parameters=self.learner.parameters,
                vocabulary=self.corpus.vocabulary.size,
                data=self.corpus.describe(),
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                processes=self.machine.num_processes,
                steps=self.pace.steps,
                flops_per_token=self.flops,
                precision="bf16" if self.learner.half else "fp32",
                **({"unmeasured": without} if (without := self._unmeasured()) else {}),
            )
        self._ids = self._monitor_ids()

    def _unmeasured(self) -> dict[str, str]:
        """What monitors will not say, and why."""
        reason = no_attention(self.learner.bare.model) if self.options.monitors else ""
        return {"attention": reason} if reason else {}

    def _monitor_ids(self) -> Tensor:
        """Validation tokens that monitors look at: rows from all over the split."""
        tokens = self.corpus.splits["valid"].tokens
        length = min(self.config.length, len(tokens))
        wanted = monitors.contexts_wanted(self.learner.bare.lm_head)
        rows = max(1, min(-(-wanted // length) + 1, len(tokens) // length))
        starts = [round(row * (len(tokens) - length) / max(1, rows - 1)) for row in range(rows)]
        return torch.stack(
            [torch.from_numpy(tokens[start : start + length].astype("int64")) for start in starts]
        )

    def _stage(self) -> None:
        """Enter the finetune stage where the first one is over: averaged at once, from the best weights."""
        state = self.state
        if (
            state.stage == "train"
            and state.step >= self.pace.stage_steps
            and self.config.optimiser.finetune_epochs
        ):
            if state.best_step is not None:
                self._written()
                weights.scatter(self.learner.bare, self._best().groups["model"])
            state.stage, state.stage_step, state.history = "finetune", state.step, []
            self._begin_average()
            self.learner.carried = ()

    def _begin_average(self) -> None:
        self.learner.begin_average()
        self.state.averaged = 0

    def _step(self) -> None:
        config, state = self.config, self.state
        batch = self.ahead.take(state.cursor)
        seed_step(config.seed, state.step, self.machine.process_index)
        done: float = state.step - state.stage_step
        if self.seconds and state.watch.pace:
            done = state.watch.share(state.step, self.seconds) * self.pace.stage_steps
        self.rate = optimiser.rate(
            config.optimiser, done, self.pace.stage_steps, finetune=state.stage == "finetune"
        )
        if state.restarted >= 0:
            self.rate *= min(1.0, (state.step - state.restarted + 1) / optimiser.settling(config.optimiser))
        if config.jitter:
            # A short sequence has fewer terms in its mean and a noisier gradient.
            self.rate *= batch.length_scale
        nll, norm = self.learner.step(batch, self.rate)
        self.tally.add(state.step, state.cursor, loss=nll, norm=norm, tokens=batch.tokens)
        state.step += 1
        state.cursor, state.epoch = batch.next, batch.epoch
        state.tokens += batch.tokens
        state.averaged = self.learner.averaged
        if self.machine.device.type == "cpu":
            # On a device a look would stop it; there it is every log line that looks.
            self._check()

    def _check(self) -> None:
        """Stop where too many steps in a row had a loss or a gradient that is no number."""
        bad = self.tally.bad_row(self.config.skip)
        if bad is not None:
            times = f"{self.config.skip + 1} times in a row, the last at" if self.config.skip else "at"
            raise self._not_finite(f"the loss or its gradient is not finite {times}", *bad)

    def _not_finite(self, what: str, step: int, cursor: batches.Cursor) -> FullrankError:
        self.writer.wait()
        kept = checkpoint.found(self.checkpoints, "step")
        last = f"{kept[-1]} is the last good checkpoint" if kept else "no checkpoint was written yet"
        message = (
            f"{what} step {step} (epoch {cursor.epoch}, position {cursor.position} of the data); {last}: "
            "lower the rate with --set optimiser.lr, or clip more with --set optimiser.clip, in another --out"
        )
        self.journal.write("alarm", kind="nan", message=message)
        self.journal.write("end", reason="nan")
        return FullrankError(message)

    def _log_training(self) -> None:
        self._check()
        tally, device = self.tally, self.machine.device
        with self._aside():
            loss, norm = tally.means()
            self.state.seconds += tally.seconds
            self.state.skipped += tally.skipped
            if tally.skipped and self.main:
                said = f"{tally.skipped} steps before step {self.state.step} had no finite gradient"
                self.show.say(f"{said}: they were left out")
            peak = peak_flops(device)
            # Of one process and its device: the tokens of a step are those of all.
            share = tally.tokens_per_second / self.machine.num_processes
            self.journal.training(
                loss=loss, gradient_norm=norm, rate=self.rate, tokens_per_second=tally.tokens_per_second,
                skipped=tally.skipped, mfu=None if peak is None else share * self.flops / peak,
                peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
                penalties=self._penalties(),
            )  # fmt: skip
            tally.begin()
            if self.seconds and self.state.watch.pace:
                self._look()

    def _penalties(self) -> dict[str, float] | None:
        """Those of the last step, without their weights."""
        penalties = self.learner.penalties
        return None if penalties is None else {name: float(value) for name, value in penalties.last.items()}

    def _evaluate(self) -> None:
        """Validation loss, monitors, alarms; decides what is best and whether averaging begins."""
        self._check()
        with self._aside():
            self._evaluated()
        self._decide()

    def _evaluated(self) -> None:
        state, averaged = self.state, self.learner.average is not None
        with self.learner.evaluated() as model:
            loss = math.nan
            # A sharded model is whole on the main process alone.
            alone = self.learner.sharded
            scored = None
            if self.main or not alone:
                scored = self._score(model, "valid", self.pace.evaluate_tokens, alone=alone)
            if self.main and scored is not None:
                loss, found, started = scored.loss, {}, time.perf_counter()
                if self.options.monitors and math.isfinite(loss):
                    found = self._measured(model)
                seconds = time.perf_counter() - started
                self.journal.evaluation("valid", scored, found, seconds, averaged=averaged)
            loss = self._agreed(loss)
            if not math.isfinite(loss):
                raise self._not_finite("the validation loss is not finite after", state.step, self.tally.last)
            state.history.append(loss)
            if state.best_loss is None or loss < state.best_loss:
                state.best_loss, state.best_step = loss, state.step
                if self.main:
                    best, about = {"model": weights.gather_model(model)}, {"loss": loss, "averaged": averaged}
                    self.writer.hand(partial(self._write_best, state.step, best, about))

    def _write(
        self, place: Path, kind: str, step: int, groups: checkpoint.Groups, state: dict[str, Any]
    ) -> None:
        checkpoint.write(place, kind, step, groups, state, self._files)

    def _write_best(self, step: int, groups: checkpoint.Groups, about: dict[str, Any]) -> None:
        self._write(self.checkpoints, "best", step, groups, about)
        self.publish()

    def _write_step(self, step: int, groups: checkpoint.Groups, state: dict[str, Any]) -> None:
        self._write(self.checkpoints, "step", step, groups, state)
        # Not before: the checkpoint just written is the first that names the new best.
        checkpoint.prune(self.checkpoints, self.config.keep)

    def _written(self) -> None:
        """Every process goes on once the main one has written all that it was handed."""
        self.writer.wait()
        self.machine.wait_for_everyone()

    def publish(self) -> None:
        """The run directory is the best model so far."""
        best = checkpoint.found(self.checkpoints, "best")
        if best:
            folder.publish(best[-1])

    def _score(
        self, model: FullrankForCausalLM, split: str, limit: int, *, alone: bool
    ) -> evaluate.Evaluation:
        """On this process alone, or on all of them together, each with every so-many-th row."""
        config, device = self.config, self.machine.device
        # In the precision of training; the last evaluations are in fp32.
        half = self.learner.half and not self.state.ended
        rows = config.evaluate_batch
        if device.type == "cuda" and not model.carries_state:
            # Windows do not see each other, and a GPU is not filled by a few.
            rows = max(rows, min(AT_ONCE // config.length, SCORES // config.length**2))
        # To compile a body for a few passes without gradients takes longer than they do.
        with as_written(model), torch.autocast(device.type, torch.bfloat16, enabled=half):
            return evaluate.evaluate(
                model, self.corpus.splits[split], eos=self.corpus.vocabulary.eos,
                batch=rows, length=config.length, limit=limit,
                pieces=config.evaluate_batch, device=device,
                rank=0 if alone else self.machine.process_index,
                processes=1 if alone else self.machine.num_processes,
            )  # fmt: skip

    def _measured(self, model: FullrankForCausalLM) -> dict[str, Any]:
        """The monitors; a model too strange to be measured trains on, and may recover."""
        try:
            return monitor.measure(model, self._ids.to(self.machine.device), seed=self.config.seed)
        except (FullrankError, torch.linalg.LinAlgError) as error:
            self.show.say(f"nothing could be measured at step {self.state.step}: {error}")
            return {}

    def _agreed(self, loss: float) -> float:
        """The main process's number on every process: decisions must not differ in a last bit."""
        if self.machine.num_processes == 1:
            return loss
        value = torch.tensor(loss, dtype=torch.float64, device=self.machine.device)
        torch.distributed.broadcast(value, 0)
        return float(value)

    def _decide(self) -> None:
        """NT-ASGD: begin to average, or end a finetune stage, once validation stops improving."""
        state, settings = self.state, self.config.optimiser
        if settings.name != "nt-asgd" or not optimiser.stopped_improving(state.history, settings.nonmonotone):
            return
        if state.stage == "finetune":
            state.ended = "finished"
        elif self.learner.average is None:
            self._begin_average()

    def _checkpoint(self) -> None:
        self._check()
        if self._saved != self.state.step:
            with self._aside():
                self._save()

    def _save(self) -> None:
        state = self.state
        groups = self.learner.whole()
        live = groups.get("live", groups["model"])
        if not all(bool(torch.isfinite(one).all()) for one in live.values()):
            # A finite gradient times a large rate: no loss has seen these weights yet.
            raise self._not_finite("the weights are not finite after", state.step, self.tally.last)
        state.counts = self.tally.to_json()
        if self.main:
            self.journal.sync()
            kept = state.to_json()
            self.writer.hand(partial(self._write_step, state.step, groups, kept))
        self._saved = state.step
        self.machine.wait_for_everyone()

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

    def _finish(self) -> None:
        """Validation and test with the best weights."""
        alone = self.learner.sharded
        self._written()
        if self.main or not alone:
            model, best = self.learner.blank(), self._best()
            folder.restore(model, best.groups["model"], best.path)
            model.to(self.machine.device)
            limit = self.config.final_tokens
            valid, test = (self._score(model, split, limit, alone=alone) for split in ("valid", "test"))
        if self.main:
            self.journal.evaluation("test", test, {}, 0.0, averaged=bool(best.state.get("averaged")))
            self.journal.write(
                "end", reason=self.state.ended, best_step=best.step, seconds=self.state.seconds,
                valid=dataclasses.asdict(valid), test=dataclasses.asdict(test),
            )  # fmt: skip
        self.machine.wait_for_everyone()
