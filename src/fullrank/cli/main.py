"""`fullrank`: choose a command, run it, and turn what goes wrong into one sentence and an exit code.

Exit codes: 0 done, 1 our mistake, 2 the user's mistake (nothing was written), 130 interrupted, 141 the reader
of a pipe left. Commands import what is heavy when they run, so that `--help` and `--version` answer at once.

A command returns its results.json, or what it found as a dict: with `--json` that is all that goes to the
output, and what people read goes to the error stream.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

from fullrank.cli.collapse import Collapse, collapse
from fullrank.cli.completion import Completion, completion
from fullrank.cli.corpus import Corpus, corpus
from fullrank.cli.demo import Demo, demo
from fullrank.cli.diagnose import Diagnose, diagnose
from fullrank.cli.eval import Eval, evaluate
from fullrank.cli.generate import Generate, generate
from fullrank.cli.report import Report, report
from fullrank.cli.series import Series, series
from fullrank.cli.study import Study, study
from fullrank.cli.train import Train, train
from fullrank.cli.upgrade import Upgrade, upgrade
from fullrank.errors import FullrankError
from fullrank.version import __version__

COMMANDS: dict[type, Callable[[Any], Path | dict[str, Any] | None]] = {
    Diagnose: diagnose,
    Series: series,
    Train: train,
    Eval: evaluate,
    Generate: generate,
    Upgrade: upgrade,
    Collapse: collapse,
    Corpus: corpus,
    Study: study,
    Report: report,
    Demo: demo,
    Completion: completion,
}
LOADED: dict[type, str] = {Report: "altair", Corpus: "", Series: "", Completion: ""}
"""What takes seconds to load before a command can begin; all others need torch."""

DESCRIPTION = """Measure and break the softmax bottleneck of language models.

`fullrank --version` prints the version; `fullrank COMMAND --help` explains a command. With --json a command's
output is its results as one JSON document, and what people read goes to the error stream."""

FRONT = """fullrank: measure and break the softmax bottleneck of language models

You have a model: does its output layer hold it back, by how much, what would help?
  fullrank diagnose MODEL --text book.txt     a verdict, eight questions, a page
  fullrank upgrade MODEL --head auto --train book.txt
                                              another head that starts as the old one, with controls
  fullrank collapse UPGRADED --text book.txt  back to the nearest plain softmax
  fullrank series RUN ...                     checkpoints over training: did the loss turn, and when?

You train one and want a head of high rank.
  fullrank train transformer-tiny --data TEXTS --head mos --out runs/a
  fullrank eval runs/a                        every token once; dynamic, with a cache, or lm-eval tasks
  fullrank generate runs/a --prompt "The"     text, also of any other model

You study the question itself.
  fullrank corpus dimension TEXT              how many dimensions does a text ask for?
  fullrank study NAME                         experiments that state their rule before they run
  fullrank report RESULTS ...                 pages again, models side by side

Nothing at hand? fullrank demo shows the bottleneck and its breaking in a minute.
fullrank COMMAND --help has every option and an example; fullrank completion bash completes them.
"""

DEBUG = "FULLRANK_DEBUG"
NO_MEMORY = "this machine has not enough memory for it: ask for less, or use a larger one"


def main() -> None:
    """Entry point of the `fullrank` script."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has left, as `head` does: no mistake of anyone's. What Python still holds
        # goes nowhere, or it would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Parse and run one command; returns the exit code."""
    if arguments in (["--version"], ["-V"]):
        print(f"fullrank {__version__}")
        return 0
    if not arguments:
        print(FRONT, end="")
        return 0
    machine = "--json" in arguments
    options = parse([argument for argument in arguments if argument != "--json"])
    if not machine:
        return _run(options)[0]
    with redirect_stdout(sys.stderr):
        code, found = _run(options)
    if isinstance(found, Path):
        found = json.loads(found.read_text(encoding="utf8"))
    if found is not None:
        print(json.dumps(found))
    return code


def _run(options: Any) -> tuple[int, Path | dict[str, Any] | None]:
    """The exit code of a command and what it found, or what was wrong."""
    try:
        _load(options)
        return 0, COMMANDS[type(options)](options)
    except FullrankError as error:
        return _complained(str(error), 2)
    except KeyboardInterrupt:
        return _complained("interrupted; nothing further was written", 130)
    except BrokenPipeError:
        raise
    except MemoryError:
        return _complained(NO_MEMORY, 2)
    except OSError as error:
        return _complained(f"{error}: check the path and its permissions", 2)
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        if "not enough memory" in str(error) or "out of memory" in str(error):
            # What torch's allocators say, of a processor and of a GPU, as RuntimeErrors.
            return _complained(NO_MEMORY, 2)
        return _complained(
            f"a mistake of ours, {type(error).__name__}: {error}; run again with {DEBUG}=1 and "
            "report what it prints",
            1,
        )


def parse(arguments: list[str]) -> Any:
    """The options of one command; leaves with tyro's own message and code where they do not parse."""
    import tyro

    return tyro.cli(
        Annotated[Diagnose, tyro.conf.subcommand("diagnose")]
        | Annotated[Series, tyro.conf.subcommand("series")]
        | Annotated[Train, tyro.conf.subcommand("train")]
        | Annotated[Eval, tyro.conf.subcommand("eval")]
        | Annotated[Generate, tyro.conf.subcommand("generate")]
        | Annotated[Upgrade, tyro.conf.subcommand("upgrade")]
        | Annotated[Collapse, tyro.conf.subcommand("collapse")]
        | Annotated[Corpus, tyro.conf.subcommand("corpus")]
        | Annotated[Study, tyro.conf.subcommand("study")]
        | Annotated[Report, tyro.conf.subcommand("report")]
        | Annotated[Demo, tyro.conf.subcommand("demo")]
        | Annotated[Completion, tyro.conf.subcommand("completion")],
        prog="fullrank",
        description=DESCRIPTION,
        args=arguments,
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )


def _load(options: Any) -> None:
    """Import what the command needs, and say so on a terminal meanwhile."""
    name = LOADED.get(type(options), "torch")
    shown = bool(name) and sys.stderr.isatty()
    if shown:
        print("loading", end="\r", file=sys.stderr, flush=True)
    try:
        if name and importlib.util.find_spec(name):
            importlib.import_module(name)
    finally:
        if shown:
            print("       ", end="\r", file=sys.stderr, flush=True)


def _complained(message: str, code: int) -> tuple[int, dict[str, Any]]:
    print(f"fullrank: {message}", file=sys.stderr)
    return code, {"error": message}


if __name__ == "__main__":
    main()
