"""A transformers model whose output layer is one of our heads.

    logits [batch, time, V]    normalised log-probabilities in fp32, which log_softmax leaves as they are
    loss                       nats per token through the fused path, without a V-wide tensor

With labels the output has both. A training step of transformers' Trainer (training mode, with
`num_items_in_batch`) reads the loss alone, so its logits are left out; `return_logits`, as an argument or in
the configuration, decides every case. The loss shifts the labels as transformers does, and is the sum of its
tokens' over `num_items_in_batch` where the caller counts them.

Log-probabilities in the place of raw logits change nothing for whatever only compares, samples or normalises.
A repetition penalty, which multiplies, sees other numbers than it saw in the original.

`model` is the body as transformers has it, with its own cache, attention and checkpointing. `lm_head` is the
head; its inner matrix is the output embedding, so that tying, resizing and adapters find what they expect.
Under most heads that matrix times the body's states is not the distribution, so a call of `base_model` is
refused (`token_outputs`), and TRL's fused output layer is answered by the head itself. A head that reads the
states of earlier tokens (`Head.reads_time`) needs them all at every step: with it `generate` runs without a
cache. A head that carries a memory of them (`Head.carries_memory`) has it in the cache, as one more layer, or
beside the state of a recurrent body (`cache_layer`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModel,
    AutoModelForCausalLM,
)
from transformers.utils.generic import can_return_tuple

from fullrank.errors import FullrankError
from fullrank.heads import Head, build
from fullrank.heads.registry import find
from fullrank.models import awd_lstm  # noqa: F401  (a body that AutoModel must know)
from fullrank.models import cache_layer as remembered
from fullrank.models.attention import install_normaliser, install_temperature
from fullrank.models.configuration import FullrankConfig
from fullrank.models.token_outputs import (
    IGNORED,
    StatesOnly,
    TokenOutputs,
    TokenSettings,
    settings_of,
    token_outputs,
)

TIED = "lm_head.decoder.weight"
CACHES = ("past_key_values", "cache_params")
"""What bodies call a cache of layers."""
SWITCHING = ("phi3", "phimoe")
"""Bodies that read a text anew where it outgrows its short frequencies."""


@dataclass
class FullrankOutput(CausalLMOutputWithPast):
    """What transformers' models return, whatever their body calls what it carries on."""

    cache_params: Any = None
    """The state of Mamba and its kin."""
    state: Any = None
    """The state of RWKV and of our LSTM."""


class HeadInputs(NamedTuple):
    """What a head is given for ids [batch, time]."""

    states: list[Tensor]
    """[batch, time, H] each, the last layer first."""
    context: Tensor | None
    """The ids under them, where the head asks for those."""
    output: Any
    """Whatever else the body had to say."""


