"""A run that begins where another one stands: `--from RUN@STEP`.

The same model goes on with the weights, optimiser, average and place in the data of that checkpoint, under
whatever rate, schedule or horizon it is given. A snapshot and the best model have no optimiser, and from them
the rate rises once more: Adam's first steps are as long as the rate whatever the gradient. Under another head
the body and W go on, and the head starts as the one before where it can: a mixture whose components are all
equal is the plain head with that W. What the new head owns beyond is drawn as in a fresh run. Under
head.tie=false a W that was tied starts as a copy of the embedding. The opposite is refused, since a trained W
would be lost. On other data a run begins at their beginning, and so it does from the best model, which keeps
no place.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit.budget import Watch
from fullrank.heads.registry import find as find_head
from fullrank.models import FullrankForCausalLM
from fullrank.train import checkpoint, folder
from fullrank.train.config import Config
from fullrank.train.model import build
from fullrank.train.state import State
from fullrank.train.weights import stored_buffers

WEIGHT = "lm_head.decoder.weight"
"""The parameter W of a head that is not tied."""


@dataclass(frozen=True, kw_only=True)
class Parent:
    """Where a run begins."""

    path: Path
    config: Config
    stored: checkpoint.Stored
    data: str
    """The digest of what it was trained on."""
    tokens: Path

    def to_json(self) -> dict[str, Any]:
        return {"run": self.path.resolve().name, "step": self.stored.step}


def parent_of(place: str) -> Parent:
    """RUN@STEP, RUN@best or RUN, which is its last checkpoint."""
    name, _, which = place.rpartition("@") if "@" in place else (place, "", "last")
    path = Path(name).expanduser()
    config = folder.config_of(path)
    tokens = folder.tokens_of(path)
    return Parent(
        path=path, config=config, stored=folder.chosen(path, which or "last"),
        data=folder.digest_of(path), tokens=tokens,
    )  # fmt: skip


def begun(parent: Parent, config: Config, vocabulary: int, data: str) -> checkpoint.Stored:
    """The checkpoint that a run of `config` begins with."""
    fresh = build(config, vocabulary)
    named = {**dict(fresh.named_parameters()), **stored_buffers(fresh)}
    own: dict[str, Tensor] = {name: tensor.detach() for name, tensor in named.items()}
    groups = _groups(parent, config, fresh)
    # The best weights have nothing of how a run goes on.
    known = {field.name for field in fields(State)}
    state = {name: value for name, value in parent.stored.state.items() if name in known}
    live = groups.get("live") or groups["model"]
    if live.keys() == own.keys() and all(live[name].shape == own[name].shape for name in own):
        made: dict[str, dict[str, Tensor]] = {
            name: values for name, values in groups.items() if name in ("model", "live")
        }
    else:
        made = {"model": _with_another_head(parent, live, own, config.head.name)}
    taken = made.get("live", made["model"])
    optimiser = groups.get("optimiser", {}) if config.optimiser.name == parent.config.optimiser.name else {}
    kept = {
        name: value
        for name, value in optimiser.items()
        if (owner := name.rpartition("/")[0]) in taken
        and (not value.ndim or value.shape == taken[owner].shape)
    }
    carried = dict(groups.get("carried", {})) if config.batch == parent.config.batch else {}
    state = {"step": parent.stored.step, "cursor": State().to_json()["cursor"], **state}
    if data != parent.data:
        state["cursor"], state["epoch"], carried = State().to_json()["cursor"], 0.0, {}
    state |= {
        "stage": "train", "stage_step": 0, "history": [], "best_loss": None, "best_step": None, "ended": "",
        "counts": {}, "seconds": 0.0, "skipped": 0, "horizon": 0,
        "watch": asdict(Watch(step=parent.stored.step)), "restarted": -1 if kept else parent.stored.step,
        "averaged": state.get("averaged", 0) if "live" in made else 0,
    }  # fmt: skip
    return checkpoint.Stored(
        path=parent.stored.path, step=parent.stored.step, state=state,
        groups={**made, "optimiser": kept, "carried": carried},
    )  # fmt: skip


def _groups(parent: Parent, config: Config, fresh: FullrankForCausalLM) -> dict[str, dict[str, Tensor]]:
    """The parent's tensors, where W and the embedding are one tensor or two as `config` has them."""
    groups = parent.stored.groups
    if parent.config.head.tie == config.head.tie:
        return groups
    if config.head.tie:
        raise FullrankError(
            f"head.tie=true would replace the W that {parent.path} trained by its embedding: leave "
            "head.tie=false"
        )
    embedding = cast(Tensor, fresh.get_input_embeddings().weight)
    name = next(name for name, parameter in fresh.named_parameters() if parameter is embedding)
    if name not in groups["model"]:
        return groups
    width, trained = embedding.shape[1], groups["model"][name].shape[1]
    if width != trained and not config.body.embedding:
        raise FullrankError(
            f"the embedding is {width} wide under head.tie=false, and {parent.path} has one of {trained}: "
            f"add --set body.embedding={trained}"
        )
    return {
        group: {**tensors, WEIGHT: tensors[name].clone()} if group in ("model", "live") else tensors
        for group, tensors in groups.items()
    }


def _with_another_head(
    parent: Parent, live: dict[str, Tensor], own: dict[str, Tensor], head: str
) -> dict[str, Tensor]:
    """The body and W of the parent under a head that is drawn."""
    lacking = sorted(
        name
        for name, tensor in own.items()
        if (name.startswith("model.") or name == WEIGHT)
        and (name not in live or live[name].shape != tensor.shape)
    )
    if lacking:
        raise FullrankError(
            f"a run from {parent.path} must have its body and the width of its head, and {lacking[0]} is "
            "another: change the head, the rates or the data, and leave body.* and head.width as they were"
        )
    made = dict(own)
    for name, tensor in live.items():
        if name in own and own[name].shape == tensor.shape:
            made[name] = tensor
    before, now = (f"lm_head.{find_head(name).row_map}" for name in (parent.config.head.name, head))
    if before in live and now in own and live[before].shape == own[now].shape:
        made[now] = live[before]
    return made
