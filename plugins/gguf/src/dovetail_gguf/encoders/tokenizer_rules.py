"""The rules of the tokenizers of encoders, from the metadata of a GGUF file.

The converter stores pieces of WordPiece with the mark of a word's start, U+2581, instead of the
mark "##" of its continuation. Files of llama.cpp before 2026 do not state whether a text is
converted to lower case; the vocabulary shows it.
Source: https://github.com/ggml-org/llama.cpp, `conversion/bert.py` and `src/llama-vocab.cpp`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail_gguf.encoders.architecture_names import ENCODER_NAMES, MODERN_BERT
from dovetail_gguf.reader import GGUFFile
from dovetail_gguf.vocabulary_metadata import SPECIAL_TOKENS, TokenType, VocabularyMetadata

WORDPIECE, UNIGRAM = "bert", "t5"
"""Values of `tokenizer.ggml.model`."""
CONTINUATION = "##"
MASK = "<mask>"
_START = "\u2581"
_WHOLE = re.compile(r"\[(unused\d+|PAD\d*|UNK|CLS|SEP|MASK)\]")
"""Tokens that older converters store without the mark of a word's start."""
_TEXTS = {
    WORDPIECE: {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"},
    UNIGRAM: {"cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>"},
}
"""Texts of special tokens whose ids a file does not state."""
_OTHER_NAMES = {"cls_token": "bos_token", "sep_token": "eos_token"}
_MAX_SHARE_OF_MARKED = 0.05
_LATIN = re.compile("[\u00c0-\u024f\u1e00-\u1eff]")


@dataclass(frozen=True, kw_only=True)
class EncoderRules:
    """The rules of one tokenizer.

    first, last: ids of the tokens around a text; None for none. separator: id of the token after
    each text of a pair. has_two_separators: whether two of them are between the texts, as in
    RoBERTa; otherwise the second text has the token type 1. unknown: id of the token for unknown
    words; None for byte-level BPE. lowercases, strips_accents: of WordPiece. charsmap: the
    normalization of Unigram.
    """

    first: int | None
    last: int | None
    separator: int
    has_two_separators: bool
    unknown: int | None
    lowercases: bool
    strips_accents: bool
    charsmap: bytes

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids of the special tokens, by the name of the variable of chat templates."""
        named = {
            "cls_token": self.first,
            "sep_token": self.separator,
            "unk_token": self.unknown,
        }
        return {name: number for name, number in named.items() if number is not None}


def read_rules(
    file: GGUFFile,
    source: VocabularyMetadata,
    model: str,
    tokens: Sequence[str],
    types: Sequence[int],
    special_ids: Mapping[str, int],
) -> EncoderRules | None:
    """Return the rules; None for the tokenizer of a decoder.

    tokens: with the marks of the original vocabulary. Raises ModelError, naming the key of the id,
    for a special token that the file lacks.
    """
    architecture = file.metadata.get("general.architecture")
    if model not in (WORDPIECE, UNIGRAM) and architecture not in ENCODER_NAMES:
        return None
    finder = _SpecialIds(source, tokens, special_ids, _TEXTS.get(model, {}))
    first, separator = finder.find("cls_token"), finder.find("sep_token")
    lowercases = strips_accents = False
    if model == WORDPIECE:
        normal = [
            token
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.NORMAL and not _WHOLE.fullmatch(token)
        ]
        lowercases = source.value(
            "normalizer.lowercase", bool, default=not any(map(_has_capital, normal))
        )
        strips_accents = source.value(
            "normalizer.strip_accents",
            bool,
            default=lowercases and not any(map(_has_accent, normal)),
        )
    return EncoderRules(
        first=first if source.value("add_bos_token", bool, default=True) else None,
        last=separator if source.value("add_eos_token", bool, default=True) else None,
        separator=separator,
        has_two_separators=model != WORDPIECE and architecture != MODERN_BERT,
        unknown=finder.find("unk_token") if model in _TEXTS else None,
        lowercases=lowercases,
        strips_accents=strips_accents,
        charsmap=source.charsmap() if model == UNIGRAM else b"",
    )


def is_sentencepiece(tokens: Sequence[str]) -> bool:
    """Return whether a vocabulary that is stored as WordPiece has the pieces of SentencePiece.

    llama.cpp's converter writes such files for CamemBERT: it adds the mark of a word's start to all
    pieces, also to those that begin with it. In a WordPiece vocabulary, at most
    the token for the mark itself begins with two marks.
    """
    num_marked = sum(token.startswith(2 * _START) and len(token) > 2 for token in tokens)
    return num_marked > len(tokens) * _MAX_SHARE_OF_MARKED


def restore_wordpieces(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Return the pieces of WordPiece with "##" before continuations of words."""
    return [_restore(token, kind) for token, kind in zip(tokens, types, strict=True)]


def name_mask_token(
    tokens: Sequence[str], types: Sequence[int], special_ids: Mapping[str, int]
) -> tuple[list[str], list[int]]:
    """Return tokens and types with the text of the mask token.

    Files that were converted from a SentencePiece model have an unused token in its place.
    """
    tokens, types = list(tokens), list(types)
    mask = special_ids.get("mask_token")
    is_filler = mask is not None and types[mask] == TokenType.UNUSED
    if mask is not None and is_filler and _WHOLE.fullmatch(tokens[mask]) and MASK not in tokens:
        tokens[mask], types[mask] = MASK, int(TokenType.CONTROL)
    return tokens, types


def _restore(token: str, kind: int) -> str:
    if kind in (TokenType.CONTROL, TokenType.UNKNOWN) or _WHOLE.fullmatch(token):
        return token
    is_start = token.startswith(_START) and len(token) > 1
    return token[1:] if is_start else f"{CONTINUATION}{token}"


def _has_capital(token: str) -> bool:
    """Return whether a token has a capital letter of ASCII, which no text in lower case has."""
    return token != token.lower() and any("A" <= char <= "Z" for char in token)


def _has_accent(token: str) -> bool:
    """Return whether a token has a Latin letter with an accent, which is not part of the letter."""
    return not token.isascii() and any(
        unicodedata.combining(char)
        for letter in _LATIN.findall(token)
        for char in unicodedata.normalize("NFD", letter)
    )


class _SpecialIds:
    """Finds the ids of special tokens. texts: the texts of tokens whose ids are not stated."""

    def __init__(
        self,
        source: VocabularyMetadata,
        tokens: Sequence[str],
        special_ids: Mapping[str, int],
        texts: Mapping[str, str],
    ) -> None:
        self._source, self._tokens = source, tokens
        self._special_ids, self._texts = special_ids, texts

    def find(self, name: str) -> int:
        """Return the id of the token `name`. Raise ModelError, naming its key, if it has none."""
        for stated in (name, _OTHER_NAMES.get(name, name)):
            if stated in self._special_ids:
                return self._special_ids[stated]
        text = self._texts.get(name)
        if text in self._tokens:
            return self._tokens.index(text)
        raise self._source.rejection(f"{SPECIAL_TOKENS[name]} is missing")
