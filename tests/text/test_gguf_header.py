"""Counts and sizes in the header of a GGUF file are held against the file before anything is allocated."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from fullrank.errors import FullrankError
from fullrank.text import gguf_header, tokenisers


def word(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(*, tensors: int = 0, fields: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def array(kind: int, length: int) -> bytes:
    return word(b"key") + struct.pack("<IIQ", 9, kind, length)


def tensor(*dimensions: int, kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return word(b"output.weight") + sizes + struct.pack("<IQ", kind, offset)


BAD = {
    "no magic": b"GGUX" + bytes(40),
    "nothing": b"",
    "cut": header()[:14],
    "fields": header(fields=10**18),
    "tensors": header(tensors=10**18),
    "bytes in an array": header(fields=1, rest=array(0, 10**15)),
    "texts in an array": header(fields=1, rest=array(8, 10**12) + bytes(100_000)),
    "arrays in an array": header(fields=1, rest=array(9, 10**7) + bytes(100_000)),
    "a text": header(fields=1, rest=struct.pack("<Q", 10**18)),
    "a type": header(fields=1, rest=word(b"key") + struct.pack("<I", 77) + bytes(50)),
    "a tensor": header(tensors=1, rest=tensor(10**6, 10**9) + bytes(1000)),
    "a tensor of no known type": header(tensors=1, rest=tensor(2, kind=999) + bytes(1000)),
    "dimensions": header(tensors=1, rest=word(b"w") + struct.pack("<I", 2**31) + bytes(1000)),
    "an offset": header(tensors=1, rest=tensor(4, offset=10**15) + bytes(1000)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_file_cannot_hold_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(BAD[name])
    with pytest.raises(FullrankError, match=r"bad\.gguf is damaged or cut short .*: download it again"):
        gguf_header.check(file)
    with pytest.raises(FullrankError, match="damaged or cut short"):
        tokenisers.loaded(str(file))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(FullrankError, match="is a named pipe"):
        gguf_header.check(tmp_path / "pipe.gguf")


def test_a_true_header_passes(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    file = tmp_path / "good.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_array("names", ["a", "b", "ü"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_bool("flag", True)
    writer.add_tensor("output.weight", np.ones((4, 64), dtype=np.float32))
    writer.add_tensor("half", np.ones((2, 64), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf_header.check(file)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(FullrankError, match="damaged or cut short"):
        gguf_header.check(file)


def test_a_model_beyond_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "large.gguf"
    file.write_bytes(header(tensors=1, rest=tensor(100)) + bytes(1000))
    gguf_header.check(file)
    monkeypatch.setattr(gguf_header, "memory", lambda: 300)
    with pytest.raises(FullrankError, match="give a smaller model"):
        gguf_header.check(file)
