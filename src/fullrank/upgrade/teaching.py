"""Another model as the teacher of an upgrade: it runs once over the text, and its body is let go.

    KL(teacher || student), nats per token, for the upgraded head and for its controls alike

Both must speak of the same tokens: up to the rows of the smaller output matrix, every id has the same name in
both tokenizers, or in neither. What one has beyond that is padding, or tokens that the other cannot say: more
rows of the teacher's are left out, and rows that it lacks have no probability. The text is cut by the
student's tokenizer.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.errors import FullrankError
from fullrank.fit import comparison, estimates, states
from fullrank.fit.collect import Windows
from fullrank.fit.comparison import Gain, Progress, Settings
from fullrank.fit.teacher import Teacher
from fullrank.heads import Head
from fullrank.heads.rows import RowHead
from fullrank.models.head_anatomy import has_own_head
from fullrank.models.loading import Loaded
from fullrank.results.upgrade import Distance, Teaching, UpgradedModel
from fullrank.upgrade.upgrade import upgrade


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TeacherModel(Teacher):
    """A teacher that was loaded."""

    facts: UpgradedModel

    def record(self, gain: Gain, limit: int) -> Teaching:
        """With what the upgraded head gained towards it; `limit` bounds a V-wide table in bytes."""
        held_out = self.parts.held_out
        return Teaching(
            model=self.facts,
            loss=estimates.mean(self.losses(held_out, limit), held_out.blocks.flatten()),
            control=gain.control,
            gain=gain.mean,
            gain_by_seed=gain.by_seed,
        )


def distance(before: Tensor | None, after: Sequence[Tensor], blocks: Tensor) -> Distance | None:
    """Of divergences [held-out tokens] before training and after each seed's; None without a teacher."""
    if before is None:
        return None
    return Distance(
        before=estimates.mean(before, blocks),
        before_error=estimates.mean_and_error(before, blocks)[1],
        after=estimates.mean_over_seeds(after, blocks),
        after_error=estimates.mean_and_error(torch.stack(list(after)).mean(dim=0), blocks)[1],
        after_by_seed=tuple(float(one.double().mean()) for one in after),
    )


def check_tokens(student: Loaded, teacher: Loaded) -> None:
    """Raise where the same id is not the same token in both."""
    rows = min(_rows(student), _rows(teacher))
    mine, theirs = (
        {number: token for token, number in one.tokenizer.get_vocab().items() if number < rows}
        for one in (student, teacher)
    )
    different = sorted(number for number in {*mine, *theirs} if mine.get(number) != theirs.get(number))
    if different:
        first = different[0]
        names = [repr(one[first]) if first in one else "no token" for one in (mine, theirs)]
        raise FullrankError(
            f"{teacher.name} has another tokenizer than {student.name}: {len(different):,} of {rows:,} ids "
            f"differ, the first is {first}, {names[1]} there and {names[0]} here; give a --teacher with the "
            "same tokenizer, such as a larger model of the same family"
        )


def _rows(loaded: Loaded) -> int:
    model: Any = loaded.model
    return len(model.get_output_embeddings().weight)


def collect(
    teacher: Loaded,
    facts: UpgradedModel,
    student: Head,
    windows: Windows,
    *,
    settings: Settings,
    cache: Path,
    progress: Progress = lambda stage, share: None,
) -> TeacherModel:
    """Run the teacher over the windows, or read the states that an earlier run has kept.

    Nothing of its body is held afterwards, but what `teacher` holds. `student` is a head of the model that is
    taught.
    """
    model: Any = teacher.model
    if not has_own_head(model):
        model = upgrade(teacher, "softmax")
    head, device = model.lm_head, student.decoder.weight.device
    if not isinstance(head, RowHead):
        raise FullrankError(
            f"the teacher {teacher.name} has the head {head.name}, which is not rows over one matrix: "
            "collapse it first (fullrank collapse), or give another --teacher"
        )
    _check_memory(head, student, windows, settings)
    whole = states.collect(
        model,
        windows,
        cache,
        fingerprint=teacher.fingerprint,
        memory=settings.memory,
        progress=lambda share: progress("running the teacher", share),
    )
    parts = states.split(whole)
    moved = states.Parts(
        fit=parts.fit.to(device), choose=parts.choose.to(device), held_out=parts.held_out.to(device)
    )
    return TeacherModel(
        head=head.requires_grad_(False).float().to(device), parts=moved, vocab=student.vocab, facts=facts
    )


def let_go() -> None:
    """Give back what a model held that nobody names any more: its parts name each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_memory(head: Head, student: Head, windows: Windows, settings: Settings) -> None:
    """Raise where what is held of the teacher beside the student's states takes more than it may."""
    tokens = windows.ids[:, 1:].numel()
    held = tokens * (sum(head.state_widths) + sum(student.state_widths)) + head.decoder.weight.numel()
    device = student.decoder.weight.device
    if device.type == "cpu" and student.vocab > comparison.SMALL_VOCABULARY:
        # What it says of the rows that are trained, of all tokens but those that are judged on.
        held += tokens * 5 // 7 * max(settings.rows, len(windows.ids.unique()))
    if 4 * held > settings.memory:
        raise FullrankError(
            f"{tokens} tokens' states of both models, the teacher's output matrix and what it says of the "
            f"rows that are trained take {4 * held / 2**30:.1f} GiB, more than --memory "
            f"{settings.memory / 2**30:.1f} GiB: take fewer --tokens or allow more"
        )
