"""Give a trained model another head that computes the same distribution before any training.

    model = upgrade("path/to/model", "mos", components=4)

The probe of `diagnose.anatomy` finds what the original does after its last state h: logits = W h + b, scaled
or soft-capped. The new head takes W and b as they are, the same tensors, tied where they were tied; the scale
is put on the state, the cap on the scores. What the head owns beyond W starts so that it changes nothing:

    softmax, moc, mos, trunk, doc, pointer   as they start by default: contexts equal to the state
    low_rank     B A the projection on the r directions in which W is largest; at full rank, all of them
    facets       without the noise between facets: their gates and parts of the vocabulary tell them apart
    sigsoftmax   b raised until log sigmoid(z) is nothing on every score of the probe; then it is softmax.
                 Over a soft cap c the lift does that, for every score there can be
    moss         the same
    plif         slopes 1, or those of the soft cap, over bins that hold the scores of the probe
    cache        its base as above, and hardly any memory: see `cached`

Gates are random, drawn for states of unit size, and divided by the size of the model's states: a mixture of
equal components is the original whatever its prior. `config.origin` keeps the name of the original, the mean
KL of the start from it in nats, and the largest difference of a log-probability, both on random tokens.
Mixtape and `as_published` mixtures squeeze their contexts by tanh and cannot start as the original: they are
refused.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from fullrank.diagnose import checks, loading
from fullrank.errors import FullrankError
from fullrank.heads import HEADS, CacheHead, Head
from fullrank.heads.contexts import Contexts
from fullrank.heads.facets import MultiFacet
from fullrank.heads.low_rank import LowRank
from fullrank.heads.plif import Plif
from fullrank.heads.sigsoftmax import BentBySigmoid
from fullrank.hf import original
from fullrank.ops import SIGSOFTMAX, Softcap

if TYPE_CHECKING:
    from fullrank.hf.model import FullrankForCausalLM

EXACT = ("softmax", "moc", "mos", "trunk", "doc", "pointer", "facets", "sigsoftmax", "moss")
"""Heads that can be the original but for rounding, whatever it does to its scores."""
SETTLED = ("hidden", "vocab", "width", "bias", "as_published")
"""Options of a head that the original decides."""
SHARPNESS = 8.0
"""Score of a state against itself in the memory of an upgraded cache, nats."""
REMEMBERED = 512
"""Steps in a memory that an upgraded cache allows for."""
SHARE = 1e-4
"""Of probability that so many steps would have at most at the start, were they all the present state."""
MARGIN = 16.0
"""How far above zero sigsoftmax lifts the lowest score that it allows for: log sigmoid(16) = -1e-7."""


def upgrade(model: Any, head: str = "mos", **options: Any) -> FullrankForCausalLM:
    """`model` with the head of that name in place of its own, and the same distribution.

    `model` is a causal language model of transformers, or what `fullrank.diagnose.loading.load` takes or
    gives: a directory, a hub name, a .gguf file. Its body and output matrix are not copied: an object that is
    passed shares them with the result. `options` are the head's own, see docs/heads.md.
    """
    name, own = "", False
    if isinstance(model, str | Path):
        model = loading.load(model)
        # Loaded here for nobody else, and to be trained as any model that is loaded.
        own = True
    if isinstance(model, loading.Loaded):
        model = dequantised(model) if own else model
        name, model = model.name, model.model
    _check_options(head, options)
    body = _body(model)
    if own:
        model.requires_grad_(True)
    training = model.training
    model.eval()
    try:
        ids = original.probe_ids(model)
        layer, log_probs = original.read(model, body, ids)
        upgraded = _assemble(model, body, layer, head, options).eval()
        with torch.no_grad(), loading.quiet():
            found = upgraded(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
    finally:
        model.train(training)
    divergence = max(0.0, float((log_probs.exp() * (log_probs - found)).sum(-1).mean()))
    difference = float((log_probs - found).abs().max())
    _check_start(upgraded.lm_head, layer, divergence, difference)
    upgraded.config.origin = {
        "name": name or Path(str(model.config.name_or_path)).name or type(model).__name__,
        "architecture": type(model).__name__,
        "kl": divergence,
        "largest_difference": difference,
    }
    return upgraded.train(training)


def dequantised(loaded: loading.Loaded) -> loading.Loaded:
    """The same model in float where its weights are quantised, because those can neither be trained nor saved
    under another head. The model is changed in place where its library does so."""
    model = cast(Any, loaded.model)
    if getattr(model.config, "quantization_config", None) is None:
        return loaded
    dtype = model.get_input_embeddings().weight.dtype
    with checks.one_sentence(f"{loaded.name}, which is quantised,"):
        model = model.dequantize() or model
        model = model.to(dtype) if dtype.is_floating_point else model
    note = "The weights were quantised and are in float now, as large as before quantisation."
    return dataclasses.replace(loaded, model=model.requires_grad_(False), notes=(*loaded.notes, note))


def _check_options(head: str, options: dict[str, Any]) -> None:
    if head == "mixtape":
        raise FullrankError(
            "mixtape squeezes its contexts by tanh, so no start of it is the original: take mos or trunk"
        )
    if options.pop("as_published", False):
        raise FullrankError(
            f"as_published squeezes the contexts of {head} by tanh, so no start of it is the original: leave "
            "it out"
        )
    if head == "cache":
        base = options.get("base", "softmax")
        if "components" in options:
            options["base_options"] = {
                **(options.get("base_options") or {}),
                "components": options.pop("components"),
            }
        if not isinstance(base, str) or base not in HEADS or base == "cache":
            raise FullrankError(
                f"the head under the cache is {base!r}: expected the name of another, such as softmax or mos"
            )
        inner = dict(options.get("base_options") or {})
        _check_options(base, inner)
    settled = sorted(set(options) & set(SETTLED))
    if settled:
        raise FullrankError(
            f"{', '.join(settled)} cannot be chosen in an upgrade: the original's output layer decides that"
        )
    if head in HEADS:
        return
    # With the name of the nearest one.
    from fullrank.heads import build

    build(head, hidden=1, vocab=1)


def _body(model: Any) -> Any:
    """The part below the output layer, which transformers must be able to build from its configuration."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    from fullrank.hf.config import FullrankConfig

    expected = "expected a causal language model of transformers, such as LlamaForCausalLM"
    if not isinstance(model, PreTrainedModel):
        raise FullrankError(
            f"got a {type(model).__name__}, {expected}: unwrap it, or merge its adapters, first"
        )
    kind = type(model).__name__
    if isinstance(model.config, FullrankConfig):
        raise FullrankError(
            f"the model has a head of ours already, {model.config.head}: upgrade its original"
        )
    if model.config.is_encoder_decoder:
        raise FullrankError(f"{kind} is an encoder-decoder model, {expected}")
    if model.get_output_embeddings() is None:
        raise FullrankError(f"{kind} has no output layer, {expected}")
    if getattr(model.config, "quantization_config", None) is not None:
        raise FullrankError(
            f"{kind} is quantised, and can neither be trained nor saved with another head: call "
            "model.dequantize() first, or load it in float"
        )
    body: Any = model.base_model
    made = MODEL_MAPPING.get(type(body.config), None)
    classes = made if isinstance(made, tuple) else (made,)
    if body is model or type(body) not in classes:
        raise FullrankError(
            f"the body of {kind} is a {type(body).__name__}, which AutoModel does not build from its "
            f"configuration, so an upgrade could not be loaded again; {expected}"
        )
    checks.finite(model)
    return body


