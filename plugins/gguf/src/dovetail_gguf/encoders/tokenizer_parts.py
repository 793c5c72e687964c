"""The parts of a tokenizer.json that the vocabularies of encoders have.

Sources: https://github.com/huggingface/tokenizers; Wu et al. 2016, arXiv:1609.08144 (WordPiece);
Kudo 2018, arXiv:1804.10959 (Unigram).
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any

from dovetail_gguf.encoders.tokenizer_rules import CONTINUATION, EncoderRules

Part = dict[str, Any]

_MAX_CHARS_OF_WORD = 100
"""Longer words are unknown, as in the original BERT."""
_SPACE = "\u2581"


def wordpiece_parts(tokens: Sequence[str], rules: EncoderRules) -> Part:
    """Return normalizer, pre-tokenizer, decoder and model of WordPiece."""
    assert rules.unknown is not None
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": rules.strips_accents,
            "lowercase": rules.lowercases,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": CONTINUATION, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": tokens[rules.unknown],
            "continuing_subword_prefix": CONTINUATION,
            "max_input_chars_per_word": _MAX_CHARS_OF_WORD,
            "vocab": {token: number for number, token in enumerate(tokens)},
        },
    }


def unigram_parts(
    tokens: Sequence[str], scores: Sequence[float], rules: EncoderRules, *, adds_space: bool
) -> Part:
    """Return normalizer, pre-tokenizer, decoder and model of Unigram, as XLM-R has them.

    adds_space: whether the first word of a text starts with a space.
    """
    charsmap = b64encode(rules.charsmap).decode("ascii")
    scheme = "always" if adds_space else "never"
    spaces = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": True}
    return {
        "normalizer": (
            {"type": "Precompiled", "precompiled_charsmap": charsmap} if charsmap else None
        ),
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, spaces],
        },
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": rules.unknown,
            "vocab": [list(pair) for pair in zip(tokens, scores, strict=True)],
            "byte_fallback": False,
        },
    }


def post_processor(tokens: Sequence[str], rules: EncoderRules) -> Part:
    """Return the template that puts special tokens around a text and between two texts."""
    first, last = ([] if number is None else [number] for number in (rules.first, rules.last))
    between = [rules.separator] * (2 if rules.has_two_separators else 1)
    second_type = 0 if rules.has_two_separators else 1
    used = {*first, *last, rules.separator}
    return {
        "type": "TemplateProcessing",
        "single": [*_special(tokens, first), _text("A", 0), *_special(tokens, last)],
        "pair": [
            *_special(tokens, first),
            _text("A", 0),
            *_special(tokens, between),
            _text("B", second_type),
            *_special(tokens, last, second_type),
        ],
        "special_tokens": {
            tokens[number]: {
                "id": tokens[number],
                "ids": [number],
                "tokens": [tokens[number]],
            }
            for number in sorted(used)
        },
    }


def _special(tokens: Sequence[str], numbers: Iterable[int], type_id: int = 0) -> list[Part]:
    return [{"SpecialToken": {"id": tokens[number], "type_id": type_id}} for number in numbers]


def _text(name: str, type_id: int) -> Part:
    return {"Sequence": {"id": name, "type_id": type_id}}
