"""`fullrank completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print what a shell needs to complete commands and options.

    Example: fullrank completion bash > ~/.local/share/bash-completion/completions/fullrank
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """For zsh: into a file _fullrank in a directory of $fpath."""


def completion(options: Completion) -> None:
    from fullrank.cli.main import parse

    parse(["--tyro-print-completion", options.shell])
