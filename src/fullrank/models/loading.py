"""How a diagnosis gets its model: a directory, a hub name, a GGUF file, or the model that a package carries.

Whatever the source, it ends as a directory in the layout of `save_pretrained`, and one path loads that: a hub
name becomes its snapshot in the hub's cache, a GGUF file is converted once (`gguf_files`). `checkpoint` looks
through the directory before transformers does, `checks` refuses what could not be measured. No code of a
checkpoint runs unless the caller says so, and nothing is ever asked on the terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fullrank.errors import FullrankError
from fullrank.models import checks, gguf_files, sizes
from fullrank.models import model_files as checkpoint
from fullrank.results import cache_directory

if TYPE_CHECKING:
    import transformers

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

PATIENCE = 10.0
"""Seconds to wait for the hub's answer before the local cache is asked alone."""

HUB_FILES = ("*.json", "*.model", "*.model.v*", "*.txt", "*.tiktoken", "*.jinja", "README.md")
"""What is fetched beside the weights."""

NOT_FETCHED = ("*/*", "consolidated*", "*.onnx", "training_args*", "optimizer*", "scheduler*", "rng_state*")
"""Second copies of the weights in other formats, and the state of training."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A causal language model that passed the checks, and its tokenizer."""

    model: transformers.PreTrainedModel
    """In evaluation mode, without gradients, in the dtype and on the device that were asked for."""
    tokenizer: transformers.PreTrainedTokenizerBase
    name: str
    source: str
    """directory, hub, gguf, bundled, or object."""
    storage: str
    """How the output matrix is stored: a dtype, or a quantisation such as Q8_0."""
    fingerprint: str
    """sha256 over configuration, weights and tokenizer."""
    notes: tuple[str, ...]
    """A sentence each for what a reader should know about how it was loaded."""
    license: str = ""
    """As its own README states it; "" where it does not."""


def _silent(message: str) -> None:
    pass


def load(
    model: str | Path | None,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    device_map: str | dict[str, Any] | None = None,
    cache: Path | None = None,
    say: Callable[[str], None] = _silent,
) -> Loaded:
    """Load a model by path or hub name, or the bundled one for None; raises FullrankError with the remedy.

    `device_map` is accelerate's, "auto" or by module: what the devices cannot hold stays in memory or on disk
    until it is needed.
    """
    checks.device(device)
    storage = ""
    notes: tuple[str, ...] = ()
    with quiet():
        if model is None or _is_gguf(model):
            file = gguf_files.bundled() if model is None else _path(model)
            source, name = ("bundled", gguf_files.BUNDLED_NAME) if model is None else ("gguf", file.stem)
            converted = gguf_files.converted(file, cache or cache_directory(), say)
            directory, storage, notes = converted.directory, converted.storage, converted.notes
        elif _is_path(model):
            directory = _path(model)
            source, name = "directory", directory.resolve().name
            if not os.path.exists(directory):
                raise FullrankError(
                    f"no such path: {model}; give a model's directory, a .gguf file or a hub name"
                )
            if not os.path.isdir(directory):
                raise FullrankError(f"{model} is a file, expected a model's directory or a .gguf file")
        else:
            source, name = "hub", str(model)
            directory = _snapshot(name, revision, allow_pickle, trust_remote_code, say)
        if revision is not None and source != "hub":
            raise FullrankError(
                f"revision {revision!r} was asked for, which only hub models have: give a hub name, or the "
                "directory of that revision"
            )
        say(f"loading {name}")
        found = checkpoint.read(directory, allow_pickle=allow_pickle)
        built, tokenizer, more = _build(found, trust_remote_code, device, dtype, device_map)
        stated = checkpoint.stated_license(directory)
    return Loaded(
        model=built,
        tokenizer=tokenizer,
        name=name,
        source=source,
        storage=storage or _storage(found, built),
        fingerprint=checkpoint.fingerprint(found),
        notes=(*notes, *more),
        license=stated,
    )


