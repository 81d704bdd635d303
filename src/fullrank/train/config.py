"""What a training run is made of: frozen dataclasses, overrides `a.b=c`, and JSON.

A recipe (`recipes.py`) is a function that returns a `Config`. Two runs with equal configs on equal data on
one kind of machine end with equal weights.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from fullrank.errors import FullrankError
from fullrank.fit.budget import Budget
from fullrank.fit.optimiser import OptimiserConfig
from fullrank.models.normalisers import check_temperature
from fullrank.text.settings import DataConfig


@dataclass(frozen=True, kw_only=True)
class BodyConfig:
    """The body. An AWD-LSTM reads the widths and its dropouts, a transformer widths, heads and dropout."""

    kind: Literal["awd_lstm", "neox", "llama"] = "awd_lstm"
    layers: int = 3
    hidden: int = 1150
    """Width of every layer but an LSTM's last."""
    last: int = 400
    """Width of an LSTM's last layer."""
    embedding: int = 0
    """Width of an LSTM's input embedding; 0 is the head's, so that both can be tied."""
    heads: int = 8
    """Attention heads of a transformer."""
    inner: int = 0
    """Width inside a transformer's feed-forward layers; 0 is four times the hidden one, of llama 8/3."""
    rate_width: int = 0
    """Hidden width that optimiser.lr is for: a transformer's hidden matrices step at lr · this / hidden. 0 is
    the hidden width as it is."""
    vocabulary_multiple: int = 1
    """The vocabulary is padded to a multiple of this."""
    dropout: float = 0.0
    """A transformer's dropout on attention and residuals; for an LSTM, of its last layer's output."""
    dropout_embedding: float = 0.0
    """Whole words dropped from an LSTM's embedding."""
    dropout_input: float = 0.0
    """Of an LSTM's embedded inputs, one mask a sequence."""
    dropout_hidden: float = 0.0
    """Between an LSTM's layers, one mask a sequence."""
    weight_drop: float = 0.0
    """Of an LSTM's recurrent weights, one mask a step."""
    normaliser: Literal["softmax", "sparsemax", "entmax15", "sink", "log_length", "sigmoid"] = "softmax"
    """What turns a transformer's attention scores into weights (`fullrank.models.normalisers`)."""
    attention_temperature: float = 1.0
    """What a transformer's attention scores are divided by before that."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The head; options that a head does not have are not given to it."""

    name: str = "softmax"
    components: int = 10
    width: int = 0
    """Of the rows, D; 0 is the width of the state that it reads."""
    private: int = 0
    """Of a trunk: entries of a row that a component owns; 0 is the head's default."""
    rank: int = 0
    """Of low_rank: the inner width; 0 is half of the rows'."""
    contexts: tuple[int, ...] = ()
    """Of doc: contexts taken from each layer, the last layer first."""
    dropout: float = 0.0
    """Of the contexts, one mask a sequence and component."""
    shared_dropout: bool = False
    """One mask a sequence for all components of mos and moss, as doc has it. With a mask each, a mixture of
    alike components has a K-th of the penalty that dropout is (docs/heads.md)."""
    bias: bool = True
    unigram: bool = True
    """Start the bias at the log frequency of every token in training."""
    lift: float = 0.0
    """Of sigsoftmax and moss: nats added to them, which moves the start along the curve of f."""
    as_published: bool = False
    """Contexts tanh(L h + l) as in the papers, instead of ours that start as the plain head."""
    centred: bool = True
    """Of a mixture that is not as published: contexts whose mean is the plain head's row."""
    tie: bool = True
    """One matrix for input embedding and head."""
    balance: float = 0.0
    """Weight of DOC's penalty on unequal use of the components."""


@dataclass(frozen=True, kw_only=True)
class PenaltyConfig:
    """What holds the head's matrix or the states in a shape, for experiments (`penalty.py`)."""

    spectrum: Literal["none", "flat", "decay", "steep"] = "none"
    """Shape that the spectrum of the head's matrix is held in."""
    spectrum_weight: float = 0.0
    states: Literal["none", "white", "together"] = "none"
    """Shape that the states which the head reads are held in."""
    states_weight: float = 0.0


HOW = frozenset(
    {
        "accumulate", "steps", "epochs", "budget", "evaluate_every", "evaluate_tokens", "final_tokens",
        "evaluate_batch", "checkpoint_every", "keep", "snapshot_every", "skip", "compile", "graph",
    }
)  # fmt: skip
"""Settings of how a run goes, which may change when it is continued; all others are what it learns."""


