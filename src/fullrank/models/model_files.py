"""What a checkpoint directory holds, read without running a model: configuration, weight files, hashes.

Everything here happens before transformers sees the directory, so that a broken or unsafe one is refused in a
sentence, and nothing here executes code from it. Weights are identified by the hash of their content; of a
file beyond HASHED_WHOLE bytes it is the size, the first and last block and blocks at equal distances between,
because reading a hundred gigabytes to name a model would take longer than many a diagnosis.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullrank.errors import FullrankError
from fullrank.results.reading import NotRegularError, read_bytes, require_plain, require_regular
from fullrank.results.reading import read_json as read_json_file

BLOCK = 1 << 20
SAMPLED_BLOCKS = 256

HASHED_WHOLE = 4 << 30
"""Bytes up to which a file is hashed whole: at 1.6 GB/s (sha256, measured on one core) under 3 s."""

PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.bin")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "*.tiktoken",
)
"""Any of these can make a tokenizer; without one transformers may build an empty tokenizer in silence."""

OUTPUT_NAMES = ("lm_head.weight", "embed_out.weight", "output_layer.weight", "output.weight")
"""What checkpoints call an output matrix of its own."""

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "I32": "int32",
}
"""safetensors' names of dtypes, and ours."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A directory with config.json and weights."""

    directory: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    """Files that hold the weights, in order."""
    pickled: bool


