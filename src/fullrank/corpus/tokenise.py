"""Text to files of windows, in several processes; a killed run goes on where it stopped.

The text is read once, in order, and handed out in batches of fragments. A batch becomes one parquet file
(`windows.py`) and one JSON file that says what is in it, written after it; the next run believes those two if
the hash is right. A fragment in the middle of a document gets the tokens before it as its first context, by
tokenising the end of the fragment before, so how a document was cut does not show in the windows.

For resampling, every fragment is in a block of text: the corpus is cut into `blocks` stretches of consecutive
documents with about the same number of characters, a long document where its fragments meet.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fullrank.corpus import windows as windows_of
from fullrank.corpus.plan import Plan
from fullrank.corpus.windows import Packing
from fullrank.errors import FullrankError
from fullrank.results.files import sha256, write_whole
from fullrank.results.reading import read_json, read_text
from fullrank.text import sources, tokenisers
from fullrank.text import workers as pool
from fullrank.text.documents import Fragment, Read, first_cut
from fullrank.text.sources import Texts
from fullrank.text.tokenisers import Tokeniser

REACH = 4096
"""Characters beyond the end of a block in which a place between two words is sought."""
PLAN = "plan.json"


class Run(NamedTuple):
    """A fragment on its way to a process."""

    text: str
    before: str
    """The end of the fragment before, where the document began earlier."""
    begins: bool
    ends: bool
    block: int


def tokenise(
    folder: Path,
    corpus: Texts,
    tokeniser_folder: Path,
    packing: Packing,
    made: Plan,
    *,
    limit: int | None = None,
    workers: int = 2,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> dict[str, Any]:
    """Fill `folder` with files of windows, those that are there left alone; returns the stage's manifest."""
    _continue(folder, made)
    read = Read()
    begun = time.monotonic()
    totals = {"tokens": 0, "windows": 0, "documents": 0}
    files: dict[str, dict[str, Any]] = {}
    fresh = 0
    processes = workers if made.characters > pool.SMALL else 1
    with pool.workers(tokenisers.load, tokeniser_folder, count=processes) as submit:
        waiting: deque[tuple[_Batch, Future[dict[str, Any]] | None]] = deque()
        batches = _batches(corpus, made, packing, read)
        exhausted = False
        while True:
            while not exhausted and len(waiting) <= workers:
                batch = next(batches, None)
                if batch is None:
                    exhausted = True
                    break
                done = _done(folder, batch.number)
                waiting.append(
                    (batch, None if done else submit(make_windows, folder, batch, packing, made.parts, None))
                )
            if not waiting:
                break
            batch, future = waiting.popleft()
            found = _done(folder, batch.number) if future is None else pool.result(future)
            assert found is not None
            left = None if limit is None else limit - totals["tokens"]
            if left is not None and found["tokens"] > left:
                found = pool.result(submit(make_windows, folder, batch, packing, made.parts, left))
            fresh += found["tokens"] if future is not None else 0
            for name in totals:
                totals[name] += found[name]
            if found["bytes"]:
                files[_name(batch.number)] = {"bytes": found["bytes"], "sha256": found["sha256"]}
            rate = fresh / max(time.monotonic() - begun, 1e-9) / 1e6
            progress(
                f"tokenising: {totals['tokens'] / 1e6:.1f}M tokens, {rate:.2f}M/s",
                min(1.0, (batch.position + batch.characters) / made.characters),
            )
            if limit is not None and totals["tokens"] >= limit:
                break
        for _, future in waiting:
            if future is not None:
                future.cancel()
    _check(corpus, packing, totals)
    for path in folder.iterdir():
        # What lies beyond the limit, and what only continuing needs.
        if path.name not in files:
            path.unlink()
    return {**totals, "replaced": read.replaced, "parts": made.parts, "blocks": made.blocks, "files": files}


