"""Text to token files: the vocabulary first, then every fragment in its split, tokenised by all cores."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fullrank.errors import FullrankError
from fullrank.text import shards, tokenisers
from fullrank.text import sources as reading
from fullrank.text import splits as splitting
from fullrank.text import vocabulary as vocabularies
from fullrank.text import workers as pool
from fullrank.text.documents import Fragment, Read, replacement_note
from fullrank.text.formats import BINARY
from fullrank.text.settings import DataConfig
from fullrank.text.shards import Writer
from fullrank.text.sources import Source, Texts
from fullrank.text.splits import SPLITS, Plan
from fullrank.text.tokenisers import Template
from fullrank.text.vocabulary import Bpe, Bytes, Passage, Vocabulary, Words

Progress = Callable[[str, float], None]
"""Hears what is done and the share of it that is done."""
Warn = Callable[[str], None]

BATCH = (1 << 19, 4 << 20)
"""Characters that are handed to a process at once, at least and at most."""

LARGE = 64 << 20
"""Bytes from which on other processes tokenise; up to here the tokenizers library's threads do as well."""


class Built(NamedTuple):
    """Token files without their description."""

    vocabulary: Vocabulary
    writers: dict[str, Writer]
    about: dict[str, Any]
    """Where it all came from."""


class Material(NamedTuple):
    """All that tokens are made from."""

    texts: Texts
    plan: Plan
    config: DataConfig
    chat: Template | None

    def fragments(self, read: Read | None = None) -> Iterator[tuple[str, Source, int, Fragment]]:
        read = Read() if read is None else read
        return splitting.assigned(self.texts, self.plan, self.config, read, self.chat)

    def watched(self, label: str, split: str, progress: Progress) -> Iterator[str]:
        """The text of one split."""
        done = 0
        for own, _, _, fragment in self.fragments():
            done += len(fragment.text)
            progress(label, min(1.0, done / max(self.texts.bytes, 1)))
            if own == split:
                yield fragment.text


def look(
    listing: list[reading.Named], sources: Sequence[str | Path], config: DataConfig, warn: Warn
) -> Texts:
    texts = reading.look(listing, sources, config.documents)
    roles = {splitting.role(one.name) for one in listing}
    named = len(listing) < 2 or (len(roles) > 1 and None not in roles)
    for name, reason in zip(texts.skipped, texts.reasons, strict=True):
        own = splitting.role(name)
        if named and own and own not in {splitting.role(source.name) for source in texts.sources}:
            # The only file of a split: leaving it out would be no help.
            raise FullrankError(reason)
        if not reason.endswith(BINARY):
            warn(f"left out: {reason}")
    return texts


def conversations(texts: Texts) -> bool:
    """Whether there may be conversations: rows whose field is another than text."""
    return any(one.kind != "text" and one.field != reading.FIELD for one in texts.sources)


def key_of(text: Material, version: int) -> str:
    """Of everything that the token files depend on."""
    texts, plan, config, chat = text
    settings: dict[str, Any] = {"level": config.level, "documents": config.documents}
    if config.level == "words":
        settings["vocabulary_from"] = config.vocabulary_from
    elif config.level == "bpe":
        settings["vocabulary_size"] = config.vocabulary_size
        if config.tokenizer:
            tokenizer, end = tokenisers.loaded(config.tokenizer)
            settings["tokenizer"] = [hashlib.sha256(tokenizer.to_str().encode()).hexdigest(), end]
        else:
            settings["bpe_size"] = config.bpe_size
    if chat is not None:
        settings["chat"] = chat.text
    if None in plan.bounds:
        settings["shares"] = [config.valid_share, config.test_share]
    sources = [(one.name, one.kind, one.member, one.field, one.sha256) for one in texts.sources]
    whole = json.dumps([version, settings, sources, plan.by, plan.bounds, plan.whole, texts.skipped])
    return hashlib.sha256(whole.encode("utf8", "surrogateescape")).hexdigest()[:24]


