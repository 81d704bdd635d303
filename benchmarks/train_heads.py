"""Heads of equal parameters on one text by one recipe, side by side on one device: which predicts better?

    python -m benchmarks.train_heads tune  --data wikitext-2 --out runs/heads
    python -m benchmarks.train_heads final --data wikitext-2 --out runs/heads --choice runs/heads/tune.json
    python -m benchmarks.train_heads width --data wikitext-2 --out runs/heads --choice runs/heads/tune.json
    python -m benchmarks.train_heads speed --data wikitext-2 --out runs/heads --at-once 1

`tune` trains every head once with the same few settings of rate and dropout, shorter than the final runs, and
notes each head's best by validation. `final` trains each head with its best setting and some seeds, `width`
softmax and mixtures at smaller widths, `speed` takes 200 steps of each head alone. All are calls of `fullrank
train awd-lstm`, several at once: an LSTM leaves most of a large GPU idle.

Of every final run: the learning curve, validation and test loss with the best weights, test loss by the
training frequency of the word, and, over the first contexts of the test text, the least rank of the
log-probabilities and the mean KL between the predictions of two contexts (as in Yang et al. 2018, 1711.03953,
but in fp64).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from fullrank.results import provenance, write_whole

SETTINGS = {
    "slow": {"optimiser.lr": "2e-3", "dropouts": "0.7"},
    "middle": {"optimiser.lr": "4e-3", "dropouts": "0.7"},
    "fast": {"optimiser.lr": "8e-3", "dropouts": "0.7"},
    "light": {"optimiser.lr": "4e-3", "dropouts": "0.35"},
    "firm": {"optimiser.lr": "8e-3", "dropouts": "1.0"},
    "sturdy": {"optimiser.lr": "8e-3", "dropouts": "1.25"},
    "heavy": {"optimiser.lr": "8e-3", "dropouts": "1.5"},
    "faster": {"optimiser.lr": "1.6e-2", "dropouts": "1.0"},
}
"""Rates, each with a factor on all of the recipe's dropouts."""
TRIED = ("firm", "heavy", "faster")
"""What each head is tried with by default: the others lost to `fast` on shorter runs, and `fast` left the
training loss 0.35 nats below that of validation after four epochs."""
DROPOUTS = ("dropout", "dropout_embedding", "dropout_input", "dropout_hidden", "weight_drop")
HEADS = ("softmax", "sigsoftmax", "mos", "moss", "trunk")
HEAVY = ("mos", "moss", "doc", "trunk")
"""Heads with K times the products. Many of them at once get into each other's cache."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Train heads side by side."""

    stage: tyro.conf.Positional[Literal["tune", "final", "width", "speed"]]
    data: Path
    out: Path
    """Directory for the runs and for STAGE.json."""
    choice: Path | None = None
    """tune.json, for the other stages."""
    heads: tuple[str, ...] = HEADS
    single: tuple[str, ...] = ("moc", "doc")
    """Heads that final runs train with one seed."""
    seeds: tuple[int, ...] = (0, 1, 2)
    settings: tuple[str, ...] = TRIED
    widths: tuple[int, ...] = (64, 128)
    epochs: float = 16.0
    at_once: int = 5
    heavy_at_once: int = 2
    only: tuple[str, ...] = ()
    """Names of runs to train; all of the stage by default."""
    add: tuple[Path, ...] = ()
    """Files of the same stage whose runs are taken in."""
    contexts: int = 10_000
    """Of the test text, for rank and KL."""
    deadline: float = 560.0
    """Seconds after which no further run is started and unfinished ones are stopped."""
    device: str = "cuda"
    extra: tuple[str, ...] = ()
    """Further settings for every run, name=value."""


@dataclass
class Run:
    name: str
    head: str
    settings: dict[str, str]
    seed: int = 0
    setting: str = ""
    process: Any = field(default=None, repr=False)


