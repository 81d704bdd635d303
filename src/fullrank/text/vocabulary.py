"""Text to token ids and back: words, bytes, or byte-level BPE.

    level   V                        end                               unknown words
    words   the types, <eos> one     one <eos> after every line        <unk>, if the text has that word
    bytes   257                      id 256 after every document       none
    bpe     as trained or loaded     one after every document          none in a byte-level one
    ids     as said                  as said                           (tokens that came without a tokeniser)

A word is what str.split() makes: what stands between any whitespace. A line ends with "\\n"; a last line
without one is a line too. Words have ids in the order in which they first appear, train before valid before
test, so a vocabulary of train alone is the beginning of that of all three. The word <eos> in a text is the
end of a line.

The BPE that is trained here has no normaliser, GPT-2's pattern of pieces (Radford et al. 2019; Sennrich et
al. 2016, 1508.07909) and all 256 bytes, so it can write any text. Special tokens in a text are text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fullrank.errors import FullrankError
from fullrank.results.files import write_whole
from fullrank.results.reading import read_json, read_text
from fullrank.text.documents import valid_unicode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOS = "<eos>"
UNKNOWN = "<unk>"
END = "<|endoftext|>"
FILE = "vocabulary.json"
TOKENIZER_FILE = "tokenizer.json"
LEAST_BPE = 257
"""All bytes and an end."""
MOST_IDS = 1 << 26
"""More than any tokeniser has: a larger id is a slip or an attack, and would cost a row each."""

ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<|end|>", "<|im_end|>", "<|eot_id|>")
"""Names of the special token that ends a text, the most usual first."""


class Passage(NamedTuple):
    """A document, or a fragment of one, on its way to tokens."""

    text: str
    ends: bool
    """Whether the document ends with it."""
    name: str
    """Of its file, for errors."""
    line: int
    """Its first line in that file, from 1."""


class Piece(NamedTuple):
    """Token ids of a part of a text."""

    ids: np.ndarray
    replaced: int
    """How many of them are the unknown word instead of one that is not in the vocabulary."""


class Vocabulary(ABC):
    """A map between texts and token ids 0 to size - 1."""

    level: ClassVar[str]
    size: int
    eos: int
    """Ends a line (words) or a document (bytes, bpe)."""
    unknown: int | None = None
    """Stands for a word that is not in the vocabulary."""

    def encode(self, text: str, *, end: bool = True) -> list[int]:
        """The ids of a whole text; without `end` it may go on, as a prompt does.

        Lone surrogates become U+FFFD, as in text that is read from a file.
        """
        text, _ = valid_unicode(text)
        return [int(token) for piece in self.stream([text], end=end) for token in piece.ids]

    @abstractmethod
    def stream(
        self, blocks: Iterable[str], *, end: bool = True, name: str = "", line: int = 1
    ) -> Iterator[Piece]:
        """The ids of one document in blocks that are cut between words; name and line are for errors."""

    def pieces(self, passages: Sequence[Passage]) -> Iterator[Piece]:
        """The ids of many passages, in pieces of any size, in order."""
        for text, ends, name, line in passages:
            yield from self.stream([text], end=ends, name=name, line=line)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def token(self, index: int) -> str:
        """One token for display."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...

    def save(self, folder: Path) -> None:
        """Write vocabulary.json and what belongs to it."""
        write_whole(folder / FILE, json.dumps(self.to_json(), ensure_ascii=False) + "\n")

    def digest(self) -> str:
        """sha256 of all that the vocabulary is."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def _checked(self, ids: Sequence[int]) -> list[int]:
        checked = [int(index) for index in ids]
        for index in checked:
            if not 0 <= index < self.size:
                raise FullrankError(
                    f"token {index} is not in this vocabulary of {self.size}: is it another run's?"
                )
        return checked


class Words(Vocabulary):
    """One id a word, one <eos> a line."""

    level = "words"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._ids = {word: index for index, word in enumerate(self.words)}
        if len(self._ids) != len(self.words) or EOS not in self._ids:
            raise FullrankError(f"a word vocabulary has each word once and {EOS}: build it from text again")
        self.size = len(self.words)
        self.eos = self._ids[EOS]
        self.unknown = self._ids.get(UNKNOWN)

    @classmethod
    def build(cls, documents: Iterable[Iterable[str]]) -> Words:
        """From documents, each in blocks that are cut between words."""
        words: dict[str, None] = {}
        for blocks in documents:
            for block in blocks:
                words.update(dict.fromkeys(_with_ends(block).split()))
        words.setdefault(EOS)
        return cls(list(words))

    def stream(
        self, blocks: Iterable[str], *, end: bool = True, name: str = "", line: int = 1
    ) -> Iterator[Piece]:
        last = "\n"
        for block in blocks:
            if not block:
                continue
            words = _with_ends(block).split()
            found = map(self._ids.get, words, itertools.repeat(-1))
            ids = np.fromiter(found, dtype=np.int64, count=len(words))
            missing = np.flatnonzero(ids < 0)
            if len(missing):
                if self.unknown is None:
                    raise self._no_word(block, name, line)
                ids[missing] = self.unknown
            yield Piece(ids, len(missing))
            line += block.count("\n")
            last = block[-1]
        if end and last != "\n":
            yield Piece(np.array([self.eos]), 0)

    def _no_word(self, block: str, name: str, first: int) -> FullrankError:
        line, word = next(
            (line, word)
            for line, text in enumerate(block.split("\n"), start=first)
            for word in text.split()
            if word not in self._ids
        )
        shown = word if len(word) <= 60 else word[:60] + "..."
        # A file is still to be prepared; a text without a name, as a prompt, comes to a finished vocabulary.
        remedy = (
            "take words from all splits with --set data.vocabulary_from=all, or use --set data.level=bpe"
            if name
            else "use words that it has"
        )
        return FullrankError(
            f"the word {shown!r} in line {line} of {name or 'the text'} is not in the vocabulary of "
            f"{self.size} words, which has no {UNKNOWN}: {remedy}"
        )

    def decode(self, ids: Sequence[int]) -> str:
        lines: list[list[str]] = [[]]
        for index in self._checked(ids):
            if index == self.eos:
                lines.append([])
            else:
                lines[-1].append(self.words[index])
        return "\n".join(" ".join(line) for line in lines)

    def token(self, index: int) -> str:
        return self.words[self._checked([index])[0]]

    def to_json(self) -> dict[str, Any]:
        return {"level": self.level, "words": self.words}


class Bytes(Vocabulary):
    """The 256 values of a byte, and an end."""

    level = "bytes"
    size = 257
    eos = 256

    def stream(
        self, blocks: Iterable[str], *, end: bool = True, name: str = "", line: int = 1
    ) -> Iterator[Piece]:
        for block in blocks:
            yield Piece(np.frombuffer(block.encode("utf8", "replace"), dtype=np.uint8), 0)
        if end:
            yield Piece(np.array([self.eos]), 0)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(index for index in self._checked(ids) if index != self.eos).decode("utf8", "replace")

    def token(self, index: int) -> str:
        if self._checked([index])[0] == self.eos:
            return END
        return chr(index) if 32 < index < 127 else f"0x{index:02x}"

    def to_json(self) -> dict[str, Any]:
        return {"level": self.level}


class Bpe(Vocabulary):
    """A tokeniser of the tokenizers library."""

    level = "bpe"

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos: int,
        *,
        size: int = 0,
        marked: bool = False,
        chat_template: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        """The template that made texts of conversations; empty without one. It is no part of the digest."""
        # A file may ask for either; both would change a text.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.marked = marked
        """Whether special tokens in a text are special, as those of a chat template are; else they are text:
        a text must not be able to end itself."""
        tokenizer.encode_special_tokens = not marked
        self.own_size = ids_of(tokenizer)
        self.size = max(self.own_size, size)
        require_size(self.size)
        """With ids that no text has, where a matrix is to have a round number of rows."""
        self.eos = eos
        unknown = getattr(tokenizer.model, "unk_token", None)
        self.unknown = tokenizer.token_to_id(unknown) if isinstance(unknown, str) else None

    @classmethod
    def train(cls, blocks: Iterable[str], size: int) -> Bpe:
        """Byte-level BPE of at most `size` entries; a short text gives fewer. Equal texts give equal ones."""
        if size < LEAST_BPE:
            raise FullrankError(
                f"data.bpe_size={size} is too small: expected at least {LEAST_BPE}, all bytes and an end"
            )
        require_size(size)
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(blocks, trainer)
        # Special tokens come first.
        return cls(tokenizer, 0)

    @classmethod
    def loaded(
        cls,
        tokenizer: Tokenizer,
        name: str,
        end: str = "",
        *,
        size: int = 0,
        marked: bool = False,
        chat_template: str = "",
    ) -> Bpe:
        """Of a tokenizer that others made; a token that ends a text is found by name where it is not said."""
        special = {
            token.content: index
            for index, token in tokenizer.get_added_tokens_decoder().items()
            if token.special or token.content == end
        }
        for known in (end, *ENDS):
            if known in special:
                return cls(tokenizer, special[known], size=size, marked=marked, chat_template=chat_template)
        raise FullrankError(
            f"{name} has no special token that ends a text (it has {', '.join(special) or 'none at all'}, "
            f"expected one of {', '.join(ENDS)}): add {END} to it, or leave data.tokenizer empty to train one"
        )

    def stream(
        self, blocks: Iterable[str], *, end: bool = True, name: str = "", line: int = 1
    ) -> Iterator[Piece]:
        for block in blocks:
            encoding = self.tokenizer.encode_batch_fast([block], add_special_tokens=False)[0]
            ids = np.array(encoding.ids, dtype=np.int64)
            yield Piece(ids, self._unknown(ids))
        if end:
            yield Piece(np.array([self.eos]), 0)

    def pieces(self, passages: Sequence[Passage]) -> Iterator[Piece]:
        # At once, so that the library's own threads share them out.
        texts = [passage.text for passage in passages]
        found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for passage, encoding in zip(passages, found, strict=True):
            ids = np.array([*encoding.ids, self.eos] if passage.ends else encoding.ids, dtype=np.int64)
            yield Piece(ids, self._unknown(ids))

    def _unknown(self, ids: np.ndarray) -> int:
        return 0 if self.unknown is None else int(np.count_nonzero(ids == self.unknown))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(self._checked(ids), skip_special_tokens=True)

    def byte_lengths(self) -> np.ndarray:
        """Bytes of text that each id stands for: exact in a byte-level tokenizer, else by its text alone."""
        exact = type(self.tokenizer.decoder).__name__ == "ByteLevel"
        lengths = np.zeros(self.size, dtype=np.int64)
        for token, index in self.tokenizer.get_vocab(with_added_tokens=False).items():
            # A letter of a byte-level token is a byte.
            lengths[index] = len(token) if exact else len(self.tokenizer.decode([index]).encode())
        for index, added in self.tokenizer.get_added_tokens_decoder().items():
            lengths[index] = 0 if added.special else len(added.content.encode())
        return lengths

    def token(self, index: int) -> str:
        text = self.tokenizer.decode(self._checked([index]), skip_special_tokens=False)
        # Half a character has no text; its name in the vocabulary stands for it.
        return text if text and "\ufffd" not in text else self.tokenizer.id_to_token(index) or f"<{index}>"

    def to_json(self) -> dict[str, Any]:
        return {**self._settings(), "tokenizer": json.loads(self.tokenizer.to_str())}

    def save(self, folder: Path) -> None:
        write_whole(folder / TOKENIZER_FILE, self.tokenizer.to_str(pretty=True) + "\n")
        template = {"chat_template": self.chat_template} if self.chat_template else {}
        write_whole(folder / FILE, json.dumps({**self._settings(), **template}) + "\n")

    def _settings(self) -> dict[str, Any]:
        padded = {"size": self.size} if self.size > self.own_size else {}
        return {"level": self.level, "eos": self.eos, **padded, **({"marked": True} if self.marked else {})}


class Numbers(Vocabulary):
    """Ids that came without a tokeniser."""

    level = "ids"

    def __init__(self, size: int, eos: int) -> None:
        require_size(size)
        self.size, self.eos = size, eos

    def stream(
        self, blocks: Iterable[str], *, end: bool = True, name: str = "", line: int = 1
    ) -> Iterator[Piece]:
        raise FullrankError(
            "these tokens came without a tokenizer, so no text can be read: train with --tokens and --set "
            "data.tokenizer=NAME"
        )

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, self._checked(ids)))

    def token(self, index: int) -> str:
        return str(self._checked([index])[0])

    def to_json(self) -> dict[str, Any]:
        return {"level": self.level, "size": self.size, "eos": self.eos}


def ids_of(tokenizer: Tokenizer) -> int:
    """One more than the largest id: there may be holes, so the number of entries would be too small."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1


