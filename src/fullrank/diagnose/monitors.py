"""Rank and geometry of a model in training, from a few hundred to a few thousand tokens.

    from W [V, D], the head's matrix          its spectrum (Godey et al. 2024, 2404.07647) and its rows' norms
    from the last layer's states              mean cosine of pairs, mean norm
    from log-probabilities [n, m]             their least rank over the shift class (`theory.rank`)
    from a mixture's prior [n, K]             entropy, shares, dead components, divergence
    from gradients of the scores [n, K, V]    the share of their norm in the columns of W, which is all that
                                              the body learns from (`questions.gradient`, there of one row)

The least rank is that of n sampled contexts and m sampled tokens, where n and m exceed D: what goes beyond D
is a rank that one softmax cannot have. Leaving tokens out shifts every row of log-probabilities by its own
constant, which changes nothing. One row a context needs no normaliser; a mixture needs each component's over
all V tokens. That one is computed in fp32: its error is an error of the prior, equal for all tokens of a
context, so the table is that of a mixture all the same. Everything else is in fp64, from the states on, with
the head's own small parameters in fp64, so that the noise floor is that of fp64 and no rank is rounding.

`train.monitor` and `train.trainer_monitor` run a body for the states and give them to `measure`, which draws
from a generator of its own: a run with monitors ends with the same weights as one without.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.diagnose.questions.anisotropy import SINK, mean_cosine
from fullrank.diagnose.questions.gradient import whitening
from fullrank.diagnose.questions.spectrum import singular_values
from fullrank.errors import FullrankError
from fullrank.heads.base import Head
from fullrank.heads.rows import RowHead
from fullrank.ops import linear_logprob
from fullrank.ops.arguments import widest_dtype
from fullrank.ops.mixture.reference import bent_scores
from fullrank.theory import least_rank

Monitors = dict[str, float | list[float]]

MONITORS: dict[str, tuple[str, str, None]] = {
    "head_singular_entropy": ("nats", "KL of W's normalised singular values to uniform: log D - H", None),
    "head_effective_rank": ("dimensions", "exp H of W's normalised singular values", None),
    "head_effective_rank_share": ("share", "the effective rank over D", None),
    "head_condition": ("ratio", "largest over smallest singular value of W", None),
    "head_weight_norm_mean": ("norm", "mean norm of W's rows", None),
    "head_weight_norm_spread": ("share", "standard deviation of those norms over their mean", None),
    "anisotropy": ("cosine", "mean cosine of two states of the last layer", None),
    "anisotropy_centred": ("cosine", "the same after the mean state is subtracted", None),
    "state_norm": ("norm", "mean norm of the last layer's states", None),
    "state_outlier": ("ratio", "largest size of a dimension of these states over the median one", None),
    "logprob_rank": ("dimensions", "least rank of sampled log-probabilities", None),
    "logprob_rank_ceiling": ("dimensions", "the most that the sample could show", None),
    "logprob_effective_rank": ("dimensions", "exp H of their normalised singular values, centred", None),
    "prior_entropy": ("nats", "mean entropy of a token's prior over K components", None),
    "prior_entropy_share": ("share", "the prior's entropy over log K", None),
    "component_shares": ("share", "mean prior of each of K components", None),
    "dead_components": ("components", "mean prior below 0.01 / K and never above 0.05", None),
    "component_divergence": ("nats", "mean KL of one component to another, over tokens and pairs", None),
    "gradient_kept": ("share", "norm of a token's score gradient that reaches the body", None),
    "attention_effective_tokens": ("tokens", "exp H of a query's attention weights", None),
    "attention_first": ("weight", "of the first position in attention", None),
    "attention_sensitivity": ("norm", "of the Jacobian of attention weights in their scores", None),
    "attention_sum": ("weight", "of all positions together, where that need not be 1", None),
    "attention_zeros": ("share", "visible positions of weight 0, where weights can be", None),
}
"""name -> (unit, meaning, lower_is_better). What does not apply to a head or a body is left out; those of
attention are `attention.monitor`'s."""

