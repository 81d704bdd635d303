"""A vocabulary of ours as a tokenizer of transformers: the same ids for every text, and the same text back.

    words   lines become "... <eos>", words are what stands between Python's white space; one id a word
    bytes   the 256 values of a byte, without merges, and an end
    bpe     the tokeniser itself
    ids     numbers with spaces between them, for tokens that came without a tokenizer

Every text begins after the token that ends one, as in training, so the tokenizer puts it first. A text that
spells a special token does not become it, except for words, where <eos> is a word, and where training read
conversations: their chat template writes special tokens, and is saved with the tokenizer. What ends with a
text is left to who asks: a prompt goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fullrank.text.vocabulary import END, Bpe, Bytes, Numbers, Vocabulary, Words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WHITE = r"[\s\x1c-\x1f]+"
"""White space as str.split() has it: Unicode's, and four separators of ASCII."""


def as_tokenizer(vocabulary: Vocabulary, *, longest: int | None = None) -> Any:
    """A `PreTrainedTokenizerFast`; `longest` is the most tokens that its model takes."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    if isinstance(vocabulary, Words):
        made, unknown = _words(vocabulary), vocabulary.unknown
    elif isinstance(vocabulary, Bytes):
        made, unknown = _bytes(), None
    elif isinstance(vocabulary, Numbers):
        made, unknown = _numbers(vocabulary), None
    else:
        assert isinstance(vocabulary, Bpe)
        # A copy: what follows must not change the one that reads text.
        made, unknown = Tokenizer.from_str(vocabulary.tokenizer.to_str()), vocabulary.unknown
    end = made.id_to_token(vocabulary.eos)
    made.post_processor = processors.TemplateProcessing(
        single=f"{end} $A", pair=f"{end} $A $B", special_tokens=[(end, vocabulary.eos)]
    )
    marked, template = False, ""
    if isinstance(vocabulary, Bpe):
        marked, template = vocabulary.marked, vocabulary.chat_template
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        unk_token=None if unknown is None else made.id_to_token(unknown),
        split_special_tokens=not marked,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        **({"chat_template": template} if template else {}),
        **({} if longest is None else {"model_max_length": longest}),
    )


def _words(vocabulary: Words) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    end = vocabulary.words[vocabulary.eos]
    unknown = None if vocabulary.unknown is None else vocabulary.words[vocabulary.unknown]
    entries = {word: index for index, word in enumerate(vocabulary.words)}
    made = Tokenizer(models.WordLevel(entries, **({} if unknown is None else {"unk_token": unknown})))
    made.normalizer = normalizers.Replace("\n", f" {end} ")
    made.pre_tokenizer = pre_tokenizers.Split(Regex(WHITE), "removed")
    # A space before every word but the first, then the ends of lines; no word contains a space.
    made.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix=" ", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(f" ?{end} ?"), "\n"),
        ]
    )
    return made


def _numbers(vocabulary: Numbers) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({str(index): index for index in range(vocabulary.size)}))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece(prefix=" ", cleanup=False)
    return made


def _bytes() -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    entries = {**{letter: value for value, letter in bytes_to_unicode().items()}, END: Bytes.eos}
    made = Tokenizer(models.BPE(entries, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


__all__ = ["as_tokenizer"]
