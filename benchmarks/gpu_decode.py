"""One token's head call while decoding: the most probable token, and a draw at temperature 1.

    plain       torch alone, softmax: argmax of the logits; softmax, then multinomial
    fullrank    head.top(states, 1) and head.sample(states) of softmax, mos and trunk
    token       a body of GPT-2 small's size on one token a sequence, without a past, and the greedy call: the
                head's part in what a user waits for, which a past would only make smaller

Hidden states [batch, D] and weights in bf16. Where it can, a call is captured in a CUDA graph, so that the
host's time drops out, and replayed many times between two events; else it is called as often. Four copies of
each head take turns: W of one would stay in the second-level cache, which a real model's body sweeps.
`time_over_softmax` is over the fastest softmax of the same batch and the same kind of call.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpt2_body import Gpt2Body
from benchmarks.gpu_heads import draw_head, path_of
from benchmarks.gpu_layer import Row
from benchmarks.gpu_settings import Settings
from benchmarks.measure import Step, reason, seconds

COPIES = 4
ROUNDS = 5

Call = Callable[[Tensor], Any]


def plain_calls(weight: Tensor) -> dict[str, Call]:
    return {
        "greedy": lambda states: (states @ weight.t()).argmax(-1),
        "sample": lambda states: torch.multinomial((states @ weight.t()).float().softmax(-1), 1),
    }


def head_calls(head: Any) -> dict[str, Call]:
    return {"greedy": lambda states: head.top(states, 1), "sample": lambda states: head.sample(states)}


def draw_bodies(settings: Settings, D: int) -> list[Gpt2Body]:
    sizes = settings.step
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        body = Gpt2Body(vocab=64, width=D, layers=sizes.layers, heads=sizes.heads, context=1)
    body = body.to(settings.dtype)
    return [body, *(copy.deepcopy(body) for _ in range(COPIES - 1))]


def with_body(body: Gpt2Body, greedy: Call) -> Call:
    """A call on states [batch, D] whose body sees one id a sequence."""
    ids: dict[int, Tensor] = {}

    def call(states: Tensor) -> Any:
        batch = states.shape[0]
        if batch not in ids:
            ids[batch] = torch.zeros(batch, 1, dtype=torch.int64, device=states.device)
        return greedy(body(ids[batch])[:, 0])

    return call


def captured(call: Call, states: Tensor) -> Step:
    """The call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(states)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(states)
    return graph.replay


def prepare(calls: list[Call], states: Tensor) -> tuple[list[Step], str | None]:
    """A step for each copy, and why they are not graphs, if they are not."""
    if states.device.type == "cuda":
        try:
            return [captured(call, states) for call in calls], None
        except Exception as error:
            why = reason(error)
            torch.cuda.synchronize()
    else:
        why = "no CUDA device"

    def step_of(call: Call) -> Step:
        return lambda: call(states)

    steps = [step_of(call) for call in calls]
    for step in steps:
        step()
    return steps, why


def in_turn(steps: list[Step], times: int) -> Step:
    def run() -> None:
        for turn in range(times):
            steps[turn % len(steps)]()

    return run


@torch.no_grad()
def measure_decoding(settings: Settings, D: int, V: int) -> list[Row]:
    K, device = settings.most, settings.device
    options: dict[str, dict[str, int]] = {
        "softmax": {}, "mos": {"components": K}, "trunk": {"components": K, "private": settings.private(D)},
    }  # fmt: skip
    heads = {
        name: [
            draw_head(name, hidden=D, vocab=V, settings=settings, seed=copy, **more) for copy in range(COPIES)
        ]
        for name, more in options.items()
    }
    sources: list[tuple[str, str, list[dict[str, Call]]]] = [
        ("plain", "softmax", [plain_calls(head.decoder.weight) for head in heads["softmax"]])
    ]
    sources += [("fullrank", name, [head_calls(head) for head in copies]) for name, copies in heads.items()]
    kinds = ["greedy", "sample"]
    if settings.step.width == D:
        kinds.append("token")
        for body, *calls in zip(draw_bodies(settings, D), *(copies for _, _, copies in sources), strict=True):
            for each in calls:
                each["token"] = with_body(body, each["greedy"])
    rows: list[Row] = []
    draw = torch.Generator(device).manual_seed(settings.seed)
    for batch in settings.batches:
        states = torch.randn(batch, D, generator=draw, device=device).to(settings.dtype)
        for kind in kinds:
            here: list[Row] = []
            for implementation, name, copies in sources:
                row: Row = {
                    "implementation": implementation, "head": name, "call": kind, "batch": batch,
                    "components": 1 if name == "softmax" else K, "width": D, "vocab": V,
                    "path": path_of(heads[name][0]) if implementation == "fullrank" else "torch",
                }  # fmt: skip
                here.append(row)
                try:
                    steps, why = prepare([calls[kind] for calls in copies], states)
                    run = in_turn(steps, settings.replays)
                    run()
                    taken = [seconds(run, device) / settings.replays for _ in range(ROUNDS)]
                except Exception as error:
                    row["missing"] = reason(error)
                    continue
                row |= {"milliseconds": 1e3 * statistics.median(taken), "graph": why is None}
                if why is not None:
                    row["no_graph"] = why
            plain = [
                each["milliseconds"] for each in here if each["head"] == "softmax" and "missing" not in each
            ]
            for row in here:
                if plain and "missing" not in row:
                    row["time_over_softmax"] = row["milliseconds"] / min(plain)
            rows += here
    return rows
