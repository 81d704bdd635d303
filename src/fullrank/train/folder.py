"""A run directory: who uses it, what it was made from, and how its weights are read back.

RUN/run.json         the settings and the digest of the data; a run of another config is refused
RUN/config.json, model.safetensors, tokenizer.json, ...    the best model so far, for `from_pretrained`:
                     copies of its checkpoint's files, which a user may edit
RUN/tokens/          the tokens, built once (data.py)
RUN/checkpoints/     checkpoint.py
RUN/snapshots/       models of chosen steps that stay, for `from_pretrained`
RUN/README.md        the best model's card, once the run is over
RUN/log.jsonl        everything that happened (log.py)
RUN/.lock            held while a process trains here
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullrank import filelock
from fullrank.errors import FullrankError
from fullrank.results import write_whole
from fullrank.results.reading import NotRegularError, read_json, read_text, require_plain
from fullrank.train import checkpoint as checkpoints
from fullrank.train.config import HOW, Config, from_json, to_json

if TYPE_CHECKING:
    from fullrank.models import FullrankForCausalLM
    from fullrank.text.store import Corpus

CONFIG = "run.json"
CHECKPOINTS = "checkpoints"
SNAPSHOTS = "snapshots"
LOG = "log.jsonl"
WEIGHTS = "model.safetensors"
TOKENS = "tokens"
_CHUNK = 1 << 30
"""Bytes that one system call copies."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a run directory; raises where another process does. The lock goes with the process in any case."""
    filelock.require()
    # Before anything is written: a directory of something else stays as it is.
    _refuse_strange(path)
    there = path.is_dir()
    path.mkdir(parents=True, exist_ok=True)
    lock = path / ".lock"
    with lock.open("a") as file:
        try:
            filelock.lock(file, wait=False)
            if not lock.exists() or not os.path.samestat(lock.stat(), os.fstat(file.fileno())):
                raise BlockingIOError("its directory was just taken away")
        except OSError as error:
            raise FullrankError(
                f"{path} is in use by another process: wait for it, or choose another --out"
            ) from error
        try:
            yield
        except FullrankError:
            # A user's mistake leaves nothing behind, not even an empty directory.
            if not there and os.listdir(path) == [lock.name]:
                shutil.rmtree(path)
            raise


def check(path: Path, config: Config, digest: str) -> None:
    """Raise where `path` holds a run that learns something else, or anything that is no run.

    How a run goes on may change (`config.HOW`). One that never came to a checkpoint has nothing to lose and
    may be begun again otherwise.
    """
    _refuse_strange(path)
    if not checkpoints.found(path / CHECKPOINTS, "step"):
        return
    was = _document(path)
    # Settings that came after the run was begun have their defaults in it.
    begun = from_json(was["config"])
    if begun != config:
        before, now = flat(to_json(begun)), flat(to_json(config))
        changed = [
            f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name) and name not in HOW
        ]
        if changed:
            raise FullrankError(
                f"{path} holds a run of another config ({'; '.join(changed[:4])}): give the same settings to "
                "continue it, or choose another --out"
            )
    if was["data"] != digest:
        raise FullrankError(
            f"{path} holds a run on other data: give the same --data to continue it, or choose another --out"
        )


def _refuse_strange(path: Path) -> None:
    """Raise where `path` is a directory with something in it that is no run."""
    if not path.is_dir():
        return
    # A log that is a pipe would be written to for ever.
    require_plain(path)
    if (path / CONFIG).exists():
        _document(path)
        return
    early = {".lock", TOKENS, *(one.name for one in _unfinished(path))}
    strange = sorted(entry.name for entry in path.iterdir() if entry.name not in early)
    if strange:
        raise FullrankError(f"{path} is no run and not empty (it holds {strange[0]}): choose another --out")


def _unfinished(path: Path) -> list[Path]:
    """What `write_whole` leaves where it is killed."""
    names = (CONFIG, LOG, "results.json", "report.html", "README.md", "published")
    return [one for name in names for one in path.glob(f".{name}.*")]


def clean(path: Path) -> None:
    """Remove what a killed writer left behind; the caller holds the directory."""
    for one in _unfinished(path):
        one.unlink(missing_ok=True)
    checkpoints.clean(path / CHECKPOINTS)
    checkpoints.clean(path / SNAPSHOTS)


def claim(path: Path, config: Config, digest: str, parent: dict[str, Any] | None = None) -> None:
    """Make `path` the directory of this run, which began in another where there is a parent."""
    path.mkdir(parents=True, exist_ok=True)
    document = {"version": 1, "config": to_json(config), "data": digest}
    if parent is not None:
        document["from"] = parent
    text = json.dumps(document, indent=1) + "\n"
    there = path / CONFIG
    if not there.exists() or read_text(there) != text:
        write_whole(there, text)


def link_tokens(built: Path, into: Path) -> None:
    """Make the token files part of the run without a second copy on disk, where the file system can."""
    there = into / built.name
    try:
        there.mkdir(parents=True, exist_ok=True)
        for file in built.iterdir():
            own = there / file.name
            # Written whole, in a folder that is named by what they hold: a copy is not made again.
            if not own.exists() or own.stat().st_size != file.stat().st_size:
                _link(file, own, there / f".{file.name}")
    except OSError as error:
        raise FullrankError(
            f"the tokens of the run cannot be written to {there}: {error.strerror}. Make room, then run the "
            "same command again"
        ) from error


