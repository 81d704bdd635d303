"""Rank and geometry of the head, and attention, at every evaluation of transformers' Trainer, in its own log.

    trainer = Trainer(model, arguments, ...)
    trainer.add_callback(FullrankMonitor(trainer))

A callback is not handed what logs, so it is given the trainer: its `log` reaches the history, TensorBoard,
W&B and whatever else reports. The numbers are those of `diagnose.monitors`, named as the evaluation names its
loss: eval_head_effective_rank, eval_logprob_rank, eval_component_shares/0 beside eval_loss.

They come from texts of the evaluation set, drawn from all over it, the same at every evaluation: each without
its padding, at most LONGEST tokens of it. Any causal language model is measured, one of ours or a plain
softmax, with adapters of PEFT or without. The main process measures, and needs whole weights: where they are
sharded, nothing is measured, which is said once. Training ends with the same weights as without.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.trainer_callback import TrainerCallback

from fullrank.diagnose import monitors
from fullrank.diagnose.attention.monitor import watching
from fullrank.errors import FullrankError
from fullrank.heads import Head
from fullrank.models.causal_lm import FullrankForCausalLM
from fullrank.upgrade.upgrade import upgrade

LONGEST = 512
"""Tokens of one text at most."""
MOST_TEXTS = 256
logger = logging.getLogger(__name__)


class FullrankMonitor(TrainerCallback):
    """Logs every monitor that applies to the model's head after each evaluation."""

    def __init__(self, trainer: Any, *, every: int = 1, contexts: int | None = None, seed: int = 0) -> None:
        """`every` so many evaluations; `contexts` bounds the sample behind logprob_rank, D + D/4 + 32 of them
        and 1088 at most by default.
        """
        if every < 1 or (contexts is not None and contexts < 3):
            raise FullrankError(
                f"every={every} and contexts={contexts} are impossible: expected every >= 1, contexts >= 3"
            )
        self.trainer, self.every, self.contexts, self.seed = trainer, every, contexts, seed
        self._evaluations: dict[str, int] = {}
        self._told: set[str] = set()
        self._plain: FullrankForCausalLM | None = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        prefix = _prefix(given.get("metrics") or {})
        number = self._evaluations.get(prefix, 0)
        self._evaluations[prefix] = number + 1
        if number % self.every or not state.is_world_process_zero:
            return
        started = time.perf_counter()
        try:
            with _unmoved():
                found = self._measured(given["model"], given["eval_dataloader"])
        except (FullrankError, torch.linalg.LinAlgError, torch.OutOfMemoryError) as error:
            # A model too strange to be measured trains on.
            self._tell(f"nothing could be measured at step {state.global_step}: {error}", type(error))
            return
        logs: dict[str, float] = {}
        for name, value in found.items():
            each = {f"/{place}": one for place, one in enumerate(value)} if isinstance(value, list) else None
            logs |= {f"{prefix}_{name}{end}": one for end, one in (each or {"": cast(float, value)}).items()}
        logs[f"{prefix}_monitor_seconds"] = time.perf_counter() - started
        self.trainer.log(logs)

    def _measured(self, model: Any, loader: Any) -> monitors.Monitors:
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        with monitors.evaluating(base), torch.no_grad():
            _check_whole(base)
            view = base if isinstance(base, FullrankForCausalLM) else self._softmax(base)
            head = active_head(view)
            wanted = monitors.contexts_wanted(head) if self.contexts is None else self.contexts
            ids, seen = _texts(loader, wanted, self.seed)
            device = head.decoder.weight.device
            ids, seen = ids.to(device), seen.to(device)
            plain = torch.autocast(device.type, enabled=False)
            with plain, watching(view.model, ids, seen) as attention:
                states, context, _ = view.head_inputs(ids, seen.long())
            ids = ids if context is None else context
            found = monitors.measure(
                head, states, ids, seen=seen, seed=self.seed, rank_contexts=self.contexts
            )
            return found | attention

    def _softmax(self, model: Any) -> FullrankForCausalLM:
        """A plain model's body and matrix, the same tensors, under our softmax head."""
        layer = model.get_output_embeddings()
        decoder = None if self._plain is None else self._plain.lm_head.decoder
        # Where the matrix was cut or the bias scaled, the view holds copies, which training leaves behind.
        if decoder is None or decoder.weight is not layer.weight or decoder.bias is not layer.bias:
            self._plain = upgrade(model, "softmax")
        assert self._plain is not None
        return self._plain

    def _tell(self, message: str, kind: type) -> None:
        if kind.__name__ not in self._told:
            self._told.add(kind.__name__)
            logger.warning(message)


def active_head(model: FullrankForCausalLM) -> Head:
    """The head that runs: where it is one of PEFT's modules to save, that is a copy beside the original."""
    head: Any = model.lm_head
    while not isinstance(head, Head):
        head = head.modules_to_save[head.active_adapters[0]]
    return head


def _prefix(metrics: dict[str, float]) -> str:
    """What the evaluation calls itself: eval, or eval_NAME for one of several sets."""
    ending = "_runtime"
    return next((name.removesuffix(ending) for name in metrics if name.endswith(ending)), "eval")


def _check_whole(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id") or parameter.is_meta:
            raise FullrankError(
                f"{name} is not whole on this process, and monitors need whole weights: train with DDP, or "
                "run `fullrank diagnose` on a saved checkpoint"
            )


def _texts(loader: Any, wanted: int, seed: int) -> tuple[Tensor, Tensor]:
    """ids [batch, time] of some `wanted` tokens, and where they are no padding."""
    rows: list[Tensor] = []
    total = 0
    for example in itertools.islice(_examples(loader.dataset, seed), MOST_TEXTS):
        batch = loader.collate_fn([example])
        mask = batch.get("attention_mask")
        if not isinstance(batch.get("input_ids"), Tensor):
            raise FullrankError("the evaluation set gives no input_ids, which monitors run the model on")
        for row, ids in enumerate(batch["input_ids"]):
            kept = ids if not isinstance(mask, Tensor) or mask.ndim != 2 else ids[mask[row].bool()]
            if len(kept) > 1:
                rows.append(kept[:LONGEST].cpu())
                total += len(rows[-1])
        if total >= wanted:
            break
    if total < 3:
        raise FullrankError("the evaluation set has fewer than 3 tokens to measure on")
    # One long text among many short ones would be mostly padding.
    length = min(max(len(row) for row in rows), max(2, 4 * max(wanted, total) // len(rows)))
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    seen = torch.zeros(len(rows), length, dtype=torch.bool)
    for place, text in enumerate(rows):
        ids[place, : len(text)] = text[:length]
        seen[place, : len(text)] = True
    return ids, seen


def _examples(dataset: Any, seed: int) -> Iterable[Any]:
    """From all over a set that has a length, in order from one that streams."""
    if not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
        return iter(dataset)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    return (cast(Any, dataset)[place] for place in order.tolist())


@contextmanager
def _unmoved() -> Iterator[None]:
    """Whoever draws random numbers in here, what comes after draws the same as if nobody had."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
