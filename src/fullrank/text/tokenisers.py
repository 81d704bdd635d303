"""Tokenisers by name: those that a corpus is counted in, and those of models with their chat templates.

    bytes        the 256 bytes of UTF-8
    words        what stands between whitespace, and <eos> after every line; V is the number of types
    bpe:32000    byte-level BPE of that size, trained on (at most 64 million characters of) the text itself
    PATH, NAME   a tokenizer.json, a transformers directory, a .gguf file or a name of the hub

Of a corpus no token is added at the end of a document, but for the <eos> of words after its last line.
Special tokens in a text are text. A tokeniser is kept in a folder, from which the processes that tokenise
load it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fullrank.errors import FullrankError
from fullrank.results.files import write_whole
from fullrank.results.reading import read_json, require_plain
from fullrank.text import gguf_header
from fullrank.text import vocabulary as vocabularies
from fullrank.text.vocabulary import (
    LEAST_BPE,
    TOKENIZER_FILE,
    Bpe,
    Bytes,
    Vocabulary,
    Words,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAINED = re.compile(r"bpe:(\d+)")
TRAINING_TEXT = 64_000_000
"""Characters that a BPE is trained on at most, in stretches from all over the text."""
NAME_FILE = "name.json"
PATIENCE = 10.0
"""Seconds to wait for the hub's answer before the local cache is asked alone."""
LOADED = "a tokenizer.json, a transformers directory, a .gguf file or a hub name"
KINDS = f"bytes, words, bpe:SIZE, {LOADED}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokeniser:
    """A vocabulary and what a corpus calls it."""

    name: str
    vocabulary: Vocabulary

    @property
    def size(self) -> int:
        # The 257th value ends a document in training; here nothing does.
        return 256 if isinstance(self.vocabulary, Bytes) else self.vocabulary.size

    def encode(self, text: str, *, ends: bool) -> NDArray[np.int64]:
        """The tokens of a fragment; `ends` if its document ends with it."""
        words = isinstance(self.vocabulary, Words)
        try:
            pieces = [piece.ids for piece in self.vocabulary.stream([text], end=ends and words)]
        except FullrankError:
            raise
        # The tokenizers library raises plain Exception, and its Rust code may panic.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            start = text[:40].replace("\n", " ")
            raise FullrankError(
                f"tokenizer {self.name} failed on the text that begins {start!r} ({error}): choose another "
                "--tokenizer, or leave that text out"
            ) from error
        ids = np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, dtype=np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.size:
            raise FullrankError(
                f"tokenizer {self.name} made token {int(ids.max())} of a vocabulary of {self.size}: choose "
                "another --tokenizer"
            )
        return ids

    def save(self, folder: Path) -> None:
        self.vocabulary.save(folder)
        write_whole(folder / NAME_FILE, json.dumps({"name": self.name}) + "\n")


def load(folder: Path) -> Tokeniser:
    """What `Tokeniser.save` wrote."""
    name = read_json(folder / NAME_FILE)["name"]
    return Tokeniser(name=name, vocabulary=vocabularies.load(folder))


def check(name: str) -> None:
    """Raise at once for a name that no tokeniser can have."""
    if name.startswith("bpe:"):
        match = TRAINED.fullmatch(name)
        if match is None or int(match[1]) < LEAST_BPE:
            raise FullrankError(
                f"--tokenizer {name} names no size: expected bpe:{LEAST_BPE} or more, such as bpe:32000"
            )
        vocabularies.require_size(int(match[1]))


def from_text(name: str) -> bool:
    """Whether a tokeniser of this name is made from the text itself."""
    return name == "words" or TRAINED.fullmatch(name) is not None


def build(
    name: str,
    texts: Callable[[], Iterable[str]],
    characters: int,
    progress: Callable[[float], None] = lambda share: None,
) -> Tokeniser:
    """The tokeniser of a name; one that is made from the text reads `texts()`, about `characters` in all."""
    check(name)
    if name == "bytes":
        return Tokeniser(name=name, vocabulary=Bytes())
    if name == "words":
        words = Words.build([_watched(texts(), characters, progress)])
        if words.size == 1:
            raise FullrankError(
                "the text has no words: give text, or --tokenizer bytes for data of other kinds"
            )
        return Tokeniser(name=name, vocabulary=words)
    if match := TRAINED.fullmatch(name):
        sample = sampled(_watched(texts(), characters, progress), characters)
        return Tokeniser(name=name, vocabulary=Bpe.train(sample, int(match[1])))
    return Tokeniser(name=Path(name).name or name, vocabulary=Bpe(loaded(name, KINDS)[0], eos=0))


def _watched(texts: Iterable[str], characters: int, progress: Callable[[float], None]) -> Iterator[str]:
    read = 0
    for text in texts:
        yield text
        read += len(text)
        progress(min(1.0, read / max(characters, 1)))