def publish(stored: Path) -> None:
    """Copy a checkpoint's model into the run directory: one file after the other, weights last.

    All but the weights are the same in every checkpoint of a run, so at no moment do they belong to different
    models.
    """
    run = stored.parent.parent
    texts = [file for file in stored.iterdir() if file.suffix in (".py", ".json")]
    names = sorted(file.name for file in texts if file.name != checkpoints.MANIFEST)
    try:
        for name in (*names, WEIGHTS):
            _copy(stored / name, run / name, run / f".published.{name}")
    except OSError as error:
        raise FullrankError(
            f"the best model cannot be copied to {run} ({error.strerror or error}): make room, then run the "
            "same command again"
        ) from error


def _copy(file: Path, target: Path, temporary: Path) -> None:
    """Replace `target` by a copy of `file`, unless it is one with the same size and time.

    A link would let an edit of the published file change the checkpoint: transformers writes config.json in
    place. On file systems that share blocks (btrfs, XFS) the copy takes no space.
    """
    status = file.stat()
    if target.exists() and not target.samefile(file):
        earlier = target.stat()
        if (earlier.st_size, earlier.st_mtime_ns) == (status.st_size, status.st_mtime_ns):
            return
    try:
        with file.open("rb") as source, temporary.open("wb") as copied:
            # Not every system has it, nor every file system, and some end early. A full disk raises again.
            with contextlib.suppress(AttributeError, OSError):
                while os.copy_file_range(source.fileno(), copied.fileno(), _CHUNK):
                    pass
            if os.fstat(copied.fileno()).st_size != status.st_size:
                source.seek(0)
                copied.seek(0)
                shutil.copyfileobj(source, copied)
        os.utime(temporary, ns=(status.st_atime_ns, status.st_mtime_ns))
        # A rename may reach the disk before the bytes do.
        checkpoints.sync(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _link(file: Path, own: Path, temporary: Path) -> None:
    """Link a token file of the cache, which no program edits; copy it where the file system has no links."""
    if own.exists() and own.samefile(file):
        return
    temporary.unlink(missing_ok=True)
    try:
        os.link(file, temporary)
    except OSError:
        shutil.copyfile(file, temporary)
    os.replace(temporary, own)


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    out: dict[str, Any] = {}
    for name, value in data.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out


def _document(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path / CONFIG)
        if not isinstance(document["config"], dict) or not isinstance(document["data"], str):
            raise ValueError("no run")
        return document
    except FileNotFoundError as error:
        raise FullrankError(f"{path} is no run directory: expected the --out of `fullrank train`") from error
    except NotRegularError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FullrankError(
            f"{path / CONFIG} is not what `fullrank train` writes ({error!r}): train into another --out"
        ) from error


def config_of(path: Path) -> Config:
    return from_json(_document(path)["config"])


def digest_of(path: Path) -> str:
    """Of the data that the run was begun on."""
    return str(_document(path)["data"])


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained run, read back."""

    path: Path
    config: Config
    corpus: Corpus
    model: FullrankForCausalLM
    """In eval mode, with the weights of `step`; those of the average where the run averaged."""
    step: int


def open_run(path: Path, *, checkpoint: str = "best", device: str = "cpu") -> Run:
    """Read a run's config, data and weights.

    checkpoint is "best" (by validation loss), "last", or the number of a step that was kept.
    """
    import torch

    from fullrank.train.model import build

    config = config_of(path)
    stored = chosen(path, checkpoint)
    corpus = corpus_of(path)
    model = build(config, corpus.vocabulary.size)
    restore(model, stored.groups["model"], stored.path)
    torch.nn.Module.to(model.eval(), torch.device(device))
    return Run(path=path, config=config, corpus=corpus, model=model, step=stored.step)


def corpus_of(path: Path) -> Corpus:
    from fullrank.text import store as data

    return data.load(tokens_of(path))


def chosen(path: Path, which: str) -> checkpoints.Stored:
    """The checkpoint of that name, whole."""
    folder = path / CHECKPOINTS
    best, steps = checkpoints.found(folder, "best"), checkpoints.found(folder, "step")
    if not best and not steps:
        raise FullrankError(f"{path} has no checkpoint yet: let it train up to its first evaluation")
    if which == "best" and best:
        return checkpoints.read(best[-1])
    if which in ("best", "last"):
        return checkpoints.read((steps or best)[-1])
    every = (*steps, *checkpoints.found(path / SNAPSHOTS, "step"), *best)
    wanted = [one for one in every if which.isdigit() and checkpoints.step_of(one) == int(which)]
    if not wanted:
        kept = ", ".join(map(str, sorted({checkpoints.step_of(one) for one in every})))
        raise FullrankError(f"{path} keeps no checkpoint {which!r}: expected best, last or one of {kept}")
    return checkpoints.read(wanted[0])


def restore(model: Any, weights: dict[str, Any], path: Path) -> None:
    """Copy named weights into a module; raises where names or shapes differ."""
    import torch

    from fullrank.train.weights import stored_buffers

    own = {**dict(model.named_parameters()), **stored_buffers(model)}
    missing, unknown = own.keys() - weights.keys(), weights.keys() - own.keys()
    other = [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    if missing or unknown or other:
        first = sorted([*missing, *unknown, *other])[0]
        raise FullrankError(
            f"{path} holds the weights of another architecture ({first} does not fit): use the run directory "
            "that it was written in"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def tokens_of(path: Path) -> Path:
    """The directory with the run's tokens; one that was begun on other data first has those too."""
    digest = _document(path)["data"]
    for meta in sorted((path / TOKENS).glob("*/manifest.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if read_json(meta)["digest"] == digest:
                return meta.parent
    raise FullrankError(f"{path} has lost its tokens: run `fullrank train` again to build them")