def _vocabulary(text: Material, progress: Progress) -> tuple[Vocabulary, str]:
    """And whose text it was made from."""
    config = text.config
    if config.level == "bytes":
        return Bytes(), "bytes"
    if config.level == "words":
        wanted = SPLITS if config.vocabulary_from == "all" else ("train",)
        return Words.build(text.watched("collecting words", one, progress) for one in wanted), (
            config.vocabulary_from
        )
    if config.tokenizer:
        tokenizer, end = tokenisers.loaded(config.tokenizer)
        template = "" if text.chat is None else text.chat.source()
        vocabulary = Bpe.loaded(
            tokenizer, config.tokenizer, end,
            size=config.vocabulary_size, marked=text.chat is not None, chat_template=template,
        )  # fmt: skip
        return vocabulary, "tokenizer"
    sampled = tokenisers.sampled(text.watched("training BPE", "train", progress), text.texts.bytes)
    trained = Bpe.train(sampled, config.bpe_size)
    return Bpe(trained.tokenizer, trained.eos, size=config.vocabulary_size), "train"


def build(folder: Path, text: Material, progress: Progress, warn: Warn) -> Built:
    """Fill a folder."""
    vocabulary, origin = _vocabulary(text, progress)
    vocabulary.save(folder)
    read, total, done = Read(), max(text.texts.bytes, 1), 0
    known = all(source.kind != "dataset" for source in text.texts.sources)
    large = (total > LARGE or not known) and vocabulary.level != "bytes"
    count = pool.cores() if large else 1
    size = min(max(total // (16 * count), BATCH[0]), BATCH[1])
    begun = time.monotonic()
    with (
        shards.writers(folder, vocabulary.size) as writers,
        pool.workers(vocabularies.load, folder, count=count) as submit,
    ):
        batches = _batches(text.fragments(read), writers, size)
        for found in pool.in_order(submit, _encode, batches, count):
            for split, (ids, replaced, text_bytes) in found.items():
                writers[split].add(ids)
                writers[split].replaced += replaced
                writers[split].bytes += text_bytes
                done += text_bytes
            tokens = sum(writer.tokens for writer in writers.values())
            rate = tokens / max(time.monotonic() - begun, 1e-9) / 1e6
            progress(f"tokenising: {tokens / 1e6:.1f}M tokens, {rate:.2f}M/s", min(1.0, done / total))
        for split, writer in writers.items():
            if not writer.documents:
                own = [one.name for one in text.texts.sources if splitting.role(one.name) == split]
                names = f" ({', '.join(own)})" if own and text.plan.by != "lines" else ""
                raise FullrankError(
                    f"the {split} split has only blank lines{names}: give text with words in it"
                )
    if read.replaced:
        warn(replacement_note(read.replaced))
    sources = [{"name": one.name, "bytes": one.bytes, "sha256": one.sha256} for one in text.texts.sources]
    about = {"vocabulary_from": origin, "split_by": text.plan.by, "from_train": list(text.plan.missing)}
    return Built(vocabulary, writers, {**about, "sources": sources, "skipped": list(text.texts.skipped)})


def _batches(
    fragments: Iterator[tuple[str, Source, int, Fragment]], writers: dict[str, Writer], size: int
) -> Iterator[list[tuple[str, Passage]]]:
    """Passages to be tokenised together, about `size` characters; counts documents and lines on the way."""
    batch: list[tuple[str, Passage]] = []
    characters = 0
    for split, source, line, fragment in fragments:
        writer = writers[split]
        writer.documents += fragment.begins
        writer.lines += fragment.text.count("\n") + (fragment.ends and not fragment.text.endswith("\n"))
        batch.append((split, Passage(fragment.text, fragment.ends, source.name, line)))
        characters += len(fragment.text)
        if characters >= size:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(
    vocabulary: Vocabulary, batch: list[tuple[str, Passage]]
) -> dict[str, tuple[np.ndarray, int, int]]:
    """Ids, unknown words and bytes of each split of a batch."""
    found = {}
    for split in dict.fromkeys(split for split, _ in batch):
        passages = [passage for own, passage in batch if own == split]
        pieces = list(vocabulary.pieces(passages))
        ids = np.concatenate([piece.ids for piece in pieces]) if pieces else np.zeros(0)
        size = sum(len(passage.text.encode("utf8", "replace")) for passage in passages)
        found[split] = (
            ids.astype(shards.dtype_of(vocabulary.size)),
            sum(piece.replaced for piece in pieces),
            size,
        )
    return found
