"""The steps that train upper layers and a head: what they are, and that graphs of them learn the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullrank.fit import captured
from fullrank.heads import Head
from fullrank.heads.alignment import alignment_loss
from fullrank.heads.cache import CacheHead
from fullrank.models.anatomy import blocks_of
from fullrank.studies.upper_layers import UpperLayers
from fullrank.studies.upper_training import MEMORY_RATE, added, training
from fullrank.upgrade import upgrade
from tests.studies.test_upper_layers import tiny

STEPS = 20


def setting(name: str, device: str = "cpu") -> tuple[UpperLayers, Head]:
    torch.manual_seed(0)
    original = tiny("llama").to(device)
    model = upgrade(original, "softmax").requires_grad_(False)
    mixture = name in ("mos", "trunk_cache")
    options = {"components": 2} if mixture else {}
    head = upgrade(original, name.removesuffix("_cache") if mixture else "softmax", **options).lm_head
    if name.endswith("cache"):
        head = CacheHead(head, temperature=8.0, memory_weight=-4.0)
    return UpperLayers(model, blocks_of(original), 2), head.to(device)


def texts(upper: UpperLayers, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids with padding at the end of some, targets that count in the second half, and what is recorded."""
    ids = torch.randint(2, 20, (4, length), generator=torch.Generator().manual_seed(seed))
    ids = ids.to(upper.model.device)
    context = ids.clone()
    context[0, -2:] = -1
    targets = torch.cat([context[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    targets[:, : length // 2] = -100
    return context, targets.masked_fill(targets < 0, -100), upper.record(ids)


def losses_of(upper: UpperLayers, head: Head) -> Callable[..., tuple[Tensor, ...]]:
    def losses(context: Tensor, targets: Tensor, recorded: Tensor) -> tuple[Tensor, ...]:
        states = upper.states(context.clamp_min(0), recorded)
        loss: Any = head(states, targets, context=context)
        if isinstance(head, CacheHead):
            loss = loss + alignment_loss(head, states, targets, context=context)
        return (loss,)

    return losses


def learned(
    name: str, device: str = "cpu", steps: int = STEPS, **options: Any
) -> tuple[list[float], dict[str, nn.Parameter], Head]:
    upper, head = setting(name, device)
    found = []
    with training(upper, head, losses_of(upper, head), rate=1e-3, steps=steps, **options) as step:
        for number in range(steps):
            found.append(float(step(*texts(upper, (10, 12)[number % 2], number))[0]))
    return found, upper.parameters() | added(head), head


@pytest.mark.parametrize(
    "name", ["trunk_cache", pytest.param("softmax", marks=pytest.mark.slow(reason="a part of the other"))]
)
def test_it_is_adamw_with_a_rate_that_rises_and_falls(name: str) -> None:
    found, parameters, _ = learned(name)
    upper, head = setting(name)
    head.decoder.requires_grad_(False)
    own = added(head)
    weight = own.pop("memory_weight", None)
    groups: list[dict[str, Any]] = [{"params": [*upper.parameters().values(), *own.values()]}]
    groups += [] if weight is None else [{"params": [weight]}]
    every = [parameter for group in groups for parameter in group["params"]]
    for parameter in every:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for number in range(STEPS):
        share = min(1.0, (number + 1) / 2) * (1 - number / STEPS)
        for group, factor in zip(optimiser.param_groups, (1, MEMORY_RATE), strict=False):
            group["lr"] = 1e-3 * factor * share
        (loss,) = losses_of(upper, head)(*texts(upper, (10, 12)[number % 2], number))
        assert float(loss.detach()) == pytest.approx(found[number], rel=1e-5)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(every, 1.0)
        optimiser.step()
    for key, value in (upper.parameters() | added(head)).items():
        torch.testing.assert_close(value, parameters[key], rtol=1e-4, atol=1e-5)


def test_w_stays_and_the_memorys_weight_may() -> None:
    for weighs in (False, True):
        _, parameters, head = learned("cache", steps=4, weighs=weighs)
        assert (float(parameters["memory_weight"]) != -4.0) is weighs
        torch.testing.assert_close(head.decoder.weight, setting("cache")[1].decoder.weight)
        assert all(value.grad is None and not value.requires_grad for value in parameters.values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "mos", "cache", "trunk_cache"])
def test_graphs_learn_what_steps_learn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []
    made = captured.CapturedStep

    def captures(*given: Any) -> Any:
        graphs.append(made(*given))
        return graphs[-1]

    monkeypatch.setattr(captured, "CapturedStep", captures)
    found, parameters, _ = learned(name, "cuda")
    assert len(graphs) == 2
    monkeypatch.setattr(captured, "WARM", STEPS + 1)
    plain, others, _ = learned(name, "cuda")
    assert len(graphs) == 2
    assert found == pytest.approx(plain, rel=1e-2)
    for key, value in parameters.items():
        torch.testing.assert_close(value, others[key], rtol=2e-2, atol=2e-3)
