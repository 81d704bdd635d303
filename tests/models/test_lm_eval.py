"""lm-evaluation-harness on local tasks: an upgraded model scores what its original scores."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.upgrade import upgrade

Make = Callable[..., Any]

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
target_delimiter: " "
num_fewshot: 1
fewshot_split: test
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
""",
    "until": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs:
  until: ["w3"]
  max_gen_toks: 8
  do_sample: false
metric_list:
  - metric: exact_match
""",
}
HEAD = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
"""


@pytest.fixture(scope="module")
def harness() -> Any:
    """The library, whose imports warn of their own parts."""
    import warnings

    pytest.importorskip("datasets")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = pytest.importorskip("lm_eval.evaluator")
        pytest.importorskip("lm_eval.models.huggingface")
        pytest.importorskip("lm_eval.tasks")
    return evaluator


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks of random words, in files."""
    folder = tmp_path_factory.mktemp("tasks")
    draw = random.Random(6)

    def words(count: int) -> str:
        return " ".join(f"w{draw.randrange(99)}" for _ in range(count))

    rows = [
        {
            "question": words(draw.randrange(4, 9)),
            "choices": [words(draw.randrange(1, 4)) for _ in range(4)],
            "answer": draw.randrange(4),
            # The longest is longer than the model's positions, so that it rolls.
            "text": words(draw.choice([20, 90])),
        }
        for _ in range(12)
    ]
    (folder / "rows.json").write_text("\n".join(json.dumps(row) for row in rows))
    for name, task in TASKS.items():
        start = HEAD.format(name=name, data=folder / "rows.json", cache=folder / "cache")
        (folder / f"{name}.yaml").write_text(start + task)
    return folder


@pytest.fixture(scope="module")
def tokeniser() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0, "<unk>": 1, **{f"w{place}": place + 2 for place in range(99)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>"
    )


def evaluated(harness: Any, tasks: Path, model: Any, tokeniser: Any) -> dict[str, Any]:
    """Every score, and what the model said to every request."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    settings = {"batch_size": 5, "device": "cpu", "max_length": 64}
    own: dict[str, Any] = {"tokenizer": tokeniser} if not isinstance(model, str) else {}
    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(list(TASKS))
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(3)
    # `simple_evaluate` would spend seconds on a description of the machine.
    found = harness.evaluate(
        lm=HFLM(pretrained=model, **own, **settings),
        task_dict=loaded,
        bootstrap_iters=0,
        log_samples=True,
    )
    said = {name: [sample["resps"] for sample in rows] for name, rows in found["samples"].items()}
    return {"scores": found["results"], "said": said}


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("choice", "until"):
        for metric, value in expected["scores"][name].items():
            assert found["scores"][name][metric] == value, (name, metric)
    for metric in ("word_perplexity,none", "bits_per_byte,none"):
        value = expected["scores"]["rolling"][metric]
        assert found["scores"]["rolling"][metric] == pytest.approx(value, rel=1e-5)
    assert found["said"]["until"] == expected["said"]["until"]
    for own, other in zip(found["said"]["choice"], expected["said"]["choice"], strict=True):
        for (answer,), (reference,) in zip(own, other, strict=True):
            assert float(answer[0]) == pytest.approx(float(reference[0]), abs=1e-4)
            assert str(answer[1]) == str(reference[1])


# datasets leaves its files to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow(
    reason="starts the harness for three seconds; train's evaluation on a task is in the default tier"
)
def test_scores_are_the_originals(
    harness: Any, tasks: Path, tokeniser: Any, tiny_model: Make, tmp_path: Path
) -> None:
    expected = evaluated(harness, tasks, tiny_model(), tokeniser)
    assert 0 < expected["scores"]["choice"]["acc,none"] < 1
    for head in ("mos", "pointer"):
        check(evaluated(harness, tasks, upgrade(tiny_model(), head), tokeniser), expected)
    # By name, as its command line does it in a process that has imported fullrank.
    made = upgrade(tiny_model(), "trunk")
    made.save_pretrained(tmp_path)
    tokeniser.save_pretrained(tmp_path)
    check(evaluated(harness, tasks, str(tmp_path), tokeniser), expected)
    with torch.no_grad():
        made.lm_head.decoder.weight.mul_(0.9)
    with pytest.raises(AssertionError):
        check(evaluated(harness, tasks, made, tokeniser), expected)


@pytest.mark.slow(reason="half a minute, most of it the imports of the harness and its thousands of tasks")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_its_command_line_finds_an_upgraded_model(
    harness: Any, tasks: Path, tokeniser: Any, tiny_model: Make, tmp_path: Path
) -> None:
    upgrade(tiny_model(), "trunk").save_pretrained(tmp_path / "model")
    tokeniser.save_pretrained(tmp_path / "model")
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
        f"pretrained={tmp_path / 'model'},trust_remote_code=True,max_length=64", "--tasks", "rolling",
        "--include_path", str(tasks), "--device", "cpu", "--output_path", str(tmp_path / "scores.json"),
    ]  # fmt: skip
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("scores*.json")
    found = json.loads(file.read_text())["results"]["rolling"]
    expected = evaluated(harness, tasks, tiny_model(), tokeniser)["scores"]["rolling"]
    assert found["bits_per_byte,none"] == pytest.approx(expected["bits_per_byte,none"], rel=1e-5)