MOST_OF_ALL = 10**12
"""Of any setting: no run has more steps, tokens or entries than that."""
MOST = {
    "seed": 2**63 - 1,
    "body.layers": 10_000,
    "head.contexts": 10_000,
    "steps": 10**10,
    "epochs": 10**7,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole training run."""

    recipe: str
    data: DataConfig = field(default_factory=DataConfig)
    body: BodyConfig = field(default_factory=BodyConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    batch: int = 40
    """Sequences a step, over all processes."""
    length: int = 70
    """Tokens of a sequence a step; a transformer's context."""
    jitter: bool = False
    """Draw each step's length around `length` and scale the rate with it, as AWD-LSTM does."""
    jitter_longer: int = 20
    """Most tokens that jitter adds to `length`."""
    rotate: bool = False
    """Of an LSTM: begin each epoch at another place of the text; without that or `jitter` all epochs have the
    same batches."""
    accumulate: int = 1
    """Parts that a step's batch is cut into, to save memory."""
    epochs: float = 20.0
    steps: int = 0
    """Training steps in all; 0 is what `epochs` makes."""
    budget: str = ""
    """In place of both: tokens=2e9, flops=1e17 or seconds=600 of training. Equal flops are equal compute,
    whatever the head."""
    activation: float = 0.0
    """Weight of the penalty on the last layer's size."""
    temporal: float = 0.0
    """Weight of the penalty on its change from one token to the next."""
    z_loss: float = 0.0
    """Weight of the penalty on the squared normalisers of a head's rows; 1e-4 is usual."""
    evaluate_every: int = 0
    """Steps from one evaluation to the next; 0 is one an epoch, and at least ten in a run."""
    evaluate_tokens: int = 0
    """Validation tokens of an evaluation while training, from all over the split; 0 is all, -1 as many as
    take 2% of training's time at most, in a long run."""
    final_tokens: int = 0
    """Tokens of the last evaluations, of validation and test, with the best weights; 0 is all."""
    evaluate_batch: int = 16
    """Sequences at once in evaluation."""
    checkpoint_every: int = 0
    """Steps from one checkpoint to the next; 0 is at every evaluation."""
    keep: int = 2
    """Checkpoints kept; the best one by validation is kept besides."""
    snapshot_every: int = 0
    """Steps from one snapshot to the next, models that stay for good; with any, also at 0, 1, 2, 4, ... 512,
    as Pythia keeps them. 0 is none."""
    skip: int = 5
    """Steps in a row whose gradient is no number that are left out and counted; at the next the run stops."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the products; weights and sums are fp32. auto: bf16 on a GPU that has it, else fp32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile for the body; auto: a transformer on a GPU."""
    graph: Literal["auto", "on", "off"] = "auto"
    """A step as one CUDA graph; auto: a transformer's, where the GPU waits for launches more than for
    products; on: an LSTM's too, and of any size."""
    seed: int = 0

    def __post_init__(self) -> None:
        Budget.parse(self.budget)
        positive = ("batch", "length", "accumulate", "evaluate_batch", "keep")
        for name in positive:
            if getattr(self, name) < 1:
                raise FullrankError(f"{name}={getattr(self, name)} is impossible: expected at least 1")
        if self.batch % self.accumulate:
            raise FullrankError(
                f"batch={self.batch} cannot be cut into accumulate={self.accumulate} equal parts: "
                "choose a multiple"
            )
        if self.steps < 0 or self.epochs <= 0:
            raise FullrankError(
                f"steps={self.steps} and epochs={self.epochs:g} make no run: expected steps >= 0 and "
                "epochs > 0"
            )
        amounts = (
            "jitter_longer", "activation", "temporal", "z_loss", "evaluate_every",
            "final_tokens", "checkpoint_every", "snapshot_every", "skip", "optimiser.weight_decay",
            "optimiser.clip", "optimiser.warmup", "optimiser.decay", "optimiser.final",
            "optimiser.nonmonotone", "optimiser.finetune_epochs", "head.balance",
            "penalty.spectrum_weight", "penalty.states_weight",
        )  # fmt: skip
        for name in amounts:
            if not _value(self, name) >= 0:
                raise FullrankError(f"{name}={_value(self, name)} is impossible: expected at least 0")
        if self.evaluate_tokens < -1:
            raise FullrankError(
                f"evaluate_tokens={self.evaluate_tokens} is impossible: expected a number of tokens, "
                "0 for all or -1 for a share of the time"
            )
        check_temperature(self.body.attention_temperature, "body.attention_temperature")
        rates = ("lr", "finetune_lr") if self.optimiser.finetune_epochs else ("lr",)
        for name in rates:
            # Beyond this a rate times a factor is no fp32 number.
            if not 0 < getattr(self.optimiser, name) <= 1e9:
                raise FullrankError(
                    f"optimiser.{name}={getattr(self.optimiser, name)} is no rate: expected above 0 and at "
                    "most 1e9"
                )
        for path in paths():
            value, most = _value(self, path), MOST.get(path, MOST_OF_ALL)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not abs(number) <= most:
                    raise FullrankError(
                        f"{path}={str(number)[:40]} is beyond all use: expected {most:,} at most"
                    )


def _value(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def to_json(config: Config) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(data: dict[str, Any]) -> Config:
    """The inverse of `to_json`; raises FullrankError for fields that this version does not know."""
    try:
        return _built(Config, data)
    except (KeyError, TypeError, ValueError) as error:
        raise FullrankError(f"this is no training config of this version ({error}): train again") from error


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a config's fields: written as text, they take a millisecond to read."""
    return typing.get_type_hints(cls)


def _built(cls: type, data: dict[str, Any]) -> Any:
    hints = _hints(cls)
    unknown = set(data) - set(hints)
    if unknown:
        raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
    values = {}
    for name, value in data.items():
        if dataclasses.is_dataclass(hints[name]):
            values[name] = _built(typing.cast(type, hints[name]), value)
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def override(config: Config, settings: Iterable[str]) -> Config:
    """Apply settings of the form a.b=c; raises FullrankError for what is no field or no value of it.

    The whole is checked when all are in: of two that need each other, either may come first.
    """
    data = dataclasses.asdict(config)
    for setting in settings:
        path, separator, text = setting.partition("=")
        if not separator:
            raise FullrankError(f"--set got {setting!r}, expected name=value, such as steps=120")
        _put(data, Config, path.strip().split("."), text.strip(), path.strip())
    return _built(Config, data)


def _put(data: dict[str, Any], cls: type, names: list[str], text: str, whole: str) -> None:
    hints = _hints(cls)
    name, *rest = names
    if name not in hints or bool(rest) != dataclasses.is_dataclass(hints.get(name)):
        known = list(paths())
        close = difflib.get_close_matches(whole, known, n=1) or [
            path for path in known if path.rpartition(".")[2] == whole.rpartition(".")[2]
        ]
        hint = f"did you mean {close[0]}?" if close else "--print-config shows all settings"
        raise FullrankError(f"no setting is called {whole!r}: {hint}")
    if rest:
        _put(data[name], hints[name], rest, text, whole)
    else:
        data[name] = _parsed(hints[name], text, whole)


def _parsed(hint: Any, text: str, whole: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    try:
        if origin is Literal:
            if text not in arguments:
                raise ValueError
            return text
        if origin is tuple:
            return tuple(arguments[0](item) for item in text.split(",") if item.strip())
        if hint is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if hint is int:
            # 2e3 is how people write steps.
            number = float(text)
            if number != int(number):
                raise ValueError
            return int(number)
        value = hint(text)
        if hint is float and not math.isfinite(value):
            raise ValueError
        return value
    except (ValueError, KeyError, OverflowError) as error:
        if origin is Literal:
            expected = "one of " + ", ".join(arguments)
        else:
            words = {bool: "true or false", int: "a whole number", float: "a number"}
            expected = "numbers with commas" if origin is tuple else words.get(hint, "text")
        raise FullrankError(f"--set {whole}={text} is no value of it: expected {expected}") from error


def paths(cls: type = Config, prefix: str = "") -> Iterable[str]:
    """Every setting as a dotted path."""
    for name, hint in _hints(cls).items():
        if dataclasses.is_dataclass(hint) and not isinstance(hint, types.UnionType):
            yield from paths(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def lines(config: Config) -> list[str]:
    """Every setting with its value, as --set takes it."""
    shown = []
    for path in paths():
        value = _value(config, path)
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        elif isinstance(value, bool):
            value = str(value).lower()
        shown.append(f"{path}={value}")
    return shown
