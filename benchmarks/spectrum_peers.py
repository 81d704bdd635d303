"""The spectrum of an output matrix: `fullrank.diagnose` beside plain SVDs and WeightWatcher, in one run.

    python -m benchmarks.spectrum_peers

Every one gets the same matrix W [V, D] in fp32 and is timed to its figures: all singular values, the stable
rank Σσ² / σ₁² and, but for WeightWatcher, the effective rank exp H(σ / Σσ). WeightWatcher's `analyze` also
fits a power law to the eigenvalues, so its time is that of its whole answer. It leaves out layers of more
than 50,000 rows without a word: `weightwatcher_limit` says how many it reports of a model with one layer of
50,304 rows, GPT-2's padded vocabulary.

The matrix is random with singular values that fall as a power law, or a model's output matrix in safetensors.
WeightWatcher is optional: without it, its line is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from fullrank.diagnose.questions.spectrum import spectrum
from fullrank.errors import FullrankError
from fullrank.results import provenance, write_whole

NAMES = ("lm_head.weight", "model.embed_tokens.weight")
INSTALL = (
    "weightwatcher is not installed, so its line is left out. It needs no other torch: pip install --no-deps "
    "weightwatcher pandas matplotlib matplotlib-inline powerlaw scikit-learn tqdm joblib loky cloudpickle "
    "threadpoolctl narwhals mpmath contourpy cycler fonttools kiwisolver pyparsing pillow python-dateutil "
    "six pytz traitlets"
)
ABOVE_THE_LIMIT = 50_304


@dataclass(frozen=True, kw_only=True)
class Config:
    """Time the spectrum of an output matrix beside its peers."""

    vocabulary: int = 49_152
    width: int = 576
    decay: float = 0.5
    """Singular value n of the random matrix falls as n to the power of minus this."""
    model: Path | None = None
    """Directory of safetensors to take the output matrix from, instead of a random one."""
    repeats: int = 3
    """Runs of each; the fastest counts."""
    seed: int = 0
    out: Path = Path("results/spectrum_peers.json")
    """Where the figures go."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way to the figures."""

    name: str
    seconds: float
    stable_rank: float
    effective_rank: float | None


def random_matrix(vocabulary: int, width: int, decay: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(vocabulary, width, generator=generator)
    rotation = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    return rows * torch.arange(1, width + 1) ** -decay @ rotation


def model_matrix(directory: Path) -> torch.Tensor:
    from safetensors import safe_open

    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found.update({name: tensors.get_tensor(name) for name in NAMES if name in tensors.keys()})  # noqa: SIM118
    for name in NAMES:
        if name in found:
            return found[name].float()
    raise FullrankError(
        f"{directory} has no safetensors with {' or '.join(NAMES)}: pass the directory of a causal model"
    )


def figures(sigma: torch.Tensor) -> tuple[float, float]:
    """Stable and effective rank."""
    squares, shares = sigma.double().square(), sigma.double() / sigma.double().sum()
    return float(squares.sum() / squares[0]), math.exp(-float(torch.special.xlogy(shares, shares).sum()))


def ours(weight: torch.Tensor) -> tuple[float, float | None]:
    found = spectrum(weight)
    return found.stable_rank, found.effective_rank


def weight_watcher_table(weight: torch.Tensor) -> Any:
    """What `analyze` returns for a model of this one layer, without what it prints and warns of."""
    weightwatcher = importlib.import_module("weightwatcher")  # here, because it is optional
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return weightwatcher.WeightWatcher(model=torch.nn.Sequential(layer)).analyze()


def weight_watcher(weight: torch.Tensor) -> tuple[float, float | None]:
    table = weight_watcher_table(weight)
    return float(table["stable_rank"][0]) if len(table) else math.nan, None


def has_weight_watcher() -> bool:
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            importlib.import_module("weightwatcher")
    except ImportError as error:
        print(f"{INSTALL} ({error})")
        return False
    return True


def measure(
    name: str,
    answer: Callable[[torch.Tensor], tuple[float, float | None]],
    weight: torch.Tensor,
    repeats: int,
) -> Measured:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        stable, effective = answer(weight)
        seconds.append(time.perf_counter() - started)
    return Measured(name=name, seconds=min(seconds), stable_rank=stable, effective_rank=effective)


def main(config: Config) -> None:
    load = os.getloadavg()[0]
    if config.model is None:
        weight = random_matrix(config.vocabulary, config.width, config.decay, config.seed)
    else:
        weight = model_matrix(config.model)
    ways: list[tuple[str, Callable[[torch.Tensor], tuple[float, float | None]]]] = [
        ("fullrank", ours),
        ("torch svdvals fp32", lambda matrix: figures(torch.linalg.svdvals(matrix))),
        ("torch svdvals fp64", lambda matrix: figures(torch.linalg.svdvals(matrix.double()))),
    ]
    layers_above_limit = None
    if has_weight_watcher():
        ways.append(("weightwatcher", weight_watcher))
        narrow = random_matrix(ABOVE_THE_LIMIT, 64, config.decay, config.seed)
        layers_above_limit = len(weight_watcher_table(narrow))
    found = [measure(name, answer, weight, config.repeats) for name, answer in ways]
    own, truth = found[0], found[2]

    table = Table(title=f"Spectrum of W {list(weight.shape)}")
    for header in ("", "seconds", "over fullrank", "stable rank", "its error", "effective rank", "its error"):
        table.add_column(header, justify="left" if header == "" else "right")
    lines = []
    for one in found:
        line = dataclasses.asdict(one) | {"over_fullrank": one.seconds / own.seconds}
        line["stable_rank_error"] = abs(one.stable_rank / truth.stable_rank - 1)
        shown = ["", ""]
        if one.effective_rank is not None and truth.effective_rank is not None:
            line["effective_rank_error"] = abs(one.effective_rank / truth.effective_rank - 1)
            shown = [f"{one.effective_rank:.4f}", f"{line['effective_rank_error']:.1e}"]
        lines.append(line)
        ratio, error = f"{line['over_fullrank']:.1f}", f"{line['stable_rank_error']:.1e}"
        table.add_row(one.name, f"{one.seconds:.2f}", ratio, f"{one.stable_rank:.4f}", error, *shown)
    Console().print(table)
    if layers_above_limit is not None:
        print(f"weightwatcher reports {layers_above_limit} of 1 layer of {ABOVE_THE_LIMIT} rows")
    agree = max(lines[0]["stable_rank_error"], lines[0]["effective_rank_error"]) < 1e-6
    print(f"fullrank and fp64 singular values {'agree' if agree else 'DISAGREE'} to 1e-6")
    document = {
        "kind": "spectrum_peers",
        "version": 1,
        "made": dataclasses.asdict(provenance(seed=config.seed, device="cpu")),
        "data": {
            "matrix": "random" if config.model is None else config.model.name,
            "shape": list(weight.shape),
            "decay": config.decay if config.model is None else None,
            "threads": torch.get_num_threads(),
            "load": round(load, 2),
            "ways": lines,
            "agree_to_1e-6": agree,
            "weightwatcher_limit": {"rows": ABOVE_THE_LIMIT, "layers_reported": layers_above_limit},
        },
    }
    write_whole(config.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