def command(config: Config, run: Run) -> list[str]:
    from fullrank.train.recipes import recipe

    body = recipe("awd-lstm", run.head).body
    chosen = dict(run.settings)
    factor = float(chosen.pop("dropouts", "1"))
    for name in DROPOUTS:
        chosen[f"body.{name}"] = f"{getattr(body, name) * factor:.4g}"
    chosen |= {"epochs": f"{config.epochs:g}", "precision": "bf16", "seed": str(run.seed)}
    chosen |= dict(item.split("=", 1) for item in config.extra)
    flags = [flag for name, value in chosen.items() for flag in ("--set", f"{name}={value}")]
    return [
        sys.executable, "-m", "fullrank.cli.main", "train", "awd-lstm", "--data", str(config.data),
        "--head", run.head, "--out", str(config.out / run.name), "--device", config.device,
        "--track", "none", *flags,
    ]  # fmt: skip


def wanted(config: Config) -> list[Run]:
    if config.stage == "speed":
        runs = [
            Run(
                f"speed-{head}-{seed}",
                head,
                {"steps": "200", "evaluate_every": "200", "evaluate_tokens": "4000", "final_tokens": "4000"},
                seed,
            )
            for seed in config.seeds
            for head in config.heads
        ]
    elif config.stage == "tune":
        runs = [
            Run(f"tune-{head}-{name}", head, dict(SETTINGS[name]), setting=name)
            for head in config.heads
            for name in config.settings
        ]
    else:
        choice = json.loads(config.choice.read_text())["data"]["chosen"] if config.choice else {}

        def best(head: str) -> str:
            # A head that was not tuned takes the setting of the one it is nearest to.
            return choice.get(head) or choice.get("mos" if head in HEAVY else "softmax") or "middle"

        if config.stage == "final":
            runs = [
                Run(f"final-{head}-{seed}", head, dict(SETTINGS[best(head)]), seed, best(head))
                for head in config.heads
                for seed in config.seeds
            ]
            runs += [
                Run(f"final-{head}-0", head, dict(SETTINGS[best(head)]), 0, best(head))
                for head in config.single
            ]
        else:
            runs = [
                Run(
                    f"width-{head}-{width}-{seed}",
                    head,
                    SETTINGS[best(head)] | {"head.width": str(width)},
                    seed,
                    best(head),
                )
                for width in config.widths
                for head in config.heads
                for seed in config.seeds
            ]
    # One seed of every head before the next: what a deadline cuts off is the last seeds.
    runs.sort(key=lambda run: run.seed)
    return [run for run in runs if not config.only or run.name in config.only]


def train_all(config: Config, runs: list[Run]) -> None:
    """At most `at_once` processes, each with few threads; what the deadline finds unfinished is stopped."""
    config.out.mkdir(parents=True, exist_ok=True)
    waiting = list(runs)
    going: list[Run] = []
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    start = time.time()
    while waiting or going:
        late = time.time() - start > config.deadline
        while waiting and len(going) < config.at_once and not late:
            full = sum(run.head in HEAVY for run in going) >= config.heavy_at_once
            able = [run for run in waiting if not (full and run.head in HEAVY)]
            if not able:
                break
            # The heavy ones are what takes long: they come first.
            run = next((run for run in able if run.head in HEAVY), able[0])
            waiting.remove(run)
            log = (config.out / f"{run.name}.log").open("w")
            run.process = subprocess.Popen(command(config, run), stdout=log, stderr=log, env=environment)
            going.append(run)
        if late:
            waiting = []
            for run in going:
                run.process.terminate()
        for run in list(going):
            if run.process.poll() is not None:
                going.remove(run)
                print(
                    f"{time.time() - start:6.0f} s  {run.name} ended with {run.process.returncode}",
                    flush=True,
                )
        time.sleep(0.5)