def _check(corpus: Texts, packing: Packing, totals: dict[str, int]) -> None:
    if totals["windows"]:
        return
    raise FullrankError(
        f"{corpus.name} has {totals['tokens']} tokens in {totals['documents']} documents, and none follows "
        f"{packing.length} others in its document: give more text, or a lower --order"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batch:
    number: int
    runs: list[Run]
    position: int
    characters: int


def _batches(corpus: Texts, made: Plan, packing: Packing, read: Read) -> Iterator[_Batch]:
    runs: list[Run] = []
    number = characters = start = 0
    tail = ""
    for fragment in sources.fragments(corpus, read):
        for piece in _pieces(fragment, made.block_characters):
            # Wrapped round, because the size of a compressed text is only estimated.
            block = piece.position // made.block_characters % made.blocks
            before = "" if piece.begins else tail
            runs.append(Run(piece.text, before, piece.begins, piece.ends, block))
            # Pieces may be shorter than a context, so the tail goes back over several.
            tail = "" if piece.ends else _tail(before + piece.text, packing)
            characters += len(piece.text)
        if characters >= made.batch_characters:
            yield _Batch(number=number, runs=runs, position=start, characters=characters)
            runs, number, start, characters = [], number + 1, start + characters, 0
    if runs:
        yield _Batch(number=number, runs=runs, position=start, characters=characters)


def _pieces(fragment: Fragment, block: int) -> Iterator[Fragment]:
    """A fragment, cut where a block of so many characters ends; a document of at most a block stays whole."""
    text, begins, ends, position = fragment
    if not (begins and ends and len(text) <= block):
        while (room := block - position % block) < len(text):
            cut = first_cut(text[room : room + REACH])
            if not cut:
                break
            cut += room
            yield Fragment(text[:cut], begins, False, position)
            text, begins, position = text[cut:], False, position + cut
    yield Fragment(text, begins, ends, position)


def _tail(text: str, packing: Packing) -> str:
    """Enough of the end of a text to make a context of."""
    tail = text[-(1024 + 64 * packing.length) :]
    return tail if len(tail) == len(text) else tail[first_cut(tail) :]


def _continue(folder: Path, made: Plan) -> None:
    """Keep what an earlier run left if it was cut in the same way."""
    text = json.dumps({**made.__dict__}, sort_keys=True)
    path = folder / PLAN
    if not path.is_file() or read_text(path) != text:
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        write_whole(path, text)


def _name(number: int) -> str:
    return f"{number:06d}.parquet"


def _done(folder: Path, number: int) -> dict[str, Any] | None:
    """What an earlier run wrote about a batch, if its file is whole."""
    path = folder / _name(number)
    try:
        found: dict[str, Any] = read_json(path.with_suffix(".json"))
        if found["bytes"] and (path.stat().st_size != found["bytes"] or sha256(path) != found["sha256"]):
            return None
    except (OSError, ValueError, KeyError):
        return None
    return found


def make_windows(
    tokeniser: Tokeniser, folder: Path, batch: _Batch, packing: Packing, parts: int, limit: int | None
) -> dict[str, Any]:
    arrays, lengths, blocks = [], [], []
    tokens = documents = 0
    for run in batch.runs:
        ids = tokeniser.encode(run.text, ends=run.ends)
        if limit is not None:
            ids = ids[: limit - tokens]
        tokens += len(ids)
        documents += run.begins and len(ids) > 0
        if run.before and len(ids):
            head = tokeniser.encode(run.before, ends=False)[-packing.length :]
            ids = np.concatenate([head, ids])
        arrays.append(ids)
        lengths.append(len(ids))
        blocks.append(run.block)
        if limit is not None and tokens >= limit:
            break
    found = windows_of.windows(
        packing,
        np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64),
        np.array(lengths, dtype=np.int64),
        np.array(blocks, dtype=np.int32),
    )
    del arrays
    path = folder / _name(batch.number)
    said: dict[str, Any] = {"tokens": tokens, "windows": len(found.next), "documents": documents}
    with contextlib.suppress(FileNotFoundError):
        # An older file of the same name must not be taken for the one that is written now.
        path.with_suffix(".json").unlink()
    if len(found.next):
        windows_of.write(path, found, parts)
        said |= {"bytes": path.stat().st_size, "sha256": sha256(path)}
    else:
        said |= {"bytes": 0, "sha256": ""}
    write_whole(path.with_suffix(".json"), json.dumps(said))
    return said
