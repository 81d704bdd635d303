"""Steps of an upgraded model in one process and in two, for test_distributed.py: `two_processes.py FOLDER
CASE...`.

Importing transformers takes long, so one process imports it and forks the others. FOLDER/one-CASE.pt and
FOLDER/two-CASE.pt hold the losses and the weights after STEPS steps. Under torchrun it is one of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

from fullrank.upgrade import upgrade

PROCESSES, STEPS, RATE = 2, 2, 0.3
LENGTHS = (12, 12, 7, 9, 5, 12, 12, 3)
CASES = {
    "trainer tied": ("trainer", True, "mos"),
    "layers tied": ("layers", True, "pointer"),
    "head untied": ("head", False, "doc"),
    "matrix untied": ("matrix", False, "mos"),
    "accelerate tied": ("accelerate", True, "doc"),
    "accelerate untied": ("accelerate", False, "mos"),
}
"""How the model is spread, whether W is tied, and the head."""


def model_of(tied: bool, head: str) -> Any:
    sizes = {
        "vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": tied,
    }  # fmt: skip
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    return upgrade(original, head).train()


def texts() -> list[dict[str, Tensor]]:
    """Eight texts, two steps of four; the padding does not count."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for length in LENGTHS:
        ids = torch.randint(2, 101, (12,), generator=generator)
        seen = torch.arange(12) < length
        found.append(
            {"input_ids": ids * seen, "attention_mask": seen.long(), "labels": ids.masked_fill(~seen, -100)}
        )
    return found


def batch(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in examples]) for name in examples[0]}


def spread(kind: str, model: Any) -> Any:
    """The model over all processes, as its users would."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    if kind == "accelerate":
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        # What an Accelerator does on a GPU; on a CPU it takes DDP whatever it is asked for.
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        stand_in = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            torch_device_mesh={("shard",): mesh},
            parallelism_config=SimpleNamespace(fsdp_dim_names=("shard",)),
            mixed_precision="no",
            is_main_process=True,
            device=torch.device("cpu"),
        )
        return fsdp2_prepare_model(stand_in, model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if kind in ("head", "matrix"):
        fully_shard(model.lm_head if kind == "head" else model.lm_head.decoder, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(kind: str, model: Any, rank: int, world: int, folder: Path) -> list[float]:
    """Losses of the steps: nats a token over the tokens of all processes."""
    rows = texts()
    if kind == "trainer":
        arguments = TrainingArguments(
            output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, optim="sgd",
            per_device_train_batch_size=4 // world, max_steps=STEPS, learning_rate=RATE, logging_steps=1,
            lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no", dataloader_pin_memory=False,
            train_sampling_strategy="sequential", log_level="error", ddp_find_unused_parameters=False,
        )  # fmt: skip
        done = Trainer(model, arguments, train_dataset=rows, data_collator=batch)
        done.train()
        return [line["loss"] for line in done.state.log_history if "loss" in line]
    if world > 1:
        model = spread(kind, model)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        every = rows[4 * step : 4 * step + 4]
        counted = sum(int((one["labels"][1:] != -100).sum()) for one in every)
        # Gradients are averaged over processes: each gives its share of the sum times their number.
        loss = model(**batch(every[rank::world]), num_items_in_batch=counted / world).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        total = loss.detach() / world
        if world > 1:
            distributed.all_reduce(total)
        losses.append(float(total))
    return losses


def run(case: str, folder: Path, name: str) -> None:
    kind, tied, head = CASES[case]
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and kind != "trainer":
        distributed.init_process_group("gloo")
    model = model_of(tied, head)
    losses = trained(kind, model, rank, world, folder)
    weights: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        weights[key] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    if rank == 0:
        torch.save({"losses": losses, "weights": weights}, folder / f"{name}-{case}.pt")
    if world > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def forked(case: str, folder: Path, port: int, rank: int) -> None:
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(addresses, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES))
    run(case, folder, "two")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    logging.set_verbosity_error()
    folder = Path(sys.argv[1])
    if "RANK" in os.environ:
        run(sys.argv[2], folder, "torchrun")
        return
    context = multiprocessing.get_context("fork")
    for case in sys.argv[2:]:
        # The reference is one process too, so that nothing it leaves is inherited.
        started = [context.Process(target=run, args=(case, folder, "one"))]
        port = free_port()
        started += [
            context.Process(target=forked, args=(case, folder, port, rank)) for rank in range(PROCESSES)
        ]
        for one in started:
            one.start()
        for one in started:
            one.join()
        assert [one.exitcode for one in started] == [0] * len(started), case


if __name__ == "__main__":
    main()
