"""The processes of a run: accelerate's view of them, and what they must agree on.

The same command runs on one process, under `torchrun` or under `accelerate launch`. Mixed precision is ours
(`Config.precision`): accelerate would wrap forward for good, and evaluation is in fp32.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch

from fullrank.errors import FullrankError

TIMEOUT = timedelta(hours=4)
"""How long processes wait for the main one, which alone tokenises and measures."""
TOGETHER = 3.0
"""Seconds in which a launcher may pass on a signal that a terminal had already given to all."""
USE_FSDP = "ACCELERATE_USE_FSDP"
GRACE = 5.0
"""Seconds that a process leaves to the main one to say what went wrong, and to the launcher to end it."""


def accelerator(device: str, trackers: tuple[str, ...], directory: str, *, fsdp: bool) -> Any:
    """accelerate's Accelerator for a device: auto, cpu or cuda."""
    from accelerate import Accelerator, DistributedType
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration

    if device not in ("auto", "cpu", "cuda", "mps"):
        raise FullrankError(f"--device {device} is unknown: expected auto, cpu, cuda or mps")
    if device == "cuda" and not torch.cuda.is_available():
        raise FullrankError("--device cuda was asked for and there is none: pass --device cpu")
    plugin = None
    if fsdp:
        from accelerate import FullyShardedDataParallelPlugin

        # An LSTM's last state is a view of its outputs; nothing writes into either.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            # By the classes in the model's `_no_split_modules`: no more than a layer is whole at a time.
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
    # accelerate keeps its settings for the whole process; a second run in it, as in a notebook, has its own.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if not torch.distributed.is_initialized():
        # What a run before this one knew of its processes went with their group.
        PartialState._reset_state()
    # `fsdp` alone decides, for each run: accelerate would remember a plugin in the environment.
    os.environ.pop(USE_FSDP, None)
    machine = Accelerator(
        cpu=device == "cpu",
        mixed_precision="no",
        log_with=list(trackers) or None,
        project_config=ProjectConfiguration(
            project_dir=directory, logging_dir=os.path.join(directory, "tensorboard")
        ),
        fsdp_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)],
    )
    os.environ.pop(USE_FSDP, None)
    if fsdp and machine.distributed_type == DistributedType.MULTI_CPU:
        # accelerate keeps FSDP2 for devices and would fall back to copies; torch shards on CPUs just as well.
        machine.state.distributed_type, machine.state.fsdp_plugin = DistributedType.FSDP, plugin
    return machine


@contextmanager
def joined() -> Iterator[None]:
    """Leave the group of processes at the end, where it was this run that made it."""
    before = torch.distributed.is_initialized()
    yield
    # Not after an error: others may be in the middle of a collective, and leaving would wait for them.
    if torch.distributed.is_initialized() and not before:
        torch.distributed.destroy_process_group()


@contextmanager
def one_voice() -> Iterator[None]:
    """What goes wrong on all processes is said once, by the main one; one that lost another says that."""
    try:
        yield
    except Exception as error:
        lost = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not is_main() and (lost or _known(error)):
            time.sleep(GRACE)
        if lost and not _known(error):
            raise FullrankError(
                "another process of this run has ended or cannot be reached: its own message says why, and "
                "the same command continues from the last checkpoint"
            ) from error
        raise


def _known(error: Exception) -> bool:
    return isinstance(error, FullrankError | OSError)


def require_same(accelerator: Any, **facts: Any) -> None:
    """Raise on all processes where one of them came with another config, other data or another checkpoint."""
    if accelerator.num_processes == 1:
        return
    digests = [hashlib.sha256(repr(value).encode()).digest() for value in facts.values()]
    own = torch.tensor([int.from_bytes(one[:7], "big") for one in digests], device=accelerator.device)
    every = accelerator.gather(own[None])
    for name, column in zip(facts, every.t(), strict=True):
        if bool((column != column[0]).any()):
            raise FullrankError(
                f"the processes see different {name}: start all of them with the same command, and put "
                "--data and --out where every machine sees the same files"
            )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Randomness of one step on one process: a function of these three, so a checkpoint needs none of it."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Stop:
    """Catches SIGTERM and Ctrl-C while open: the loop saves and leaves. A second one is obeyed at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._first: float | None = None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def _catch(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self._first = now if self._first is None else self._first
        if launched and now - self._first > TOGETHER:
            self.release()
            signal.raise_signal(number)
            return
        self.received = number
        if not launched:
            signal.signal(number, self._before.get(number) or signal.SIG_DFL)

    def release(self) -> None:
        """From here on a signal is obeyed at once: everything is saved."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def agreed(self, accelerator: Any) -> bool:
        """Whether any process was told to stop; all processes call this together."""
        if accelerator.num_processes == 1:
            return self.received is not None
        flag = torch.tensor(int(self.received is not None), device=accelerator.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)


def is_main() -> bool:
    """Whether this is the process that writes and speaks; also before any accelerator exists."""
    return int(os.environ.get("RANK", "0")) == 0
