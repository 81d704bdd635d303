"""Pilot of the bracket: gains of small output layers over a fixed softmax, in sample and on new text.

A class of output layers has a base that stays fixed. Its best member gains g over the base. A fit of the
class to its optimum on N tokens brackets g: the mean gain in sample is at least g, on new text at most g. The
pilot measures both ends on a real model, for classes whose maps and gates are confined to q directions.

    y     = S^-1/2 U' F^1/2 (h - mu)         q leading directions of the scores, unit variance    [N, q]
    h0    = h + P (A y + a)                  the base: fitted on other text, then fixed           [N, D]
    row_k = h0 + P (X_k Z_k y + b_k)         component k, rank r                                  [N, D]
    prior = softmax_k(G y + c)               gate                                                 [N, K]

P = F^-1/2 U gives steps of unit size in the scores. F is the mean covariance of the rows of W under the
model's own probabilities; U holds the eigenvectors of F^1/2 Cov(h) F^1/2. No label enters this choice, and W
is fixed.

    python -m benchmarks.bracket_pilot tokens enwik8.gz --model DIR --out tokens.npz
    python -m benchmarks.bracket_pilot fit tokens.npz --model DIR --out results/bracket_pilot.json

`tokens` writes clean text, one document an article. `fit` needs CUDA, appends every finished fit to its
record, and continues where an earlier call stopped (`--seconds`).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullrank import mixture_nll

WINDOW = 1024
TEST_TOKENS = 700_000
BASE_TOKENS = 800_000
LARGEST_MAP = 64  # directions of the base's map


@dataclass(frozen=True, kw_only=True)
class LayerClass:
    """A class of output layers over the fixed base."""

    name: str
    directions: int
    components: int = 1
    rank: int = 0
    opposite: bool = False
    """Two components with opposite maps: row = h0 +- P x z'y."""
    hidden: int = 0
    """Width of a hidden layer in place of a map (a softmax, the control)."""


SMALL = [
    LayerClass(name="opposite r1 q16", directions=16, components=2, rank=1, opposite=True),
    LayerClass(name="opposite r1 q64", directions=64, components=2, rank=1, opposite=True),
    LayerClass(name="mos K2 r1 q16", directions=16, components=2, rank=1),
    LayerClass(name="mos K2 r4 q16", directions=16, components=2, rank=4),
    LayerClass(name="mos K4 r4 q16", directions=16, components=4, rank=4),
    LayerClass(name="mos K2 r4 q64", directions=64, components=2, rank=4),
    LayerClass(name="mos K2 r16 q64", directions=64, components=2, rank=16),
    LayerClass(name="mos K4 r16 q64", directions=64, components=4, rank=16),
    LayerClass(name="map r8 q16", directions=16, rank=8),
    LayerClass(name="map r32 q64", directions=64, rank=32),
    LayerClass(name="hidden q16", directions=16, hidden=16),
    LayerClass(name="hidden q64", directions=64, hidden=64),
]
LARGE = [
    LayerClass(name="mos K4 r576 full", directions=576, components=4, rank=576),
    LayerClass(name="map full", directions=576, rank=576),
    LayerClass(name="hidden full", directions=576, hidden=1152),
    LayerClass(name="mos K2 r576 full", directions=576, components=2, rank=576),
    LayerClass(name="mos K4 r64 full", directions=576, components=4, rank=64),
]