DEAD_SHARE, DEAD_MOST = 0.01, 0.05
"""A component is dead if its mean prior is below DEAD_SHARE / K and its largest one below DEAD_MOST."""
MOST_CONTEXTS = 1088
"""Contexts and tokens of the log-probabilities at most: their SVD takes about a second on one core."""
DIVERGENCE_TOKENS = 16
GRADIENT_TOKENS, GRADIENT_SCORES = 64, 1 << 24
"""Tokens whose gradient is looked at, fewer where their K x V scores are more than this."""
TABLE_BYTES = 256 << 20


def contexts_wanted(head: Head) -> int:
    """Tokens that `measure` needs to see a rank beyond D."""
    return min(head.width + head.width // 4 + 32, MOST_CONTEXTS)


@torch.no_grad()
def measure(
    head: Head,
    states: Sequence[Tensor],
    ids: Tensor,
    *,
    seen: Tensor | None = None,
    seed: int = 0,
    rank_contexts: int | None = None,
) -> Monitors:
    """Every monitor that applies to the head, from the states [batch, time, H] that it reads.

    `ids` [batch, time] are the tokens under them, each row of a text of its own; `seen` [batch, time] is
    False where there is padding. `rank_contexts` bounds the sample of the log-probabilities in both
    directions; `contexts_wanted` by default. Weights must be whole on this process. What comes out as no
    number is nan. What lies on a device without fp64 is measured on the CPU.
    """
    if ids.ndim != 2 or ids.numel() < 3:
        raise FullrankError(f"monitors got ids of shape {list(ids.shape)}, expected [batch, time], 3 or more")
    seen = torch.ones_like(ids, dtype=torch.bool) if seen is None else seen.bool()
    if widest_dtype(ids.device) != torch.float64:
        head, states = copy.deepcopy(head).cpu(), [state.cpu() for state in states]
        ids, seen = ids.cpu(), seen.cpu()
    size = contexts_wanted(head) if rank_contexts is None else rank_contexts
    weight = head.decoder.weight
    with torch.autocast(ids.device.type, enabled=False):
        read = [state.to(weight.dtype) for state in states[: head.states]]
        found = _matrix(weight)
        found |= _geometry(read[0], seen)
        if all(bool(torch.isfinite(part).all()) for part in (weight, *(state[seen] for state in read))):
            generator = torch.Generator().manual_seed(seed)
            found |= _rank(head, read, ids, seen, size, generator)
            found |= _mixture(head, [state[seen] for state in read], generator)
            found |= _gradient(head, read, ids, seen, generator)
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and then each as it was."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _matrix(weight: Tensor) -> Monitors:
    weight = weight.detach()
    norms = weight.float().norm(dim=1)
    mean = norms.mean()
    found: Monitors = {
        "head_weight_norm_mean": float(mean),
        "head_weight_norm_spread": float(norms.std(correction=0) / mean),
    }
    spectral = ("singular_entropy", "effective_rank", "effective_rank_share", "condition")
    if not math.isfinite(float(mean)) or float(mean) == 0.0:
        return {f"head_{name}": math.nan for name in spectral} | found
    sigma = singular_values(weight).cpu()
    shares = sigma / sigma.sum()
    entropy = float(torch.special.entr(shares).sum())
    D = len(sigma)
    values = (
        math.log(D) - entropy,
        math.exp(entropy),
        math.exp(entropy) / D,
        float(sigma[0] / sigma[-1]) if sigma[-1] > 0 else math.inf,
    )
    return {f"head_{name}": value for name, value in zip(spectral, values, strict=True)} | found


def _geometry(last: Tensor, seen: Tensor) -> Monitors:
    """As `diagnose.anisotropy` has it: without the first position of a text and states of outsized norm."""
    kept = seen & (seen.cumsum(dim=1) > 1) if last.shape[1] > 1 else seen
    states = last[kept].double()
    norms = states.norm(dim=1)
    states = states[(norms <= SINK * norms.median()) & (norms > 0)]
    found: Monitors = {"state_norm": float(norms.mean())}
    if len(states) < 3:
        return found | dict.fromkeys(("anisotropy", "anisotropy_centred", "state_outlier"), math.nan)
    sizes = states.square().mean(dim=0).sqrt()
    found["state_outlier"] = float(sizes.max() / sizes.median())
    one = torch.zeros(len(states), dtype=torch.long, device=states.device)
    for name, these in (("anisotropy", states), ("anisotropy_centred", states - states.mean(dim=0))):
        found[name] = mean_cosine(these, one).value
    return found


def _rank(
    head: Head, states: list[Tensor], ids: Tensor, seen: Tensor, size: int, generator: torch.Generator
) -> Monitors:
    log_probs = sampled_log_probs(head, states, ids, size, generator, seen=seen)
    if not bool(torch.isfinite(log_probs).all()):
        return {"logprob_rank": math.nan, "logprob_effective_rank": math.nan}
    found = least_rank(log_probs)
    shares = found.singular_values / found.singular_values.sum().clamp(min=1e-300)
    return {
        "logprob_rank": float(found.rank),
        "logprob_rank_ceiling": float(found.ceiling),
        "logprob_effective_rank": math.exp(float(torch.special.entr(shares).sum())),
    }


def sampled_log_probs(
    head: Head,
    states: list[Tensor],
    ids: Tensor,
    size: int,
    generator: torch.Generator,
    *,
    seen: Tensor | None = None,
) -> Tensor:
    """Log-probabilities of at most `size` contexts and size + 1 tokens, up to a shift a context, fp64.

    states [batch, time, H] are those that the head reads, ids [batch, time] the tokens under them; both as
    in `measure`, with `seen`.
    """
    seen = torch.ones_like(ids, dtype=torch.bool) if seen is None else seen
    bias = head.decoder.bias
    # A masked token has no logarithm in any context.
    allowed = torch.arange(head.vocab) if bias is None else (~torch.isneginf(bias)).nonzero()[:, 0].cpu()
    # A row of m tokens has rank m - 1 at most, beside its shift.
    columns = allowed[torch.randperm(len(allowed), generator=generator)[: size + 1]].sort().values
    columns = columns.to(ids.device)
    if isinstance(head, RowHead):
        log_probs = _row_table(head, [state[seen] for state in states], size, columns, generator)
    else:
        log_probs = _any_table(head, states, ids, seen, size, columns, generator)
    # cuSOLVER takes longer over a matrix of this size than the way to a CPU and back.
    return log_probs.cpu()


def _row_table(
    head: RowHead, flat: list[Tensor], size: int, columns: Tensor, generator: torch.Generator
) -> Tensor:
    """Log-probabilities [n, m] up to a shift a row, fp64, from a head that is rows over one matrix."""
    chosen = torch.randperm(len(flat[0]), generator=generator)[:size].sort().values.to(columns.device)
    small = _doubled(head)
    rows, log_prior = small.rows([state[chosen].double() for state in flat])
    weight = head.decoder.weight[columns].double()
    bias = None if head.decoder.bias is None else head.decoder.bias[columns].double()
    bent = [bent_scores(rows[:, k], weight, bias, small.pointwise) for k in range(rows.shape[1])]
    if log_prior is None or len(bent) == 1:
        return bent[0]
    # Over all V tokens, one row a context and component.
    each = rows.flatten(0, 1).to(head.decoder.weight.dtype)
    _, normaliser = linear_logprob(
        each,
        head.decoder.weight,
        chosen.new_zeros(len(each)),
        bias=head.decoder.bias,
        pointwise=head.pointwise,
    )
    offset = log_prior.double() - normaliser.double().view(log_prior.shape)
    total = bent[0] + offset[:, :1]
    for k in range(1, len(bent)):
        total = torch.logaddexp(total, bent[k] + offset[:, k : k + 1])
    return total


def _doubled(head: RowHead) -> Any:
    """The head in fp64 without its matrix, for its rows and its pointwise function."""
    # Sharing the decoder in the copy, and taking it out again, spares a copy of W.
    small = copy.deepcopy(head, {id(head.decoder): head.decoder})
    del small.decoder
    return small.double()


def _any_table(
    head: Head,
    states: list[Tensor],
    ids: Tensor,
    seen: Tensor,
    size: int,
    columns: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """The same from any head, through its forward on whole texts: it may read neighbours and ids."""
    wide = copy.deepcopy(head).double()
    batch, time = ids.shape
    order = torch.randperm(batch, generator=generator)
    # As many texts as hold `size` tokens beside their padding.
    held = seen.cpu().sum(dim=1)[order].cumsum(dim=0)
    texts = order[: int((held < size).sum()) + 1].sort().values.to(ids.device)
    parts = []
    for piece in texts.split(max(1, TABLE_BYTES // (8 * head.vocab * time))):
        log_probs = wide([state[piece].double() for state in states], context=ids[piece])
        parts.append(log_probs[seen[piece]][:, columns])
    return torch.cat(parts)[:size]


def _mixture(head: Head, flat: list[Tensor], generator: torch.Generator) -> Monitors:
    if not isinstance(head, RowHead) or not head.mixture or head.components < 2:
        return {}
    parts = head.flat_parts(flat)
    assert parts.gate is not None
    prior = parts.gate.double().exp()
    K = prior.shape[1]
    shares, most = prior.mean(dim=0), prior.amax(dim=0)
    dead = (shares < DEAD_SHARE / K) & (most < DEAD_MOST)
    entropy = torch.special.entr(prior).sum(dim=1).mean()
    values = torch.cat([entropy[None], dead.sum()[None].double(), shares]).tolist()
    found: Monitors = {
        "prior_entropy": values[0],
        "prior_entropy_share": values[0] / math.log(K),
        "component_shares": values[2:],
        "dead_components": values[1],
    }
    # The contexts of moc are averaged before the softmax: no component is a distribution of its own.
    if parts.rows.shape[1] == K:
        picked = torch.randperm(len(prior), generator=generator)[:DIVERGENCE_TOKENS].to(prior.device)
        divergence = torch.tensor(head.describe([state[picked] for state in flat]).divergence)
        found["component_divergence"] = float(divergence.sum()) / (K * (K - 1))
    return found


def _gradient(
    head: Head, states: list[Tensor], ids: Tensor, seen: Tensor, generator: torch.Generator
) -> Monitors:
    """Of the loss of the next token, in the scores of all rows together: mean over tokens of |P g| / |g|."""
    pairs = seen[:, :-1] & seen[:, 1:]
    if not isinstance(head, RowHead) or not bool(pairs.any()):
        return {}
    flat, targets = [state[:, :-1][pairs] for state in states], ids[:, 1:][pairs]
    size = max(8, min(GRADIENT_TOKENS, GRADIENT_SCORES // (head.components * head.vocab)))
    picked = torch.randperm(len(targets), generator=generator)[:size].to(targets.device)
    rows, log_prior, _ = head.flat_parts([state[picked] for state in flat])
    weight, bias = head.decoder.weight.detach(), head.decoder.bias
    scores = rows @ weight.T if bias is None else rows @ weight.T + bias
    with torch.enable_grad():
        scores = scores.detach().requires_grad_()
        wanted = targets[picked][:, None, None].expand(-1, rows.shape[1], 1)
        each = head.pointwise(scores).log_softmax(dim=-1).gather(-1, wanted)[..., 0]
        (slopes,) = torch.autograd.grad(-(log_prior.detach() + each).logsumexp(dim=-1).sum(), scores)
    reached = (slopes @ weight).double() @ whitening(weight)
    energy = reached.square().sum(dim=(1, 2)) / slopes.double().square().sum(dim=(1, 2)).clamp(min=1e-300)
    return {"gradient_kept": float(energy.clamp(max=1.0).sqrt().mean())}
