"""An external memory: keys and the tokens that followed them, searched exactly, a chunk of keys at a time.

    nearest(store, queries [n, D], k) -> scores [n, k] = q . key, tokens [n, k]     the k largest of all

The largest inner products are the largest terms of a cache head's sum, so the search is by what is scored.
Nothing beyond n x chunk scores is held. A store may lie in a file that is mapped, not read. `index()` puts a
faiss index in the place of the exact search, for stores so large that reading every key is too slow: then the
search is approximate. It needs `pip install 'fullrank[memory]'`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.heads.memory import entry_tokens
from fullrank.heads.pieces import checkpointed, cut, piece_tokens

if TYPE_CHECKING:
    from fullrank.heads.cache import CacheHead

CHUNK = 16384
"""Keys that are scored at once."""
LEAST_CELL = 39
"""Keys a cell that faiss wants before it calls its training sound."""


class Store:
    """Keys [S, D] and the token [S] that followed each."""

    def __init__(self, keys: Tensor, tokens: Tensor) -> None:
        if keys.ndim != 2 or tokens.shape != keys.shape[:1] or tokens.is_floating_point():
            raise FullrankError(
                f"a store got keys of shape {list(keys.shape)} and tokens of {list(tokens.shape)} in "
                f"{tokens.dtype}, expected [S, D] and [S] whole numbers"
            )
        self.keys, self.tokens = keys.detach(), tokens.detach().long()
        self.faiss: Any = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        return self.keys.shape[1]

    @classmethod
    def empty(cls, width: int, *, dtype: torch.dtype = torch.float32) -> Store:
        return cls(torch.empty(0, width, dtype=dtype), torch.empty(0, dtype=torch.long))

    @torch.no_grad()
    def add(self, head: CacheHead, hidden: Tensor, *, context: Tensor) -> None:
        """Append every remembered step of sequences [batch, time]: n - 1 entries of n tokens."""
        memory = head.remember(hidden, context=context, length=context.shape[-1])
        tokens = entry_tokens(memory.ids).flatten()
        there = tokens >= 0
        keys = memory.keys.flatten(0, 1)[there].to(self.keys.device, self.keys.dtype)
        if keys.shape[1] != self.width:
            raise FullrankError(f"the head's keys have width {keys.shape[1]}, the store's {self.width}")
        self.keys = torch.cat([self.keys, keys])
        self.tokens = torch.cat([self.tokens, tokens[there].to(self.tokens.device)])
        self.faiss = None

    def save(self, file: Path) -> None:
        """Write the store whole or not at all."""
        from safetensors.torch import save_file

        beside = file.with_name(f".{file.name}.part")
        save_file({"keys": self.keys.contiguous(), "tokens": self.tokens.contiguous()}, beside)
        beside.replace(file)

    @classmethod
    def load(cls, file: Path) -> Store:
        """The store of a file, whose keys are read as they are needed."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            found = load_file(file)
            return cls(found["keys"], found["tokens"])
        except (OSError, SafetensorError, KeyError) as error:
            raise FullrankError(f"{file} is no store ({error}): write one with Store.save") from error

    def index(self, *, cells: int | None = None, probes: int = 32) -> None:
        """Search approximately from now on: k-means cells of which `probes` are looked into."""
        try:
            faiss = importlib.import_module("faiss")
        except ImportError as error:
            raise FullrankError(
                "an index needs faiss: pip install 'fullrank[memory]', or leave index() out to search exactly"
            ) from error
        cells = max(1, min(int(len(self) ** 0.5), len(self) // LEAST_CELL)) if cells is None else cells
        keys = self.keys.float().cpu().numpy()
        quantiser = faiss.IndexFlatIP(self.width)
        index = faiss.IndexIVFFlat(quantiser, self.width, cells, faiss.METRIC_INNER_PRODUCT)
        index.train(keys)
        index.add(keys)
        index.nprobe = min(probes, cells)
        self.faiss = index

    @torch.no_grad()
    def search(self, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest inner products of queries [n, D]: scores and places [n, count], best first.

        Where the store has fewer entries, the rest is -inf at place -1.
        """
        n, device = len(queries), queries.device
        if self.faiss is not None:
            found, places = self.faiss.search(queries.float().cpu().numpy(), count)
            places = torch.from_numpy(places).to(device)
            scores = torch.from_numpy(found).to(device, queries.dtype)
            return scores.masked_fill(places < 0, -torch.inf), places
        scores = queries.new_full((n, count), -torch.inf)
        places = torch.full((n, count), -1, device=device)
        rows = max(1, piece_tokens(device, 4 * (CHUNK + count)))
        for part in cut(n, rows) if n else ():
            for start in range(0, len(self), CHUNK):
                keys = self.keys[start : start + CHUNK].to(device, queries.dtype)
                with torch.autocast(device.type, enabled=False):
                    here = torch.matmul(queries[part], keys.t())
                where = torch.arange(start, start + len(keys), device=device).expand_as(here)
                both = torch.cat([scores[part], here], 1)
                best = torch.topk(both, count, dim=1)
                places[part] = torch.cat([places[part], where], 1).gather(1, best.indices)
                scores[part] = best.values
        return scores, places


def nearest(store: Store, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Scores [n, count] of the nearest entries, differentiable in the queries, and their tokens; -1: none."""
    wide = queries if queries.dtype == torch.float64 else queries.float()
    if not len(store):
        return wide.new_full((len(wide), count), -torch.inf), torch.full((len(wide), count), -1).to(
            wide.device
        )
    scores, places = store.search(wide.detach(), count)
    tokens = store.tokens[places.clamp_min(0).to(store.tokens.device)].to(queries.device)
    tokens = tokens.masked_fill(places < 0, -1)
    if not (torch.is_grad_enabled() and queries.requires_grad):
        return scores, tokens

    def again(piece: slice) -> Tensor:
        keys = store.keys[places[piece].clamp_min(0).to(store.keys.device)].to(wide.device, wide.dtype)
        with torch.autocast(wide.device.type, enabled=False):
            found = torch.matmul(keys, wide[piece, :, None])[..., 0]
        return found.masked_fill(places[piece] < 0, -torch.inf)

    columns = 4 * count * store.width
    return checkpointed(again, cut(len(queries), piece_tokens(queries.device, columns))), tokens
