"""What learns: a model with its optimiser, average and carried state, on a device and between processes.

    forward and backward of a batch in parts, clip, update, average
    as a checkpoint has it, all whole: model, optimiser, average, carried state of all rows

A model is copied to all processes, or sharded: by FSDP2, or with the head's matrix split over the vocabulary.
Sharded weights cannot be evaluated or measured by one process; the main one keeps a whole copy for that.
All processes call these together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import optimiser
from fullrank.fit.captured import SMALL, Step, can_capture
from fullrank.heads.vocab_parallel import VocabParallelHead, clip_gradients, ignored_parameters, shard
from fullrank.models import FullrankForCausalLM
from fullrank.models.flops import training_flops
from fullrank.models.randomness import restored_randomness
from fullrank.ops.arguments import widest_dtype
from fullrank.text.store import Corpus
from fullrank.train import evaluate, folder, weights
from fullrank.train.batches import Batch
from fullrank.train.checkpoint import Stored
from fullrank.train.config import Config
from fullrank.train.model import build, start_at_unigram, width_factors
from fullrank.train.objective import Carried, Objective, Prediction
from fullrank.train.penalty import Penalties


def precision_of(setting: str, device: torch.device) -> str:
    """What auto is on a device."""
    if setting != "auto":
        return setting
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


def no_graph(config: Config, inner: torch.optim.Optimizer, *, sharded: bool) -> str:
    """Why a step of such a run cannot be one CUDA graph; no words where it can."""
    reasons = {
        "head.balance with accumulate above 1 repeats random numbers": _needs_usage(config),
        "jitter=true makes batches of many lengths": config.jitter,
        "what a penalty measured is read between steps": Penalties.of(config.penalty) is not None,
        f"{config.optimiser.name} has no fused step": not can_capture(inner),
        "processes wait for each other": sharded,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def _needs_usage(config: Config) -> bool:
    """Whether the use of the components must be known before the first part of a batch has its gradients."""
    return config.head.balance > 0.0 and config.accumulate > 1


class Learner:
    """One process's part of what learns; `rows` are its rows of a batch."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        machine: Any,
        stored: Stored | None,
        *,
        rows: slice,
        vocab_parallel: bool = False,
        fsdp: bool = False,
    ) -> None:
        self.config, self.machine, self.rows = config, machine, rows
        self.vocabulary = corpus.vocabulary.size
        self.bare = self.blank()
        """The model itself, without what accelerate puts around it."""
        self.parameters = sum(parameter.numel() for parameter in self.bare.parameters())
        if stored is not None:
            folder.restore(self.bare, stored.groups.get("live") or stored.groups["model"], stored.path)
        elif config.head.unigram:
            tokens = corpus.splits["train"].tokens
            counts = evaluate.token_counts(tokens, self.bare.lm_head.vocab)
            start_at_unigram(self.bare.lm_head, counts, lift=config.head.lift)
        self._spread(vocab_parallel=vocab_parallel, fsdp=fsdp)
        self.average: optimiser.Average | None = None
        self.carried: Carried = ()
        if stored is not None:
            self._restore(stored)

    def blank(self) -> FullrankForCausalLM:
        """A whole model of this architecture, on the CPU."""
        return build(self.config, self.vocabulary)

    def _spread(self, *, vocab_parallel: bool, fsdp: bool) -> None:
        """Put the model on its device and between the processes."""
        if vocab_parallel and fsdp:
            raise FullrankError("--vocab-parallel and --fsdp both shard the head's matrix: pass one of them")
        if vocab_parallel:
            if self.config.head.tie:
                raise FullrankError(
                    "--vocab-parallel splits W between processes, and a tied embedding needs it whole: pass "
                    "--set head.tie=false"
                )
            self.bare.to(self.machine.device)
            self.bare.lm_head = shard(self.bare.lm_head)
        config = self.config
        self.penalties = Penalties.of(config.penalty)
        if self.penalties is not None and (vocab_parallel or fsdp):
            raise FullrankError(
                "penalty.spectrum and penalty.states need the head's matrix whole on every process: train "
                "without --vocab-parallel and --fsdp"
            )
        objective = Objective(
            self.bare,
            activation=config.activation,
            temporal=config.temporal,
            balance=config.head.balance,
            z_loss=config.z_loss,
            penalties=self.penalties,
        )
        if vocab_parallel:
            ignored_parameters(objective)
        # FSDP2 gathers the weights of one of these after another.
        objective._no_split_modules = sorted(  # type: ignore[assignment]
            {
                type(layer).__name__
                for layers in self.bare.model.modules()
                if isinstance(layers, torch.nn.ModuleList)
                for layer in layers
            }
        )
        device = self.machine.device
        made = optimiser.make(
            self.bare, config.optimiser, device, factors=width_factors(self.bare, config.body)
        )
        self.objective, self.optimiser = self.machine.prepare(objective, made)
        self.bare = self.machine.unwrap_model(self.objective).model
        self.half = precision_of(config.precision, device) == "bf16"
        if device.type == "cuda":
            # Products that stay in fp32: three times the speed, and errors below those of bf16.
            torch.set_float32_matmul_precision("high")
        compiled = device.type == "cuda" and config.body.kind != "awd_lstm"
        if config.compile == "on" or (config.compile == "auto" and compiled):
            # In place, so that names and checkpoints know nothing of it. The head's loss is compiled already.
            self.bare.model.compile(dynamic=False)
        self.sharded = vocab_parallel or fsdp
        flops = training_flops(self.bare, config.length) * config.batch * config.length
        asked = config.graph == "on" or (config.graph == "auto" and compiled and flops < SMALL)
        sharded = self.sharded or self.machine.num_processes > 1
        self.no_graph = no_graph(config, self.inner_optimiser, sharded=sharded)
        """Why a step cannot be one CUDA graph; no words where it can."""
        self._update_once = Step(
            self._step,
            self.inner_optimiser,
            captures=asked and device.type == "cuda" and not self.no_graph,
            remedy="the same command goes on with --set graph=off",
        )
        self.plain: FullrankForCausalLM | None = None
        """The whole copy of a sharded model, on the main process."""
        if self.sharded and self.machine.is_main_process:
            self.plain = self.blank().to(self.machine.device)

    def _restore(self, stored: Stored) -> None:
        """Optimiser, average and carried state of a checkpoint."""
        weights.scatter_optimiser(self.bare, self.inner_optimiser, stored.groups["optimiser"])
        # An average that has begun may have no iterate yet.
        if "live" in stored.groups:
            self.average = optimiser.Average(self.bare)
            self.average.count = stored.state.get("averaged", 0)
            self.average.mean = {
                name: weights.part(
                    self.bare, name, parameter, stored.groups["model"][weights.plain_name(name)]
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

    @property
    def averaged(self) -> int:
        """Iterates in the average; 0 where there is none."""
        return 0 if self.average is None else self.average.count

    def begin_average(self) -> None:
        self.average = optimiser.Average(self.bare)

    def step(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor]:
        """One update; returns the batch's loss without penalties, and its gradient's norm before clipping.

        Where that norm is no number nothing is updated.
        """
        device = self.machine.device
        ids, targets = batch.ids.to(device, non_blocking=True), batch.targets.to(device, non_blocking=True)
        if batch.fresh:
            self.carried = tuple(map(torch.zeros_like, self.carried))
        optimiser.set_rate(self.inner_optimiser, rate)
        loss, norm, *carried = self._update_once(ids, targets, *self.carried)
        self.carried = tuple(carried)
        if self.average is not None:
            # Out of the step, which may be a graph from before there was one.
            self.average.update(self.bare)
        return loss, norm

    def _step(self, ids: Tensor, targets: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        """Loss and norm, and what is carried on: all that it reads is given, as a graph needs it."""
        nll, following = self._gradients(ids, targets, carried)
        norm = self._clip()
        good = torch.isfinite(norm)
        self._update(good)
        self.optimiser.zero_grad(set_to_none=True)
        # What a bad step carries on may be bad as well.
        return nll, norm, *(torch.where(good, tensor, 0.0) for tensor in following)

    def _update(self, good: Tensor) -> None:
        """Step where `good`, which is the same on all processes: a gradient is summed over them first."""
        inner = self.inner_optimiser
        if can_capture(inner):
            # Its kernel reads it, so that nobody waits for the device.
            inner.found_inf = (~good).float()  # type: ignore[attr-defined]
            self.optimiser.step()
        elif bool(good):
            self.optimiser.step()

    def _gradients(self, ids: Tensor, targets: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
        """Gradients of the batch's mean loss; returns that loss without penalties, and what is carried on."""
        parts = self.config.accumulate
        total, following = ids.new_zeros((), dtype=widest_dtype(ids.device)), []
        usage = self._usage(ids, targets, carried) if _needs_usage(self.config) else None
        for number, part in enumerate(self._parts(ids, targets, carried)):
            last = number + 1 == parts
            quiet = contextlib.nullcontext() if last else self.machine.no_sync(self.objective)
            with quiet:
                out = self._predicted(*part, usage)
                self.machine.backward(out.value / parts)
            total += out.nll / parts
            following.append(out.carried)
        return total, tuple(torch.cat(tensors) for tensors in zip(*following, strict=True))

    def _parts(
        self, ids: Tensor, targets: Tensor, carried: Carried
    ) -> Iterator[tuple[Tensor, Tensor, Carried]]:
        size = ids.shape[0] // self.config.accumulate
        for start in range(0, ids.shape[0], size):
            rows = slice(start, start + size)
            yield ids[rows], targets[rows], tuple(tensor[rows] for tensor in carried)

    def _predicted(self, ids: Tensor, targets: Tensor, carried: Carried, usage: Tensor | None) -> Prediction:
        with torch.autocast(self.machine.device.type, torch.bfloat16, enabled=self.half):
            return self.objective(ids, targets, carried, usage)

    @torch.no_grad()
    def _usage(self, ids: Tensor, targets: Tensor, carried: Carried) -> Tensor:
        """[K], the mean prior over the components of the whole batch: one more forward pass, whose random
        numbers are those of the passes that have gradients."""
        with restored_randomness(self.machine.device):
            parts = [
                cast(Tensor, self._predicted(*part, None).usage)
                for part in self._parts(ids, targets, carried)
            ]
        return torch.stack(parts).mean(0)

    def _clip(self) -> Tensor:
        most = self.config.optimiser.clip or math.inf
        if isinstance(self.bare.lm_head, VocabParallelHead):
            return clip_gradients(self.bare, most)
        norm = torch.nn.utils.clip_grad_norm_(self.bare.parameters(), most)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[FullrankForCausalLM]:
        """The model to evaluate on this process: averaged where there is an average, whole where sharded."""
        with self.average.swapped_in(self.bare) if self.average is not None else contextlib.nullcontext():
            every = weights.gather(self.bare) if self.sharded else {}
            if self.plain is not None:
                weights.scatter(self.plain, every)
            yield self.bare if self.plain is None else self.plain

    def whole(self) -> dict[str, weights.Whole]:
        """All that a checkpoint holds of this, by group."""
        groups = {
            "model": weights.gather_model(self.bare, None if self.average is None else self.average.mean),
            "optimiser": weights.gather_optimiser(self.bare, self.inner_optimiser),
            "carried": self._whole_carried(),
        }
        if self.average is not None:
            groups["live"] = weights.gather_model(self.bare)
        return groups

    def _whole_carried(self) -> weights.Whole:
        """The carried state of all rows of the batch, in their order."""
        tensors = [tensor.contiguous() for tensor in self.carried]
        if self.machine.num_processes > 1:
            tensors = [self.machine.gather(tensor) for tensor in tensors]
        return {str(number): tensor.to("cpu", copy=True) for number, tensor in enumerate(tensors)}
