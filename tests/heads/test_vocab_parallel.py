"""A head split over processes, under DistributedDataParallel, against one process with the same global batch.

Run as a script this file starts three gloo processes; all train together, and then two of them alone. Each
builds its model from a seed of its own, so that what they share must come from process 0.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fullrank.errors import FullrankError
from fullrank.heads import build
from fullrank.heads.vocab_parallel import (
    VocabParallelHead,
    clip_gradients,
    full_state,
    ignored_parameters,
    load_full_state,
    shard,
    unshard,
)

PROCESSES = 3
SECONDS = 120
H, V, D, OLDER = 6, 11, 4, 5
BATCH, TIME, STEPS, RATE = 2, 3, 3, 0.3
MIXTURE = {"components": 3}
HEADS: dict[str, dict[str, Any]] = {
    "softmax": {"bias": True},
    "low_rank": {"rank": 2},
    "sigsoftmax": {"bias": True},
    "plif": {"bins": 40, "limit": 3.0, "spread": 1.0},
    "moc": MIXTURE,
    "mos": MIXTURE | {"bias": True},
    "moss": MIXTURE | {"as_published": True},
    "trunk": MIXTURE | {"private": 2},
    "doc": {"layers": ((H, 2), (OLDER, 1))},
}


several = pytest.mark.slow(
    reason="three processes import torch for nine seconds; in CI, by make test-processes, and a split head "
    "in one process is in the default tier"
)

CASES = [*((name, 2) for name in HEADS), ("mos", 3), ("plif", 3)]
"""Heads and numbers of processes."""


class Model(nn.Module):
    def __init__(self, name: str, seed: int, **changed: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(7, OLDER), nn.Linear(OLDER, H)
        self.head = build(name, hidden=H, vocab=V, width=D, **HEADS[name] | changed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
        self.double()

    def states(self, features: Tensor) -> list[Tensor]:
        older = torch.tanh(self.first(features))
        return [self.last(older), older][: self.head.states]

    def forward(self, features: Tensor, targets: Tensor | None = None, **options: Any) -> Any:
        return self.head(self.states(features), targets, **options)


def batch(processes: int) -> dict[str, Tensor]:
    """The global batch: one shape [BATCH, TIME] a process, with ignored tokens and weights."""
    draw = torch.Generator().manual_seed(7)
    shape = (BATCH * processes, TIME)
    targets = torch.randint(V, shape, generator=draw)
    targets[0, 1] = targets[2, 0] = -100
    return {
        "features": torch.randn(*shape, 7, generator=draw, dtype=torch.float64),
        "targets": targets,
        "token_weight": torch.rand(shape, generator=draw, dtype=torch.float64) + 0.1,
    }


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By the names of the plain model."""
    named = (
        (name.replace("head.inner.", "head."), parameter) for name, parameter in model.named_parameters()
    )
    return {name: parameter.grad.clone() for name, parameter in named}


