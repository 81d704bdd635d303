"""A training run as any model that is loaded, and its test split as any text.

A run directory is a directory of transformers, so `models.loading.load(RUN)` gives its best model. What only
a run has is here: its other checkpoints, verified by their checksums, and text that it was not trained on.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import torch

from fullrank.errors import FullrankError
from fullrank.fit import collect
from fullrank.models.anatomy import longest
from fullrank.models.loading import Loaded, load
from fullrank.results import is_run
from fullrank.train import folder


def load_any(model: str | Path, *, checkpoint: str = "best", device: str = "cpu") -> Loaded:
    """A run at a checkpoint (best, last or a step), or whatever else `load` takes."""
    path = Path(model).expanduser()
    if is_run(path):
        return load_run(path, checkpoint=checkpoint, device=device)
    if checkpoint != "best":
        raise FullrankError(
            f"{model} is no training run and has no checkpoint {checkpoint!r}: leave --checkpoint out"
        )
    return load(model, device=device)


def load_run(
    path: Path, *, checkpoint: str = "best", device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Loaded:
    config, stored = folder.config_of(path), folder.chosen(path, checkpoint)
    which = "the last that was kept" if checkpoint == "best" else "as asked"
    if stored.path.name.startswith("best"):
        which = "the best by validation"
    note = f"The weights are those of step {stored.step:,}, {which}, of the recipe {config.recipe}."
    loaded = load(stored.path, device=device, dtype=dtype)
    return dataclasses.replace(loaded, name=path.resolve().name, source="run", notes=(note, *loaded.notes))


def held_out_windows(path: Path, loaded: Loaded, *, tokens: int, window: int) -> collect.Windows:
    """Windows from all over a run's test split, mixed, each after the token that ends a text."""
    corpus = folder.corpus_of(path)
    split, vocabulary = corpus.splits["test"], corpus.vocabulary
    used = min(tokens, len(split.tokens))
    if used < collect.LEAST_TOKENS:
        raise FullrankError(
            f"the run's test split has {used} tokens, expected {collect.LEAST_TOKENS} or more: give a "
            "longer text with --text"
        )
    own = min(window, longest(loaded.model) or window) - 1
    if used < collect.LEAST_WINDOWS * own:
        own = max(8, used // collect.SHORT_TEXT_WINDOWS)
    count = used // own
    last = len(split.tokens) - own
    starts = [place * last // max(1, count - 1) for place in collect.mixed_order(count)]
    ids = np.stack([split.tokens[start : start + own] for start in starts])
    rows = torch.from_numpy(ids.astype(np.int64))
    digest = hashlib.sha256(vocabulary.digest().encode())
    digest.update(ids.astype("<u4").tobytes())
    # The bytes of a part are taken as that share of the split's.
    return collect.Windows(
        ids=torch.cat([torch.full((count, 1), vocabulary.eos), rows], dim=1),
        sizes=torch.full((count, own), split.bytes / len(split.tokens), dtype=torch.float64),
        sources=("test split of the run",),
        sha256=digest.hexdigest(),
        starts_with_bos=True,
    )
