"""A training run, diagnosed: every question that its head allows.

    one row a token     the head is f(W x + b) of one row x: softmax, low_rank, moc, sigsoftmax, plif. Every
                        question is asked of that layer, with the rows for states. Where f bends the scores,
                        `better_head` is left out: its controls are softmaxes
    anything else       mixtures, mixtape, facets, pointer: there is no single layer to ask. Loss, spectrum of
                        W, geometry of the body's states, and the least rank of the head's log-probabilities

The rank of what is not linear is that of sampled contexts and tokens in fp64, as the monitors measure it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from fullrank.diagnose import anisotropy, logprob_rank, loss
from fullrank.diagnose.diagnosis import USUAL, Answers, Progress, Settings, answer, chosen_questions
from fullrank.diagnose.monitors import sampled_log_probs
from fullrank.errors import FullrankError
from fullrank.heads.base import Head
from fullrank.heads.rows import RowHead
from fullrank.models.anatomy import Anatomy
from fullrank.models.output_layer import OutputLayer
from fullrank.ops import IDENTITY, PiecewiseLinear, Pointwise
from fullrank.results.diagnosis import Anisotropy, Diagnosis, ModelFacts
from fullrank.train import checkpoint as checkpoints
from fullrank.train.collected import OUTPUT, RunStates, Text, from_files, from_split, states_of, windows_of
from fullrank.train.config import to_json
from fullrank.train.folder import CHECKPOINTS, Run, open_run


def diagnose_run(
    path: Path | str,
    *,
    text: Sequence[Path | str] = (),
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    settings: Settings = USUAL,
    out: Path | None = None,
    checkpoint: str = "best",
    device: str = "cpu",
    progress: Progress = lambda stage, share: None,
) -> Diagnosis:
    """Diagnose the run at `path` on its test split, or on files of text in its vocabulary.

    Arguments as of `diagnose.run`; `checkpoint` as of `open_run`.
    """
    asked = chosen_questions(only, skip)
    progress("loading the run", 0.0)
    run = open_run(Path(path), checkpoint=checkpoint, device=device)
    _check_finite(run)
    read = (
        from_files(run, [Path(one) for one in text], settings.tokens)
        if text
        else from_split(run, settings.tokens)
    )
    windows = windows_of(run, read, settings.window)
    states = states_of(
        run,
        read,
        windows,
        memory=settings.memory,
        progress=lambda share: progress("running the model", share),
    )
    build = Anatomy(
        output=_output(run.model.lm_head),
        facts=_facts(run, read, states, checkpoint),
        states_rank=states.rank,
        blocks=(),
    )
    head, name = run.model.lm_head, run.corpus.vocabulary.token
    # The body has done its work, and its memory is better used for what follows.
    del run
    kind = RowAnswers if states.single else MixtureAnswers
    return answer(kind(build, states, settings, name, head), windows, asked, out, progress)


class RowAnswers(Answers):
    """The questions to a head that makes one row a token."""

    states: RunStates

    def __init__(
        self,
        build: Anatomy,
        states: RunStates,
        settings: Settings,
        name: Callable[[int], str],
        head: Head,
    ) -> None:
        super().__init__(build, states, settings, name)
        self.head = head

    def loss(self, progress: Progress) -> object:
        states = self.states
        found = loss.loss(states.losses, states.sizes, states.positions, states.blocks)
        # A carried state has seen the whole text before: no place in a window is special.
        return dataclasses.replace(found, by_position=()) if states.carries else found

    def anisotropy(self, progress: Progress) -> object:
        states = self.states
        layers = tuple(
            anisotropy.layer_geometry(
                sampled,
                states.layer_positions,
                states.layer_blocks,
                layer=number,
                name=name,
                seed=self.settings.seed,
            )
            for number, (sampled, name) in enumerate(zip(states.sampled, states.layer_names, strict=True))
        )
        return Anisotropy(tokens=len(states.layer_positions), layers=layers)

    def logprob_rank(self, progress: Progress) -> object:
        if not self.output.linear:
            return logprob_rank.of_table(
                self._bent_table(), f"{self.head.name} bends the scores, so the width sets no ceiling"
            )
        return logprob_rank.logprob_rank(
            self.hidden,
            self.output,
            storage=self.build.facts.storage,
            states_rank=self.states.rank,
            norm=self._taken_by(),
            dtype=torch.float32,
            seed=self.settings.seed,
        )

    def better_head(self, progress: Progress) -> object:
        if not self.output.linear:
            raise FullrankError(
                f"{self.head.name} bends the scores of this run, and the heads of this question are refitted "
                "from a softmax"
            )
        return super().better_head(progress)

    def _taken_by(self) -> str:
        """What takes dimensions from the rows."""
        norm, lost = self.build.facts.final_norm, self.head.width - self.states.rank
        return norm if norm and lost == 1 and self.head.hidden == self.head.width else "the head's projection"

    def _bent_table(self) -> Tensor:
        """f(W x + b) of sampled rows and tokens, fp64: the rows as they are, so that no rank is rounding."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        rows = torch.randperm(len(self.hidden), generator=generator)[: logprob_rank.CONTEXTS]
        tokens = torch.randperm(self.output.tokens, generator=generator)[: logprob_rank.COLUMNS]
        weight, bias = self.output.weight, self.output.bias
        tokens = tokens.to(weight.device)
        wide = OutputLayer(
            weight=weight[tokens].double(),
            bias=None if bias is None else bias[tokens].double(),
            pointwise=self.output.pointwise,
            tokens=len(tokens),
        )
        return wide.logits(self.hidden[rows.to(weight.device)].double())


