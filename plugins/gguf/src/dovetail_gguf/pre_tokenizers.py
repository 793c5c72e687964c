"""The rules by which byte-level BPE splits a text into words, by the name in `tokenizer.ggml.pre`.

The patterns are those of the original tokenizers. A pattern that differs from the one used in
training splits a text into different tokens, which makes every output worse. Therefore only the
names in `PRE_TOKENIZERS` are supported. Source:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Component = Mapping[str, Any]
"""A component of a tokenizer, in the form of tokenizer.json."""


def _split(pattern: str) -> Component:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_level(*, use_regex: bool) -> Component:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


_BYTES = _byte_level(use_regex=False)
_GPT2_WORDS = _byte_level(use_regex=True)
_DIGITS: Component = {"type": "Digits", "individual_digits": True}


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """One rule to split a text.

    steps: components that split the text into byte-level words.
    normalizer: component that changes the text first.
    ignores_merges: whether a word in the vocabulary is always one token.
    adds_bos: the default of `tokenizer.ggml.add_bos_token`.
    """

    steps: tuple[Component, ...]
    normalizer: Component | None = None
    ignores_merges: bool = False
    adds_bos: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(digits: str, contractions: str = "") -> str:
    """Return a pattern that splits words before capital letters."""
    before, symbols = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    mostly_lower = f"{before}{_UPPER}*{_LOWER}+{contractions}"
    mostly_upper = f"{before}{_UPPER}+{_LOWER}*{contractions}"
    return f"{mostly_lower}|{mostly_upper}|{digits}{symbols}{_SPACES}"


_LLAMA3 = PreTokenizer(
    steps=(_split(_CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _SYMBOLS + _SPACES), _BYTES),
    ignores_merges=True,
    adds_bos=True,
)
_CL100K = PreTokenizer(steps=_LLAMA3.steps, ignores_merges=True)
_QWEN2 = PreTokenizer(
    steps=(_split(_CONTRACTIONS + _WORD + r"|\p{N}" + _SYMBOLS + _SPACES), _BYTES),
    normalizer={"type": "NFC"},
)
_QWEN35 = PreTokenizer(
    steps=(
        _split(
            _CONTRACTIONS
            + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
            + _SPACES
        ),
        _BYTES,
    ),
    normalizer={"type": "NFC"},
)
_GPT2 = PreTokenizer(steps=(_GPT2_WORDS,))
_MODERN_BERT = PreTokenizer(steps=(_GPT2_WORDS,), normalizer={"type": "NFC"})
_SMOLLM = PreTokenizer(steps=(_DIGITS, _GPT2_WORDS))
_GPT4O = PreTokenizer(
    steps=(_split(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")), _BYTES), ignores_merges=True
)
_TEKKEN = PreTokenizer(
    steps=(_split(_cased_words(r"\p{N}")), _BYTES), ignores_merges=True, adds_bos=True
)
_DEEPSEEK_V3 = PreTokenizer(
    steps=(
        _split(r"\p{N}{1,3}"),
        _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        _split(
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
        ),
        _BYTES,
    )
)
_CASED_RANGES = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba "
    "1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 "
    "1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb "
    "1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d "
    "212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a "
    "ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943 "
)
"""The letters in the pattern of DeepSeek LLM: the cased letters of an old Unicode version."""


def _characters(ranges: str) -> str:
    """Return the ranges of hexadecimal code points as the inside of a character class."""
    return "".join("-".join(chr(int(end, 16)) for end in x.split("-")) for x in ranges.split())


_DEEPSEEK_LLM = PreTokenizer(
    steps=(
        _split(r"[\r\n]"),
        _split(rf"\s?[{_characters(_CASED_RANGES)}]+"),
        _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        _split(r"\s+$"),
        _split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        _DIGITS,
        _BYTES,
    )
)
_DEEPSEEK_CODER = PreTokenizer(
    steps=(
        _split(r"[\r\n]"),
        _split(r"\s?\p{L}+"),
        _split(r"\s?\p{P}+"),
        _split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        _DIGITS,
        _BYTES,
    )
)
_DEFAULT = PreTokenizer(
    steps=(
        _split(r"[\p{P}\$\+<=>\^~\|]+"),
        _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        _split(r"\p{N}+"),
        _split("[0-9][0-9][0-9]"),
        _BYTES,
    )
)

_NAMES = (
    (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_CL100K, "dbrx smaug-bpe"),
    (_QWEN2, "qwen2 deepseek-r1-qwen"),
    (_QWEN35, "qwen35"),
    (_GPT2, "gpt-2 phi-2 mpt olmo mellum trillion roberta-bpe"),
    (_MODERN_BERT, "modern-bert"),
    (_SMOLLM, "smollm starcoder refact command-r codeshell minerva-7b"),
    (_GPT4O, "gpt-4o llama4 kanana2"),
    (_TEKKEN, "tekken"),
    (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense"),
    (_DEEPSEEK_LLM, "deepseek-llm"),
    (_DEEPSEEK_CODER, "deepseek-coder"),
    (_DEFAULT, "default"),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: row for row, names in _NAMES for name in names.split()
}