def read(directory: Path, *, allow_pickle: bool) -> Checkpoint:
    """Look through a directory; raises FullrankError where there is no model that may be loaded."""
    require_plain(directory)
    config = read_json(directory / "config.json")
    safe = _weights(directory, "model.safetensors")
    if safe:
        for file in safe:
            header(file)
        return Checkpoint(directory=directory, config=config, weights=tuple(safe), pickled=False)
    pickles = sorted({file for pattern in PICKLES for file in directory.glob(pattern)})
    if not pickles:
        raise FullrankError(
            f"{directory} holds a config.json but no weights, expected model.safetensors beside it: save the "
            "model there again, or pass --allow-pickle for a hub model that has only pickles"
        )
    if not allow_pickle:
        raise FullrankError(
            f"{directory} holds its weights as a pickle ({pickles[0].name}), which can run code when read: "
            "convert them to safetensors, or pass --allow-pickle if you trust where they came from"
        )
    weights = _weights(directory, "pytorch_model.bin") or [directory / "pytorch_model.bin"]
    if not weights[0].is_file():
        raise FullrankError(
            f"{directory} holds {pickles[0].name}, expected pytorch_model.bin: save the model again with "
            "save_pretrained"
        )
    return Checkpoint(directory=directory, config=config, weights=tuple(weights), pickled=True)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint."""
    try:
        content = read_json_file(path)
    except FileNotFoundError as error:
        raise FullrankError(
            f"{path.parent} has no {path.name}, expected a directory as save_pretrained writes it: "
            "give the one that holds the model's weights"
        ) from error
    except OSError as error:
        raise FullrankError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    except NotRegularError:
        raise
    except ValueError as error:
        raise FullrankError(f"{path} is not JSON ({error}): download or save the model again") from error
    if not isinstance(content, dict):
        raise FullrankError(f"{path} holds a {type(content).__name__}, expected a JSON object: save it again")
    return content


def header(path: Path) -> dict[str, str]:
    """Name and dtype of every tensor of a safetensors file, from its header; refuses a cut file."""
    return {name: DTYPES.get(dtype, dtype.lower()) for name, (dtype, _) in _tensors(path).items()}


def stored(checkpoint: Checkpoint) -> tuple[int, int]:
    """Tensors in the files of a checkpoint, and entries in all of them; of pickles, which are not opened, at
    most so many tensors and about so many entries."""
    if checkpoint.pickled:
        size = sum(file.stat().st_size for file in checkpoint.weights)
        return size, size // 4
    counts = [count for file in checkpoint.weights for _, count in _tensors(file).values()]
    return len(counts), sum(counts)


def _tensors(path: Path) -> dict[str, tuple[str, int]]:
    """Dtype and number of entries by name."""
    damaged = FullrankError(f"{path} is damaged or cut short: download or save the model again")
    require_regular(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            # A length read from a damaged file could ask for any amount of memory.
            entries = json.loads(file.read(length)) if length + 8 <= size else None
    except OSError as error:
        raise FullrankError(f"{path} cannot be read ({error.strerror}): download the model again") from error
    except (ValueError, RecursionError) as error:
        raise damaged from error
    if not isinstance(entries, dict):
        raise damaged
    entries.pop("__metadata__", None)
    try:
        if size < 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0):
            raise damaged
        return {name: (str(entry["dtype"]), math.prod(entry["shape"])) for name, entry in entries.items()}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise damaged from error


def storage(checkpoint: Checkpoint, names: list[str]) -> str:
    """The dtype in which the checkpoint stores the tensor with one of these names; "" if not found.

    The model's names may carry a prefix ("model.", "transformer.") that the checkpoint lacks, or lack one,
    and transformers renames the output matrix of some families when it loads them.
    """
    if checkpoint.pickled:
        return ""
    stored = {name: dtype for file in checkpoint.weights for name, dtype in header(file).items()}
    wanted = [*names, *OUTPUT_NAMES]
    for name in wanted:
        if name in stored:
            return stored[name]
    for name in wanted:
        for key, dtype in stored.items():
            if key.endswith("." + name) or name.endswith("." + key):
                return dtype
    return ""


def has_tokenizer(directory: Path) -> bool:
    return next(tokenizer_files(directory), None) is not None


def tokenizer_files(directory: Path) -> Iterator[Path]:
    for pattern in TOKENIZER_FILES:
        yield from sorted(directory.glob(pattern))


def fingerprint(checkpoint: Checkpoint) -> str:
    """Hash of configuration, weights and tokenizer; the same directory elsewhere has the same one."""
    digest = hashlib.sha256(read_bytes(checkpoint.directory / "config.json"))
    rest = (
        checkpoint.directory / name for name in ("tokenizer_config.json", "added_tokens.json", "merges.txt")
    )
    small = (*tokenizer_files(checkpoint.directory), *filter(Path.is_file, rest))
    for file in (*checkpoint.weights, *small, *sorted(checkpoint.directory.glob("*.py"))):
        digest.update(f"\0{file.name}\0{content_hash(file)}".encode())
    return digest.hexdigest()


def content_hash(path: Path) -> str:
    """sha256 of a file's content, or of its size and sampled blocks beyond HASHED_WHOLE bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size <= HASHED_WHOLE:
                return hashlib.file_digest(file, "sha256").hexdigest()
            digest = hashlib.sha256(f"sampled {size}".encode())
            for index in range(SAMPLED_BLOCKS):
                file.seek((size - BLOCK) * index // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(BLOCK))
            return digest.hexdigest()
    except OSError as error:
        raise FullrankError(f"{path} cannot be read ({error.strerror}): check its permissions") from error


def stated_license(directory: Path) -> str:
    """What its README states in the front matter that the hub reads; "" where it states nothing."""
    from huggingface_hub import ModelCard

    try:
        text = read_bytes(directory / "README.md").decode("utf8", "replace")
        found = ModelCard(text, ignore_metadata_errors=True).data.to_dict().get("license")
    except Exception:  # of several libraries, about a file that no measurement needs
        return ""
    return found if isinstance(found, str) else ""


def first_line(error: BaseException) -> str:
    """What an exception of a library says, as a part of one sentence."""
    text = str(error).strip() or type(error).__name__
    line = " ".join(text.splitlines()[0].split()).rstrip(".:")
    return line if len(line) <= 300 else line[:299] + "…"


def _weights(directory: Path, name: str) -> list[Path]:
    """The one file of that name, or those that the index of a sharded checkpoint names, or none."""
    if (directory / name).is_file():
        return [directory / name]
    index = directory / f"{name}.index.json"
    if not index.is_file():
        return []
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict) or not parts:
        raise FullrankError(f"{index} has no weight_map: download or save the model again")
    names = sorted(set(map(str, parts.values())))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise FullrankError(
            f"{index} names {outside[0]!r}, expected files beside it: download or save the model again"
        )
    files = [directory / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FullrankError(
            f"{directory} lacks {len(missing)} of the {len(files)} files that {index.name} names "
            f"({missing[0]}): download the model again"
        )
    return files
