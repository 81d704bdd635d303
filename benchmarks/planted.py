"""Models on disk whose bottleneck is known, and texts drawn from the truth that they fall short of.

    python -m benchmarks.planted CASE DIRECTORY        writes model/, text.txt and truth.json

The truth is a mixture of K softmaxes over the states h [D] of the model's own body,

    p(y | h) = 1/K sum_k softmax(W_t (h + s M_k h)),        sum_k M_k = 0,

so its log-probabilities have a higher rank than any softmax of width D, and a mixture head over these states
can represent it exactly. The model in the directory has the best softmax: its W minimises the exact cross
entropy against p over the distribution of contexts (not over a sample of the text), so its one fault is the
bottleneck. `gain` is its loss minus the entropy of p; the spread s is sought until it is what was asked for.

What of this is rank? A softmax whose row is another function of the state gets a part of the gain as well.
`gain_over_equal` is what is left over the best softmax whose rows have a perceptron with as many parameters
as the true mixture's maps (the control of a diagnosis, fitted against the exact truth), `gain_over_rows` over
one whose row is free for every context. A better head's gain over a control lies between these and `gain`.
(Constant differences between components would be worse: they are mostly a bias of words, no rank at all.)

Contexts. A body without layers has one state a word, so contexts are enumerated, weighted by the stationary
distribution of the chain of words. A body with layers attends to `ATTENTION` words only: its state depends on
a few last words, not on where a diagnosis cuts the text into windows, and contexts are sampled by writing
many streams side by side. Tied embeddings are fitted as a whole, rows and states together, so
there the truth is a mixture over other states than the model's.

A bent truth is no mixture that a head here could represent: components move with the state as
tanh does, and their priors follow it,

    p(y | h) = sum_k pi_k(h) softmax(W_t (h + s (tanh(2 M_k h) - mean_k))),       pi = softmax(A h + a).

A healthy model is the same with K = 1 and s = 0: its text is drawn from its own softmax, or, where `shift` is
above zero, from one with another matrix and bias over the same states. There a refit gains and no head beats
the refit.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from fullrank.fit.controls import Perceptron
from fullrank.models.anatomy import states as states_of
from fullrank.models.loading import quiet
from fullrank.results import write_whole

Dtype = Literal["float32", "bfloat16", "float16"]

ATTENTION = 3
"""Words that a layer attends to, itself included."""
STREAMS = 128
"""Written side by side: few, because words next to where two meet are not drawn from the truth."""
SAMPLED = 20_000
"""Contexts of a body with layers over which its head is fitted and the gain is computed."""
SEARCHED = 5_000
"""The same while the spread is sought, and for rows that are bent or free."""
CLOSE = 0.03
"""How far from the gain asked for the search of the spread may end, as a share of it."""
MOST_SPREAD = 8.0
FIT = torch.float64


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its text."""

    vocab: int
    width: int
    components: int = 1
    """Of the truth; 1 is a healthy model."""
    gain: float = 0.0
    """Nats per token to be lost to the bottleneck."""
    tokens: int = 200_000
    layers: int = 0
    family: Literal["llama", "gpt_neox"] = "llama"
    tied: bool = False
    dtype: Dtype = "float32"
    bits: int = 0
    """Of the output matrix: each row on a grid of its own, as files for small machines have it; 0: none."""
    contexts: int | None = None
    """Words fall into so many classes that are the same as contexts; by default every word is its own."""
    sharpness: float = 1.5
    """Standard deviation of the truth's scores."""
    shift: float = 0.0
    """Of the text's softmax against the model's, as a share of its scores."""
    bent: bool = False
    """Components that bend with the state, of priors that follow it."""
    tails: bool = False
    """Norms of states far apart, and a few directions that hold most of them."""


