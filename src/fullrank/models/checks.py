"""What must hold of a model before anything is measured, each with its error of one sentence.

A model that loads is not yet the model that was meant: weights that the checkpoint lacks would be random, a
head of another task has no next-token distribution, and a NaN would come out as a verdict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fullrank.errors import FullrankError
from fullrank.models.model_files import Checkpoint, first_line


def device(name: str) -> None:
    """The device exists here."""
    try:
        wanted = torch.device(name)
    except RuntimeError as error:
        raise FullrankError(f"{name!r} is no device that torch knows: give cpu, cuda or mps") from error
    kind = wanted.type
    absent = (kind == "cuda" and (wanted.index or 0) >= torch.cuda.device_count()) or (
        kind == "mps" and not torch.backends.mps.is_available()
    )
    if absent:
        raise FullrankError(f"device {name!r} was asked for, but torch sees none here: use --device cpu")


def device_name(name: str) -> str:
    """The device in words."""
    if name.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(name)
    return f"{name}, {torch.get_num_threads()} threads" if name == "cpu" else name


def known(found: Checkpoint, *, trust_remote_code: bool) -> None:
    """transformers has the code of the model itself, or may run the checkpoint's."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, path = found.config.get("model_type"), found.directory / "config.json"
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return
    if found.config.get("auto_map"):
        if trust_remote_code:
            return
        raise FullrankError(
            f"{path} needs code that comes with the checkpoint (model type {model_type!r}): read that code, "
            "and pass --trust-remote-code if you trust it"
        )
    if not model_type:
        raise FullrankError(f"{path} names no model_type, so nothing says what it is: save the model again")
    raise FullrankError(
        f"{path} names the model type {model_type!r}, which transformers {transformers.__version__} does not "
        "know: upgrade transformers, or check the spelling"
    )


def task(config: Any, directory: Path, *, trust_remote_code: bool) -> None:
    """It is a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    architectures = config.architectures if isinstance(config.architectures, list | tuple) else []
    named = ", ".join(map(str, architectures)) or type(config).__name__.removesuffix("Config")
    expected = "expected a causal language model, which predicts the next token, such as LlamaForCausalLM"
    if getattr(config, "is_encoder_decoder", False):
        raise FullrankError(f"{directory} is an encoder-decoder model ({named}): {expected}")
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    accepted: set[str] = set()
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        # The body alone is accepted as well: where the head is tied to the embedding, it is the whole model.
        classes: Any = (MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], MODEL_MAPPING.get(type(config), ()))
        accepted = {
            cls.__name__ for item in classes for cls in (item if isinstance(item, tuple) else (item,))
        }
        # Some old checkpoints spell their class otherwise ("LLaMAForCausalLM").
        if not architectures or any(
            str(item).endswith(("ForCausalLM", "LMHeadModel")) for item in architectures
        ):
            return
    if not accepted.intersection(architectures):
        raise FullrankError(f"{directory} is a {named}: {expected}")


def complete(directory: Path, report: dict[str, Any]) -> None:
    """The checkpoint held every weight of the model, in its shape; `report` is transformers' loading info."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise FullrankError(
            f"{directory} lacks {count(missing, 'tensor')} of the model, which would be random "
            f"({some(missing)}): give a checkpoint of the whole model with its output layer"
        )
    if report["mismatched_keys"]:
        name, came, expected = min(report["mismatched_keys"])
        raise FullrankError(
            f"{directory} stores {name} as {tuple(came)}, its config.json makes it {tuple(expected)}: "
            "configuration and weights are of different models, save them together"
        )


def finite(model: Any) -> None:
    """No weight is NaN or infinite."""
    bad = []
    for name, weight in model.named_parameters():
        if weight.is_meta and hasattr(model, "hf_device_map"):
            # Offloaded: reading all of it from the disk would cost as much as the diagnosis, and states that
            # are no numbers are refused as well.
            continue
        if weight.is_meta:
            raise FullrankError(f"{name} has no values (it is on the meta device): load the model's weights")
        # One-byte floats have no isfinite; they come from quantisers, not from training that went wrong.
        if weight.is_floating_point() and weight.element_size() > 1 and not torch.isfinite(weight).all():
            bad.append(name)
    if bad:
        dtype = str(model.dtype).removeprefix("torch.")
        raise FullrankError(
            f"NaN or infinite values in {count(bad, 'tensor')} of the model as {dtype}: {some(bad)}; repair "
            "the checkpoint, or load it in float32 if it overflowed"
        )


def tokens(model: Any, tokenizer: Any) -> tuple[str, ...]:
    """Every token has a row in the output matrix; returns notes.

    Special tokens may lack one: a padding or image token beyond the matrix is common (Gemma 3 has one), and
    harmless as long as no text spells it.
    """
    rows, ids = output_rows(model), tokenizer.get_vocab()
    if not ids:
        raise FullrankError("the tokenizer is empty: give the one that the model was trained with")
    decoder = getattr(tokenizer, "added_tokens_decoder", {})
    special = {index for index, token in decoder.items() if token.special}
    largest = max((index for index in ids.values() if index not in special), default=-1)
    if largest >= rows:
        raise FullrankError(
            f"the tokenizer has ids up to {largest}, the output matrix has {rows} rows: "
            "give the tokenizer that the model was trained with"
        )
    beyond = sorted(token for token, index in ids.items() if index >= rows)
    if not beyond:
        return ()
    return (
        f"{count(beyond, 'special token')} of the tokenizer without a row in the output matrix: "
        f"{some(beyond)}",
    )


def output_weight(model: Any) -> torch.Tensor | None:
    """The matrix that transformers calls the output embedding, where there is one."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


def output_rows(model: Any) -> int:
    weight = output_weight(model)
    # The matrix of a quantised layer may be packed; its shape then says nothing.
    if weight is None or not weight.is_floating_point():
        return int(model.config.get_text_config().vocab_size)
    return int(weight.shape[0])


@contextlib.contextmanager
def one_sentence(what: str) -> Iterator[None]:
    """Turn whatever a library raises about an input into an error of one sentence."""
    try:
        yield
    except FullrankError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise FullrankError(f"{what} does not fit into memory: use a smaller dtype or model") from error
    except Exception as error:  # of a dozen libraries, about files that a user brought
        if "trust_remote_code" in str(error):
            raise FullrankError(
                f"{what} needs code that comes with the checkpoint: read that code, and pass "
                "--trust-remote-code if you trust it"
            ) from error
        remedy = "install what is missing" if isinstance(error, ImportError) else "check the files"
        raise FullrankError(f"{what} cannot be loaded ({first_line(error)}): {remedy}") from error


def count(items: Sequence[str], noun: str) -> str:
    return f"{len(items)} {noun}" + ("" if len(items) == 1 else "s")


def some(items: Sequence[str]) -> str:
    return ", ".join(items[:3]) + (", ..." if len(items) > 3 else "")
