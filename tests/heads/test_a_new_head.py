"""Adding a head is its file, its test and its row in docs/heads.md: one that is written here (`a_new_head`)
trains, upgrades a model, is diagnosed, splits over two processes and is saved, without a line anywhere else.

Run as a script this file starts two gloo processes.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor

from fullrank import results
from fullrank.errors import FullrankError
from fullrank.heads import HEADS, RowHead, build
from fullrank.heads.vocab_parallel import full_state, shard

NAME = "scaled_copies"
H, V, D = 6, 11, 4
SMALL = (
    "body.hidden=8", "body.last=6", "head.width=6", "head.components=2", "batch=4", "length=5", "steps=6",
    "evaluate_every=3", "evaluate_batch=2", "optimiser.lr=0.02", "head.balance=0.1", "optimiser.lr_head=2",
)  # fmt: skip


def define() -> type[RowHead]:
    """Run the file that defines the head."""
    known = set(HEADS)
    spec = importlib.util.spec_from_file_location("a_new_head", Path(__file__).with_name("a_new_head.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(HEADS) - known == {NAME}
    return module.ScaledCopies


@pytest.fixture(scope="module", autouse=True)
def defined() -> Iterator[type[RowHead]]:
    """Known to all that build heads, in this file and no longer."""
    yield define()
    del HEADS[NAME]


def warmed(seed: int = 0) -> RowHead:
    torch.manual_seed(seed)
    head = build(NAME, hidden=H, vocab=V, width=D, bias=True).double()
    assert isinstance(head, RowHead)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return head


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(4, 3, H, generator=draw, dtype=torch.float64), torch.randint(V, (4, 3), generator=draw)


def test_its_equation() -> None:
    head = warmed()
    state = batch()[0][0, 0]
    prior = torch.softmax(head.gate.weight @ state, 0)
    row = head.project.weight @ state
    components = [
        torch.softmax(head.log_scale[k].exp() * head.decoder.weight @ row + head.decoder.bias, 0)
        for k in range(3)
    ]
    expected = sum(prior[k] * component for k, component in enumerate(components))
    torch.testing.assert_close(head(state[None])[0].exp(), expected)
    record = head.describe(state[None])
    torch.testing.assert_close(torch.tensor(record.shares), prior.float())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of `fullrank train` with it, balanced and with a rate of its own."""
    from fullrank.cli.main import run as command

    place = tmp_path_factory.mktemp("train")
    draw = torch.Generator().manual_seed(0)
    for split, count in (("train", 20), ("valid", 4), ("test", 40)):
        rows = torch.randint(12, (count, 9), generator=draw).tolist()
        lines = [" ".join(f"w{word}" for word in row) for row in rows]
        (place / f"{split}.txt").write_text("\n".join(lines) + "\n")
    settings = [word for setting in SMALL for word in ("--set", setting)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLRANK_CACHE", str(place / "cache"))
        patch.setenv("FULLRANK_DEBUG", "1")
        arguments = ["train", "awd-lstm", "--data", str(place), "--head", NAME, "--out", str(place / "run")]
        assert command([*arguments, "--device", "cpu", "--track", "none", *settings]) == 0
        yield place / "run"


def test_it_trains(run: Path) -> None:
    record, _ = results.load(run / "results.json")
    assert isinstance(record, results.Training)
    first, last, _ = record.evaluations
    assert last.loss < first.loss
    shares = [last.monitors[f"component_shares/{k}"] for k in range(2)]
    assert sum(shares) == pytest.approx(1.0)
    assert last.monitors["component_divergence"] > 0, "its scales have left the start"


def test_a_run_with_it_is_diagnosed(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("altair", reason="the command writes a page")
    from fullrank.cli.main import run as command

    text = str(run.parent / "test.txt")
    assert command(["diagnose", str(run), "--text", text, "--out", str(tmp_path), "--quick"]) == 0
    record, _ = results.load(tmp_path / "results.json")
    assert isinstance(record, results.Diagnosis)
    assert record.loss is not None


def test_question_six_fits_it() -> None:
    """On a text of two temperatures, which no softmax of the width says."""
    from fullrank.diagnose.questions.better_head import better_head, components_for
    from fullrank.fit import comparison
    from fullrank.fit.states import Part, Parts
    from fullrank.models.output_layer import OutputLayer

    draw = torch.Generator().manual_seed(0)
    weight = 6.0 * torch.randn(32, D, generator=draw)

    def part(windows: int) -> Part:
        hidden = torch.randn(windows, 20, D, generator=draw)
        sharp = torch.where(torch.rand(windows, 20, 1, generator=draw) < 0.5, 1.0, 0.0)
        shares = torch.softmax((sharp * hidden @ weight.T).flatten(0, 1), 1)
        targets = torch.multinomial(shares, 1, generator=draw).view(windows, 20)
        blocks = torch.arange(windows)[:, None].expand(windows, 20)
        return Part(states=(hidden,), targets=targets, ids=targets, blocks=blocks)

    from fullrank.fit.controls import plain_layer

    assert NAME in comparison.candidates()
    found = better_head(
        plain_layer(OutputLayer(weight=weight, tokens=32)),
        Parts(fit=part(75), choose=part(15), held_out=part(30)),
        heads=(NAME,), measure_power=False,
        settings=comparison.Settings(seeds=1, rates=(0.5,), epochs=8),
    )  # fmt: skip
    fit = next(one for one in found.fits if one.head == NAME)
    assert found.split is not None
    assert fit.components == components_for(found.split.sure)
    assert found.best == NAME
    assert fit.steps > 0
    assert fit.loss.value < found.original.value - 0.3
    assert found.best_gain.low > 0.02


def tiny() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
    return model.eval()


def test_it_upgrades_a_model_and_is_saved(tmp_path: Path) -> None:
    from fullrank.fit.comparison import candidates
    from fullrank.models import FullrankForCausalLM
    from fullrank.upgrade import upgrade

    original, ids = tiny(), torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = original(input_ids=ids).logits.log_softmax(-1)
        assert expected.exp().max() > 0.2
        model = upgrade(original, NAME, components=4)
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=2e-5, rtol=0)
    assert model.lm_head.name == NAME
    assert NAME in candidates()
    optimiser = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimiser.step()
    model.save_pretrained(tmp_path)
    again = FullrankForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        trained = model(input_ids=ids).logits
        assert not torch.allclose(trained, expected, atol=1e-3)
        torch.testing.assert_close(again(input_ids=ids).logits, trained, atol=1e-6, rtol=0)


def test_it_is_fitted_on_frozen_states() -> None:
    """The training of an upgrade asks for its pace and draws its gates anew."""
    head = warmed()
    paces = {name: head.pace(name, parameter, (2.0,)) for name, parameter in head.own_parameters()}
    assert paces == {"log_scale": 2.0 / D, "project.weight": 1 / H, "gate.weight": 1 / H}


@pytest.mark.slow(reason="two processes for one head more; test_vocab_parallel.py splits the others")
def test_it_splits_over_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", __file__, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    head, (states, targets) = warmed(), batch()
    loss, log_prior = head(states, targets, return_prior=True)
    (loss + 0.1 * log_prior.exp().sum(0).var()).backward()
    for rank in range(2):
        part = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(part["loss"], loss.detach())
        torch.testing.assert_close(part["log_prior"], log_prior.detach())
        for name, parameter in head.own_parameters():
            torch.testing.assert_close(part["gradients"][name], parameter.grad)
        assert part["state"].keys() == head.state_dict().keys()
    rows = [torch.load(tmp_path / f"{rank}.pt")["rows"] for rank in range(2)]
    torch.testing.assert_close(torch.cat(rows), head.decoder.weight.grad)


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(FullrankError, match=r"Other has the name 'mos'.*mos\.MixtureOfSoftmaxes already"):
        type("Other", (RowHead,), {"name": "mos"})
    assert HEADS["mos"].__module__ == "fullrank.heads.mos"


def test_the_same_class_defined_again_takes_its_place(defined: type[RowHead]) -> None:
    again = type("ScaledCopies", (RowHead,), {"name": NAME, "__module__": defined.__module__})
    assert HEADS[NAME] is again
    HEADS[NAME] = defined


def work(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    head = shard(warmed(seed=rank))
    states, targets = (tensor[2 * rank : 2 * rank + 2] for tensor in batch())
    loss, log_prior = head(states, targets, return_prior=True)
    (loss + 0.1 * log_prior.exp().sum(0).var()).backward()
    gradients = {name.removeprefix("inner."): one.grad for name, one in head.own_parameters()}
    done = {
        "loss": loss.detach(), "log_prior": log_prior.detach(), "gradients": gradients,
        "rows": head.decoder.weight.grad, "state": full_state(head),
    }  # fmt: skip
    torch.save(done, folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def main(folder: Path) -> int:
    """Fork the processes from one that has torch in memory."""
    define()
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work, args=(folder, rank)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
