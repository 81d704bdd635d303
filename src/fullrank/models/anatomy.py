"""Find the output layer inside a model, whatever its code calls it, and check the finding against the model.

Two facts hold for every causal model of transformers: `get_output_embeddings` gives the module that scores
the vocabulary, and what enters that module is the state. So a hook on it collects states from any body, and
the rest is measured, not looked up: a short probe compares the model's own logits with W h + b and finds

    logits = W h + b,   logits = s (W h + b),   or   logits = c tanh( s (W h + b) / c )

or gives up with an error. The probe also changes its later tokens and looks whether earlier states move: then
the model sees the future, and next-token losses would be meaningless.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.errors import FullrankError
from fullrank.models.loading import Loaded, quiet, resident
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import IDENTITY, Pointwise
from fullrank.ops.pointwise import Softcap
from fullrank.results.diagnosis import ModelFacts

PROBE = 24
"""Tokens of the probe."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What configurations call the cap; the probe decides whether it is applied."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Anatomy:
    """What a diagnosis needs to know of a model's build."""

    output: OutputLayer
    facts: ModelFacts
    states_rank: int
    """The dimension that the final norm leaves to the states."""
    blocks: tuple[nn.Module, ...]
    """The layers of the body, in order; empty where none were recognised."""


class _Reached(Exception):  # noqa: N818  (a signal, not an error)
    """The state is here: the product with the matrix is not needed."""