class Layer(nn.Module):
    """Rows and log prior of a class, from states in whitened coordinates."""

    step: Tensor

    def __init__(self, kind: LayerClass, step: Tensor, seed: int) -> None:
        super().__init__()
        self.kind = kind
        q, maps = kind.directions, 1 if kind.opposite else kind.components
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * scale)

        inner = kind.hidden or kind.rank
        self.inward = random(maps, q, inner, scale=1 / math.sqrt(q))
        single = kind.components == 1
        self.outward = random(maps, inner, q, scale=0.0 if single else 0.1 / math.sqrt(inner))
        self.shift = nn.Parameter(torch.zeros(maps, q), requires_grad=not kind.opposite)
        self.inner_shift = nn.Parameter(torch.zeros(maps, inner), requires_grad=kind.hidden > 0)
        gates = kind.components - 1
        self.gate = random(q, gates, scale=0.5 / math.sqrt(q))
        self.gate_shift = nn.Parameter(torch.zeros(gates))
        self.register_buffer("step", step[:q].clone())  # [q, D]

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def forward(self, base: Tensor, whitened: Tensor) -> tuple[Tensor, Tensor]:
        """base [N, D], whitened [N, q] -> rows [N, K, D], log prior [N, K]."""
        y = whitened[:, : self.kind.directions]
        inner = torch.einsum("nq,kqr->knr", y, self.inward) + self.inner_shift[:, None]
        if self.kind.hidden:
            inner = torch.nn.functional.gelu(inner)
        move = inner @ self.outward + self.shift[:, None]  # [maps, N, q]
        if self.kind.opposite:
            move = torch.cat([move, -move])
        rows = base[:, None] + (move @ self.step).transpose(0, 1)
        logits = torch.cat([y.new_zeros(len(y), 1), y @ self.gate + self.gate_shift], dim=1)
        return rows, logits.log_softmax(1)