def from_objects(model: Any, tokenizer: Any, *, name: str = "") -> Loaded:
    """A model and tokenizer that exist already, after the same checks; a model in training mode leaves it."""
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    for item, expected in ((model, PreTrainedModel), (tokenizer, PreTrainedTokenizerBase)):
        if not isinstance(item, expected):
            raise FullrankError(
                f"got a {type(item).__name__}, expected a transformers {expected.__name__}: "
                "unwrap it, or merge its adapters, first"
            )
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise FullrankError(
            f"got a {type(model).__name__}, expected a causal language model with its output layer"
        )
    notes: tuple[str, ...] = ()
    if model.training:
        notes = ("the model was in training mode and was put into evaluation mode",)
    model.eval()
    checks.finite(model)
    notes += checks.tokens(model, tokenizer)
    weight = checks.output_weight(model)
    config = model.config
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        name=name or Path(str(getattr(config, "_name_or_path", ""))).name or type(model).__name__,
        source="object",
        storage=_quantisation(config) or str(model.dtype if weight is None else weight.dtype).split(".")[-1],
        fingerprint=_object_fingerprint(model, tokenizer),
        notes=notes,
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' and the hub's bars and warnings off the terminal, and put things back after."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    level, hub_level = logging.get_verbosity(), hub_logging.get_verbosity()
    bars, hub_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity(logging.CRITICAL)
        hub_logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            hub_logging.set_verbosity(hub_level)
            if bars:
                logging.enable_progress_bar()
            if not hub_bars:
                disable_progress_bars()


def _path(model: str | Path) -> Path:
    # os.path rather than Path: a strange argument (an unknown user, a name too long) makes no exception.
    return Path(os.path.expanduser(model))


def _is_gguf(model: str | Path) -> bool:
    return str(model).lower().endswith(".gguf") and not os.path.isdir(_path(model))


def _is_path(model: str | Path) -> bool:
    """Whether a path was meant: it exists, begins as paths do, or is no possible name on the hub."""
    text = str(model)
    return (
        isinstance(model, Path)
        or text.startswith((".", "/", "~"))
        or HUB_NAME.fullmatch(text) is None
        or os.path.exists(text)
        or Path(text).suffix in (".bin", ".safetensors", ".pt", ".pth", ".ckpt", ".json", ".zip", ".onnx")
    )


def _snapshot(
    name: str, revision: str | None, allow_pickle: bool, trust_remote_code: bool, say: Callable[[str], None]
) -> Path:
    """The hub's files of a model in the hub's own cache, fetched where they are not there yet."""
    import huggingface_hub
    from huggingface_hub import errors

    say(f"fetching {name} from the hub, where it is not in the local cache")
    wanted = [*HUB_FILES, "*.safetensors"]
    wanted += ["pytorch_model*.bin"] if allow_pickle else []
    wanted += ["*.py"] if trust_remote_code else []
    at = f" at revision {revision}" if revision else ""
    refusals = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)
    try:
        # Asked first, because snapshot_download waits without end for a server that does not answer.
        try:
            huggingface_hub.HfApi().model_info(name, revision=revision, timeout=PATIENCE)
            reached = True
        except refusals:
            raise
        except Exception:  # connection errors come in the classes of several libraries
            reached = False
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=wanted,
                ignore_patterns=list(NOT_FETCHED),
                local_files_only=not reached,
            )
        )
    except errors.GatedRepoError as error:
        raise FullrankError(
            f"{name} is gated on the hub: accept its terms there and log in with `hf auth login`, or give "
            "the directory of a downloaded model"
        ) from error
    except refusals as error:
        raise FullrankError(
            f"there is no model {name}{at} on the hub, nor a path of that name: check the spelling, or log "
            "in with `hf auth login` if it is private"
        ) from error
    except Exception as error:  # not cached, or the connection broke
        raise FullrankError(
            f"{name}{at} is not in the local cache and the hub could not be reached: check the connection, "
            "or give the directory of a downloaded model"
        ) from error