CASES = {
    "small": Case(vocab=384, width=16, components=4, gain=0.18, tokens=300_000),
    "pair": Case(vocab=512, width=16, components=2, gain=0.10, tokens=200_000, dtype="bfloat16"),
    "narrow": Case(
        vocab=256, width=8, components=3, gain=0.30, tokens=100_000, dtype="float16", sharpness=2.0
    ),
    "tied": Case(vocab=384, width=24, components=4, gain=0.05, tokens=300_000, tied=True, dtype="bfloat16"),
    "neox": Case(
        vocab=1024, width=32, components=4, gain=0.25, tokens=200_000, family="gpt_neox", dtype="float16",
        sharpness=2.0,
    ),
    "layers": Case(
        vocab=256, width=32, components=4, gain=0.15, tokens=200_000, layers=2, dtype="bfloat16"
    ),
    "large": Case(
        vocab=4096, width=32, components=4, gain=0.30, tokens=300_000, contexts=512, dtype="bfloat16",
        sharpness=2.0,
    ),
    "deep": Case(vocab=256, width=8, components=4, gain=0.60, tokens=200_000, sharpness=3.0),
    "quantised": Case(vocab=384, width=16, components=4, gain=0.20, tokens=250_000, bits=4, dtype="float16"),
    "broad": Case(vocab=512, width=48, components=4, gain=0.20, tokens=300_000),
    "mid": Case(vocab=1024, width=64, components=4, gain=0.18, tokens=300_000),
    "wide": Case(vocab=512, width=96, components=4, gain=0.20, tokens=300_000),
    "bent": Case(vocab=512, width=20, components=3, gain=0.12, tokens=250_000, bent=True),
    "healthy_small": Case(vocab=384, width=16, tokens=300_000),
    "healthy_few": Case(vocab=512, width=16, tokens=20_000),
    "healthy_tied": Case(vocab=512, width=24, tokens=200_000, tied=True, dtype="bfloat16"),
    "healthy_neox": Case(
        vocab=1024, width=32, tokens=200_000, family="gpt_neox", dtype="float16", sharpness=2.0
    ),
    "healthy_layers": Case(vocab=256, width=32, tokens=200_000, layers=2, dtype="bfloat16"),
    "healthy_large": Case(
        vocab=4096, width=32, tokens=300_000, contexts=512, dtype="bfloat16", sharpness=2.0
    ),
    "healthy_quantised": Case(vocab=384, width=16, tokens=200_000, bits=4, dtype="float16"),
    "healthy_shift": Case(vocab=384, width=16, tokens=200_000, shift=0.2),
    "healthy_tails": Case(vocab=512, width=32, tokens=200_000, tails=True, dtype="bfloat16"),
    "healthy_mid": Case(vocab=1024, width=64, tokens=300_000),
    "healthy_wide": Case(vocab=512, width=96, tokens=300_000),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Where a case was written, and what is true of it."""

    model: Path
    text: Path
    gain: float
    """Nats per token between the stored softmax and the truth: what the best head would buy these states. For
    a healthy model the gain of a high-rank head over a refitted softmax, which is zero."""
    gain_over_equal: float
    """The same over the best softmax whose rows have a perceptron of as many parameters as the true maps."""
    gain_over_rows: float
    """The same over the best softmax of this width with a free row for every context."""
    gain_of_mixture: float
    """What is there for a mixture whose rows are affine in the state: all of it, but of a bent truth."""
    refit_gain: float
    """What a refitted softmax gains: zero up to the rounding of the stored matrix, but where a text has
    moved from what the model was fitted on."""
    entropy: float
    """Of the truth, nats per token: no head has a lower loss."""
    loss: float
    """Of the stored softmax under the truth."""
    spread: float
    gradient: float
    """The largest entry of the gradient of the exact loss in the best softmax's matrix, before rounding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Truth:
    """The mixture that the text is drawn from."""

    weight: Tensor
    """[V, D]"""
    maps: Tensor
    """[K, D, D]"""
    offset: Tensor
    """[D] of all rows: zero, but where the text has moved away from the model."""
    gate: Tensor | None = None
    """[K, D + 1] of priors that follow the state; else they are equal."""
    bent: bool = False
    size: float = 1.0
    """How far components stand apart."""

    def log_probs(self, states: Tensor) -> Tensor:
        """[C, D] to [C, V]."""
        parts = torch.full((len(states), len(self.weight)), -math.inf, dtype=states.dtype)
        log_prior = torch.full((len(states), len(self.maps)), -math.log(len(self.maps)), dtype=states.dtype)
        moves = torch.einsum("cd,ked->cke", states, self.maps)
        if self.gate is not None:
            log_prior = (states @ self.gate[:, :-1].T + self.gate[:, -1]).log_softmax(1)
        if self.bent:
            moves = torch.tanh(2 * moves)
            moves = moves - torch.einsum("ck,cke->ce", log_prior.exp(), moves)[:, None]
        for component in range(len(self.maps)):
            rows = states + self.size * moves[:, component] + self.offset
            own = log_prior[:, component, None] + (rows @ self.weight.T).log_softmax(1)
            parts = torch.logaddexp(parts, own)
        return parts

    def spread(self, by: float) -> Truth:
        return dataclasses.replace(self, size=by * self.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class Contexts:
    """States, how likely each is, and the truth at each."""

    states: Tensor
    """[C, D]"""
    joint: Tensor
    """[C, V] probability of a context and the word after it."""
    entropy: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """The best softmax over some contexts."""

    weight: Tensor
    """[V, D]"""
    gradient: float
    """The largest entry of the loss's gradient there."""


def plant(directory: Path, case: Case, *, seed: int = 0) -> Planted:
    """Make model and text of a case; the same seed makes the same files."""
    generator = torch.Generator().manual_seed(seed)
    body = _body(case, generator)
    truth, spread = _truth(case, generator), 0.0
    if case.tied:
        _set_embedding(body, case, truth.weight)
    if case.components > 1:
        spread = _sought(case, body, truth, generator)
        truth = truth.spread(spread)
    fitted = Fitted(weight=truth.weight, gradient=0.0)
    if case.shift:
        # The bias lies in the span of the matrix, so that rows which move by a constant can follow it.
        truth = dataclasses.replace(
            truth,
            weight=truth.weight + case.shift * _scores(case, generator),
            offset=case.shift * torch.randn(case.width, generator=generator, dtype=FIT),
        )
    contexts = _contexts(case, body, truth, generator, SAMPLED)
    if case.components > 1:
        fitted = _best(case, body, contexts, truth.weight, steps=1000)
    _set_output(body, case, fitted.weight)
    stored = _store(body, case, directory / "model")
    if case.components == 1 and not case.shift:
        # Drawn from the matrix as it is stored, rounded.
        truth = dataclasses.replace(truth, weight=stored)
        contexts = _contexts(case, body, truth, generator, SAMPLED)
    elif not case.layers:
        # Tied rows were fitted and rounded, and the states with them; the truth at each context is the same.
        contexts = dataclasses.replace(contexts, states=_word_states(case, body))
    loss = cross_entropy(contexts, stored)
    short, mixed = loss - contexts.entropy, case.components > 1
    planted = Planted(
        model=directory / "model",
        text=directory / "text.txt",
        gain=short if mixed else 0.0,
        gain_over_equal=bent_rows(contexts, stored, case.components) - contexts.entropy if mixed else 0.0,
        gain_over_rows=free_rows(contexts, stored) - contexts.entropy if mixed else 0.0,
        gain_of_mixture=loss - best_mixture(contexts, stored) if case.bent else (short if mixed else 0.0),
        refit_gain=loss - cross_entropy(contexts, fitted.weight) if mixed else short,
        entropy=contexts.entropy,
        loss=loss,
        spread=spread,
        gradient=fitted.gradient,
    )
    write_whole(planted.text, _lines(_written(case, body, truth, contexts, generator)))
    facts = {"case": dataclasses.asdict(case), "seed": seed, **dataclasses.asdict(planted)}
    facts |= {"model": planted.model.name, "text": planted.text.name}
    write_whole(directory / "truth.json", json.dumps(facts, indent=1) + "\n")
    return planted


def cross_entropy(contexts: Contexts, weight: Tensor) -> float:
    """Exact loss of a softmax under the truth."""
    return -float((contexts.joint * (contexts.states @ weight.T).log_softmax(1)).sum())


def best_softmax(contexts: Contexts, start: Tensor, *, steps: int = 600) -> Fitted:
    """L-BFGS in the coordinates of Newton's step with the Hessian's block of every row: rare words,
    whose blocks are small, would hardly move else."""
    states, joint = contexts.states, contexts.joint
    share = joint.sum(1, keepdim=True)
    # Behind a LayerNorm states do not fill the space, and along what is left nothing would hold the matrix.
    singular = torch.linalg.svd(states, full_matrices=False)
    basis = singular.Vh[1e-5 * singular.S[0] < singular.S].T
    within = states @ basis
    pairs = (within[:, :, None] * within[:, None, :]).flatten(1)
    own = (states @ start.T).softmax(1)
    blocks = ((share * own * (1 - own)).T @ pairs).view(len(start), *basis.shape[1:] * 2)
    factors = torch.linalg.cholesky(blocks)
    change = torch.zeros(len(start), basis.shape[1], dtype=FIT)

    def weight() -> Tensor:
        moved = torch.linalg.solve_triangular(factors.mT, change[..., None], upper=True)[..., 0]
        return start + moved @ basis.T

    _minimise([change], lambda: -(joint * (states @ weight().T).log_softmax(1)).sum(), steps=steps)
    found = weight()
    gradient = (share * (states @ found.T).softmax(1) - joint).T @ states
    return Fitted(weight=found, gradient=float(gradient.abs().max()))


def free_rows(contexts: Contexts, start: Tensor) -> float:
    """Loss of the best softmax of this width whose row is free for every context, from above: the descent
    is from the model's own rows, and stops."""
    rows, weight = contexts.states[:SEARCHED].clone(), start.clone()
    joint = contexts.joint[:SEARCHED] / contexts.joint[:SEARCHED].sum()
    before = -float((joint * (rows @ weight.T).log_softmax(1)).sum())
    after = _minimise([rows, weight], lambda: -(joint * (rows @ weight.T).log_softmax(1)).sum(), steps=300)
    return cross_entropy(contexts, start) - (before - after)


def bent_rows(contexts: Contexts, start: Tensor, components: int) -> float:
    """Loss of the best softmax whose rows have a perceptron of a mixture's size."""
    states, joint = contexts.states[:SEARCHED], contexts.joint[:SEARCHED] / contexts.joint[:SEARCHED].sum()
    D = states.shape[1]
    extra = (components - 1) * (D * D + D) + components * D
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rows, weight = Perceptron(D, max(1, extra // (2 * D + 1))).to(FIT), start.clone()
        # Off the point where the inner layer has no gradient.
        torch.nn.init.normal_(rows.leave.weight, std=0.05 / D**0.5)

    def loss() -> Tensor:
        return -(joint * (rows([states])[0].flatten(0, 1) @ weight.T).log_softmax(1)).sum()

    before = -float((joint * (states @ start.T).log_softmax(1)).sum())
    return cross_entropy(contexts, start) - (
        before - _minimise([*rows.parameters(), weight], loss, steps=300)
    )


def best_mixture(contexts: Contexts, start: Tensor, components: int = 4) -> float:
    """Loss of the best mixture of rows that are affine in the state, from above: the descent is from a small
    random split of the softmax, and stops."""
    states, joint = contexts.states[:SEARCHED], contexts.joint[:SEARCHED] / contexts.joint[:SEARCHED].sum()
    D = states.shape[1]
    generator = torch.Generator().manual_seed(0)
    maps = 0.3 * torch.randn(components, D, D, generator=generator, dtype=FIT) / D**0.5
    gate = torch.zeros(components, D + 1, dtype=FIT)
    truth = Truth(weight=start.clone(), maps=maps - maps.mean(0), offset=torch.zeros(D, dtype=FIT), gate=gate)
    before = -float((joint * (states @ start.T).log_softmax(1)).sum())
    learnt = [truth.weight, truth.maps, truth.offset, gate]
    after = _minimise(learnt, lambda: -(joint * truth.log_probs(states)).sum(), steps=300)
    return cross_entropy(contexts, start) - (before - after)


def _minimise(parameters: Sequence[Tensor], loss: Callable[[], Tensor], *, steps: int) -> float:
    """Full-batch L-BFGS in place; returns the loss."""
    for one in parameters:
        one.requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        parameters, max_iter=steps, history_size=20, tolerance_grad=1e-10, tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> float:
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return float(value.detach())

    optimiser.step(closure)
    for one in parameters:
        one.requires_grad_(False)
    return float(loss())


def _best(case: Case, body: Any, contexts: Contexts, start: Tensor, *, steps: int) -> Fitted:
    if not case.tied:
        return best_softmax(contexts, start, steps=steps)
    weight = start.clone()
    norm = body.model.norm

    def loss() -> Tensor:
        scaled = weight * (weight.pow(2).mean(1, keepdim=True) + norm.variance_epsilon).rsqrt()
        return -(contexts.joint * (scaled * norm.weight.to(FIT) @ weight.T).log_softmax(1)).sum()

    _minimise([weight], loss, steps=steps)
    weight.requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss(), weight)
    return Fitted(weight=weight.detach(), gradient=float(gradient.abs().max()))


def _sought(case: Case, body: Any, truth: Truth, generator: torch.Generator) -> float:
    """The spread of the components that loses about the gain that was asked for."""
    spread, start = 1.0, truth.weight
    below: tuple[float, float] | None = None
    above: tuple[float, float] | None = None
    for _ in range(16):
        contexts = _contexts(case, body, truth.spread(spread), generator, SEARCHED)
        # A search need not end where the gradient is zero; the gain is computed anew after it.
        fitted = _best(case, body, contexts, start, steps=100)
        if case.tied:
            _set_output(body, case, fitted.weight)
            contexts = dataclasses.replace(contexts, states=_word_states(case, body))
            _set_output(body, case, truth.weight)
        found, start = cross_entropy(contexts, fitted.weight) - contexts.entropy, fitted.weight
        if abs(found / case.gain - 1) < CLOSE:
            return spread
        if found < case.gain:
            below = (spread, found)
        else:
            above = (spread, found)
        if below and above:
            # Straight in the logarithms, where a gain is nearly a power of the spread.
            way = math.log(case.gain / below[1]) / math.log(above[1] / below[1])
            spread = below[0] * (above[0] / below[0]) ** min(0.9, max(0.1, way))
        else:
            spread *= min(2.0, max(0.3, (case.gain / found) ** 0.4))
        if spread > MOST_SPREAD:
            break
    raise ValueError(f"no spread loses {case.gain} nats: {found:.3f} at {spread:.2f}; make it sharper")


def _scores(case: Case, generator: torch.Generator) -> Tensor:
    return (
        torch.randn(case.vocab, case.width, generator=generator, dtype=FIT) * case.sharpness / case.width**0.5
    )


def _truth(case: Case, generator: torch.Generator) -> Truth:
    K, D = case.components, case.width
    weight = _scores(case, generator)
    maps = torch.randn(K, D, D, generator=generator, dtype=FIT) / D**0.5
    gate = torch.randn(K, D + 1, generator=generator, dtype=FIT) / D**0.5 if case.bent else None
    # Centred: else the mean row is moved, which a softmax follows and no rank is needed for.
    return Truth(
        weight=weight, maps=maps - maps.mean(0), offset=torch.zeros(D, dtype=FIT), gate=gate, bent=case.bent
    )


def _body(case: Case, generator: torch.Generator) -> Any:
    """A model with random weights that its dtype can hold, run in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = max(1, case.width // 16)
    settings: dict[str, Any] = {
        "vocab_size": case.vocab,
        "hidden_size": case.width,
        "intermediate_size": 2 * case.width,
        "num_hidden_layers": case.layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": case.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    kind: str = case.family
    if kind == "llama":
        settings |= {"num_key_value_heads": heads, "rms_norm_eps": 1.0 if case.tails else 1e-6}
    if case.layers:
        # A llama that attends to few words.
        kind = "mistral"
        settings["sliding_window"] = ATTENTION
    with quiet(), torch.no_grad():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
        model.requires_grad_(False)
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                drawn = torch.randn(weight.shape, generator=generator)
                weight.copy_(drawn if "embed" in name else drawn / weight.shape[1] ** 0.5)
        rows = torch.randn(case.vocab, case.width, generator=generator)
        if case.tails:
            rows = rows * torch.randn(case.vocab, 1, generator=generator).exp()
            model.model.norm.weight.copy_(3.0 / (1.0 + torch.arange(case.width)) ** 0.5)
        _set_embedding(model, case, rows)
    return model


def _set_embedding(model: Any, case: Case, rows: Tensor) -> None:
    """Words of one class share the row of its first word."""
    first = torch.arange(case.vocab) % (case.contexts or case.vocab)
    model.get_input_embeddings().weight.copy_(rows[first])
    model.to(getattr(torch, case.dtype)).to(torch.float32)


def _set_output(model: Any, case: Case, weight: Tensor) -> None:
    if case.bits:
        step = weight.abs().amax(dim=1, keepdim=True) / (2 ** (case.bits - 1) - 1)
        weight = (weight / step).round() * step
    model.get_output_embeddings().weight.copy_(weight)
    model.to(getattr(torch, case.dtype)).to(torch.float32)


@torch.no_grad()
def _word_states(case: Case, body: Any) -> Tensor:
    """[C, D] of a body without layers."""
    words = torch.arange(case.contexts or case.vocab)
    return states_of(body, words[:, None])[:, 0].to(FIT)


def _contexts(case: Case, body: Any, truth: Truth, generator: torch.Generator, sampled: int) -> Contexts:
    if case.layers:
        states = _streams(case, body, truth, generator, sampled)[1]
        share = torch.full((len(states), 1), 1 / len(states), dtype=FIT)
    else:
        states = _word_states(case, body)
    log_probs = truth.log_probs(states)
    if not case.layers:
        share = _stationary(log_probs.exp(), len(states))[:, None]
    joint = share * log_probs.exp()
    return Contexts(states=states, joint=joint, entropy=-float((joint * log_probs).sum()))


def _stationary(table: Tensor, classes: int) -> Tensor:
    """[C, V] probabilities of words after a context to how often each context comes in the long run."""
    moves = torch.zeros(classes, classes, dtype=FIT)
    moves.index_add_(1, torch.arange(table.shape[1]) % classes, table)
    share = torch.full((classes,), 1 / classes, dtype=FIT)
    for _ in range(10_000):
        before, share = share, share @ moves
        if float((share - before).abs().sum()) < 1e-14:
            break
    return share / share.sum()


@torch.no_grad()
def _streams(
    case: Case, body: Any, truth: Truth, generator: torch.Generator, count: int
) -> tuple[Tensor, Tensor]:
    """Words [STREAMS, steps] and the states [STREAMS x steps, D] that they were drawn from."""
    seen = case.layers * (ATTENTION - 1) + 1
    words = torch.randint(case.vocab, (STREAMS, seen), generator=generator)
    steps, settling = -(-count // STREAMS), 4 * seen
    states = []
    for _ in range(settling + steps):
        states.append(states_of(body, words[:, -seen:])[:, -1].to(FIT))
        drawn = torch.multinomial(truth.log_probs(states[-1]).exp(), 1, generator=generator)
        words = torch.cat([words, drawn], dim=1)
    return words[:, -steps:], torch.stack(states[settling:], dim=1).flatten(0, 1)


def _written(
    case: Case, body: Any, truth: Truth, contexts: Contexts, generator: torch.Generator
) -> list[int]:
    """The text's words."""
    if case.layers:
        return _streams(case, body, truth, generator, case.tokens)[0].flatten().tolist()[: case.tokens]
    table = contexts.joint / contexts.joint.sum(1, keepdim=True)
    # One chain from end to end, by the inverse of the distribution function.
    ladder = table.cumsum(1)
    ladder[:, -1] = 1.0
    below = ladder.numpy()
    words = [0]
    for share in torch.rand(case.tokens, generator=generator, dtype=FIT).tolist():
        words.append(int(below[words[-1] % len(below)].searchsorted(share, side="right")))
    return words[1:]


def _lines(words: Sequence[int]) -> str:
    lines = (words[start : start + 20] for start in range(0, len(words), 20))
    return "".join(" ".join(f"w{word}" for word in line) + "\n" for line in lines)


def _store(model: Any, case: Case, directory: Path) -> Tensor:
    """Save model and tokenizer; returns the output matrix as it is stored."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{word}": word for word in range(case.vocab)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with quiet():
        model.to(getattr(torch, case.dtype)).save_pretrained(directory)
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
        model.to(torch.float32)
    return model.get_output_embeddings().weight.to(FIT)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Write one case to a directory: model/, text.txt and truth.json."""

    case: Annotated[str, tyro.conf.Positional]
    """One of the names in CASES."""
    directory: Annotated[Path, tyro.conf.Positional]
    seed: int = 0


def main(config: Config) -> None:
    if config.case not in CASES:
        raise SystemExit(f"no case {config.case!r}: expected one of {', '.join(CASES)}")
    planted = plant(config.directory, CASES[config.case], seed=config.seed)
    print(
        f"{config.case}: loss {planted.loss:.4f}, entropy {planted.entropy:.4f}, gain {planted.gain:.4f} "
        f"nats ({planted.gain_over_equal:.4f} over an equal softmax, {planted.gain_over_rows:.4f} over free "
        f"rows), a refit {planted.refit_gain:.4f}"
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
