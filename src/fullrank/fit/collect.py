"""Stream states out of a model, once: text to windows, windows to states, states to files for the next run.

A window is `window` tokens that see each other and nothing else. Its tokens but the first are predicted;
where the tokenizer begins texts with a begin token, so does every window (`bos` overrules it). Windows come
from all over the text (`text.sample`) and are mixed, so that parts to fit on and to judge on are alike. Kept
are

    hidden [N, D]        what enters the output matrix, for every predicted token
    layers [L, n, D]     every layer's states at a sample of positions, for the geometry

in one file for every few windows, written under another name and renamed when whole. So memory holds one
batch beside the result, a killed run leaves only whole files, and the next run with the same model, text and
options goes on where it stopped, however many windows it runs at once (`batch_size`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import batch_size, shards
from fullrank.fit.estimates import BLOCK
from fullrank.models.anatomy import Anatomy, input_device, states, watched
from fullrank.models.model_files import first_line
from fullrank.text import sample
from fullrank.text.documents import replacement_note
from fullrank.text.standard_library import standard_library
from fullrank.text.tokenisers import template_of

LEAST_TOKENS = 256
LEAST_WINDOWS = 3
"""One to fit on, one to choose on, one to judge on."""
SHORT_TEXT_WINDOWS = 8
CHARACTERS_PER_TOKEN = 8
"""That are read for a window at first; more where they do not fill it."""
MOST_PER_TOKEN = 64
LAYER_STATES = 2048
"""States a layer that are kept for the geometry, at most."""
WINDOWS_A_FILE = 4
FORMAT = 1
"""Of the cached files; raised when their meaning changes."""
KEY_LENGTH = 24
KEY = re.compile(f"[0-9a-f]{{{KEY_LENGTH}}}")
"""Names of the directories with cached states."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Text as token ids."""

    ids: Tensor
    """[windows, window]."""
    sizes: Tensor
    """[windows, window - 1] bytes of each predicted token."""
    sources: tuple[str, ...]
    sha256: str
    """Of the text under these windows, and of no other."""
    starts_with_bos: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class States:
    """Everything the questions ask of a model and a text."""

    hidden: Tensor
    """[N, D] fp32."""
    targets: Tensor
    """[N] the token that followed."""
    sizes: Tensor
    """[N] its bytes."""
    positions: Tensor
    """[N] how many tokens of its window were seen before the last one."""
    blocks: Tensor
    """[N] block of text, for intervals."""
    windows: Tensor
    """[N] window."""
    layers: Tensor
    """[L, n, D] at sampled positions; the last is what enters the output matrix."""
    layer_names: tuple[str, ...]
    layer_positions: Tensor
    layer_blocks: Tensor