class MixtureAnswers(RowAnswers):
    """The questions to a head that is no single layer: a softmax's figures would not be its own."""

    def logprob_rank(self, progress: Progress) -> object:
        states, device = self.states, self.output.weight.device
        # Whole segments: some heads look at the tokens before.
        count = len(states.targets) // states.segment
        shape, used = (count, states.segment), count * states.segment
        generator = torch.Generator().manual_seed(self.settings.seed)
        with torch.no_grad():
            table = sampled_log_probs(
                self.head,
                [one[:used].view(*shape, -1).to(device) for one in states.read],
                states.inputs[:used].view(shape).to(device),
                logprob_rank.CONTEXTS,
                generator,
            )
        if not bool(torch.isfinite(table).all()):
            raise FullrankError("some log-probabilities came out as no finite number, so they have no rank")
        why = f"The width sets no ceiling to {_described(self.head)}"
        return logprob_rank.of_table(table, why)

    def rank_needed(self, progress: Progress) -> object:
        self._refuse()

    def better_head(self, progress: Progress) -> object:
        self._refuse()

    def unreachable(self, progress: Progress) -> object:
        self._refuse()

    def gradient(self, progress: Progress) -> object:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise FullrankError(
            f"this question is about one linear output layer, and this run has {_described(self.head)} "
            "instead"
        )


def _described(head: Head) -> str:
    components = getattr(head, "components", 0)
    if isinstance(head, RowHead) and components > 1:
        return f"a mixture of {components} components ({head.name})"
    return f"the head {head.name}"


def _check_finite(run: Run) -> None:
    for name, parameter in run.model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise FullrankError(
                f"{name} of {run.path} at step {run.step} holds NaN or infinite numbers: train again, with a "
                "smaller --set optimiser.lr"
            )


def _output(head: Head) -> OutputLayer:
    """W, b and f; of a mixture, what its components share."""
    weight, bias = head.decoder.weight.detach(), head.decoder.bias
    pointwise: Pointwise = head.pointwise if isinstance(head, RowHead) else IDENTITY
    if isinstance(pointwise, PiecewiseLinear):
        pointwise = dataclasses.replace(pointwise, slopes=pointwise.slopes.detach())
    return OutputLayer(
        weight=weight,
        bias=None if bias is None else bias.detach(),
        pointwise=pointwise,
        tokens=len(weight),
    )


def _facts(run: Run, text: Text, states: RunStates, checkpoint: str) -> ModelFacts:
    model, head = run.model, run.model.lm_head
    return ModelFacts(
        name=run.path.resolve().name,
        source="run",
        architecture=f"{type(model.model).__name__} with {head.name}",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=model.config.num_hidden_layers,
        width=head.width,
        vocabulary=head.vocab,
        tokens=head.vocab,
        tied=model.config.tie_word_embeddings,
        bias=head.decoder.bias is not None,
        logit_scale=1.0,
        softcap=None,
        final_norm=states.final_norm,
        storage="float32",
        dtype="float32",
        fingerprint=_fingerprint(run),
        notes=(*_notes(run, states, checkpoint), *text.notes),
    )


def _notes(run: Run, states: RunStates, checkpoint: str) -> Iterator[str]:
    model, head = run.model, run.model.lm_head
    best = checkpoint == "best" and bool(checkpoints.found(run.path / CHECKPOINTS, "best"))
    which = (
        "the best by validation" if best else "the last that was kept" if checkpoint == "best" else "as asked"
    )
    yield f"The weights are those of step {run.step:,}, {which}, of the recipe {run.config.recipe}."
    if states.carries:
        yield (
            "The body carries its state through the whole text: windows only part it, and there is no loss "
            "by position."
        )
    yield "Every token is predicted, the first of a window from the token before it."
    if not states.single:
        yield (
            f"The output layer is {_described(head)}: the matrix is what its parts share, and the width is "
            "that of its rows."
        )
    elif states.layer_names[-1] == OUTPUT:
        yield "What enters the output matrix is the row that the head makes of the last layer's state."
    if model.config.tie_word_embeddings:
        yield "The output matrix is tied: it is the input embedding as well."
    if states.single and head.decoder.bias is not None:
        yield "The output layer has a bias: one dimension more than the width."


def _fingerprint(run: Run) -> str:
    """Of the configuration, the vocabulary and the weights."""
    digest = hashlib.sha256(json.dumps(to_json(run.config), sort_keys=True).encode())
    digest.update(run.corpus.vocabulary.digest().encode())
    for name, parameter in sorted(run.model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