def summary(config: Config, run: Run) -> dict[str, Any]:
    """What a run's log says; "loss" and "test" are nan where it did not finish."""
    path = config.out / run.name / "log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    evaluations = [line for line in lines if line["event"] == "evaluate" and line["split"] == "valid"]
    points = [line for line in lines if line["event"] == "train"]
    end = next((line for line in lines if line["event"] == "end" and line["reason"] == "finished"), None)
    start: dict[str, Any] = next((line for line in lines if line["event"] == "start"), {})
    keep = ("step", "epoch", "loss", "standard_error")
    monitored = (
        "head_effective_rank",
        "anisotropy",
        "logprob_rank",
        "prior_entropy_share",
        "dead_components",
    )
    return {
        "name": run.name,
        "head": run.head,
        "setting": run.setting,
        "seed": run.seed,
        "settings": run.settings,
        "parameters": start.get("parameters"),
        "device": start.get("device"),
        "finished": end is not None,
        "steps": start.get("steps"),
        "seconds_training": end["seconds"] if end else None,
        "curve": [
            {name: line[name] for name in keep}
            | {name: line["monitors"].get(name) for name in monitored if name in line["monitors"]}
            for line in evaluations
        ],
        "tokens_per_second": [line["tokens_per_second"] for line in points],
        "train_loss": [[line["step"], round(line["loss"], 5)] for line in points],
        "best_valid": min((line["loss"] for line in evaluations), default=math.nan),
        "valid": end["valid"] if end else None,
        "test": end["test"] if end else None,
        "alarms": [line["message"] for line in lines if line["event"] == "alarm"],
        "monitor_seconds": sum(line["monitor_seconds"] for line in evaluations),
    }


def examine(config: Config, run: Run) -> dict[str, Any]:
    """Rank and KL of the first test contexts, and test losses by word frequency, with the best weights."""
    import torch

    from fullrank.train import evaluate
    from fullrank.train.folder import open_run

    opened = open_run(config.out / run.name, device=config.device)
    model, corpus = opened.model, opened.corpus
    test, eos = corpus.splits["test"], corpus.vocabulary.eos
    losses = evaluate.token_losses(model, test.tokens, eos=eos, batch=40, length=70, device=config.device)
    counts = evaluate.token_counts(corpus.splits["train"].tokens, corpus.vocabulary.size)
    table = evaluate.by_frequency(losses, test.tokens, counts)
    rows = [dataclasses.asdict(row) for row in table]
    if run.seed:
        # Rank and KL of one seed a head: their decomposition takes longer than the evaluation.
        return {"by_frequency": rows}
    tokens = torch.from_numpy(test.tokens[: config.contexts].astype("int64")).to(config.device)
    ids = torch.cat([tokens.new_tensor([eos]), tokens[:-1]])[None]
    with torch.no_grad():
        states, carried = [], None
        for piece in ids.split(500, dim=1):
            read, _, out = model.head_inputs(piece, state=carried)
            states.append([state[0] for state in read])
            carried = out.state
        joined = [torch.cat(parts) for parts in zip(*states, strict=True)]
        head = model.lm_head.double()
        log_probs = torch.cat(
            [head([state[at : at + 500].double() for state in joined]) for at in range(0, len(tokens), 500)]
        ).double()
    return {"by_frequency": rows, **rank_and_divergence(log_probs)}


def rank_and_divergence(log_probs: Any) -> dict[str, Any]:
    """Of log-probabilities [n, V] in fp64.

    The singular values of the centred table come from its Gram matrix, whose rounding hides what lies below
    sqrt(n eps) of the largest: that is the floor. The mean KL of ordered pairs i != j has a closed form.
    """
    import torch

    n = log_probs.shape[0]
    probs = log_probs.exp()
    own = (probs * log_probs).sum(1).mean()
    cross = probs.mean(0) @ log_probs.mean(0)
    divergence = float((own - cross) * n / (n - 1))
    centred = log_probs - log_probs.mean(1, keepdim=True)
    values = torch.linalg.eigvalsh(centred @ centred.T).flip(0).clamp(min=0).sqrt().cpu()
    floor = float(values[0]) * math.sqrt(n * 2.0**-52)
    shares = values / values.sum()
    return {
        "contexts": n,
        "least_rank": int((values > floor).sum()),
        "rank_floor_share": floor / float(values[0]),
        "ranks_above": {
            f"{share:g}": int((values > share * values[0]).sum()) for share in (1e-2, 1e-3, 1e-4, 1e-5)
        },
        "effective_rank": math.exp(-float(torch.special.xlogy(shares, shares).sum())),
        "pairwise_kl": divergence,
    }