def tokenise(
    tokenizer: Any,
    files: Sequence[str | Path],
    *,
    tokens: int,
    window: int,
    longest: int | None,
    in_order: bool = False,
    bos: bool | None = None,
    warn: Callable[[str], None] = lambda message: warnings.warn(message, stacklevel=3),
) -> Windows:
    """As many windows as `tokens` fill, from all over the files or from the default text.

    A text of fewer than three windows gets shorter ones; `longest` is the model's own limit. The windows are
    mixed, so that any part of them is of all sources; `in_order` takes the beginning of the text as it
    stands, for what remembers it. `bos` says whether windows begin with the begin token; None leaves that to
    the tokenizer. `warn` gets a sentence if places of the text were not valid Unicode.
    """
    if tokens < LEAST_TOKENS:
        raise FullrankError(f"{tokens} tokens were asked for, expected {LEAST_TOKENS} or more")
    window = min(window, longest or window)
    if window < 8:
        raise FullrankError(f"windows of {window} tokens were asked for, expected 8 or more")
    begin = begin_token(tokenizer, bos)
    own, chat = window - (begin is not None), template_of(tokenizer)
    wanted, each = max(LEAST_WINDOWS, tokens // own), CHARACTERS_PER_TOKEN
    while True:
        if not files:
            documents = [document.text for document in standard_library(limit=wanted * own * each)]
            found = sample.Sample(
                stretches=(sample.BETWEEN.join(documents),),
                whole=sum(map(len, documents)) < wanted * own * each,
                sources=(_default_source(len(documents)),),
            )
        elif in_order:
            found = sample.beginning(files, wanted * own * each, chat)
        else:
            found = sample.draw(files, count=wanted, characters=own * each, chat=chat)
        encoded = [_encode(tokenizer, stretch) for stretch in found.stretches]
        ready = sum(len(one.ids) // own for one in encoded)
        # A stretch at the end of a long row may stay empty: no reason to read a whole disk.
        if found.whole or ready >= wanted or (files and each > MOST_PER_TOKEN and ready >= LEAST_WINDOWS):
            break
        each *= 2
    if found.replaced:
        warn(replacement_note(found.replaced))
    total = sum(len(one.ids) for one in encoded)
    if total < LEAST_TOKENS:
        raise FullrankError(
            f"the text has {total} tokens, expected {LEAST_TOKENS} or more: give a longer one with --text"
        )
    used = min(tokens, total)
    if used < LEAST_WINDOWS * own:
        own = max(8, used // SHORT_TEXT_WINDOWS)
    cut = _cut(encoded, own, used // own, mixed=bool(files) and not in_order)
    chosen, sizes = torch.stack([one.ids for one in cut]), torch.stack([one.sizes for one in cut])
    if begin is not None:
        chosen = torch.cat([torch.full((len(cut), 1), begin), chosen], dim=1)
    else:
        sizes = sizes[:, 1:]
    return Windows(
        ids=chosen,
        sizes=sizes.clamp(min=0),
        sources=found.sources,
        sha256=hashlib.sha256(b"\0".join(one.text for one in cut)).hexdigest(),
        starts_with_bos=begin is not None,
    )


def _default_source(count: int) -> str:
    import platform

    return f"Python {platform.python_version()} documentation and docstrings, {count} pieces"


class _Encoded(NamedTuple):
    """A stretch of text as tokens."""

    ids: list[int]
    starts: list[int]
    """The byte at which each begins, and the end of the last one."""
    text: bytes


class _Cut(NamedTuple):
    """A window's worth of tokens."""

    ids: Tensor
    sizes: Tensor
    text: bytes
    """That these tokens were made from."""


def _encode(tokenizer: Any, stretch: str) -> _Encoded:
    """Tokens without special ones."""
    text = stretch.encode("utf8", "surrogatepass")
    if getattr(tokenizer, "is_fast", False):
        try:
            found = tokenizer(stretch, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        except Exception as error:  # the library's own, as for a word that a vocabulary without <unk> lacks
            raise FullrankError(
                f"the text cannot be put into tokens of this model ({first_line(error)}): give one in its "
                "words"
            ) from error
        at = _byte_offsets(stretch)
        starts = [at[begin] for begin, _ in found["offset_mapping"]]
        return _Encoded(found["input_ids"], [*starts, len(text)], text)
    # Tokenizers without offsets: the bytes are shared out evenly, which leaves every sum right on average.
    ids = tokenizer(stretch, add_special_tokens=False, verbose=False)["input_ids"]
    starts = [round(len(text) * place / max(1, len(ids))) for place in range(len(ids))]
    return _Encoded(ids, [*starts, len(text)], text)


def _cut(encoded: Sequence[_Encoded], own: int, count: int, *, mixed: bool) -> list[_Cut]:
    """`count` runs of `own` tokens; mixed they are from all over the text, and so is every part of them."""
    rounds: dict[int, list[tuple[int, _Cut]]] = {}
    place = 0
    for ids, starts, text in encoded:
        for first in range(0, len(ids) - own + 1, own):
            bounds = starts[first : first + own + 1]
            part = text[bounds[0] : bounds[-1]]
            made = _Cut(torch.tensor(ids[first : first + own]), torch.diff(torch.tensor(bounds)), part)
            # Of several stretches the first window each, before any gives a second.
            rounds.setdefault(first if len(encoded) > 1 else 0, []).append((place, made))
            place += 1
    if not mixed:
        return [made for _, made in rounds[0][:count]]
    chosen: list[tuple[int, _Cut]] = []
    for group in rounds.values():
        room = min(count - len(chosen), len(group))
        chosen += [group[place * len(group) // room] for place in range(room)]
    chosen.sort(key=lambda one: one[0])
    return [chosen[place][1] for place in mixed_order(len(chosen))]


def mixed_order(count: int) -> list[int]:
    """An order of `count` places in a text such that those of any part of it lie all over the text."""
    # Multiples of the golden ratio: any run of them lies evenly between 0 and 1.
    steps = [place * (5**0.5 - 1) / 2 % 1 for place in range(count)]
    rank = {step: number for number, step in enumerate(sorted(steps))}
    return [rank[step] for step in steps]


def _byte_offsets(joined: str) -> Sequence[int]:
    """The byte in UTF-8 at which every character begins, and the end of the last one."""
    if joined.isascii():
        return range(len(joined) + 1)
    points = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    lengths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    return [0, *np.cumsum(lengths).tolist()]


def begin_token(tokenizer: Any, wanted: bool | None = None) -> int | None:
    """The token that the tokenizer puts before every text, or says that it should; `wanted` overrules it."""
    if wanted is False:
        return None
    if wanted and tokenizer.bos_token_id is None:
        raise FullrankError("the tokenizer has no begin token: leave out --bos yes")
    if wanted:
        return tokenizer.bos_token_id
    if getattr(tokenizer, "add_bos_token", None) is True and tokenizer.bos_token_id is not None:
        # One that was converted from another format may have lost the rule and kept the word.
        return tokenizer.bos_token_id
    try:
        begun, plain = _both("a", tokenizer)
    except Exception:  # the library's own: a vocabulary of words may lack every letter
        begun, plain = _both("", tokenizer)
    added = len(begun) > len(plain) and begun[0] not in plain[:1]
    return begun[0] if added and begun[0] == tokenizer.bos_token_id else None


def _both(text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids with the special ones that the tokenizer adds, and without."""
    begun = tokenizer(text, verbose=False)["input_ids"]
    return begun, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def collect(
    model: Any,
    anatomy: Anatomy,
    windows: Windows,
    directory: Path,
    *,
    memory: int,
    batch: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
    say: Callable[[str], None] = lambda line: None,
) -> States:
    """Run the model over the windows, `batch` at once, or read what an earlier run kept in `directory`."""
    ids = windows.ids
    check_vocabulary(ids, anatomy.output.vocabulary)
    count, length = ids.shape
    D, layers = anatomy.output.width, len(anatomy.blocks) + 2 if anatomy.blocks else 1
    body = _body_width(model, D)
    each = _sample_size(count, length, layers, body, memory)
    check_memory(count * length, 4 * (count * (length - 1) * D + layers * count * each * body), memory)
    where = directory / _key(anatomy, windows, each)
    _only(directory, where)
    generator = torch.Generator().manual_seed(0)
    places = torch.stack([1 + torch.randperm(length - 2, generator=generator)[:each] for _ in range(count)])
    places = places.sort(dim=1).values
    # Widths differ where a projection stands between the body and the matrix: then the body's layers are
    # shown without what enters the matrix.
    same = body == D
    hidden = torch.empty(count, length - 1, D)
    sampled = torch.empty(layers if same else layers - 1, count, each, body)
    files = {}
    for start in range(0, count, WINDOWS_A_FILE):
        file, part = where / f"{start:06d}.safetensors", slice(start, min(start + WINDOWS_A_FILE, count))
        inside = part.stop - part.start
        found = shards.read(
            file, {"hidden": (inside, length - 1, D), "layers": (layers - 1, inside, each, body)}
        )
        if found is None:
            files[part.stop] = file, part
        else:
            hidden[part], sampled[: layers - 1, part] = found["hidden"], found["layers"]
    missing = torch.tensor(
        [number for _, part in files.values() for number in range(part.start, part.stop)], dtype=torch.int64
    )

    def run(part: slice) -> dict[str, Tensor]:
        chosen = missing[part]
        return _run(model, anatomy, ids[chosen], places[chosen], (layers - 1, len(chosen), each, body))

    for part, found in batch_size.over(
        len(missing), batch_size.chosen(model, length, memory, batch), run, say
    ):
        hidden[missing[part]], sampled[: layers - 1, missing[part]] = found["hidden"], found["layers"]
        last = int(missing[part.stop - 1]) + 1
        for end in [end for end in files if end <= last]:
            file, whole = files.pop(end)
            content = {"hidden": hidden[whole], "layers": sampled[: layers - 1, whole].contiguous()}
            shards.write(file, content, "--out")
        progress((count - len(missing) + part.stop) / count)
    if same:
        sampled[-1] = hidden.gather(1, places[..., None].expand(-1, -1, D))
    number = torch.arange(count)[:, None].expand(count, length - 1)
    position = torch.arange(length - 1).expand(count, length - 1)
    pieces = -(-(length - 1) // BLOCK)
    block = number * pieces + position // BLOCK
    names = ("embedding", *(f"block {layer}" for layer in range(1, layers - 1)), "output")[-layers:]
    return States(
        hidden=hidden.flatten(0, 1),
        targets=ids[:, 1:].flatten(),
        sizes=windows.sizes.flatten(),
        positions=position.flatten(),
        blocks=block.flatten(),
        windows=number.flatten(),
        layers=sampled.flatten(1, 2),
        layer_names=names if same else names[:-1],
        layer_positions=places.flatten(),
        layer_blocks=block.gather(1, places).flatten(),
    )


def _sample_size(count: int, length: int, layers: int, width: int, memory: int) -> int:
    """Positions a window whose states are kept at every layer."""
    affordable = memory // 4 // (4 * layers * count * width)
    return max(2, min(length - 2, -(-LAYER_STATES // count), affordable))


def _body_width(model: Any, width: int) -> int:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    found = getattr(config, "hidden_size", None)
    return found if isinstance(found, int) else width


@torch.no_grad()
def _run(
    model: Any, anatomy: Anatomy, ids: Tensor, places: Tensor, shape: tuple[int, ...]
) -> dict[str, Tensor]:
    rows = torch.arange(len(ids))[:, None]
    caught: dict[int, Tensor] = {}

    def take(layer: int, value: Tensor) -> None:
        caught[layer] = value.reshape(*ids.shape, -1)[rows, places].float().cpu()

    with watched(anatomy.blocks, take):
        found = states(model, ids.to(input_device(model)))[:, :-1].float().cpu()
    check_finite(model, found)
    inner = torch.zeros(shape)
    for layer, value in caught.items():
        if value.shape == inner.shape[1:]:
            inner[layer] = value
    return {"hidden": found, "layers": inner}


def check_finite(model: Any, *found: Tensor) -> None:
    """Raise for states that are no numbers."""
    if not all(bool(one.isfinite().all()) for one in found):
        raise FullrankError(
            f"the model's states hold NaN or infinity in {model.dtype}: run it with --dtype float32, or "
            "check its weights"
        )


def check_vocabulary(ids: Tensor, rows: int) -> None:
    """Raise for tokens that the output matrix, of so many rows, does not have."""
    largest = int(ids.max())
    if largest >= rows:
        raise FullrankError(
            f"the text has token {largest}, but the output matrix has {rows} rows: the tokenizer belongs to "
            "another model"
        )


def check_memory(tokens: int, needed: int, memory: int) -> None:
    """Raise for states that take more bytes than they may: a quarter is for the body while it runs."""
    if needed > memory * 3 // 4:
        raise FullrankError(
            f"states of {tokens} tokens take {needed / 2**30:.1f} GiB, more than three quarters of --memory "
            f"{memory / 2**30:.1f} GiB: take fewer --tokens or allow more"
        )


def _key(anatomy: Anatomy, windows: Windows, each: int) -> str:
    """A name for what the states depend on, and nothing else."""
    facts = anatomy.facts
    content = json.dumps([FORMAT, facts.fingerprint, facts.dtype, facts.width, facts.layers, each])
    digest = hashlib.sha256(content.encode("utf8"))
    digest.update(windows.ids.numpy().tobytes())
    return digest.hexdigest()[:KEY_LENGTH]


def _only(directory: Path, wanted: Path) -> None:
    """A directory keeps the states of one model and text: those of earlier ones would fill the disk."""
    if directory.is_dir():
        for other in directory.iterdir():
            # Only what this file made: the directory may be someone's own of that name.
            if other != wanted and KEY.fullmatch(other.name) and other.is_dir():
                shutil.rmtree(other, ignore_errors=True)