def sampled(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Every so manieth fragment, so that about TRAINING_TEXT characters of all are taken."""
    share, owed, taken = min(1.0, TRAINING_TEXT / max(characters, 1)), 0.0, 0
    for text in texts:
        owed += share * len(text)
        if share == 1.0 or owed >= len(text) / 2:
            yield text
            owed -= len(text)
            taken += len(text)
        # A dataset does not say how long it is.
        if taken > 2 * TRAINING_TEXT:
            return


def loaded(name: str, kinds: str = LOADED) -> tuple[Tokenizer, str]:
    """A tokenizer by its file, directory or name, and the token that ends a text where that is said."""
    tokenizer, end = _read(name, kinds)
    # Before it is written or hashed: both go over every id up to the largest.
    vocabularies.require_size(vocabularies.ids_of(tokenizer))
    return tokenizer, end


def _read(name: str, kinds: str) -> tuple[Tokenizer, str]:
    path = Path(os.path.expanduser(name))
    try:
        from tokenizers import Tokenizer

        if path.is_file() and path.suffix == ".json":
            return Tokenizer.from_file(str(path)), ""
        if (path / TOKENIZER_FILE).is_file():
            return Tokenizer.from_file(str(path / TOKENIZER_FILE)), _end(path)
        found = _transformers(name, kinds)
    except FullrankError:
        raise
    # transformers, tokenizers and the hub raise many kinds; all mean that there is no such tokeniser.
    except Exception as error:
        raise _no_tokenizer(name, error, kinds) from error
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise FullrankError(
            f"tokenizer {name} is no fast one (a {type(found).__name__}): give one with a tokenizer.json"
        )
    return backend, found.eos_token or ""


def chat_of(name: str) -> Template | None:
    """The same by the tokenizer's name."""
    path = Path(os.path.expanduser(name))
    if not name or (path.is_file() and path.suffix == ".json"):
        return None
    try:
        return template_of(_transformers(name, LOADED))
    except FullrankError:
        raise
    except Exception as error:
        raise _no_tokenizer(name, error, LOADED) from error


class Template:
    """The chat template of a tokenizer of transformers, as a function."""

    def __init__(self, tokenizer: Any) -> None:
        self.text = str(tokenizer.chat_template)
        self._tokenizer = tokenizer

    def source(self) -> str:
        """The template for another tokenizer: it first sets the special tokens that it names."""
        template = str(self._tokenizer.get_chat_template())
        tokens = self._tokenizer.special_tokens_map.items()
        named = [(name, str(token)) for name, token in tokens if name in template]
        return "".join(f"{{% set {name} = {json.dumps(token)} %}}\n" for name, token in named) + template

    def __call__(self, messages: list[Any]) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False)
        # A template is a program of its own, and raises what it likes.
        except Exception as error:
            raise FullrankError(
                f"the chat template fails on {str(messages)[:60]!r} ({error}): expected messages such as "
                '{"role": "user", "content": "..."}'
            ) from error


def template_of(tokenizer: Any) -> Template | None:
    """What makes a text of a conversation, if the tokenizer has a chat template."""
    return Template(tokenizer) if getattr(tokenizer, "chat_template", None) else None


def _end(directory: Path) -> str:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        said = read_json(directory / "tokenizer_config.json").get("eos_token")
        return (said.get("content") if isinstance(said, dict) else said) or ""
    return ""


def _no_tokenizer(name: str, error: Exception, kinds: str) -> FullrankError:
    lines = str(error).strip().splitlines() or ["no reason was given"]
    return FullrankError(
        f"tokenizer {name} cannot be loaded ({type(error).__name__}: {lines[0]}): give {kinds}"
    )


def _transformers(name: str, kinds: str) -> Any:
    path = Path(os.path.expanduser(name))
    if path.is_file() and path.suffix.lower() == ".gguf":
        gguf_header.check(path)
        return _auto(str(path.parent), gguf_file=path.name)
    if path.is_dir():
        require_plain(path)
        return _auto(str(path))
    if path.exists() or path.suffix == ".json":
        raise FullrankError(
            f"{name} is {'no' if path.exists() else 'not there as a'} tokenizer: give {kinds}"
        )
    return _auto(name, local_files_only=not _reached(name))


def _reached(name: str) -> bool:
    """Whether the hub answers; asked once, because loading asks it many times."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        huggingface_hub.HfApi().model_info(name, timeout=PATIENCE)
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise
    # Connection errors come in the classes of several libraries.
    except Exception:
        return False
    return True


def _auto(name: str, **options: Any) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    finally:
        logging.set_verbosity(level)


def tokens_per_character(tokeniser: Tokeniser, texts: Sequence[str]) -> float:
    """Estimated on some fragments; more than 1 in bytes of other scripts."""
    characters = sum(map(len, texts))
    tokens = sum(len(tokeniser.encode(text, ends=True)) for text in texts)
    return tokens / max(characters, 1)