def train(model: nn.Module, data: dict[str, Tensor], plain: nn.Module) -> dict[str, Any]:
    """The gradients of a few losses, then some steps; `plain` is the model without its wrapper."""
    out: dict[str, Any] = {}
    loss = model(**data, reduction="none")
    assert loss.shape == data["targets"].shape
    loss.square().mean().backward()
    out["none"] = loss.detach()
    out["none gradients"] = gradients_of(plain)
    plain.zero_grad()
    loss = model(data["features"], data["targets"], reduction="sum")
    loss.backward()
    out["sum"] = loss.detach()
    out["sum gradients"] = gradients_of(plain)
    plain.zero_grad()
    loss, log_prior = model(data["features"], data["targets"], return_prior=True)
    if log_prior is not None:
        loss = loss + log_prior.exp().sum(0).var()
    loss.backward()
    out["prior"] = log_prior if log_prior is None else log_prior.detach()
    out["balanced gradients"] = gradients_of(plain)
    optimiser = torch.optim.SGD(plain.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimiser.zero_grad()
        loss = model(**data)
        loss.backward()
        if step == 0:
            out["mean gradients"] = gradients_of(plain)
        out["norm"] = clip_gradients(plain, 0.1)
        out["clipped"] = gradients_of(plain)
        optimiser.step()
        losses.append(loss.detach())
    out["losses"] = torch.stack(losses)
    _, stats = model(data["features"], data["targets"], return_stats=True)
    out["stats"] = tuple(stats)
    out["log_probs"] = model(data["features"]).detach()
    return out


# What a process does.


def solve(name: str, rank: int, size: int, group: Any) -> dict[str, Any]:
    plain = Model(name, seed=rank)
    plain.head = shard(plain.head, group)
    ignored = ignored_parameters(plain)
    model = DistributedDataParallel(plain, process_group=group)
    own = {key: value[rank * BATCH : (rank + 1) * BATCH] for key, value in batch(size).items()}
    out = train(model, own, plain)
    head = plain.head
    out["ignored"] = ignored
    out["first"] = {key: value.detach().clone() for key, value in plain.first.state_dict().items()}
    out["state"] = full_state(head)
    out["shard"] = (head.start, head.stop, tuple(head.decoder.weight.shape))
    # Back through a plain head, and into a head that held something else.
    whole = unshard(head)
    out["whole log_probs"] = whole(plain.states(own["features"])).detach()
    other = Model(name, seed=5)
    other.head = shard(other.head, group)
    load_full_state(other.head, out["state"])
    out["loaded"] = full_state(other.head)
    values, ids = head.top(plain.states(own["features"]), 2)
    out["top"] = (values, ids)
    out["sample"] = head.sample(plain.states(own["features"]))
    return out


def drop(rank: int, group: Any) -> dict[str, Any]:
    """A head with dropout, on processes in different random states."""
    model = Model("mos", seed=0, dropout=0.5)
    model.head = shard(model.head, group)
    torch.manual_seed(100 + rank)
    own = {key: value[rank * BATCH : (rank + 1) * BATCH] for key, value in batch(2).items()}
    losses = []
    for _ in range(2):
        model.zero_grad()
        loss = model(**own)
        loss.backward()
        losses.append(loss.detach())
    after = torch.rand(3)
    torch.manual_seed(100 + rank)
    for _ in range(2):
        torch.randint(1 << 62, ())
    small = {key: value for key, value in gradients_of(model).items() if key.startswith("head.contexts")}
    model.eval()
    quiet = torch.stack([model(**own).detach() for _ in range(2)])
    return {"losses": losses, "after": after, "expected": torch.rand(3), "small": small, "quiet": quiet}


def clip_alone(rank: int, group: Any) -> dict[str, Tensor]:
    """Clip where the first process alone has gradients: of all parameters, then of W."""
    model = Model("softmax", seed=0)
    model.head = shard(model.head, group)
    norms = {}
    for name, some in (("all", model.parameters()), ("matrix", model.head.decoder.parameters())):
        model.zero_grad(set_to_none=True)
        for parameter in some if rank == 0 else ():
            parameter.grad = torch.ones_like(parameter)
        norms[name] = clip_gradients(model, 0.5)
        norms[f"{name} after"] = clip_gradients(model, 0.5)
    return norms


def refuse(rank: int, group: Any) -> list[str]:
    """The messages that wrong use gives, on every process alike."""
    told = []
    model = Model("softmax", seed=0)
    model.head = shard(model.head, group)
    data = batch(2)
    attempts = [
        lambda: model(data["features"][: 1 + rank], data["targets"][: 1 + rank]),
        lambda: model(data["features"], data["targets"], token_weight=data["token_weight"] if rank else None),
        lambda: model(data["features"], torch.full_like(data["targets"], V + rank)),
        lambda: shard(build("softmax", hidden=H, vocab=1), group),
    ]
    for attempt in attempts:
        with pytest.raises(FullrankError) as error:
            attempt()
        told.append(str(error.value))
    return told


def work(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=PROCESSES,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    groups = {3: None, 2: distributed.new_group([0, 1])}
    for size, group in groups.items():
        if rank >= size:
            continue
        done: dict[str, Any] = {
            name: solve(name, rank, size, group) for name, processes in CASES if processes == size
        }
        if size == 2:
            done["dropout"] = drop(rank, group)
            done["clip_alone"] = clip_alone(rank, group)
            done["refused"] = refuse(rank, group)
        torch.save(done, folder / f"done-{size}-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def launch(folder: Path) -> None:
    """Run the processes; one that fails ends all, and so does a hang."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", __file__, str(folder)]
    with (folder / "log.txt").open("w") as log:
        parent = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        code = parent.wait(SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    assert code == 0, f"exit code {code}\n{(folder / 'log.txt').read_text()}"


def main(folder: Path) -> int:
    """Fork the processes from one that has torch in memory: importing it takes longer than all the work."""
    importlib.import_module("torch._dynamo")  # which DistributedDataParallel imports
    # Nothing here has started a thread that a fork could lose.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work, args=(folder, rank)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    while None in (codes := [process.exitcode for process in processes]):
        if any(codes):
            break
        time.sleep(0.02)
    return int(codes != [0] * PROCESSES)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    """For each number of processes, what each of them found."""
    folder = tmp_path_factory.mktemp("processes")
    launch(folder)
    return {size: [torch.load(folder / f"done-{size}-{rank}.pt") for rank in range(size)] for size in (2, 3)}


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], tuple[dict[str, Any], Model]]:
    """The same training on one process."""
    trained = {}
    for name, size in CASES:
        model = Model(name, seed=0)
        trained[name, size] = train(model, batch(size), model), model
    return trained


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


every_case = pytest.mark.parametrize(("name", "size"), CASES)


@every_case
@several
def test_losses_are_those_of_the_global_batch(done, alone, name, size):
    parts, (want, _) = [part[name] for part in done[size]], alone[name, size]
    for part in parts:
        same(part["losses"], want["losses"])
        same(part["sum"], want["sum"])
    same(torch.cat([part["none"] for part in parts]), want["none"])
    assert want["losses"][-1] < want["losses"][0]


@every_case
@pytest.mark.parametrize("kind", ["mean", "sum", "none", "balanced", "clipped"])
@several
def test_gradients_are_those_of_one_process(done, alone, name, size, kind):
    parts, (want, _) = [part[name] for part in done[size]], alone[name, size]
    key = kind if kind == "clipped" else f"{kind} gradients"
    for parameter, gradient in want[key].items():
        each = [part[key][parameter] for part in parts]
        if parameter.startswith("head.decoder."):
            same(torch.cat(each), gradient)
        else:
            for one in each:
                same(one, gradient)


@every_case
@several
def test_the_prior_is_that_of_the_tokens_of_all_processes(done, alone, name, size):
    want, model = alone[name, size]
    assert (want["prior"] is not None) is model.head.mixture
    for part in done[size]:
        if want["prior"] is None:
            assert part[name]["prior"] is None
        else:
            same(part[name]["prior"], want["prior"])


@every_case
@several
def test_weights_after_some_steps_are_those_of_one_process(done, alone, name, size):
    _, model = alone[name, size]
    for part in done[size]:
        assert part[name]["state"].keys() == model.head.state_dict().keys()
        for key, value in model.head.state_dict().items():
            same(part[name]["state"][key], value)
            assert torch.equal(part[name]["loaded"][key], part[name]["state"][key])
        for key, value in model.first.state_dict().items():
            same(part[name]["first"][key], value)


@every_case
@several
def test_outputs_of_the_own_tokens(done, alone, name, size):
    parts, (want, _) = [part[name] for part in done[size]], alone[name, size]
    same(torch.cat([part["log_probs"] for part in parts]), want["log_probs"])
    for part in parts:
        same(part["whole log_probs"], part["log_probs"])
        values, ids = part["log_probs"].topk(2, dim=-1)
        same(part["top"][0], values)
        assert torch.equal(part["top"][1], ids)
        assert part["sample"].shape == (BATCH, TIME)
    for index, column in enumerate(want["stats"]):
        same(torch.cat([part["stats"][index] for part in parts]), column)


@every_case
@several
def test_the_norm_that_clips_takes_in_all_rows_of_w(done, alone, name, size):
    (want, _), steps = alone[name, size], [part[name]["norm"] for part in done[size]]
    assert want["norm"] > 0.1
    for norm in steps:
        same(norm, want["norm"])
        assert torch.equal(norm, steps[0])


@several
def test_a_process_without_gradients_takes_part_in_clipping(done):
    first, second = (part["clip_alone"] for part in done[2])
    # Six of the eleven rows of W and of its bias.
    matrix = torch.tensor(6.0 * (D + 1), dtype=torch.float64).sqrt()
    same(first["matrix"], matrix)
    assert first["all"] > matrix
    for name in ("matrix", "all"):
        # The first process's rows of W count on both; all else counts where it is.
        same(second[name], matrix)
    assert float(first["all after"]) == pytest.approx(0.5, rel=1e-5)


def test_clipping_agrees_with_torch():
    one, other = Model("mos", seed=0), Model("mos", seed=0)
    for model in (one, other):
        model(**batch(2)).backward()
    same(clip_gradients(one, 0.1), torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1))
    for name, gradient in gradients_of(one).items():
        same(gradient, gradients_of(other)[name])


@several
def test_shards_are_uneven_and_hidden_from_data_parallel(done):
    assert [part["mos"]["shard"] for part in done[3]] == [(0, 4, (4, D)), (4, 8, (4, D)), (8, 11, (3, D))]
    assert done[3][0]["mos"]["ignored"] == ["head.decoder.weight", "head.decoder.bias"]
    assert done[2][0]["moc"]["ignored"] == ["head.decoder.weight"]


@several
def test_dropout_drops_the_same_entries_everywhere(done):
    one, other = (part["dropout"] for part in done[2])
    for mine, theirs in zip(one["losses"], other["losses"], strict=True):
        assert torch.equal(mine, theirs)
    assert one["small"].keys() == other["small"].keys() != set()
    for name, gradient in one["small"].items():
        assert torch.equal(gradient, other["small"][name])
    # Each call draws anew, the process's own random state goes on as it was, and evaluation draws nothing.
    assert one["losses"][0] != one["losses"][1]
    for part in (one, other):
        assert torch.equal(part["after"], part["expected"])
        assert torch.equal(part["quiet"][0], part["quiet"][1])
    assert not torch.equal(one["after"], other["after"])


@several
def test_wrong_use_raises_on_every_process(done):
    one, other = (part["refused"] for part in done[2])
    shapes, weights, target, vocabulary = one
    assert "[[1, 3], [2, 3]]" in shapes
    assert "expected the same on all" in shapes
    assert "with token weights: [False, True]" in weights
    assert f"target {V} lies in 0 shards" in target
    assert "V=1 vocabulary entries cannot be split over 2 processes" in vocabulary
    assert one == other


# On one process.


@pytest.mark.parametrize("name", HEADS)
def test_a_lone_process_gives_the_plain_result(alone, name):
    want, model = alone[name, 2]
    lone = Model(name, seed=0)
    lone.head = shard(lone.head)
    assert isinstance(lone.head, VocabParallelHead)
    got = train(lone, batch(2), lone)
    for key in ("losses", "none", "sum", "log_probs"):
        same(got[key], want[key])
    for key, value in model.head.state_dict().items():
        same(full_state(lone.head)[key], value)


def test_autocast_reaches_the_split_head_as_it_does_the_plain_one():
    plain, lone = (Model("mos", seed=0).float() for _ in range(2))
    lone.head = shard(lone.head)
    features, targets = batch(2)["features"].float(), batch(2)["targets"]
    for model in (plain, lone):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(features, targets)
        loss.backward()
        assert loss.dtype == torch.float32
    for name, gradient in gradients_of(plain).items():
        assert gradient.norm() > 0
        torch.testing.assert_close(gradients_of(lone)[name], gradient, rtol=0.02, atol=0.003)


def test_clipping_without_gradients_still_joins_the_sum_of_all_processes(monkeypatch):
    """The other processes would wait for it for ever."""
    sums = []
    monkeypatch.setattr(distributed, "all_reduce", lambda total, *_, **__: sums.append(total.clone()))
    model = Model("mos", seed=0)
    model.head = shard(model.head)
    model.head.processes = 2
    assert clip_gradients(model, 0.1) == 0.0
    assert sums == [torch.zeros((), dtype=torch.float64)]


def test_a_tied_head_is_refused():
    model = Model("softmax", seed=0)
    model.head = shard(model.head)
    with pytest.raises(FullrankError, match=r"tied.*--set head\.tie=false"):
        model.head.tie(nn.Embedding(V, D))
    model.tied = True
    with pytest.raises(FullrankError, match=r"tied.*--set head\.tie=false"):
        ignored_parameters(model)


@pytest.mark.parametrize("name", ["mixtape", "facets", "pointer"])
def test_a_head_beyond_one_matrix_is_refused(name):
    with pytest.raises(FullrankError, match=rf"{name} does not go through one matrix alone.*softmax"):
        shard(build(name, hidden=H, vocab=V))


def test_a_state_that_does_not_fit_changes_nothing():
    head = shard(Model("mos", seed=0).head)
    before = full_state(head)
    other = Model("softmax", seed=1).head.state_dict()
    with pytest.raises(FullrankError, match=r"lacks \['contexts.*same kind and options"):
        load_full_state(head, other)
    wrong = {**before, "decoder.weight": torch.zeros(V + 1, D, dtype=torch.float64)}
    with pytest.raises(FullrankError, match=r"decoder.weight has shape \[12, 4\].*expected \[11, 4\]"):
        load_full_state(head, wrong)
    for name, value in full_state(head).items():
        assert torch.equal(value, before[name])


def test_frozen_rows_stay_frozen():
    head = Model("mos", seed=0).head
    head.decoder.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in shard(head).decoder.parameters())


if __name__ == "__main__":
    # Not through an orderly exit: a process that waits for others would be waited for.
    code = main(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)
