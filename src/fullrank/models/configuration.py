"""The configuration of a model: the body's own, and what makes the head; and of the one body that is ours.

    {"model_type": "fullrank",
     "body": {"model_type": "llama", ...},                        as the original has it
     "head": {"name": "mos", "hidden": 576, "components": 4},     arguments of fullrank.heads.build
     "vocab_size": 49152, "tie_word_embeddings": true, "logit_scale": 1.0, "softcap": null}

Whatever else is asked of it (max_position_embeddings, eos_token_id, num_hidden_layers, ...) the body's text
configuration answers.

Beside every config.json stands IMPORT_FILE, one import, which `auto_map` names. So a program that imports
only transformers (`lm_eval`) finds the installed package where its user passes trust_remote_code. No code of
the model is copied, and where fullrank is imported transformers takes our class and leaves the file alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from fullrank.errors import FullrankError
from fullrank.models.normalisers import check_temperature
from fullrank.results import write_whole

IMPORT_FILE = "fullrank_import.py"
IMPORT = '''"""The model is one of the installed package fullrank: nothing else is in here."""

from fullrank.models import FullrankConfig  # noqa: F401
'''


class FullrankConfig(PreTrainedConfig):
    """A body of transformers and a head of ours."""

    model_type: ClassVar[str] = "fullrank"
    sub_configs: ClassVar[dict[str, Any]] = {"body": AutoConfig}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    body: Any = None
    """Configuration of the body, a `PreTrainedConfig` or its dictionary with a model_type."""
    head: dict[str, Any] | None = None
    """`name`, `hidden` and the options of `fullrank.heads.build`; None is plain softmax."""
    vocab_size: int | None = None
    """Rows of the output matrix; None is as many as the body embeds."""
    tie_word_embeddings: bool = False
    """Whether the output matrix is the input embedding."""
    logit_scale: float = 1.0
    """What the body's last state is multiplied by before the head reads it."""
    softcap: float | None = None
    """c where scores z are bent to c tanh(z / c)."""
    normaliser: str = "softmax"
    """What turns attention scores into weights (`normalisers.py`); a parameter of it is learnt, a number for
    each layer and attention head."""
    attention_temperature: float = 1.0
    """What attention scores are divided by, whatever the normaliser."""
    return_logits: bool | None = None
    """Whether forward gives log-probabilities beside a loss as well; None leaves them out in training steps
    of transformers' Trainer alone. They are V wide: set False where only losses are read."""
    origin: dict[str, Any] | None = None
    """What was upgraded, and how near the start came to it: see `fullrank.upgrade.upgrade`."""

    def __post_init__(self, **extra: Any) -> None:
        check_temperature(self.attention_temperature, "attention_temperature")
        body = self.body
        if isinstance(body, dict):
            kind = str(body.get("model_type"))
            if kind not in CONFIG_MAPPING:
                raise FullrankError(
                    f"the body's model type is {kind!r}, which this transformers does not know: upgrade "
                    "transformers"
                )
            body = CONFIG_MAPPING[kind](**body)
        elif body is None:
            # transformers builds an empty configuration to see which values are not the default ones.
            body = PreTrainedConfig()
        # While there is no body, its values are not taken for this configuration's own and stored twice.
        self.body = None
        asked = extra.pop("attn_implementation", None)
        super().__post_init__(**extra)
        self.body = body
        self._attn_implementation = asked or body._attn_implementation
        self.head = {"name": "softmax"} if self.head is None else dict(self.head)
        if self.vocab_size is None:
            self.vocab_size = getattr(self.get_text_config(), "vocab_size", None)

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **options: Any) -> None:
        self.auto_map = {"AutoConfig": f"{Path(IMPORT_FILE).stem}.{FullrankConfig.__name__}"}
        write_whole(Path(save_directory) / IMPORT_FILE, IMPORT)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing, where transformers would save a copy of this file with every model from now on."""

    def to_diff_dict(self) -> dict[str, Any]:
        found = super().to_diff_dict()
        # Where the body came from is a place on somebody's machine; transformers leaves out only its own.
        if isinstance(found.get("body"), dict):
            found["body"].pop("_name_or_path", None)
        return found

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> Any:
        return self.body.get_text_config(decoder=decoder, encoder=encoder)

    def validate(self) -> None:
        """By the rules of the body's own kind: those for all kinds refuse layers that some kinds have."""
        self.body.validate()

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here comes by.
        if name.startswith("_") or self.__dict__.get("body") is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.get_text_config(), name)


class AwdLstmConfig(PreTrainedConfig):
    """An AWD-LSTM (`awd_lstm.py`); `hidden_size` is the width of its states, as everywhere else."""

    model_type: ClassVar[str] = "awd_lstm"

    vocab_size: int = 10_000
    embedding_size: int = 400
    inner_size: int = 1150
    """Width of every layer but the last."""
    hidden_size: int = 400
    """Width of the last layer."""
    num_hidden_layers: int = 3
    dropout: float = 0.0
    """Of the last layer's output, one mask a sequence."""
    dropout_embedding: float = 0.0
    """Whole words dropped from the embedding."""
    dropout_input: float = 0.0
    """Of the embedded inputs, one mask a sequence."""
    dropout_hidden: float = 0.0
    """Between layers, one mask a sequence."""
    weight_drop: float = 0.0
    """Of the recurrent weights, one mask a step."""
    use_cache: bool = True
    """Whether forward hands out the state."""

    def __post_init__(self, **extra: Any) -> None:
        super().__post_init__(**extra)
        for name in ("vocab_size", "embedding_size", "inner_size", "hidden_size", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise FullrankError(
                    f"{name}={getattr(self, name)} is impossible: expected a whole number >= 1"
                )
        for name in ("dropout", "dropout_embedding", "dropout_input", "dropout_hidden", "weight_drop"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise FullrankError(f"{name}={getattr(self, name)} is impossible: expected 0 <= {name} < 1")


AutoConfig.register(AwdLstmConfig.model_type, AwdLstmConfig, exist_ok=True)
AutoConfig.register(FullrankConfig.model_type, FullrankConfig, exist_ok=True)