def main(config: Config) -> None:
    runs = wanted(config)
    start = time.time()
    train_all(config, runs)
    found = []
    for run in runs:
        one = summary(config, run)
        if config.stage in ("final", "width") and one["finished"]:
            one |= examine(config, run)
        found.append(one)
    for path in config.add:
        names = {one["name"] for one in found}
        earlier = json.loads(path.read_text())["data"]["runs"]
        found += [one for one in earlier if one["curve"] and one["name"] not in names]
    chosen = best_settings(found) if config.stage == "tune" else {}
    show(config, found)
    device = next((one["device"] for one in found if one["device"]), config.device)
    document = {
        "kind": f"train_heads_{config.stage}",
        "version": 1,
        "made": dataclasses.asdict(provenance(seed=None, device=str(device))),
        "data": {
            "settings": SETTINGS, "extra": config.extra, "chosen": chosen, "epochs": config.epochs,
            "at_once": config.at_once,
            "seconds": time.time() - start,
            "runs": found,
        },
    }  # fmt: skip
    write_whole(config.out / f"{config.stage}.json", json.dumps(document, indent=1) + "\n")


def best_settings(found: list[dict[str, Any]]) -> dict[str, str]:
    """Each head's best setting at the last evaluation that all its runs came to."""
    chosen = {}
    for head in dict.fromkeys(one["head"] for one in found):
        mine = [one for one in found if one["head"] == head and one["curve"]]
        if mine:
            step = min(one["curve"][-1]["step"] for one in mine)
            losses = {
                one["setting"]: next(point["loss"] for point in one["curve"] if point["step"] == step)
                for one in mine
            }
            chosen[head] = min(losses, key=lambda name: losses[name])
    return chosen


def show(config: Config, found: list[dict[str, Any]]) -> None:
    table = Table(title=f"{config.stage}: nats per token, perplexity per word, {config.epochs:g} epochs")
    for header in ("head", "setting", "seed", "parameters", "valid", "test", "least rank", "KL", "s"):
        table.add_column(header, justify="left" if header in ("head", "setting") else "right")
    for one in sorted(found, key=lambda one: (one["head"], one["name"])):
        valid, test = one["valid"], one["test"]
        table.add_row(
            one["head"], one["setting"], str(one["seed"]), f"{one['parameters'] or 0:,}",
            f"{valid['loss']:.4f} {valid['perplexity']:.2f}" if valid else f"({one['best_valid']:.4f})",
            f"{test['loss']:.4f} {test['perplexity']:.2f}" if test else "unfinished",
            str(one.get("least_rank", "")), f"{one['pairwise_kl']:.3f}" if "pairwise_kl" in one else "",
            f"{one['seconds_training'] or 0:.0f}",
        )  # fmt: skip
    console = Console(width=130)
    console.print(table)
    if config.stage == "speed":
        # The first lines are warming up.
        speed = {
            head: statistics.median(
                value for one in found if one["head"] == head for value in one["tokens_per_second"][4:]
            )
            for head in config.heads
        }
        for head, value in speed.items():
            console.print(
                f"{head:<12}{value:,.0f} tokens/s, {speed[config.heads[0]] / value:.2f} times the time of "
                f"{config.heads[0]}"
            )
    for head in dict.fromkeys(one["head"] for one in found):
        tests = [one["test"]["perplexity"] for one in found if one["head"] == head and one["test"]]
        if len(tests) > 1 and config.stage == "final":
            console.print(
                f"{head:<12}test perplexity {statistics.mean(tests):.2f} ± {statistics.stdev(tests):.2f}"
            )


if __name__ == "__main__":
    main(tyro.cli(Config))