class FullrankForCausalLM(PreTrainedModel, GenerationMixin):
    """Any text body of transformers under any of our heads."""

    config_class = FullrankConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    # Which attention runs is checked by the body.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: FullrankConfig, *, body: Any = None, head: Head | None = None) -> None:
        """`body` and `head` are parts that exist already, with their weights; else both are built."""
        super().__init__(config)
        self.model = AutoModel.from_config(config.body) if body is None else body
        if config.normaliser != "softmax" and body is None:
            # Softmax stays with the fused attention that it has.
            install_normaliser(self.model, config.normaliser, start=_normaliser_start(config))
        if config.attention_temperature != 1.0:
            install_temperature(self.model, config.attention_temperature)
        self.lm_head = build_head(config) if head is None else head
        # One object: what resizes the model writes to it, and the body must read that.
        self.config.body = self.model.config
        self._is_stateful = self.model._is_stateful
        self._can_compile_fullgraph = False
        self._no_split_modules = self.model._no_split_modules
        self._skip_keys_device_placement = self.model._skip_keys_device_placement
        self._tied_weights_keys = {TIED: f"model.{embedding_name(self.model)}"}
        # Wherever scores are bent, a shift of them all counts, and bf16 cannot hold a large one exactly.
        kept = [name for name, _ in self.lm_head.named_parameters() if name in self.lm_head.precise]
        self._keep_in_fp32_modules_strict = [f"lm_head.{name}" for name in kept]
        for part in (body, self.lm_head):
            # What has its values is not drawn anew; on the meta device nothing has.
            for module in part.modules() if part is not None else ():
                if not any(tensor.is_meta for tensor in module.parameters(recurse=False)):
                    module._is_hf_initialized = True
        self.post_init()

    @property
    def _no_split_modules(self) -> set[str]:
        """Kinds of modules that stay on one device; under FSDP, each a unit of its own."""
        # The head uses its matrix beside the call of the matrix's own module, so it must not be split. FSDP
        # has units for that module and for the embedding that it may be tied to, which lie across the head.
        sharded = torch.distributed.is_available() and torch.distributed.is_initialized()
        return set(self._unsplit) if sharded else {*self._unsplit, type(self.lm_head).__name__}

    @_no_split_modules.setter
    def _no_split_modules(self, names: Iterable[str] | None) -> None:
        self._unsplit = {*(names or ())} - {type(self.lm_head).__name__}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
        **more: Any,
    ) -> FullrankOutput | TokenOutputs:
        """`labels` [batch, time] are the input ids, -100 where a token does not count; they are shifted here.

        `shift_labels` takes labels that are shifted already, `ignore_index` another number than -100. With
        `fused_lm_head=True` the output is TRL's: per-token log-probabilities in place of logits. All else
        goes to the body.
        """
        shift_labels, ignore_index = more.pop("shift_labels", None), more.pop("ignore_index", -100)
        per_token = more.pop("fused_lm_head", False)
        if per_token and more.get("output_router_logits"):
            raise FullrankError(
                "output_router_logits asks for the load-balancing loss of a mixture of experts, which this "
                "model does not compute: pass router_aux_loss_coef=0.0 to the trainer"
            )
        head = self.lm_head
        memory = None
        if self._remembers and self.carries_state:
            more["state"], memory = remembered.split(more.get("state"))
        elif self._remembers:
            memory = remembered.read(more.get("cache_params", past_key_values))
        elif head.reads_time:
            self._check_whole(past_key_values)
            use_cache = False
        wanted = more.pop("output_hidden_states", None)
        wanted = self.config.output_hidden_states if wanted is None else wanted
        output = self.model(
            **self._body_inputs(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                output_hidden_states=True if wanted or head.states > 1 else None,
            ),
            **more,
        )
        states, context = self._states(output, input_ids, attention_mask)
        held = {} if memory is None else {"memory": memory}
        loss = logits = None
        if labels is not None and shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if per_token:
            return self._token_outputs(
                states, context, labels, shift_labels, ignore_index=ignore_index, count=num_items_in_batch
            )
        if shift_labels is not None:
            loss = head(
                states,
                shift_labels.to(states[0].device),
                context=context,
                reduction="mean" if num_items_in_batch is None else "sum",
                ignore_index=ignore_index,
                **held,
            )
            if num_items_in_batch is not None:
                count = num_items_in_batch
                loss = loss / (count.to(loss.device) if isinstance(count, Tensor) else count)
            return_logits = self.config.return_logits if return_logits is None else return_logits
            if return_logits is None:
                # A training step of transformers' Trainer reads the loss alone.
                return_logits = not (self.training and num_items_in_batch is not None)
        if shift_labels is None or return_logits:
            logits = self._log_probs(states, context, logits_to_keep, memory)
        state = getattr(output, "state", None)
        if self._remembers and self.carries_state:
            if context is not None and state is not None:
                after = head.remember(states, context=context, **held)
                state = remembered.StateWithMemory(state=state, memory=after)
        elif self._remembers:
            cache = next(
                (found for name in CACHES if (found := getattr(output, name, None)) is not None), None
            )
            if context is not None and getattr(cache, "layers", None):
                remembered.extend(cache, head.remember(states, context=context, length=context.shape[1]))
        return FullrankOutput(
            loss=loss,
            logits=cast(Any, logits),
            **{name: getattr(output, name, None) for name in CACHES},
            state=state,
            hidden_states=output.hidden_states if wanted else None,
            attentions=getattr(output, "attentions", None),
        )

    def head_inputs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        state: Any = None,
        layers: bool = False,
    ) -> HeadInputs:
        """What the head reads for ids [batch, time]. Nothing V wide is made.

        `state` is what the output of the last call on the same texts had by that name, where the body
        carries one; with `layers` the output has every layer's states.
        """
        output = self.model(
            **self._body_inputs(
                input_ids=input_ids,
                attention_mask=attention_mask,
                use_cache=self.carries_state,
                output_hidden_states=True if layers or self.lm_head.states > 1 else None,
                state=state,
            )
        )
        return HeadInputs(*self._states(output, input_ids, attention_mask), output)

    @property
    def carries_state(self) -> bool:
        """Whether a text can be read part by part, each with the `state` after the one before."""
        return "state" in self._accepted

    def generate(self, *arguments: Any, **settings: Any) -> Any:
        """As `GenerationMixin.generate`; a head that reads earlier states, and has no memory of them, runs
        without a cache, as does a body that has none. Texts of different lengths are padded on the left; a
        text of no token is refused."""
        given = (*arguments[:1], settings.get("inputs"), settings.get("input_ids"))
        _check_texts(next((ids for ids in given if ids is not None), None), settings.get("attention_mask"))
        if not self._has_cache or (self.lm_head.reads_time and not self._remembers):
            settings["use_cache"] = False
        return GenerationMixin.generate(cast(Any, self), *arguments, **settings)

    @property
    def base_model(self) -> Any:
        """The body; where the head is more than one matrix, a view of it that cannot be called."""
        head = self._modules.get("lm_head")
        return self.model if head is None or self._one_matrix else StatesOnly(self.model, self.lm_head.name)

    @property
    def _one_matrix(self) -> bool:
        """Whether logits are the body's states times the output embedding, so that others may multiply."""
        return self.lm_head.one_matrix and self.config.logit_scale == 1.0

    def __setattr__(self, name: str, value: Any) -> None:
        settings = settings_of(value) if name == "forward" else None
        if settings is not None:
            # TRL replaces forward by a product of states and output embedding: forward answers it instead.
            self._token_settings = settings
            return
        super().__setattr__(name, value)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head.replace_decoder(new_embeddings)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        head, old = self.lm_head, self.lm_head.vocab
        if head.fixed_vocabulary and (new_num_tokens or pad_to_multiple_of):
            raise FullrankError(
                f"{head.name} has parameters for each of its {old} tokens and cannot be resized: upgrade the "
                "resized original instead"
            )
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        decoder = head.decoder
        # A tied matrix grows with the embedding, of which its module knows nothing.
        decoder.out_features = self.config.vocab_size = len(decoder.weight)
        head.replace_decoder(decoder)
        if decoder.bias is not None and mean_resizing and head.vocab > old:
            # transformers gives a tied head's new tokens the bias 0, which says much where others have 20.
            with torch.no_grad():
                decoder.bias[old:] = decoder.bias[:old].mean()
        return embedding

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        # transformers looks for the name kwargs, and then for what forward takes.
        kind = self.model.config.model_type
        if len(input_ids) > 1 and kind == "rwkv":
            # transformers mixes the rows of a batch where a state meets one token of each: all is read again.
            kwargs.pop("state", None)
            next_sequence_length = None
        cache, short = kwargs.get("past_key_values"), None
        if kind in SWITCHING:
            short = getattr(self.model.config, "original_max_position_embeddings", None)
        if cache is not None and short is not None and cache.get_seq_length() <= short < input_ids.shape[1]:
            # From here on all positions turn by other frequencies than those that the cache was made with.
            kwargs["past_key_values"] = next_sequence_length = None
        return GenerationMixin.prepare_inputs_for_generation(
            cast(Any, self), cast(Any, input_ids), next_sequence_length, **kwargs
        )

    def _reorder_cache(self, cache: Any, rows: Tensor) -> Any:
        """As a beam search picks its beams. transformers knows how to do it to its own caches alone."""
        if not hasattr(cache, "reorder_cache"):
            return remembered.select(cache, rows)
        cache.reorder_cache(rows)
        return cache

    def _supports_default_dynamic_cache(self) -> bool:  # type: ignore[override]
        if self.carries_state:
            # An empty cache beside the state would be reordered in its place.
            return False
        # transformers asks the name of the class, and the body's is what it means.
        original: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self.config.body), None)
        return original is None or original._supports_default_dynamic_cache()

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: else a body's module without weights of its own is not asked to fill the buffers that no
        checkpoint has (the multipliers of Falcon-H1), and reads whatever memory held."""
        return cls.is_remote_code()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Weights that a checkpoint lacks: those of the head are drawn as the head draws them."""
        name = next((name for name, part in self.lm_head.named_modules() if part is module), None)
        if name is None:
            super()._init_weights(module)
            return
        if all(getattr(own, "_is_hf_initialized", False) for own in module.parameters(recurse=False)):
            return
        fresh = build_head(cast(FullrankConfig, self.config)).get_submodule(name)
        for own, drawn in zip(module.parameters(recurse=False), fresh.parameters(recurse=False), strict=True):
            if not getattr(own, "_is_hf_initialized", False):
                own.copy_(drawn)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *rest: Any) -> Any:
        made = GenerationMixin._prepare_cache_for_generation(
            cast(Any, self), generation_config, model_kwargs, *rest
        )
        # transformers chooses the argument by the name of the class, which is not the body's.
        if "cache_params" in self._accepted and "past_key_values" in model_kwargs:
            model_kwargs["cache_params"] = model_kwargs.pop("past_key_values")
        if self._remembers:
            cache = next((model_kwargs[name] for name in CACHES if model_kwargs.get(name) is not None), None)
            if getattr(cache, "layers", None) and remembered.find(cache) is None:
                # Before the first step: a static cache would be compiled without it.
                remembered.add(cache)
        return made

    @property
    def _remembers(self) -> bool:
        """Whether the head's memory goes with the body's cache or state."""
        return self.lm_head.carries_memory and self._has_cache

    @property
    def _has_cache(self) -> bool:
        """Whether the body goes on from what it has read, by any name."""
        return not self._accepted.isdisjoint((*CACHES, "state"))

    @property
    def _accepted(self) -> set[str]:
        """Names of the body's arguments."""
        return set(inspect.signature(self.model.forward).parameters)

    def _body_inputs(self, **inputs: Any) -> dict[str, Any]:
        given = {name: value for name, value in inputs.items() if value is not None}
        accepted = self._accepted
        if "position_ids" not in accepted:
            given.pop("position_ids", None)
        if "cache_params" in accepted and "attention_mask" in given:
            ids = given.get("input_ids", given.get("inputs_embeds"))
            if ids is None or given["attention_mask"].shape[1] != ids.shape[1]:
                # A mask over the past: a recurrent state has left out already what is to be left out.
                del given["attention_mask"]
        return given

    def _check_whole(self, cache: Any) -> None:
        if cache is not None and cache.get_seq_length() > 0:
            raise FullrankError(
                f"{self.lm_head.name} reads the states of all earlier tokens and got a cache of "
                f"{cache.get_seq_length()} tokens in their place: pass the whole text with use_cache=False"
            )

    def _states(
        self, output: Any, input_ids: Tensor | None, mask: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """What the head reads, the last layer first, and the ids under it where it asks for them."""
        head, last = self.lm_head, output.last_hidden_state
        decoder: Any = head.decoder
        if not isinstance(decoder, nn.Linear) and not hasattr(decoder, "modules_to_save"):
            # Its own matrix would be read, and what is added to it passed by without a word.
            raise FullrankError(
                f"{type(decoder).__name__} adapts the output matrix, which {head.name} would pass by: "
                "leave decoder out of target_modules and put lm_head in modules_to_save"
            )
        if hasattr(decoder, "unshard"):
            # Where FSDP has the matrix in another unit than the head, nobody else calls it: so its hooks run,
            # be it for no token, and it is whole until the gradients are there.
            decoder(last.new_empty(0, head.width, dtype=decoder.weight.dtype))
            decoder.unshard()
        states = [last if self.config.logit_scale == 1.0 else last * self.config.logit_scale]
        if head.states > 1:
            layers = output.hidden_states
            if layers is None or len(layers) < head.states:
                raise FullrankError(
                    f"{head.name} reads {head.states} layers, the body gives "
                    f"{0 if layers is None else len(layers)}: build the head with fewer layers"
                )
            states += [layers[-1 - back] for back in range(1, head.states)]
        states = [state.to(head.decoder.weight.dtype) for state in states]
        context = None
        if head.needs_context:
            if input_ids is None:
                raise FullrankError(
                    f"{head.name} points at the ids of earlier tokens and got inputs_embeds: pass input_ids"
                )
            context = input_ids.to(states[0].device)
        if head.reads_time and mask is not None and mask.ndim == 2:
            # With a cache the mask covers the past as well.
            seen = mask[:, -states[0].shape[1] :].to(states[0].device).bool()
            states = [state * seen[..., None] for state in states]
            context = None if context is None else context.masked_fill(~seen, -1)
        return states, context

    def _token_outputs(
        self,
        states: list[Tensor],
        context: Tensor | None,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        *,
        ignore_index: int,
        count: Tensor | int | None,
    ) -> TokenOutputs:
        """For `labels` [batch, time] the outputs are [batch, time - 1], for shifted ones [batch, time]."""
        if shift_labels is None:
            raise FullrankError("fused_lm_head=True got neither labels nor shift_labels: pass one of them")
        targets = shift_labels.to(states[0].device)
        targets = targets.masked_fill(targets == ignore_index, IGNORED)
        settings = getattr(self, "_token_settings", TokenSettings())
        return token_outputs(
            self.lm_head,
            states,
            targets,
            settings,
            context=context,
            count=count,
            drop_last=labels is not None,
        )

    def _log_probs(
        self, states: list[Tensor], context: Tensor | None, keep: int | Tensor, memory: Any = None
    ) -> Tensor:
        head = self.lm_head
        positions: Any = slice(-keep, None) if isinstance(keep, int) and keep else keep
        held = {} if memory is None else {"memory": memory}
        if isinstance(positions, slice) and head.carries_memory and context is not None:
            before, last = slice(None, positions.start), positions
            if context[:, before].shape[1]:
                # What is not asked for becomes memory, so that nothing V wide is made of it.
                memory = head.remember(
                    [state[:, before] for state in states], context=context[:, before], **held
                )
                held = {"memory": memory}
            return cast(Tensor, head([state[:, last] for state in states], context=context[:, last], **held))
        if isinstance(positions, int):
            return cast(Tensor, head(states, context=context, **held))
        if head.reads_time:
            return cast(Tensor, head(states, context=context, **held))[:, positions]
        return cast(Tensor, head([state[:, positions] for state in states]))


def _check_texts(ids: Any, mask: Any) -> None:
    """Refuse what nothing can be generated from: its next token would come from a state of padding."""
    if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.shape[1]:
        raise FullrankError(
            f"a batch of {len(ids)} texts of no token has nothing to go on from: begin each with a token, "
            "such as the tokenizer's bos_token"
        )
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not mask.numel():
        return
    last = mask[:, -1] != 0
    if not bool(last.all()):
        row = int((~last).nonzero()[0])
        empty = not bool(mask[row].any())
        raise FullrankError(
            f"text {row} of the batch {'is empty' if empty else 'ends in padding'} by its attention mask: "
            + (
                "begin it with a token, such as the tokenizer's bos_token"
                if empty
                else "pad on the left, with tokenizer.padding_side='left'"
            )
        )


def build_head(config: FullrankConfig) -> Head:
    """The head that a configuration describes, with its own random weights."""
    options = dict(config.head or {})
    name = options.pop("name", "softmax")
    if config.origin is not None and "centred" in find(name).options():
        # Upgrades of version 0.1 were made before there was a choice.
        options.setdefault("centred", False)
    hidden = options.pop("hidden", None) or config.get_text_config().hidden_size
    head = build(name, hidden=hidden, vocab=cast(int, config.vocab_size), **options)
    if config.softcap is not None:
        head.cap_scores(config.softcap)
    return head


def _normaliser_start(config: FullrankConfig) -> float | None:
    """The factor on log n begins as softmax for the last token of a full context."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or 2
    return 1 / math.log(max(2, context)) if config.normaliser == "log_length" else None


def embedding_name(body: nn.Module) -> str:
    """The name of the body's input embedding among its parameters."""
    embedding = body.get_input_embeddings()  # type: ignore[operator]
    return next(f"{name}.weight" for name, module in body.named_modules() if module is embedding)


AutoModelForCausalLM.register(FullrankConfig, FullrankForCausalLM, exist_ok=True)
# The Trainer looks here whether label smoothing has to shift the labels.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FullrankConfig.model_type] = FullrankForCausalLM.__name__