def _assemble(
    model: Any, body: Any, layer: original.Layer, name: str, options: dict[str, Any]
) -> FullrankForCausalLM:
    from fullrank.hf.config import FullrankConfig
    from fullrank.hf.model import FullrankForCausalLM, build_head

    rows, width = layer.weight.shape
    settings: dict[str, Any] = {"name": name, "hidden": width, **options}
    under = options.get("base") if name == "cache" else name
    own: dict[str, Any] = dict(options.get("base_options") or {}) if name == "cache" else settings
    if under is None:
        # A softmax that has a map of its own to train, as the heads that it will be held against.
        under = "mos" if "components" in own else "moc"
        own.setdefault("components", 1)
    if layer.bias is not None or (under in ("sigsoftmax", "moss") and layer.softcap is None):
        settings["bias"] = True
    default = inspect.signature(HEADS[under]).parameters.get("components")
    if default is not None:
        # Whoever reads the configuration should not have to know it.
        own.setdefault("components", default.default)
    inner = body.config.get_text_config().hidden_size
    if under == "facets" and inner != width:
        raise FullrankError(
            f"facets reads layers of one width, the body's have {inner} and its last state {width}: take "
            "doc, which reads them as they are"
        )
    if under == "low_rank":
        own.setdefault("rank", width)
    if under == "doc":
        own.setdefault("layers", [[width, 3], [inner, 1]])
    if under == "plif":
        own.setdefault("limit", _limit(layer))
    if name == "cache":
        settings = {**cached(layer), **settings, "base": under, "base_options": own}
    config = FullrankConfig(
        body=body.config,
        head=settings,
        vocab_size=rows,
        tie_word_embeddings=layer.tied,
        logit_scale=layer.scale,
        softcap=None if under == "plif" else layer.softcap,
        dtype=body.config.dtype,
    )
    config.name_or_path = model.config.name_or_path
    try:
        head = build_head(config)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise FullrankError(
            f"{name} cannot be built with {given} ({error}): docs/heads.md has the form of its options"
        ) from error
    _settle(head, layer)
    upgraded = FullrankForCausalLM(config, body=body, head=head)
    upgraded.generation_config = copy.deepcopy(model.generation_config)
    return upgraded


