"""`fullrank`: choose a command, run it, and turn what goes wrong into one sentence and an exit code.

Exit codes: 0 done, 1 our mistake, 2 the user's mistake (nothing was written), 130 interrupted, 141 the reader
of a pipe left. Commands import what is heavy when they run, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

from fullrank.cli.collapse import Collapse, collapse
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

COMMANDS: dict[type, Callable[[Any], None]] = {
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
}

DESCRIPTION = """Measure and break the softmax bottleneck of language models.

`fullrank --version` prints the version; `fullrank COMMAND --help` explains a command."""

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
    options = parse(arguments)
    try:
        COMMANDS[type(options)](options)
    except FullrankError as error:
        return _complain(str(error), 2)
    except KeyboardInterrupt:
        return _complain("interrupted; nothing further was written", 130)
    except BrokenPipeError:
        raise
    except MemoryError:
        return _complain(NO_MEMORY, 2)
    except OSError as error:
        return _complain(f"{error}: check the path and its permissions", 2)
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        if "not enough memory" in str(error):
            # What torch's allocator says, as a RuntimeError.
            return _complain(NO_MEMORY, 2)
        return _complain(
            f"a mistake of ours, {type(error).__name__}: {error}; run again with {DEBUG}=1 and "
            "report what it prints",
            1,
        )
    return 0


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
        | Annotated[Demo, tyro.conf.subcommand("demo")],
        prog="fullrank",
        description=DESCRIPTION,
        args=arguments or ["--help"],
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )


def _complain(message: str, code: int) -> int:
    print(f"fullrank: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
