"""The record of a diagnosis: one field a question, None where the question was not asked or not finished.

Losses are in nats per token unless a name says otherwise. An `Estimate` is a value with its 95% interval over
text blocks (and seeds, where there are several). docs/results.md explains the fields for readers of the JSON.
"""

from __future__ import annotations

import dataclasses
import typing

from fullrank.results.attention import Attention
from fullrank.results.estimate import Estimate
from fullrank.results.files import Provenance


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What was found in the model, and how it was read."""

    name: str
    source: str
    """Where it came from: directory, hub, gguf, bundled, object, or run."""
    architecture: str
    parameters: int
    layers: int
    width: int
    """D: the width of the vectors that enter the output matrix."""
    vocabulary: int
    """V: rows of the output matrix."""
    tokens: int
    """Rows that the tokenizer can name; the rest is padding."""
    tied: bool
    """Whether the output matrix is the input embedding."""
    bias: bool
    logit_scale: float
    """What the model multiplies its logits by; 1 where it does not."""
    softcap: float | None
    """c of the soft cap c tanh(z / c) on the logits."""
    final_norm: str
    """The class of the norm before the output matrix; "" where none was found."""
    storage: str
    """How the output matrix is stored: a dtype, or a quantisation such as Q8_0."""
    dtype: str
    """What the model was run in."""
    fingerprint: str
    """Hash of configuration and weights, by which cached states are known."""
    notes: tuple[str, ...]
    """One sentence for everything that was detected and handled."""
    given: str = ""
    """What names it on a command line; "" for the bundled model and for one in memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFacts:
    """What the model was run on."""

    sources: tuple[str, ...]
    sha256: str
    """Of the text under the windows, and of no other."""
    bytes: int
    """Of the part that was used."""
    tokens: int
    """That were predicted."""
    window: int
    """Tokens a window: no context is longer."""
    windows: int
    starts_with_bos: bool
    """Whether every window begins with the token that begins texts."""
    fit_tokens: int
    """Tokens on which heads are refitted."""
    choose_tokens: int
    """Tokens on which learning rates and stopping are chosen."""
    held_out_tokens: int
    """Tokens on which refitted heads are compared, seen by nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Something a reader should know first."""

    code: str
    """rank_deficient_head, unreachable_tokens, collapsed_layer, outlier_dimension, better_head, ..."""
    question: str
    """The field of the diagnosis that it stands on."""
    sentence: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionLoss:
    """Mean loss of the tokens at positions `first` to `last` of their window, counted from 0."""

    first: int
    last: int
    nats: Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Question 1: how good is it?"""

    nats_per_token: Estimate
    standard_error: float
    """Of nats_per_token, from the spread over text blocks."""
    perplexity: Estimate
    """Per token."""
    bits_per_byte: Estimate
    tokens: int
    bytes: int
    blocks: int
    by_position: tuple[PositionLoss, ...]
    block_nats: tuple[float, ...] = ()
    """Summed over each block of text, so that two models on the same text can be compared block by block."""
    block_tokens: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spectrum:
    """Question 2: the spectrum of the output matrix (rows of real tokens), p = σ / Σσ."""

    singular_values: tuple[float, ...]
    singular_entropy: float
    """KL(p || uniform) = log D - H(p), nats."""
    effective_rank: float
    """exp H(p) = D exp(-singular_entropy)."""
    random_effective_rank: float
    """The effective rank of a Gaussian matrix of the same shape, by the Marchenko-Pastur law."""
    stable_rank: float
    """Σσ² / σ₁²."""
    participation_ratio: float
    """(Σσ²)² / Σσ⁴."""
    condition: float
    """σ₁ / σ_D."""
    numerical_rank: int
    """Singular values above the storage noise."""
    noise: float
    """The largest singular value that rounding to the storage format is expected to make."""
    noise_origin: str
    """In words, what the noise was computed from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutlierDimension:
    dimension: int
    variance_share: float
    """Of the sum of all dimensions' variances."""
    kurtosis: float
    """Fourth standardised moment; 3 for a Gaussian."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerGeometry:
    """One layer's states, sink positions left out."""

    layer: int
    """0 is the embedding, the last is what enters the output matrix."""
    name: str
    cosine: Estimate
    """Mean cosine of two states."""
    cosine_centred: Estimate
    """The same after the mean state is subtracted."""
    top_variance_share: float
    """Share of the variance in the one direction that has most of it."""
    effective_rank: float
    """Of the centred states' covariance."""
    outliers: tuple[OutlierDimension, ...]
    """Dimensions with an outsized share of the variance, largest first."""
    largest_kurtosis: float
    sinks: int
    """Positions left out: the first of each window, and tokens of outsized norm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anisotropy:
    """Question 3: geometry by layer."""

    tokens: int
    layers: tuple[LayerGeometry, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogprobRank:
    """Question 4: the rank of the log-probabilities over the shift class."""

    least_rank: int
    gap_rank: int
    """Where consecutive singular values fall by the largest ratio: a second opinion."""
    gap: float
    noise_floor: float
    """In units of singular_values."""
    ceiling: int
    """What width, norm and bias allow, or the sample where that is smaller."""
    ceiling_reason: str
    contexts: int
    columns: int
    """Tokens of the vocabulary that were looked at: all of them for a linear head."""
    method: str
    """core: exact, from QR of states and matrix; columns: from sampled columns of log-probabilities."""
    singular_values: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPoint:
    """Held-out loss with an output matrix of one rank.

    Intervals are those of the difference to the curve's control, the original matrix or the r = D refit: how
    hard the text is in all adds nothing to a comparison on the same tokens.
    """

    rank: int
    truncated: Estimate
    """Spectral truncation in the metric of the states' second moment."""
    refitted: Estimate | None
    """W = A B refitted on frozen states from the truncation; None for ranks that were not refitted."""
    learning_rate: float | None
    """The pace that was chosen, relative to the width: `fit/trainee.py` says how it is meant."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankNeeded:
    """Question 5: what rank does it need?"""

    points: tuple[RankPoint, ...]
    """By rising rank; the last is r = D."""
    original: Estimate
    """The matrix as it came, on the same held-out tokens."""
    tolerance: float
    """Nats per token that a smaller matrix may lose against the r = D refit."""
    knee: Estimate
    """The rank at which the refitted curve comes within the tolerance, interpolated in log rank."""
    truncated_knee: Estimate
    """The same for the truncated curve against the original matrix."""
    still_falling: bool
    """Whether the loss still falls from the last refitted rank below D to D, and the need may lie between:
    then more width could help as well."""
    slope: Estimate
    """Nats per token that the last doubling of the rank bought, from half the width to all of it."""
    noise: float = 0.0
    """Nats per token by which refits of one rank differ: the tolerance is not below twice that."""
    bound: str = ""
    """"at most": every refit was within the tolerance; "at least": none but the full width's was."""
    converged: bool = True
    """Whether all refits had flat curves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadFit:
    """One head refitted on frozen states."""

    head: str
    """A head's name, or softmax_equal: softmax with a wider context and as many parameters as mos."""
    components: int
    parameters: int
    """That were trained."""
    loss: Estimate
    """Held-out nats per token, mean over seeds."""
    gain: Estimate
    """Loss of the refitted softmax minus this one's on the same tokens: what the head buys, nats a token."""
    gain_over_equal: Estimate
    """The same against softmax_equal."""
    gain_by_seed: tuple[float, ...]
    learning_rate: float
    """The pace that was chosen, relative to the width."""
    steps: int
    """After which the fit was best on the tokens set aside for choosing."""
    converged: bool = False
    """Whether its learning curve had become flat, and was not cut off by the work allowed."""
    curve: tuple[CurvePoint, ...] = ()
    """Its learning curve."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurvePoint:
    steps: int
    loss: float
    """Nats per token on the tokens set aside for choosing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitTest:
    """Would splitting the head's rows help? Without training; docs/theory.md has the equations."""

    found: tuple[float, ...]
    """The leading eigenvalues of the second derivative, on the tokens that heads are fitted on: how much more
    the rows' scores vary than the model's own distribution implies."""
    null: float
    """The largest of them when the next token is drawn from the model itself."""
    judged: tuple[Estimate, ...]
    """The same directions on other tokens, where their expectation is 0 if nothing is to be had, with
    intervals at 95% for all of them together."""
    sure: int
    """How many of these are surely above 0; they stand first."""
    components: int
    """What mixtures were given for it."""
    gain: Estimate | None
    """Nats per token that the split gains over the refitted layer by itself, on the tokens set aside for
    choosing; None where none did."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Power:
    """What the fits could have seen: a gain was planted in the same states, and they looked for it."""

    planted: Estimate
    """Nats per token of the true mixture over the refitted softmax, on tokens drawn from it."""
    found: Estimate
    """Of the fitted mixture over that softmax, on the same tokens."""
    smallest: float
    """The smallest gain that would have been told from zero four times in five, along the directions that
    were looked at; inf: not even the planted."""
    converged: bool
    """Whether the fits of the planted gain had flat curves."""
    covered: float = 1.0
    """Of all directions of rows times those of states: the share that was looked at, and planted along."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BetterHead:
    """Question 6: what would a better head buy?"""

    original: Estimate
    """The head as it came, on the held-out tokens."""
    fits: tuple[HeadFit, ...]
    """softmax and softmax_equal first: the controls."""
    best: str
    """The high-rank head with the lowest loss on the tokens set aside for choosing."""
    best_gain: Estimate
    """Its gain over the best control as both were fitted here, with the spread over blocks of text."""
    seeds: int
    fit_tokens: int
    held_out_tokens: int
    trained_rows: int
    """Rows of the output matrix that were trained: tokens that occur or have a share of the probability."""
    control: str = ""
    """What the best head is measured against: the best of original, softmax and softmax_equal."""
    refit_gain: Estimate | None = None
    """What fitting the model's own output layer to the text gains on the held-out tokens."""
    split: SplitTest | None = None
    power: Power | None = None
    """None where it was not asked for."""

    @property
    def stayed(self) -> bool:
        """Whether the best head is as it began, the model's own softmax: then its interval says nothing."""
        steps = [fit.steps for fit in self.fits if fit.head == self.best]
        return steps == [0] and max(abs(self.best_gain.low), abs(self.best_gain.high)) < 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnreachableToken:
    id: int
    text: str
    depth: float
    """How far inside the hull its row lies, as a share of the way from the boundary to the mean row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unreachable:
    """Question 7: tokens it can never say."""

    vocabulary: int
    argmaxable: int
    """Tokens with a verified state from which they lead."""
    never: tuple[UnreachableToken, ...]
    """Tokens that no state puts first, each with a verified certificate."""
    duplicates: int
    """Of these, tokens whose row equals another's to the last bit: they can only tie."""
    undecided: int
    """Tokens out of time, or too near the boundary to tell in fp64."""
    padding_never: int
    """Padding rows that can never lead: no loss to anyone."""
    capacity: int
    """The most tokens whose probabilities can be set at will, for half of the sets tried."""
    capacity_interval: tuple[int, ...]
    capacity_samples: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradient:
    """Question 8: how much of the logit gradient reaches the body."""

    kept_norm: Estimate
    """Mean over tokens of |P g| / |g|, with g = softmax - onehot and P the projection on the columns of W."""
    kept_energy: Estimate
    """Mean over tokens of |P g|² / |g|²."""
    null_norm: float
    """sqrt(rank / V): what a random subspace of the same rank keeps."""
    null_energy: float
    tokens: int
    quantiles: tuple[float, ...]
    """Of |P g| / |g| over tokens, at 5, 25, 50, 75, 95%."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Missing:
    """A question without an answer."""

    question: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer first."""

    outcome: str
    """held back, not held back, or undecided."""
    gain: Estimate | None
    """Nats per token by which a better head would do better than the best control: what the fits found and
    what they miss of a planted gain. inf for the upper end where that is not known; None where nothing was
    measured."""
    smallest: float
    """The smallest gain that would have been seen, nats per token; inf where that is not known."""
    lines: tuple[str, ...]
    """Three sentences: held back or not; by how much, and what would have been seen; what to do next."""
    next: str
    """A command, or ""."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answered:
    """How one answer came to be: those of one file may come from several commands."""

    made: Provenance
    """The time is that of the answer."""
    settings: dict[str, str]
    """Those that the question reads, as words."""
    text: str
    """SHA-256 of the text under the windows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything `fullrank diagnose` found out about a model."""

    kind: typing.ClassVar[str] = "diagnosis"
    version: typing.ClassVar[int] = 1

    model: ModelFacts
    text: TextFacts
    findings: tuple[Finding, ...]
    loss: Loss | None
    spectrum: Spectrum | None
    anisotropy: Anisotropy | None
    logprob_rank: LogprobRank | None
    rank_needed: RankNeeded | None
    better_head: BetterHead | None
    unreachable: Unreachable | None
    gradient: Gradient | None
    missing: tuple[Missing, ...]
    """Questions that were not asked, could not be answered, or were interrupted, and why."""
    seconds: dict[str, float]
    """Time a question took, on the machine that ran it."""
    attention: Attention | None = None
    """The question that is answered only when it is asked for by name."""
    verdict: Verdict | None = None
    """None in files of earlier versions."""
    answered: dict[str, Answered] = dataclasses.field(default_factory=dict)
    """By question: which command answered it, when, and with which settings."""


QUESTIONS = (
    "loss",
    "spectrum",
    "anisotropy",
    "logprob_rank",
    "rank_needed",
    "better_head",
    "unreachable",
    "gradient",
)
"""The fields of a diagnosis that answer a question about the output layer, in the order of the report."""

BY_NAME = ("attention",)
"""Questions about other parts of the model, answered only when asked for by name: they take minutes."""