def cached(layer: original.Layer) -> dict[str, Any]:
    """Options of a cache that hardly changes the original, and can learn to.

    Scores of at most about `SHARPNESS` nats, where sqrt(H) would give those of trained states a hundred; and
    the memory weighed against probabilities, since their normaliser wanders by several nats between tokens.
    """
    states = max(layer.weight.shape[1] * layer.size**2, 1e-6)
    return {
        "temperature": states / SHARPNESS,
        "memory_weight": math.log(SHARE / REMEMBERED) - SHARPNESS,
        "maps": True,
        "normalised": True,
    }


def _limit(layer: original.Layer) -> float:
    """Bins over the scores of the probe and a quarter more; for a soft cap as far as it still rises."""
    wide = 1.25 * max(abs(layer.low), abs(layer.high), 16.0)
    return float(math.ceil(wide if layer.softcap is None else max(wide, 4.0 * layer.softcap)))


@torch.no_grad()
def _settle(head: Head, layer: original.Layer) -> None:
    """Give the head W and b, and what it owns a start that changes nothing."""
    from fullrank.hf.model import precise_parameters

    whole = head
    head = head.base if isinstance(head, CacheHead) else head
    bias = layer.bias
    if head.pointwise is SIGSOFTMAX:
        start = torch.zeros(head.vocab) if bias is None else bias.float()
        # Other text may have lower scores than the probe, the more so the wider they spread.
        bias = start.to(layer.weight.device) + (MARGIN + (layer.high - layer.low) / 2 - layer.low)
    if isinstance(head, BentBySigmoid) and head.softcap is not None:
        head.lift.fill_(MARGIN + head.softcap)
    if isinstance(head, LowRank):
        weight = layer.weight.float()
        directions = torch.linalg.eigh(weight.T @ weight).eigenvectors.flip(1)[:, : head.down.out_features]
        full = head.down.out_features == head.width
        head.down.weight.copy_(torch.eye(head.width) if full else directions.T)
        head.up.weight.copy_(torch.eye(head.width) if full else directions)
    if isinstance(head, MultiFacet):
        head.facets.weight.view(-1, head.width, 2 * head.hidden)[:, :, head.hidden :] = 0.0
        head.prior.weight.div_(max(layer.size, 1.0))
    if isinstance(head, Plif) and layer.softcap is not None:
        knots = torch.linspace(-head.limit, head.limit, len(head.steepness) + 1, dtype=torch.float64)
        slopes = Softcap(layer.softcap)(knots).diff() / knots.diff()
        # The inverse of softplus.
        head.steepness.copy_(slopes + torch.log(-torch.expm1(-slopes)))
    contexts = getattr(head, "contexts", None)
    if isinstance(contexts, Contexts) and layer.size > 0:
        contexts.gate.weight.div_(layer.size)
    whole.to(device=layer.weight.device)
    kept = precise_parameters(whole)
    for name, parameter in whole.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.to(layer.weight.dtype)
    head.decoder.weight = layer.weight
    if bias is not None:
        head.decoder.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)


def _check_start(head: Head, layer: original.Layer, divergence: float, difference: float) -> None:
    """Refuse a result that is not what was promised, rather than hand it on."""
    precise = layer.weight.dtype in (torch.float32, torch.float64)
    exact = head.name in EXACT or (isinstance(head, LowRank) and head.down.out_features == head.width)
    exact |= head.name == "plif" and layer.softcap is None
    wrong = difference > 1e-3 if precise else divergence > 0.05
    if not math.isfinite(divergence) or (exact and wrong):
        raise FullrankError(
            f"the upgraded model is {divergence:.3g} nats away from the original, with a largest difference "
            f"of {difference:.3g}: it does something beside its output matrix, and cannot be upgraded yet"
        )
