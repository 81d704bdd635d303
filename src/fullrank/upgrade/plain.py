"""An upgraded model's body under the output layer of its own architecture, as transformers has it."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn

from fullrank.errors import FullrankError
from fullrank.models import anatomy, loading
from fullrank.ops import IDENTITY, Pointwise, Softcap
from fullrank.upgrade.original import EveryRow


@torch.no_grad()
def plain_model(model: Any) -> tuple[Any, Pointwise, float]:
    """The body under the output layer of its own architecture, which has the upgraded head's matrix.

    Also what that architecture does to its scores, and the factor that it has on W h + b.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from fullrank.models.configuration import FullrankConfig

    if not isinstance(getattr(model, "config", None), FullrankConfig):
        raise FullrankError(
            f"got a {type(model).__name__}, expected an upgraded model: give the --out of fullrank upgrade"
        )
    body, head = model.model, model.lm_head
    if type(body.config) not in MODEL_FOR_CAUSAL_LM_MAPPING or model.config.normaliser != "softmax":
        raise FullrankError(
            f"transformers has no plain model with this body, a {type(body).__name__} with "
            f"{model.config.normaliser} attention: there is nothing to collapse into"
        )
    if model.config.attention_temperature != 1.0:
        raise FullrankError(
            f"transformers has no plain model whose attention has a temperature of "
            f"{model.config.attention_temperature:g}: there is nothing to collapse into"
        )
    config = copy.deepcopy(body.config)
    config.tie_word_embeddings = False
    with loading.quiet(), torch.device("meta"):
        plain: Any = AutoModelForCausalLM.from_config(config)
    setattr(plain, plain.base_model_prefix, body)
    old = plain.get_output_embeddings()
    if old is None or plain.base_model is not body:
        raise FullrankError(f"{type(plain).__name__} has no output layer of its own to collapse into")
    weight = head.decoder.weight
    layer = nn.Linear(head.width, head.vocab, bias=old.bias is not None, device="meta", dtype=weight.dtype)
    layer = layer.to_empty(device=weight.device)
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.zero_()
    plain.set_output_embeddings(layer)
    plain.eval()
    if plain.get_output_embeddings().weight is plain.get_input_embeddings().weight:
        raise FullrankError(
            f"{type(plain).__name__} always ties its output matrix to the embedding, so no other can be saved"
        )
    left = [name for name, value in plain.named_parameters() if value.is_meta]
    if left:
        raise FullrankError(
            f"{type(plain).__name__} has more than a body and an output matrix ({left[0]}): it is not taken"
        )
    plain.generation_config = copy.deepcopy(model.generation_config)
    facts = anatomy.examine(
        loading.Loaded(
            model=plain, tokenizer=cast(Any, EveryRow(head.vocab)), name="", source="object",
            storage="float32", fingerprint="", notes=(),
        )
    ).facts  # fmt: skip
    pointwise = IDENTITY if facts.softcap is None else Softcap(facts.softcap)
    return plain, pointwise, facts.logit_scale
