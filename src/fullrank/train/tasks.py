"""Scores of lm-evaluation-harness, of a run or any other model, on tasks by name or in files of one's own.

A text begins as the model's tokenizer begins it. An LSTM reads one request at a time: a state that has read
padding is another state.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullrank.errors import FullrankError
from fullrank.fit.collect import begin_token
from fullrank.models.loading import Loaded, quiet
from fullrank.models.model_files import first_line
from fullrank.results.evaluation import TaskScore

BATCH = 8
"""Requests at once."""


def task_scores(
    loaded: Loaded, names: Sequence[str], *, path: Path | None = None, limit: int = 0
) -> tuple[TaskScore, ...]:
    """Every metric of the tasks; `path` has YAML files of tasks, `limit` bounds the examples of each."""
    with warnings.catch_warnings(), quiet():
        # The harness warns of its own parts.
        warnings.simplefilter("ignore")
        try:
            from lm_eval import evaluator
            from lm_eval.models.huggingface import HFLM
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise FullrankError(
                f"--tasks needs lm-evaluation-harness ({error}): pip install lm-eval"
            ) from error
        model: Any = loaded.model
        one = getattr(model, "carries_state", False)
        try:
            manager = None if path is None else TaskManager(include_path=str(path), include_defaults=False)
            if manager is None or not set(names) <= set(manager.all_tasks):
                # Its own thousands take many seconds to look through.
                manager = TaskManager(include_path=None if path is None else str(path))
            found = evaluator.evaluate(
                lm=HFLM(
                    pretrained=model,
                    tokenizer=loaded.tokenizer,
                    batch_size=1 if one else BATCH,
                    add_bos_token=begin_token(loaded.tokenizer) is not None,
                    device=str(model.device),
                ),
                task_dict=manager.load(list(names)),
                limit=limit or None,
                bootstrap_iters=1000,
            )
        except FullrankError:
            raise
        except Exception as error:  # of the harness, about names and files that a user brought
            raise FullrankError(
                f"the tasks {', '.join(names)} cannot be run ({first_line(error)}): check their names, and "
                "give --task-path for tasks in files"
            ) from error
    return tuple(_scores(found["results"] if found else {}))


def _scores(results: dict[str, dict[str, Any]]) -> list[TaskScore]:
    """{"task": {"acc,none": 0.5, "acc_stderr,none": 0.1}} as records."""
    scores = []
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            scores.append(
                TaskScore(
                    task=task,
                    metric=metric,
                    value=float(value),
                    standard_error=float(error) if isinstance(error, int | float) else math.nan,
                )
            )
    return scores