def require_size(size: int) -> None:
    """Every id has a row of a matrix and a place in counts, whether a text has it or not."""
    if size > MOST_IDS:
        raise FullrankError(
            f"a vocabulary of {size:,} was asked for, by its size or by its largest id, expected at most "
            f"{MOST_IDS:,}: correct that number, or give another tokenizer"
        )


def load(folder: Path) -> Vocabulary:
    """What `save` wrote."""
    path = folder / FILE
    try:
        data = read_json(path)
        level = data["level"]
        if level == "words":
            return Words([str(word) for word in data["words"]])
        if level == "bytes":
            return Bytes()
        if level == "ids":
            return Numbers(int(data["size"]), int(data["eos"]))
        if level == "bpe":
            tokenizer = _tokenizer(folder / TOKENIZER_FILE)
            return Bpe(
                tokenizer,
                int(data["eos"]),
                size=int(data.get("size", 0)),
                marked=bool(data.get("marked")),
                chat_template=str(data.get("chat_template", "")),
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, FullrankError):
            raise
        raise FullrankError(f"{path} is no vocabulary ({error!r}): prepare the data again") from error
    raise FullrankError(
        f"{path} has level {level!r}, expected words, bytes, bpe or ids: prepare the data again"
    )


def _tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(read_text(path))
    except OSError as error:
        raise FullrankError(f"no tokenizer at {path} ({error.strerror}): prepare the data again") from error
    # The library raises plain Exception for all that it cannot read.
    except Exception as error:
        raise FullrankError(f"{path} is no tokenizer.json ({error}): prepare the data again") from error


def _with_ends(block: str) -> str:
    return block.replace("\n", f" {EOS} ")
