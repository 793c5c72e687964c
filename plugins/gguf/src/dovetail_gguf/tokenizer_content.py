"""Converts the vocabulary of a GGUF file to the content of a tokenizer.json.

Source: https://github.com/huggingface/tokenizers
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.errors import ModelError
from dovetail_gguf.encoders.tokenizer_parts import (
    post_processor,
    unigram_parts,
    wordpiece_parts,
)
from dovetail_gguf.encoders.tokenizer_rules import UNIGRAM, WORDPIECE
from dovetail_gguf.vocabulary import BYTE_LEVEL, MAX_SPLIT_CHARS, MAX_SPLITS, Vocabulary
from dovetail_gguf.vocabulary_metadata import MAX_MERGES, TokenType

_TOKENS = "tokenizer.ggml.tokens"
_SPACE = "\u2581"
"""The character that SentencePiece uses for a space."""
_SPECIAL = (TokenType.UNKNOWN, TokenType.CONTROL)
_ADDED = (*_SPECIAL, TokenType.USER_DEFINED)
_OUTSIDE_OF_TEXT = (*_ADDED, TokenType.BYTE)
"""Types of tokens that are never the result of a merge."""


def tokenizer_content(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the object in a tokenizer.json. Raise ModelError if a limit is exceeded."""
    rules = vocabulary.encoder
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(vocabulary)),
        # `add_bos_token` and `add_eos_token` of decoders are separate settings.
        "post_processor": None if rules is None else post_processor(vocabulary.tokens, rules),
        **_parts(vocabulary),
    }


def _parts(vocabulary: Vocabulary) -> dict[str, Any]:
    tokens, rules = vocabulary.tokens, vocabulary.encoder
    if vocabulary.model == BYTE_LEVEL:
        return _byte_level(vocabulary)
    if rules is not None and vocabulary.model == WORDPIECE:
        return wordpiece_parts(tokens, rules)
    if rules is not None and vocabulary.model == UNIGRAM:
        adds_space = vocabulary.adds_space_prefix
        return unigram_parts(tokens, vocabulary.scores, rules, adds_space=adds_space)
    return _sentencepiece(vocabulary)


def _added_tokens(vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
    """Yield the added tokens, which are matched before a text is split into words.

    The mask token of an encoder includes the spaces before it.
    """
    plain = {"single_word": False, "rstrip": False, "normalized": False}
    mask = None if vocabulary.encoder is None else vocabulary.special_ids.get("mask_token")
    for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in _ADDED and token:
            flags = {"special": kind in _SPECIAL, "lstrip": number == mask, **plain}
            yield {"id": number, "content": token, **flags}


def _bpe(vocabulary: Vocabulary, **fields: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary.ids,
        **fields,
    }


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    pre = vocabulary.pre
    assert pre is not None
    merges = vocabulary.merges
    return {
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.steps},
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "model": _bpe(vocabulary, ignore_merges=pre.ignores_merges, merges=merges),
    }


def _sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256))
    to_pieces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_text = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    normalizers, decoders = [to_pieces], [to_text, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if vocabulary.adds_space_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            unk_token=vocabulary.tokens[vocabulary.special_ids["unk_token"]],
            fuse_unk=True,
            byte_fallback=has_bytes,
            merges=derive_merges(vocabulary),
        ),
    }


def derive_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the pairs that form each piece, the piece with the highest score first.

    SentencePiece joins the neighbors that form the piece with the highest score. The order is the
    same as in published tokenizer.json files, which are converted from SentencePiece models.
    """
    pieces = [
        (token, score)
        for token, score, kind in zip(
            vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True
        )
        if kind not in _OUTSIDE_OF_TEXT
    ]
    num_splits = sum(len(token) for token, _ in pieces)
    if num_splits > MAX_SPLITS:
        raise ModelError(
            f"the pieces in {_TOKENS} have {num_splits} characters; the limit is {MAX_SPLITS}"
        )
    num_chars = sum(len(token) ** 2 for token, _ in pieces)
    if num_chars > MAX_SPLIT_CHARS:
        raise ModelError(
            f"the pieces in {_TOKENS} are too long: the sum of their squared lengths is "
            f"{num_chars}; the limit is {MAX_SPLIT_CHARS}"
        )
    ids = {token: vocabulary.ids[token] for token, _ in pieces}
    pieces.sort(key=lambda piece: piece[1], reverse=True)
    merges: list[tuple[str, str]] = []
    for token, _ in pieces:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        if len(merges) > MAX_MERGES:
            raise ModelError(f"the pieces in {_TOKENS} need more than {MAX_MERGES} merges")
    return merges