def _build(
    found: checkpoint.Checkpoint,
    trust_remote_code: bool,
    device: str,
    dtype: torch.dtype,
    device_map: str | dict[str, Any] | None,
) -> tuple[Any, Any, tuple[str, ...]]:
    """Model, tokenizer and notes of a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    directory = found.directory
    checks.known(found, trust_remote_code=trust_remote_code)
    if not checkpoint.has_tokenizer(directory):
        raise FullrankError(
            f"{directory} has no tokenizer (tokenizer.json or the like), which the text needs: save the "
            "model's own there with tokenizer.save_pretrained"
        )
    # Remote code may stand in another repository; nothing else may be looked up.
    options: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "local_files_only": not trust_remote_code,
    }
    with checks.one_sentence(f"the configuration in {directory}"):
        config = AutoConfig.from_pretrained(directory, **options)
    checks.task(config, directory, trust_remote_code=trust_remote_code)
    if device_map is None and not _quantisation(config):
        sizes.require_stored(config, directory, *checkpoint.stored(found), itemsize=dtype.itemsize)
    with checks.one_sentence(f"the tokenizer in {directory}"):
        tokenizer = AutoTokenizer.from_pretrained(directory, **options)
        # A setting of the wrong kind shows only here.
        tokenizer("", verbose=False)
    quantised = _quantisation(config)
    if device_map is None and quantised:
        device_map = {"": device}
    what = f"{directory}, which is quantised with {quantised}," if quantised else f"the model in {directory}"
    with checks.one_sentence(what):
        both: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            use_safetensors=not found.pickled,
            # Reported and refused below, by name.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **({} if device_map is None else {"device_map": device_map}),
            **options,
        )
        model, report = both
        checks.complete(directory, report)
        model = model.eval().requires_grad_(False)
        if device_map is None:
            model = model.to(device)
    checks.finite(model)
    notes = checks.tokens(model, tokenizer)
    unused = sorted(report["unexpected_keys"])
    if unused:
        notes += (f"{checks.count(unused, 'tensor')} of the checkpoint not used: {checks.some(unused)}",)
    return model, tokenizer, notes


def _storage(found: checkpoint.Checkpoint, model: Any) -> str:
    """How the checkpoint stores the output matrix, which decides what its small singular values mean."""
    weight = checks.output_weight(model)
    names = [name for name, item in model.named_parameters(remove_duplicate=False) if item is weight]
    stored = checkpoint.storage(found, names)
    if stored in ("", "uint8", "int8", "int32"):
        stored = _quantisation(model.config) or stored
    if stored:
        return stored
    # Pickles are not opened twice; what the model was saved in is what its configuration says.
    said = found.config.get("dtype") or found.config.get("torch_dtype")
    return str(said or model.dtype).removeprefix("torch.")


def _quantisation(config: Any) -> str:
    """A name for how a checkpoint was quantised; "" if it was not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return ""
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    method = settings.get("quant_method") or "an unnamed method"
    method = str(getattr(method, "value", method))
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else settings.get("bits")
    return f"{method} {bits}-bit" if bits else method


@contextlib.contextmanager
def resident(module: torch.nn.Module) -> Iterator[None]:
    """The values of a layer that accelerate has offloaded are there inside, in memory."""
    if not any(weight.is_meta for weight in module.parameters(recurse=False)):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module, "cpu"):
        yield


def _object_fingerprint(model: Any, tokenizer: Any) -> str:
    """Of a model in memory: configuration, every tensor up to 4 GiB in all (its ends beyond), vocabulary."""
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    left = checkpoint.HASHED_WHOLE
    for name, tensor in model.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        with resident(model.get_submodule(layer)):
            tensor = getattr(model.get_submodule(layer), leaf) if tensor.is_meta else tensor
            flat = tensor.detach().reshape(-1)
            left -= flat.numel() * flat.element_size()
            if left < 0 and flat.numel() > 2 * checkpoint.BLOCK:
                flat = torch.cat((flat[: checkpoint.BLOCK], flat[-checkpoint.BLOCK :]))
            digest.update(f"\0{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
            digest.update(flat.cpu().contiguous().view(torch.uint8).numpy())
    digest.update(repr(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])).encode())
    return digest.hexdigest()