_MARKUP = [
    (re.compile(r"<!--.*?-->", re.S), ""), (re.compile(r"<ref[^>]*/>|<ref.*?</ref>", re.S), ""),
    (re.compile(r"<(math|pre|gallery|table)[^>]*>.*?</\1>", re.S), ""), (re.compile(r"<[^>]{1,200}>"), ""),
    (re.compile(r"\[\[(?:Image|File|Category|[a-z-]{2,12}):[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]"), ""),
    (re.compile(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]"), r"\1"), (re.compile(r"\[\w+://\S*\s?([^\]]*)\]"), r"\1"),
    (re.compile(r"'{2,}"), ""), (re.compile(r"^[ :;*#|!{=].*$", re.M), ""), (re.compile(r"\n{2,}"), "\n"),
]  # fmt: skip
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", re.S)
_ENTITIES = (
    ("&lt;", "<"),
    ("&gt;", ">"),
    ("&quot;", '"'),
    ("&amp;", "&"),
    ("&nbsp;", " "),
    ("&mdash;", "-"),
    ("&ndash;", "-"),
)


def wikipedia_articles(path: Path) -> list[str]:
    """Articles of a Wikipedia dump without markup, those of at least 200 characters."""
    with gzip.open(path, "rt", encoding="utf8", errors="replace") as file:
        dump = file.read()
    articles = []
    for match in re.finditer(r"<text[^>]*>(.*?)</text>", dump, re.S):
        text = match.group(1)
        for entity, character in _ENTITIES:
            text = text.replace(entity, character)
        if text[:9].upper() == "#REDIRECT":
            continue
        for _ in range(4):
            text = _TEMPLATE.sub("", text)
        for pattern, replacement in _MARKUP:
            text = pattern.sub(replacement, text)
        if len(text.strip()) >= 200:
            articles.append(text.strip())
    return articles


def write_tokens(options: argparse.Namespace) -> None:
    """Tokens of all articles, each after an end-of-text token, with the articles' lengths."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    articles = wikipedia_articles(Path(options.text))
    ids: list[np.ndarray] = []
    for start in range(0, len(articles), 500):
        for encoding in tokenizer.encode_batch_fast(articles[start : start + 500], add_special_tokens=False):
            ids.append(np.array([options.separator, *encoding.ids], dtype=np.uint16))
    lengths = np.array([len(document) for document in ids], dtype=np.int32)
    np.savez_compressed(options.out, ids=np.concatenate(ids), lengths=lengths)
    print(f"{len(articles):,} articles, {int(lengths.sum()):,} tokens")


@torch.no_grad()
def states_of(model: Any, ids: Tensor, batch: int = 64) -> Tensor:
    """States [T, D] before the output layer, bf16, in windows of 1,024 tokens."""
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    states = torch.empty(*windows.shape, model.config.hidden_size, dtype=torch.bfloat16, device="cuda")
    for start in range(0, len(windows), batch):
        part = windows[start : start + batch].to("cuda").long()
        states[start : start + batch] = model.model(part, use_cache=False).last_hidden_state
    return states.view(-1, states.shape[-1])


@torch.no_grad()
def directions_of(states: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean state [D], inward map [D, D] and outward step [D, D] of all directions, the leading ones first."""
    sample = states[
        torch.randperm(len(states), device="cuda", generator=torch.Generator("cuda").manual_seed(0))[:200_000]
    ].float()
    mean = sample.mean(0)
    covariance = torch.cov(sample.T).double()
    fisher = torch.zeros_like(covariance)
    Wf = W.float()
    for part in sample[:40_000].split(2_000):
        p = (part @ Wf.T).softmax(-1)
        mean_row = (p @ Wf).double()
        fisher += Wf.T.double() @ (p.sum(0).double()[:, None] * Wf.double()) - mean_row.T @ mean_row
    fisher /= 40_000
    values, vectors = torch.linalg.eigh(fisher)
    values = values.clamp(min=values.max() * 1e-6)
    root, inverse_root = (vectors * values.sqrt()) @ vectors.T, (vectors / values.sqrt()) @ vectors.T
    spread, U = torch.linalg.eigh(root @ covariance @ root)
    order = spread.argsort(descending=True)
    spread, U = spread[order].clamp(min=1e-9), U[:, order]
    print(
        "variance of the scores by direction:",
        [round(float(v), 2) for v in spread[[0, 3, 15, 63, 255, 575]]],
        flush=True,
    )
    return mean, (root @ U / spread.sqrt()).float(), (inverse_root @ U).T.float().contiguous()


class Text:
    """Whitened coordinates, base rows and targets of a set of tokens, made a batch at a time."""

    def __init__(
        self, states: Tensor, targets: Tensor, documents: Tensor, mean: Tensor, inward: Tensor
    ) -> None:
        self.states, self.targets, self.documents = states, targets, documents
        self.mean, self.inward = mean, inward
        self.base: Layer | None = None

    def batch(self, index: Tensor, directions: int) -> tuple[Tensor, Tensor, Tensor]:
        states = self.states[index].float()
        whitened = (states - self.mean) @ self.inward[:, : max(directions, LARGEST_MAP)]
        if self.base is not None:
            with torch.no_grad():
                rows, _ = self.base(states, whitened)
            states = rows[:, 0]
        return states, whitened, self.targets[index]


def token_losses(
    text: Text, layer: Layer | None, index: Tensor, W: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Loss of each token [n], in nats; the base alone where `layer` is None."""
    losses = []
    with torch.no_grad():
        for part in index.split(65_536):
            states, whitened, targets = text.batch(part, layer.kind.directions if layer else LARGEST_MAP)
            if layer is None:
                rows, prior = states[:, None], states.new_zeros(len(part), 1)
            else:
                rows, prior = layer(states, whitened)
            losses.append(mixture_nll(rows.to(dtype), prior, W.to(dtype), targets, reduction="none"))
    return torch.cat(losses)


def fit(
    layer: Layer,
    text: Text,
    index: Tensor,
    W: Tensor,
    *,
    tokens_seen: int,
    batch: int,
    rate: float,
    seed: int,
) -> None:
    """Adam with a cosine to zero over `tokens_seen` tokens; the weights of the last fifth are averaged."""
    parameters = [p for p in layer.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.98))
    steps = max(1, tokens_seen // batch)
    generator = torch.Generator("cuda").manual_seed(seed)
    order, at = torch.randperm(len(index), device="cuda", generator=generator), 0
    total = [torch.zeros_like(p) for p in parameters]
    averaged = 0
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        if at + batch > len(order):
            order, at = torch.randperm(len(index), device="cuda", generator=generator), 0
        chosen = index[order[at : at + batch]]
        at += batch
        states, whitened, targets = text.batch(chosen, layer.kind.directions)
        rows, prior = layer(states, whitened)
        loss = mixture_nll(rows.bfloat16(), prior, W, targets)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        if step >= int(steps * 0.8):
            averaged += 1
            torch._foreach_add_(total, [p.detach() for p in parameters])
    with torch.no_grad():
        for parameter, summed in zip(parameters, total, strict=True):
            parameter.copy_(summed / averaged)


def by_document(gain: Tensor, documents: Tensor) -> dict[str, float]:
    """Mean gain a token, its standard error clustered by document, and the effective number of documents."""
    documents = documents.unique(return_inverse=True)[1]
    counts = torch.bincount(documents).double()
    sums = torch.zeros_like(counts).index_add_(0, documents, gain.double())
    mean = sums.sum() / counts.sum()
    residual = sums - mean * counts
    effective = counts.sum() ** 2 / (counts**2).sum()
    error = (residual**2).sum().sqrt() / counts.sum() * math.sqrt(len(counts) / max(len(counts) - 1, 1))
    return {
        "mean": float(mean),
        "error": float(error),
        "documents": len(counts),
        "effective": float(effective),
    }


def schedule(tokens: int, parameters: int) -> tuple[int, int]:
    """Tokens seen in training, and tokens a step."""
    if tokens <= 50_000:
        return tokens * 100, tokens
    if tokens <= 200_000:
        return 40_960 * 250, 40_960
    if tokens <= 1_200_000:
        return 12_000_000, 32_768
    if tokens <= 4_500_000:
        return 14_000_000, 32_768
    return 2 * tokens, 49_152 if parameters > 50_000 else 65_536


def run_fits(options: argparse.Namespace) -> None:
    """Every class at every N: fit, then gains over the base in sample and on the test documents."""
    from transformers import AutoModelForCausalLM

    torch.set_float32_matmul_precision("high")
    started = time.time()
    record_path = Path(options.out)
    record: dict[str, Any] = json.loads(record_path.read_text()) if record_path.exists() else {"fits": []}
    done = {(f["class"], f["tokens_asked"], f["start"]) for f in record["fits"]}
    stored = np.load(options.tokens)
    ids, lengths = (
        torch.from_numpy(stored["ids"].astype(np.int32)),
        torch.from_numpy(stored["lengths"]).long(),
    )
    cache = Path(options.cache)
    loading = {"gguf_file": options.gguf} if options.gguf else {}
    if (cache / "states.pt").exists():
        states, W = torch.load(cache / "states.pt", map_location="cuda", weights_only=True)
    else:
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, **loading)
        model.cuda().eval()
        W = model.get_output_embeddings().weight.detach().clone()
        states = states_of(model, ids)
        del model
        cache.mkdir(parents=True, exist_ok=True)
        torch.save((states, W), cache / "states.pt")
    print(f"states of {len(states):,} tokens after {time.time() - started:.0f} s", flush=True)

    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[: len(states)]
    position = torch.arange(len(states))
    # The first token of a document, its separator, is no target.
    valid = torch.zeros(len(states), dtype=torch.bool)
    valid[:-1] = owner[1:] == owner[:-1]
    targets = ids[(position + 1).clamp(max=len(ids) - 1)].long().cuda()
    mean, inward, outward = directions_of(states, W)
    text = Text(states, targets, owner.cuda(), mean, inward)

    shuffled = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(options.seed))
    rank_of = torch.empty_like(shuffled)
    rank_of[shuffled] = torch.arange(len(shuffled))
    cumulative = lengths[shuffled].cumsum(0)
    base_end = int((cumulative < BASE_TOKENS).sum())
    test_end = int((cumulative < BASE_TOKENS + TEST_TOKENS).sum())
    place = rank_of[owner]
    base_index = torch.nonzero(valid & (place < base_end))[:, 0].cuda()
    test_index = torch.nonzero(valid & (place >= base_end) & (place < test_end))[:, 0].cuda()
    fit_places = place.masked_fill(~valid | (place < test_end), len(lengths) + 1)

    base = Layer(LayerClass(name="base", directions=LARGEST_MAP, rank=LARGEST_MAP), outward, 0).cuda()
    stored_loss = token_losses(text, None, test_index, W).double().mean()
    fit(base, text, base_index, W, tokens_seen=8_000_000, batch=32_768, rate=0.01, seed=0)
    text.base = base
    base_test = token_losses(text, None, test_index, W)
    exact = token_losses(text, None, test_index[:100_000], W, torch.float32)
    record["rounding"] = {"base, bf16 less fp32": float((base_test[:100_000] - exact).double().mean())}
    record["loss"] = {"stored softmax": float(stored_loss), "base": float(base_test.double().mean())}
    record["text"] = {
        "base tokens": len(base_index), "test tokens": len(test_index), "test documents": test_end - base_end,
        "all tokens": len(ids), "documents": len(lengths),
    }  # fmt: skip
    record["device"], record["torch"] = torch.cuda.get_device_name(), torch.__version__
    print(record["loss"], record["rounding"], record["text"], f"{time.time() - started:.0f} s", flush=True)

    ends = lengths[shuffled[test_end:]].cumsum(0)
    plan = [(kind, n, 0) for n in options.sizes for kind in SMALL]
    plan += [(kind, n, 0) for kind in LARGE for n in options.sizes if n > 1_500_000]
    plan += [(kind, n, s) for n in options.sizes if n <= 1_000_000 for kind in SMALL[:4] for s in (1, 2)]
    base_losses: dict[int, Tensor] = {}
    for kind, tokens, start in plan:
        if (kind.name, tokens, start) in done:
            continue
        if time.time() - started > options.seconds:
            print("stopped by --seconds; the same command continues", flush=True)
            return
        last = test_end + int((ends <= tokens).sum())
        index = torch.nonzero(fit_places < last)[:, 0].cuda()
        if tokens not in base_losses:
            base_losses = {tokens: token_losses(text, None, index, W)}
        began = time.time()
        layer = Layer(kind, outward, start).cuda()
        seen, batch = schedule(len(index), layer.parameter_count())
        rate = 0.02 if kind.directions <= 64 else 0.002
        fit(layer, text, index, W, tokens_seen=seen, batch=min(batch, len(index)), rate=rate, seed=start)
        inside = by_document(base_losses[tokens] - token_losses(text, layer, index, W), text.documents[index])
        new = by_document(base_test - token_losses(text, layer, test_index, W), text.documents[test_index])
        entry = {
            "class": kind.name, "settings": asdict(kind), "parameters": layer.parameter_count(),
            "tokens_asked": tokens, "tokens": len(index), "start": start, "tokens_seen": seen,
            "in_sample": inside, "new_text": new,
            "gate_norm": float(layer.gate.detach().norm()), "seconds": round(time.time() - began, 2),
        }  # fmt: skip
        if kind.components == 2 and tokens == 1_000_000:
            part = test_index[:100_000]
            text32 = token_losses(text, None, part, W, torch.float32) - token_losses(
                text, layer, part, W, torch.float32
            )
            text16 = base_test[:100_000] - token_losses(text, layer, part, W)
            entry["gain_in_fp32_and_bf16"] = [float(text32.double().mean()), float(text16.double().mean())]
        record["fits"].append(entry)
        record_path.write_text(json.dumps(record, indent=1))
        print(
            f"{kind.name:18s} p={entry['parameters']:>8,} N={len(index):>10,} start {start}: "
            f"in {inside['mean']:+.5f} ({inside['error']:.5f})  new {new['mean']:+.5f} ({new['error']:.5f})  "
            f"gate {entry['gate_norm']:.1f}  {entry['seconds']:.1f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    tokens = commands.add_parser("tokens")
    tokens.add_argument("text")
    tokens.add_argument("--model", required=True)
    tokens.add_argument("--separator", type=int, default=0)
    tokens.add_argument("--out", default="tokens.npz")
    tokens.set_defaults(run=write_tokens)
    fits = commands.add_parser("fit")
    fits.add_argument("tokens")
    fits.add_argument("--model", required=True)
    fits.add_argument("--gguf", default="")
    fits.add_argument("--cache", default=".cache/bracket")
    fits.add_argument("--out", default="results/bracket_pilot.json")
    fits.add_argument("--seconds", type=float, default=1e9)
    fits.add_argument("--seed", type=int, default=0)
    fits.add_argument(
        "--sizes", type=int, nargs="+", default=[40_000, 160_000, 1_000_000, 4_000_000, 11_000_000]
    )
    fits.set_defaults(run=run_fits)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
