"""Give a trained model another head that computes the same distribution before any training.

    model = upgrade("path/to/model", "mos", components=4)

The probe of `models.anatomy` finds what the original does after its last state h: logits = W h + b, scaled
or soft-capped. The new head takes W and b as they are, the same tensors, tied where they were tied; the scale
is put on the state, the cap on the scores. What the head owns beyond W starts so that it changes nothing:
how, and whether exactly or nearly, the head says (`Head.start_options`, `start_from`, `starts_exactly`).
Gates are random, drawn for states of unit size, and divided by the size of the model's states: a mixture of
equal components is the original whatever its prior. `config.origin` keeps the name of the original, where
that was found (`Loaded.source`), the mean KL of the start from it in nats, and the largest difference of a
log-probability, both on random tokens. What squeezes its contexts by tanh, mixtape and `as_published`
mixtures, cannot start as the original: refused.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from fullrank.errors import FullrankError
from fullrank.heads import Start
from fullrank.heads.registry import find
from fullrank.models import checks, head_anatomy, loading
from fullrank.upgrade import original

if TYPE_CHECKING:
    from fullrank.models.causal_lm import FullrankForCausalLM


def upgrade(model: Any, head: str = "mos", **options: Any) -> FullrankForCausalLM:
    """`model` with the head of that name in place of its own, and the same distribution.

    `model` is a causal language model of transformers, or what `fullrank.models.loading.load` takes or
    gives: a directory, a hub name, a .gguf file. Its body and output matrix are not copied: an object that is
    passed shares them with the result. `options` are the head's own, see docs/heads.md.
    """
    name, source, own = "", "object", False
    if isinstance(model, str | Path):
        model = loading.load(model)
        # Loaded here for nobody else, and to be trained as any model that is loaded.
        own = True
    if isinstance(model, loading.Loaded):
        model = dequantised(model) if own else model
        name, source, model = model.name, model.source, model.model
    find(head)
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
    _check_start(layer.start, upgraded.lm_head.starts_exactly(layer.start), divergence, difference)
    upgraded.config.origin = {
        "name": name or Path(str(model.config.name_or_path)).name or type(model).__name__,
        "source": source,
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


def _body(model: Any) -> Any:
    """The part below the output layer, which transformers must be able to build from its configuration."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    from fullrank.models.configuration import FullrankConfig

    expected = "expected a causal language model of transformers, such as LlamaForCausalLM"
    if not isinstance(model, PreTrainedModel):
        raise FullrankError(
            f"got a {type(model).__name__}, {expected}: unwrap it, or merge its adapters, first"
        )
    kind = type(model).__name__
    if isinstance(model.config, FullrankConfig):
        # A run of ours, or an upgrade to plain softmax.
        head_anatomy.check_one_matrix(model)
    if model.config.is_encoder_decoder:
        raise FullrankError(f"{kind} is an encoder-decoder model, {expected}")
    if model.get_output_embeddings() is None:
        raise FullrankError(f"{kind} has no output layer, {expected}")
    if getattr(model.config, "quantization_config", None) is not None:
        raise FullrankError(
            f"{kind} is quantised, and can neither be trained nor saved with another head: call "
            "model.dequantize() first, or load it in float"
        )
    # Not `base_model`: of one of ours with a scale or a cap that is a view.
    body: Any = getattr(model, model.base_model_prefix, model)
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
    from fullrank.models.causal_lm import FullrankForCausalLM, build_head
    from fullrank.models.configuration import FullrankConfig

    start = layer.start
    rows, width = start.weight.shape
    config = FullrankConfig(
        body=body.config,
        head={"name": name, "hidden": width, **find(name).start_options(start, options)},
        vocab_size=rows,
        tie_word_embeddings=layer.tied,
        logit_scale=layer.scale,
        normaliser=getattr(model.config, "normaliser", "softmax"),
        attention_temperature=getattr(model.config, "attention_temperature", 1.0),
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
    head.start_from(start)
    # A head that bends its scores itself has no cap but what it makes of it.
    config.softcap = head.softcap
    upgraded = FullrankForCausalLM(config, body=body, head=head)
    upgraded.generation_config = copy.deepcopy(model.generation_config)
    return upgraded


def _check_start(start: Start, exact: bool, divergence: float, difference: float) -> None:
    """Refuse a result that is not what was promised, rather than hand it on."""
    precise = start.weight.dtype in (torch.float32, torch.float64)
    wrong = difference > 1e-3 if precise else divergence > 0.05
    if not math.isfinite(divergence) or (exact and wrong):
        raise FullrankError(
            f"the upgraded model is {divergence:.3g} nats away from the original, with a largest difference "
            f"of {difference:.3g}: it does something beside its output matrix, and cannot be upgraded yet"
        )
