"""The mixture loss against plain torch, torch.compile and torch's own linear_cross_entropy, in one run.

    python -m benchmarks.output_layer --device cpu
    python -m benchmarks.output_layer --device cuda [--only layer stages step decode] [--shapes 768x50304]
    python -m benchmarks.output_layer --device cuda --impl triton chunked

On CUDA this is `gpu_suite.py`: every peer, the stages of our pass, training steps and decoding. What follows
is the run on a CPU. Forward and backward of a mixture of K softmaxes, N tokens, width D, vocabulary V:

    fullrank     fullrank.mixture_nll
    eager        logits, log_softmax, logsumexp over the components, autograd
    compiled     torch.compile of the same (inductor)
    torch        F.linear_cross_entropy in chunks, -logsumexp_k (log prior_k - nll_k); torch >= 2.13
    products     the three bare matrix products, preallocated: what no exact loss goes under

Times are taken in rounds, every variant once a round, so that a busy machine slows all alike; the figures are
medians and quartiles. Peak memory is beyond inputs and gradients, each variant in a process of its own.
With --impl the named implementations are held against the bare products alone, on the shapes of `GPU_SHAPES`.
The bar, for the default shape in fp32 on a CPU: at most 0.9 of eager's time and a tenth of eager's memory.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import MIB, quartiles, seconds
from fullrank.ops import mixture_nll
from fullrank.results import provenance, write_whole

TIME_BAR, MEMORY_BAR = 0.9, 0.1
VARIANTS = ("fullrank", "eager", "compiled", "torch", "products")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the output layer."""

    N: int = 512
    """Tokens."""
    K: int = 4
    """Components."""
    D: int = 280
    """Width of a context vector."""
    V: int = 32768
    """Vocabulary."""