def input_device(model: Any) -> torch.device:
    """Where token ids go: of a model that is spread over devices, accelerate takes them on from there."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


@torch.no_grad()
def states(model: Any, ids: Tensor) -> Tensor:
    """What enters the output matrix [batch, time, D]; the model stops there, so nothing V wide is made."""
    if hasattr(model, "head_inputs"):
        from fullrank.models import head_anatomy

        return head_anatomy.rows(model.lm_head, model.head_inputs(ids).states)
    found: list[Tensor] = []

    def catch(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.append(inputs[0].detach())
        raise _Reached

    handle = model.get_output_embeddings().register_forward_pre_hook(catch)
    try:
        # A cache of keys and values would be kept for nothing.
        with contextlib.suppress(_Reached), quiet():
            model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    if not found:
        raise FullrankError(
            f"{type(model).__name__} never calls its output embedding, so its states cannot be found: "
            "expected a causal language model of transformers"
        )
    return found[-1].reshape(*ids.shape, -1)


@contextlib.contextmanager
def watched(blocks: tuple[nn.Module, ...], take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Hand the input of the first block (layer 0) and every block's output (layers 1 ...) to `take`."""

    def before(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        value = inputs[0] if inputs else keywords.get("hidden_states")
        if isinstance(value, Tensor):
            take(0, value)

    def after(number: int) -> Callable[..., None]:
        def catch(module: nn.Module, inputs: tuple[Any, ...], result: Any) -> None:
            take(number, result[0] if isinstance(result, tuple | list) else result)

        return catch

    handles = []
    if blocks:
        handles.append(blocks[0].register_forward_pre_hook(before, with_kwargs=True))
        handles += [block.register_forward_hook(after(layer)) for layer, block in enumerate(blocks, start=1)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def examine(loaded: Loaded) -> Anatomy:
    """Find the output layer and say what was found; FullrankError where the model is not what it seems."""
    model = loaded.model
    if hasattr(model, "head_inputs"):
        from fullrank.models import head_anatomy

        return head_anatomy.examine(loaded)
    head: Any = model.get_output_embeddings()
    if head is None:
        raise FullrankError(f"{type(model).__name__} has no output embedding: give a causal language model")
    with resident(head):
        weight, bias = _linear(model, head)
    named = named_tokens(loaded, len(weight))
    hidden, logits, norm = _probe(model, weight, named)
    hidden, logits = hidden.to(weight.device), logits.to(weight.device)
    scores = hidden.float() @ weight.T
    if bias is not None:
        scores += bias
    columns = logits.shape[-1]
    if columns < len(weight):
        # Some models cut their padding off before the softmax: those rows take no part.
        weight, bias = weight[:columns], None if bias is None else bias[:columns]
        named = min(named, columns)
        scores = scores[:, :columns]
    scale, pointwise = _shape(scores, logits.float(), model)
    if scale != 1.0:
        weight, bias = weight * scale, None if bias is None else bias * scale
    output = OutputLayer(weight=weight, bias=bias, pointwise=pointwise, tokens=named)
    blocks = blocks_of(model)
    with resident(norm[0]) if norm else contextlib.nullcontext():
        name, lost = norm_rank(norm, biased=bias is not None)
    embedding = model.get_input_embeddings()
    tied = getattr(embedding, "weight", None) is getattr(head, "weight", head)
    facts = ModelFacts(
        name=loaded.name,
        source=loaded.source,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=len(blocks),
        width=output.width,
        vocabulary=output.vocabulary,
        tokens=named,
        tied=tied,
        bias=bias is not None,
        logit_scale=scale,
        softcap=pointwise.cap if isinstance(pointwise, Softcap) else None,
        final_norm=name,
        storage=loaded.storage,
        dtype=str(model.dtype).removeprefix("torch."),
        fingerprint=loaded.fingerprint,
        notes=(*loaded.notes, *_notes(output, loaded, tied, scale, name, lost)),
    )
    return Anatomy(output=output, facts=facts, states_rank=output.width - lost, blocks=blocks)


def named_tokens(loaded: Loaded, rows: int) -> int:
    """Rows of the output matrix that the tokenizer has names for."""
    return min(max(loaded.tokenizer.get_vocab().values(), default=-1) + 1, rows)


def _linear(model: Any, head: Any) -> tuple[Tensor, Tensor | None]:
    """W [V, D] and b [V] in fp32, copies; a quantised layer is asked through its forward."""
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    plain = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
    if not plain or type(head).__name__.startswith(("Linear4bit", "Linear8bit", "QuantLinear", "WQLinear")):
        width = getattr(head, "in_features", None)
        if not isinstance(width, int):
            raise FullrankError(
                f"the output layer of {type(model).__name__} is a {type(head).__name__} whose matrix cannot "
                "be read: dequantise the model first"
            )
        with torch.no_grad():
            unit = torch.eye(width, dtype=model.dtype, device=input_device(model))
            start = head(torch.zeros_like(unit[:1])).float()
            weight = torch.cat([head(rows).float() - start for rows in unit.split(256)]).T.contiguous()
            bias = start[0] if bool(start.abs().max() > 0) else None
    assert isinstance(weight, Tensor)
    return weight.detach().float().clone(), None if bias is None else bias.detach().float().clone()


@torch.no_grad()
def _probe(model: Any, weight: Tensor, named: int) -> tuple[Tensor, Tensor, tuple[nn.Module, Tensor] | None]:
    """States [n, D] and the model's own logits [n, V] of a few random tokens, and the last norm that ran."""
    ids, half = probe_ids(model, named)
    caught: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda module, inputs: caught.append(inputs[0].detach())
    )
    try:
        with norms_that_run(model) as ran, quiet():
            found = model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    logits = getattr(found, "logits", None)
    if logits is None or not caught:
        raise FullrankError(f"{type(model).__name__} gives no logits: expected a causal language model")
    hidden = caught[-1].reshape(*ids.shape, -1)
    if hidden.shape[-1] != weight.shape[1]:
        raise FullrankError(
            f"states of width {hidden.shape[-1]} enter an output matrix of width {weight.shape[1]} in "
            f"{type(model).__name__}: its output layer is more than one matrix and is not read yet"
        )
    require_causal(model, hidden, half)
    norm = None
    if ran and ran[-1][1].shape == caught[-1].shape and torch.equal(ran[-1][1], caught[-1]):
        norm = ran[-1]
    return hidden.flatten(0, 1), logits.flatten(0, 1), norm


def probe_ids(model: Any, named: int) -> tuple[Tensor, int]:
    """Two texts of random tokens [2, time], alike up to the second number."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(named, (2, min(PROBE, longest(model) or PROBE)), generator=generator)
    half = ids.shape[1] // 2
    ids[1, :half] = ids[0, :half]
    return ids.to(input_device(model)), half


@contextlib.contextmanager
def norms_that_run(model: Any) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Every norm that is called inside, and what it gave, in order."""
    ran: list[tuple[nn.Module, Tensor]] = []

    def remember(module: nn.Module, inputs: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            ran.append((module, result))

    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    handles = [module.register_forward_hook(remember) for module in norms]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def require_causal(model: Any, hidden: Tensor, half: int) -> None:
    """Raise for states [2, time, D] of the probe that are no numbers, or that see later tokens."""
    if not hidden.isfinite().all():
        raise FullrankError(
            f"the states of {type(model).__name__} hold NaN or infinity in {model.dtype}: run it with "
            "--dtype float32, or check its weights"
        )
    before, moved = hidden[0, :half].float(), hidden[1, :half].float()
    # What an untrained encoder lets through is little, what rounding makes is less.
    tolerance = 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.05
    if float((before - moved).norm()) > tolerance * float(before.norm()):
        raise FullrankError(
            f"{type(model).__name__} sees later tokens: states of earlier ones change with them; "
            "expected a causal language model, which predicts each token from those before it"
        )


def _shape(scores: Tensor, logits: Tensor, model: Any) -> tuple[float, Pointwise]:
    """The scale and the pointwise function that make the model's logits out of W h + b."""
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.05
    text_config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    cap = next((value for name in SOFTCAPS if (value := getattr(text_config, name, None))), None)
    everywhere = torch.ones_like(logits, dtype=torch.bool)
    candidates: list[tuple[Pointwise, Tensor, Tensor]] = [(IDENTITY, logits, everywhere)]
    if cap:
        # First, because small logits pass for uncapped ones. Near the cap atanh magnifies rounding: the scale
        # is read off the others.
        share = (logits / cap).clamp(-0.99, 0.99)
        candidates.insert(0, (Softcap(float(cap)), cap * torch.atanh(share), share.abs() < 0.9))
    for pointwise, straight, clear in candidates:
        scale = float((scores * straight)[clear].sum() / scores[clear].square().sum())
        if abs(scale - 1) < 1e-4:
            scale = 1.0
        made = pointwise(scale * scores)
        if float((made - logits).norm()) <= tolerance * float(logits.norm()):
            return scale, pointwise
    raise FullrankError(
        f"the logits of {type(model).__name__} are not its output matrix times the state, nor a scaled or "
        "soft-capped form of that: this output layer is not read yet"
    )


def longest(model: Any) -> int | None:
    """The most tokens that the model takes at once; None where it sets no limit."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for field in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def blocks_of(model: Any) -> tuple[nn.Module, ...]:
    """The body's list of layers: the longest list of modules, of as many as the configuration says."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    count = getattr(config, "num_hidden_layers", None)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    exact = [module for module in lists if len(module) == count]
    chosen = exact or sorted(lists, key=len, reverse=True)[:1]
    return tuple(chosen[0]) if chosen else ()


def norm_rank(norm: tuple[nn.Module, Tensor] | None, *, biased: bool) -> tuple[str, int]:
    """The final norm's class, and how many dimensions it takes from the states: 1 if it centres them.

    A norm that subtracts the mean of a state leaves Σ_d h_d / γ_d = 0, a hyperplane; a shift β moves it off
    the origin, and then states span all D dimensions. But beside a bias of the head, which has the constant
    already, the shift adds nothing.
    """
    if norm is None:
        return "", 0
    module, result = norm
    gain, shift = getattr(module, "weight", None), getattr(module, "bias", None)
    name = type(module).__name__
    states = result.detach().float().flatten(0, -2)
    if isinstance(shift, Tensor) and bool(shift.detach().abs().max() > 0):
        if not biased:
            return name, 0
        states = states - shift.detach().float()
    gains = [torch.ones(states.shape[-1], device=states.device)]
    if isinstance(gain, Tensor):
        # Some norms multiply by their weight, some by one plus their weight.
        gains = [gain.detach().float(), 1 + gain.detach().float()]
    for factor in gains:
        if bool((factor.abs() > 1e-6).all()):
            straight = states / factor
            if bool(straight.mean(dim=-1).abs().max() <= 1e-4 * straight.square().mean().sqrt()):
                return name, 1
    return name, 0


def padding_note(output: OutputLayer) -> str:
    return (
        f"{output.vocabulary - output.tokens} rows of the output matrix are padding that no tokenizer entry "
        "names: they count in losses, as in the model, and are left out of spectrum and ranks."
    )


def _notes(
    output: OutputLayer, loaded: Loaded, tied: bool, scale: float, norm: str, lost: int
) -> Iterator[str]:
    if tied:
        yield "The output matrix is tied: it is the input embedding as well."
    if output.vocabulary > output.tokens:
        yield padding_note(output)
    if output.bias is not None:
        yield "The output layer has a bias: one dimension more than the width."
    if scale != 1.0:
        yield f"The model multiplies its logits by {scale:.6g}; the matrix is measured with that factor."
    if isinstance(output.pointwise, Softcap):
        yield (
            f"Logits are soft-capped at {output.pointwise.cap:g}, so log-probabilities are not linear in the "
            "states: their rank is measured on sampled contexts and tokens."
        )
    if lost:
        yield f"{norm} subtracts the mean of each state, which takes one dimension from them."
    if loaded.storage not in ("float32", "float64", "bfloat16", "float16"):
        yield f"The output matrix is stored as {loaded.storage} and was dequantised to float32."
