"""Log-probabilities at ids, entropy and divergences against their materialised versions, in one run.

    python -m benchmarks.distil --device cpu
    python -m benchmarks.distil --device cuda

Forward and backward, gradients of rows, prior and W, for a softmax and for a mixture of K:

    ids          log-probabilities at M ids a token, weighed unevenly: a policy gradient's
    entropy      the mean over tokens
    forward      KL(teacher || student), the teacher given as states and matrix
    reverse      KL(student || teacher)
    jensen_shannon
    top          KL to a teacher of which M tokens are known, the rest lumped

    fullrank       fullrank.ops.token_logprobs, entropy, divergence
    materialised   log_softmax of all N x V scores (logsumexp over the components of K), then autograd
    products       the bare matrix products of the output, preallocated: 4 of the student for ids and top, 3
                   for the others, and 1 of the teacher where there is one

Times are taken in rounds, every variant once a round; the figures are medians. Extra memory is the most that
is allocated during a call beyond what was before it, less the gradients. The difference is the larger of the
relative differences of the gradients of rows and W: on CUDA both are rounded. Both are measured on a CPU with
more tokens of a smaller width (`MEMORY_TOKENS`, `MEMORY_WIDTH`): products of many wide ones would take
minutes. The bar is 1.15 of an output's own products.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import MIB, Step, in_rounds, peak_bytes, quartiles, reason, release
from fullrank.ops import Mixture, TopTokens, divergence, entropy, token_logprobs
from fullrank.ops.workspace import most_rows
from fullrank.results import provenance, write_whole

BAR = 1.15
MEMORY_TOKENS, MEMORY_WIDTH = 512, 64
OUTPUTS = ("ids", "entropy", "forward", "reverse", "jensen_shannon", "top")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Measure the outputs beside the loss: time over their own products, and memory."""

    device: str = "cpu"
    """cpu or cuda."""
    N: int = 0
    """Tokens; by default 64 on a CPU, 8192 on CUDA."""
    D: int = 0
    """Width of a row; by default 1024 on a CPU, 2048 on CUDA."""
    V: int = 128256
    """Vocabulary."""
    M: int = 64
    """Ids a token."""
    components: tuple[int, ...] = (1, 4)
    """Of the student; the teacher is a softmax."""
    only: tuple[str, ...] = OUTPUTS
    """Outputs to measure."""
    repeats: int = 0
    """Rounds that count; by default 2 on a CPU, 5 on CUDA."""
    threads: int = 0
    """Threads of a CPU run; 0 leaves torch's choice."""
    seed: int = 0
    out: Path = Path("results/distil.json")
    """Where the figures go; those of the other device are kept."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Leaves of a student, and what it is compared with."""

    rows: Tensor
    log_prior: Tensor
    weight: Tensor
    teacher: Mixture
    ids: Tensor
    upstream: Tensor
    """[N, M]"""
    top: TopTokens

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.rows, self.log_prior, self.weight

    @property
    def student(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows, self.log_prior, self.weight


def make_inputs(config: Config, K: int) -> Inputs:
    draw = torch.Generator().manual_seed(config.seed)
    N, D, V = config.N, config.D, config.V
    dtype = torch.bfloat16 if config.device == "cuda" else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(config.device, dtype)

    states, weight = there(normal(N, D)), there(normal(V, D) * 2 / D**0.5)
    # No id twice: the materialised divergence from top tokens would count it twice.
    apart = torch.arange(config.M) * (V // config.M)
    ids = (torch.randint(V, (N, 1), generator=draw) + apart) % V
    log_q = (normal(N, config.M).log_softmax(1) - 0.1).to(config.device)
    return Inputs(
        rows=there(normal(N, K, D)).requires_grad_(),
        log_prior=normal(N, K).log_softmax(-1).to(config.device).requires_grad_(),
        weight=there(normal(V, D) * 2 / D**0.5).requires_grad_(),
        teacher=Mixture.softmax(states, weight),
        ids=ids.to(config.device),
        upstream=normal(N, config.M).to(config.device),
        top=TopTokens(ids.to(config.device), log_q),
    )


def fullrank_loss(inputs: Inputs, output: str) -> Tensor:
    if output == "ids":
        return (token_logprobs(*inputs.student, inputs.ids) * inputs.upstream).mean()
    if output == "entropy":
        return entropy(*inputs.student)
    if output == "top":
        return divergence(*inputs.student, inputs.top)
    return divergence(*inputs.student, inputs.teacher, kind=output)


def materialised_loss(inputs: Inputs, output: str) -> Tensor:
    components = (inputs.rows @ inputs.weight.t()).float().log_softmax(-1)
    log_p = components[:, 0]
    if components.shape[1] > 1:
        log_p = torch.logsumexp(components + inputs.log_prior[:, :, None], 1)
    if output == "ids":
        return (log_p.gather(1, inputs.ids) * inputs.upstream).mean()
    if output == "entropy":
        return -(log_p.exp() * log_p).sum(1).mean()
    if output == "top":
        at, log_q = log_p.gather(1, inputs.ids), inputs.top.log_probs
        rest, rest_q = (torch.log1p(-each.exp().sum(1)) for each in (at, log_q))
        return ((log_q.exp() * (log_q - at)).sum(1) + rest_q.exp() * (rest_q - rest)).mean()
    with torch.no_grad():
        log_q = (inputs.teacher.rows[:, 0] @ inputs.teacher.weight.t()).float().log_softmax(-1)
    if output == "forward":
        return functional.kl_div(log_p, log_q, log_target=True, reduction="batchmean")
    if output == "reverse":
        return functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    middle = torch.logaddexp(log_p, log_q) - 0.6931471805599453
    both = (
        functional.kl_div(middle, each, log_target=True, reduction="batchmean") for each in (log_p, log_q)
    )
    return sum(both, torch.zeros((), device=log_p.device)) / 2


def products(inputs: Inputs, output: str) -> Step:
    """The products of an output, in chunks of rows as it has them."""
    rows, weight = inputs.rows.detach().flatten(0, 1), inputs.weight.detach()
    chunk = min(rows.shape[0], most_rows(rows.device))
    scores = rows.new_empty(chunk, weight.shape[0])
    d_rows, d_weight = torch.empty_like(rows), torch.zeros_like(weight)
    scored = 2 if output in ("ids", "top") else 1
    states = None if output in ("ids", "top", "entropy") else inputs.teacher.rows[:, 0]

    def step() -> None:
        for start in range(0, rows.shape[0], chunk):
            part = rows[start : start + chunk]
            place = scores[: part.shape[0]]
            for _ in range(scored):
                torch.mm(part, weight.t(), out=place)
            torch.mm(place, weight, out=d_rows[start : start + chunk])
            torch.addmm(d_weight, place.t(), part, out=d_weight)
        for part in () if states is None else states.split(chunk):
            torch.mm(part, inputs.teacher.weight.t(), out=scores[: part.shape[0]])

    return step


def training_step(inputs: Inputs, loss: Callable[[Inputs, str], Tensor], output: str) -> Step:
    def step() -> None:
        for leaf in inputs.leaves:
            leaf.grad = None
        loss(inputs, output).backward()

    return step


def extra_bytes(step: Step, inputs: Inputs, device: str) -> int:
    """The most that a call allocates beyond its gradients."""
    for leaf in inputs.leaves:
        leaf.grad = None
    made = sum(leaf.numel() * leaf.itemsize for leaf in inputs.leaves)
    if device == "cuda":
        return (peak_bytes(step, device) or 0) - made
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        step()
    events = seen.profiler.kineto_results.events()
    sizes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    held = peak = 0
    for _, _, size in sizes:
        held += size
        peak = max(peak, held)
    return peak - made


def both_steps(inputs: Inputs, output: str) -> dict[str, Step]:
    return {
        "fullrank": training_step(inputs, fullrank_loss, output),
        "materialised": training_step(inputs, materialised_loss, output),
    }


def measure_memory(inputs: Inputs, output: str, config: Config) -> Row:
    """Extra memory of both, and how far their gradients lie apart."""
    row: Row = {"memory_N": inputs.rows.shape[0], "memory_D": inputs.rows.shape[2]}
    gradients: dict[str, list[Tensor]] = {}
    for name, step in both_steps(inputs, output).items():
        release(config.device)
        try:
            row[f"{name}_extra_mib"] = extra_bytes(step, inputs, config.device) / MIB
            # A prior of one component has none.
            gradients[name] = [cast(Tensor, each.grad).float().cpu() for each in (inputs.rows, inputs.weight)]
        except (RuntimeError, MemoryError) as error:
            row[f"{name}_missing"] = reason(error)
        for leaf in inputs.leaves:
            leaf.grad = None
    if len(gradients) == 2:
        row["gradient_difference"] = max(
            float((one - other).norm() / other.norm())
            for one, other in zip(gradients["fullrank"], gradients["materialised"], strict=True)
        )
    return row


def measure_time(inputs: Inputs, output: str, config: Config) -> Row:
    row: Row = {"N": config.N, "D": config.D}
    steps = {**both_steps(inputs, output), "products": products(inputs, output)}
    times, failed = in_rounds(steps, config.device, config.repeats)
    row |= {f"{name}_missing": why for name, why in failed.items()}
    row |= {f"{name}_ms": 1e3 * quartiles(each.behind)[1] for name, each in times.items()}
    if "fullrank_ms" in row and "products_ms" in row:
        row["over_products"] = row["fullrank_ms"] / row["products_ms"]
    return row


def show(rows: list[Row]) -> Table:
    table = Table(title="forward and backward; extra memory beyond inputs and gradients")
    for name in (
        "output",
        "K",
        "ms",
        "over products",
        "extra MiB",
        "materialised ms",
        "extra MiB",
        "difference",
    ):
        table.add_column(name, justify="left" if name == "output" else "right")

    def number(row: Row, name: str, form: str) -> str:
        return format(row[name], form) if name in row else "-"

    for row in rows:
        table.add_row(
            row["output"], str(row["components"]), number(row, "fullrank_ms", ".1f"),
            number(row, "over_products", ".3f"), number(row, "fullrank_extra_mib", ".0f"),
            number(row, "materialised_ms", ".1f"), number(row, "materialised_extra_mib", ".0f"),
            number(row, "gradient_difference", ".1e"),
        )  # fmt: skip
    return table


def main(config: Config) -> None:
    cuda = config.device == "cuda"
    config = dataclasses.replace(
        config,
        N=config.N or (8192 if cuda else 64),
        D=config.D or (2048 if cuda else 1024),
        repeats=config.repeats or (5 if cuda else 2),
    )
    if config.threads:
        torch.set_num_threads(config.threads)
    rows: list[Row] = []
    for K in config.components:
        inputs = make_inputs(config, K)
        larger = inputs
        if not cuda:
            larger = make_inputs(dataclasses.replace(config, N=MEMORY_TOKENS, D=MEMORY_WIDTH), K)
        for output in config.only:
            row: Row = {"output": output, "components": K, "V": config.V, "M": config.M}
            row |= measure_memory(larger, output, config) | measure_time(inputs, output, config)
            print(json.dumps(row), flush=True)
            rows.append(row)
        del inputs, larger
        release(config.device)
    Console().print(show(rows))
    over = [row["output"] for row in rows if row.get("over_products", 0.0) > BAR]
    print(f"over {BAR} of their own products: {', '.join(over) or 'none'}")
    known = json.loads(config.out.read_text()) if config.out.exists() else {}
    name = torch.cuda.get_device_name() if cuda else "cpu"
    about = dataclasses.asdict(provenance(seed=config.seed, device=name))
    known[config.device] = {"provenance": about, "threads": torch.get_num_threads(), "bar": BAR, "rows": rows}
    write_whole(config.out, json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