# Language models with mixtures and without: WikiText-2 with long and short batches, GPT-2's vocabulary.
GPU_SHAPES = (
    Shape(N=8192, K=10, D=280, V=33278),
    Shape(N=2800, K=10, D=280, V=33278),
    Shape(N=2800, K=1, D=400, V=33278),
    Shape(N=8192, K=4, D=768, V=50304),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Measure the output layer: this package against plain torch and its peers."""

    device: str = "cpu"
    """cpu or cuda."""
    shape: Shape = dataclasses.field(default_factory=Shape)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of rows and weight."""
    impl: tuple[Literal["auto", "triton", "chunked"], ...] = ()
    """Measure these implementations against the bare products alone, in bfloat16 on several shapes."""
    repeats: int = 7
    """Rounds; every variant runs once in each."""
    threads: int = 0
    """Threads of a CPU run; 0 leaves torch's choice."""
    seed: int = 0
    out: Path | None = None
    """Where the figures go; results/output_layer_<device>.json by default."""
    peak: str = ""
    """Measure the peak memory of this variant alone and print it: how the measurement calls itself."""
    only: tuple[Literal["layer", "stages", "step", "decode"], ...] = ()
    """On CUDA: run these parts alone; the file keeps the others."""
    shapes: tuple[str, ...] = ()
    """On CUDA: DxV, for instance 768x50304; by default those of `gpu_settings.py`."""
    without: tuple[str, ...] = ()
    """On CUDA: implementations to leave out, for instance cce."""
    bodies: tuple[Literal["compiled", "eager"], ...] = ("compiled", "eager")
    """On CUDA: of the model whose training steps are measured."""
    deadline: float = 540.0
    """On CUDA: seconds after which nothing more is started."""
    tiny: bool = False
    """Run all that CUDA runs with tiny sizes on any device, to see that it runs."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    rows: Tensor
    log_prior: Tensor
    weight: Tensor
    targets: Tensor

    def drop_gradients(self) -> None:
        for tensor in (self.rows, self.log_prior, self.weight):
            tensor.grad = None


def make_inputs(shape: Shape, config: Config) -> Inputs:
    draw = torch.Generator().manual_seed(config.seed)
    dtype = DTYPES[config.dtype]

    def leaf(values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(config.device, dtype).requires_grad_()

    return Inputs(
        rows=leaf(torch.randn(shape.N, shape.K, shape.D, generator=draw), dtype),
        log_prior=leaf(torch.randn(shape.N, shape.K, generator=draw).log_softmax(-1), torch.float32),
        weight=leaf(torch.randn(shape.V, shape.D, generator=draw).div_(shape.D**0.5), dtype),
        targets=torch.randint(shape.V, (shape.N,), generator=draw).to(config.device),
    )


def fullrank_loss(inputs: Inputs, impl: str = "auto") -> Tensor:
    return mixture_nll(inputs.rows, inputs.log_prior, inputs.weight, inputs.targets, impl=impl)


def eager_loss(rows: Tensor, log_prior: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    components = (rows @ weight.t()).float().log_softmax(-1)
    log_probs = torch.logsumexp(components + log_prior[:, :, None], dim=1)
    return functional.nll_loss(log_probs, targets)


def torch_loss(inputs: Inputs) -> Tensor:
    N, K, D = inputs.rows.shape
    nll = functional.linear_cross_entropy(
        inputs.rows.reshape(N * K, D), inputs.weight, inputs.targets.repeat_interleave(K), reduction="none",
        options=torch.nn.LinearCrossEntropyOptions(),
    )  # fmt: skip
    return -torch.logsumexp(inputs.log_prior - nll.view(N, K), dim=1).mean()


def products(inputs: Inputs) -> Callable[[], None]:
    """Scores, the rows' gradient and W's gradient, in chunks and with padded rows as the loss has them."""
    rows, weight = inputs.rows.detach().flatten(0, 1), inputs.weight.detach()
    V = weight.shape[0]
    chunk, stride = (512, V) if rows.device.type == "cpu" else (16384, -(-V // 64) * 64)
    scores = rows.new_empty(min(chunk, rows.shape[0]), stride)[:, :V]
    d_rows, d_weight = torch.empty_like(rows), torch.empty_like(weight)

    def run() -> None:
        for start in range(0, rows.shape[0], chunk):
            part = rows[start : start + chunk]
            buffer = torch.mm(part, weight.t(), out=scores[: part.shape[0]])
            torch.mm(buffer, weight, out=d_rows[start : start + chunk])
            d_weight.addmm_(buffer.t(), part, beta=0.0 if start == 0 else 1.0)

    return run


def make_step(variant: str, inputs: Inputs) -> Callable[[], None]:
    """One forward and backward pass; gradients are dropped first, as a training step does."""
    if variant == "products":
        return products(inputs)
    if variant == "torch" and not hasattr(functional, "linear_cross_entropy"):
        raise RuntimeError(f"absent from torch {torch.__version__}")
    tensors = (inputs.rows, inputs.log_prior, inputs.weight, inputs.targets)
    compiled = torch.compile(eager_loss) if variant == "compiled" else eager_loss
    losses: dict[str, Callable[[], Tensor]] = {
        "fullrank": lambda: fullrank_loss(inputs),
        "eager": lambda: eager_loss(*tensors),
        "compiled": lambda: compiled(*tensors),
        "torch": lambda: torch_loss(inputs),
    }
    loss = losses.get(variant) or (lambda: fullrank_loss(inputs, variant))

    def run() -> None:
        inputs.drop_gradients()
        loss().backward()

    return run


def measure_times(
    config: Config, variants: tuple[str, ...] = VARIANTS
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of every variant and round, and why a variant is missing."""
    inputs = make_inputs(config.shape, config)
    steps: dict[str, Callable[[], None]] = {}
    times: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    for variant in variants:
        try:
            step = make_step(variant, inputs)
            step()
        # A peer may fail in ways of its own (no compiler, no memory): that is a line of the table.
        except Exception as error:
            missing[variant] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        steps[variant], times[variant] = step, []
    gc.collect()
    gc.disable()
    for turn in range(config.repeats):
        names = list(steps)
        # Another order every round: nobody always comes after the same neighbour.
        for variant in names[turn % len(names) :] + names[: turn % len(names)]:
            times[variant].append(seconds(steps[variant], config.device))
    gc.enable()
    return times, missing


def resident() -> tuple[int, int]:
    """Bytes of memory now and at most since the last reset, from the kernel."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def peak_cpu(step: Callable[[], None], gradient_bytes: int) -> int:
    gc.collect()
    if Path("/proc/self/clear_refs").exists():
        now, _ = resident()
        # Resets the high-water mark, which the import of torch and the tiny warm-up may have raised.
        Path("/proc/self/clear_refs").write_text("5")
        step()
        return resident()[1] - now - gradient_bytes
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before - gradient_bytes


def measure_peak(config: Config) -> int:
    """Bytes beyond inputs and gradients that one step of `config.peak` needs, in this fresh process."""
    tiny = Shape(N=16, K=config.shape.K, D=config.shape.D, V=64)
    make_step(config.peak, make_inputs(tiny, config))()
    inputs = make_inputs(config.shape, config)
    step = make_step(config.peak, inputs)
    if config.peak == "compiled":
        # The compiler's own memory is spent once, not every step.
        step()
        inputs.drop_gradients()
    leaves = (inputs.rows, inputs.log_prior, inputs.weight)
    gradient_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    if config.device == "cpu":
        return peak_cpu(step, gradient_bytes)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - gradient_bytes


def peak_in_a_process(config: Config, variant: str) -> int | str:
    """Bytes, or why there is no figure."""
    options = {"device": config.device, "dtype": config.dtype, "threads": config.threads, "seed": config.seed}
    options |= {f"shape.{name}": size for name, size in dataclasses.asdict(config.shape).items()}
    command = [sys.executable, "-m", "benchmarks.output_layer", "--peak", variant]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    # Large blocks go back to the kernel when they are freed, so that the high-water mark is of live memory.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["killed"])[-1][:200]
    return int(done.stdout.split()[-1])


def summarise(
    times: dict[str, list[float]], missing: dict[str, str], peaks: dict[str, int | str]
) -> dict[str, dict[str, Any]]:
    """A line of figures for every variant; ratios are of the same round, so that load drops out."""
    lines: dict[str, dict[str, Any]] = {}
    eager_peak = peaks.get("eager")
    for variant in VARIANTS:
        if variant in missing:
            lines[variant] = {"missing": missing[variant]}
            continue
        ratios = [mine / plain for mine, plain in zip(times[variant], times["eager"], strict=True)]
        low, middle, high = quartiles(ratios)
        line: dict[str, Any] = {
            "seconds": statistics.median(times[variant]),
            "all_seconds": times[variant],
            "time_to_eager": middle,
            "time_to_eager_quartiles": [low, high],
        }
        peak = peaks.get(variant)
        if isinstance(peak, int):
            line["peak_bytes"] = peak
            if isinstance(eager_peak, int) and eager_peak > 0:
                line["memory_to_eager"] = peak / eager_peak
        elif peak is not None:
            line["peak_missing"] = peak
        lines[variant] = line
    return lines


def show(config: Config, lines: dict[str, dict[str, Any]]) -> None:
    shape = config.shape
    table = Table(
        title=f"Output layer, forward and backward: N={shape.N} K={shape.K} D={shape.D} V={shape.V} "
        f"{config.dtype} on {config.device}"
    )
    for column in ("variant", "seconds", "time / eager", "quartiles", "peak MiB", "memory / eager"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for variant, line in lines.items():
        if "missing" in line:
            table.add_row(variant, "-", "-", line["missing"], "-", "-")
            continue
        low, high = line["time_to_eager_quartiles"]
        peak = f"{line['peak_bytes'] / MIB:.1f}" if "peak_bytes" in line else "-"
        memory = f"{line['memory_to_eager']:.3f}" if "memory_to_eager" in line else "-"
        table.add_row(
            variant,
            f"{line['seconds']:.3f}",
            f"{line['time_to_eager']:.3f}",
            f"{low:.3f} to {high:.3f}",
            peak,
            memory,
        )
    Console(width=max(100, Console().width)).print(table)


def compare_implementations(config: Config) -> None:
    """A table of the implementations asked for: milliseconds and their ratio to three bare products."""
    table = Table(title=f"Forward and backward in bfloat16 on {config.device}, against three bare products")
    for column in ("N", "K", "D", "V", "variant", "milliseconds", "time / products", "quartiles", "peak MiB"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for shape in GPU_SHAPES:
        here = dataclasses.replace(config, shape=shape, dtype="bfloat16", impl=())
        times, missing = measure_times(here, ("products", *config.impl))
        sizes = [str(size) for size in dataclasses.astuple(shape)]
        for variant, each in times.items():
            pairs = zip(each, times["products"], strict=True)
            low, middle, high = quartiles([mine / bare for mine, bare in pairs])
            peak = "-" if variant == "products" else peak_in_a_process(here, variant)
            table.add_row(
                *sizes, variant, f"{1e3 * statistics.median(each):.3f}", f"{middle:.3f}",
                f"{low:.3f} to {high:.3f}", f"{peak / MIB:.0f}" if isinstance(peak, int) else peak,
            )  # fmt: skip
        for variant, why in missing.items():
            table.add_row(*sizes, variant, "-", "-", why, "-")
    Console(width=max(120, Console().width)).print(table)


def run_on_cuda(config: Config) -> int:
    # Not before it is asked for: a CPU run needs none of it.
    from benchmarks import gpu_settings, gpu_suite, gpu_table

    only = config.only or gpu_settings.PARTS
    if config.tiny:
        out = config.out or Path("runs") / "output_layer_tiny.json"
        settings = gpu_settings.tiny(out=out, device=config.device, only=only, compiler="eager")
    elif not torch.cuda.is_available():
        raise SystemExit(
            "--device cuda needs a CUDA device, and torch sees none: run it on a machine with one"
        )
    else:
        settings = gpu_settings.Settings(
            device=config.device, out=config.out or Path("results") / "output_layer_cuda.json", only=only,
            shapes=gpu_settings.parse_shapes(config.shapes), repeats=config.repeats, without=config.without,
            deadline=config.deadline, seed=config.seed, bodies=config.bodies,
        )  # fmt: skip
    document = gpu_suite.run_suite(settings)
    shown = f"{document['device']}, {settings.out}\n\n{gpu_table.tables(document)}"
    write_whole(settings.out.with_suffix(".txt"), shown + "\n")
    print(f"\n{shown}")
    return 0


def run(config: Config) -> int:
    if config.threads:
        torch.set_num_threads(config.threads)
    # torch tells of slow bf16 and of its own fallbacks; the figures show them.
    warnings.simplefilter("ignore")
    if config.impl and not config.peak:
        compare_implementations(config)
        return 0
    if config.peak:
        print(measure_peak(config))
        return 0
    if config.tiny or config.device == "cuda":
        return run_on_cuda(config)
    times, missing = measure_times(config)
    peaks = {variant: peak_in_a_process(config, variant) for variant in times if variant != "products"}
    lines = summarise(times, missing, peaks)
    show(config, lines)
    mine = lines["fullrank"]
    met = mine["time_to_eager"] <= TIME_BAR and mine.get("memory_to_eager", float("inf")) <= MEMORY_BAR
    barred = config.device == "cpu" and config.shape == Shape() and config.dtype == "float32"
    console = Console()
    if barred:
        word = "met" if met else "not met"
        console.print(f"bar {word}: at most {TIME_BAR} of eager's time and {MEMORY_BAR} of its memory")
    data = {
        "device": config.device,
        "dtype": config.dtype,
        "shape": dataclasses.asdict(config.shape),
        "threads": torch.get_num_threads(),
        "repeats": config.repeats,
        "variants": lines,
        "bar": {"time_to_eager": TIME_BAR, "memory_to_eager": MEMORY_BAR, "met": met} if barred else None,
    }
    device = torch.cuda.get_device_name() if config.device == "cuda" else config.device
    made = dataclasses.asdict(provenance(seed=config.seed, device=device))
    document = {"kind": "output_layer", "version": 1, "made": made, "data": data}
    path = config.out or Path("results") / f"output_layer_{config.device}.json"
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    console.print(f"wrote {path}")
    return 0 if met or not barred else 1


if __name__ == "__main__":
    sys.exit(run(tyro.cli(Config)))
