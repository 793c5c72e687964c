"""Tests a tokenizer in a bounded child: loads it, checks its components, and uses it.

A tokenizer is rejected if its components (replacements and templates) could make a text much
longer, or if it fails or creates far too many tokens for a probe text. A crash, too much memory or
too much time ends the child, which `tokenizer_trial` reports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from dovetail.errors import ModelError
from dovetail.tokenizers.core_building import build_core, is_panic

if TYPE_CHECKING:
    import tokenizers

MAX_TOKEN_ID = 2**31 - 2
MAX_TOKEN_CHARS = 1 << 14
MAX_COMPONENTS = 100
"""Maximum number of normalizers, pre-tokenizers, post-processors and decoders together."""
MAX_GROWTH = 32
"""Maximum factor by which all components together may lengthen a text."""
_FIXED_GROWTH = {
    ("normalizer", "ByteLevel"): 2,
    ("pre_tokenizer", "ByteLevel"): 2,
    ("normalizer", "BertNormalizer"): 3,
}
MAX_ADDED_CHARS = 4096
"""Maximum characters that components may add to a text, or that replace one character."""
MAX_AFFIX_CHARS = 64
"""Maximum length of `continuing_subword_prefix` and `end_of_word_suffix`."""
MAX_WORD_CHARS = 256
"""Maximum `max_input_chars_per_word`, because WordPiece takes cubic time in a word's length."""
MAX_PREFIX_BYTES = 1 << 15
"""Maximum total bytes of the Unigram pieces that can start at the same position of a text; this
limits the time of tokenizing."""
MAX_TEMPLATE_PIECES = 64
MAX_TEXT_COPIES = 4
"""Maximum number of times that the templates together may repeat the tokens of a text."""
_PLACES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_TEXTS = (
    "",
    "Hello, world! It's 3.14 o'clock\n\n\tand we're  here. ",
    "你好，世界 これはペンです 안녕하세요 Привет мир مرحبا שלום नमस्ते ไทย",
    "é\u0301\u200d\ufdfa\ufb01 😀👩\u200d🚀\x00\x07\r\n\u2028\ufffd",
    "def f(x):\n    return x ** 2  # <s> </s> [INST] <|im_start|> &amp; <br/>\n",
)
_UNITS = ("a", "A", " ", "\n", "1", ".", "é", "你", "a ", "a1", "-=")
_UNIT_REPEATS = 2000
_CHAR_REPEATS = 100
_MAX_PROBED_CHARS = 96
_ESCAPE = re.compile(r"\\(?:x\{([0-9a-fA-F]+)\}|[xu]([0-9a-fA-F]{1,4})|([0-7]{1,3}))")
_RANGE = re.compile(r"([^\\])-(.)", re.DOTALL)
_NUM_DECODES = 64
_DECODE_TOKENS = 16

_loaded: list[tokenizers.Tokenizer] = []


def check(request: Mapping[str, Any] | None, blob: bytes) -> None:
    """Load the tokenizer in `blob`. If `request` is None, run probes on the loaded tokenizer.

    request: `added_tokens` and `special_texts` for `build_core`. Raises ModelError with a phrase
    about the problem.
    """
    try:
        if request is None:
            _probe(_loaded[-1])
        else:
            _loaded.append(_load(request, blob))
    except ModelError:
        raise
    except MemoryError:
        raise
    except BaseException as error:
        what = "the tokenizers library failed with a Rust panic: " if is_panic(error) else ""
        raise ModelError(f"{what}{' '.join(str(error).split())[:300]}") from None


def _load(request: Mapping[str, Any], blob: bytes) -> tokenizers.Tokenizer:
    core = build_core(blob, request["added_tokens"], request["special_texts"])
    components = _components(core)
    _check_growth(components)
    _check_templates(components)
    _check_ids(core)
    _check_model(core)
    return core


def _probe(core: tokenizers.Tokenizer) -> None:
    _probe_encoding(core, _components(core))
    _probe_decoding(core)


def _components(core: tokenizers.Tokenizer) -> list[Mapping[str, Any]]:
    """Return the description of each component as in tokenizer.json. Sequences are flattened."""
    components: list[Mapping[str, Any]] = []
    for key in _PLACES:
        part = getattr(core, key)
        waiting = [] if part is None else [json.loads(part.__getstate__())]
        while waiting:
            value = waiting.pop()
            parts = value.get(f"{key}s", value.get("pretokenizers", value.get("processors")))
            if value.get("type") == "Sequence" and isinstance(parts, list):
                waiting.extend(parts)
            else:
                components.append({**value, "place": key})
    return components


def _check_growth(components: list[Mapping[str, Any]]) -> None:
    if len(components) > MAX_COMPONENTS:
        raise ModelError(
            f"the tokenizer has {len(components)} components; at most {MAX_COMPONENTS} are allowed"
        )
    encoding, decoding, added = 1.0, 1.0, 0
    for component in components:
        growth = _growth(component)
        if component["place"] == "decoder":
            decoding *= growth
        else:
            encoding *= growth
        if component["type"] == "Prepend":
            added += len(component["prepend"])
    worst = max(encoding, decoding)
    if worst > MAX_GROWTH or added > MAX_ADDED_CHARS:
        raise ModelError(
            f"the components lengthen a text by a factor of {worst:.3g} and add {added} characters "
            f"before it; the limits are {MAX_GROWTH} and {MAX_ADDED_CHARS} characters"
        )


def _growth(component: Mapping[str, Any]) -> float:
    """Return an upper bound for the factor by which a component lengthens a text."""
    if component["type"] == "Replace":
        return _replacement_growth(component)
    return _FIXED_GROWTH.get((component["place"], component["type"]), 1)


def _replacement_growth(replace: Mapping[str, Any]) -> float:
    shortest = len(replace["pattern"].get("String", ""))
    content = len(replace["content"])
    # A regex or an empty pattern may match the empty string between any two characters.
    return max(1.0, content / shortest if shortest else 1.0 if content <= 1 else 1 + content)


def _check_templates(components: list[Mapping[str, Any]]) -> None:
    copies, pieces = 1, 0
    for component in components:
        if component["type"] != "TemplateProcessing":
            continue
        single = component["single"]
        copies *= max(1, sum("Sequence" in piece for piece in single))
        pieces += len(single) + len(component["pair"])
        pieces += sum(len(token["ids"]) for token in component["special_tokens"].values())
    if copies > MAX_TEXT_COPIES or pieces > MAX_TEMPLATE_PIECES:
        raise ModelError(
            f"the templates have {pieces} pieces and repeat a text {copies} times; at most "
            f"{MAX_TEMPLATE_PIECES} pieces and {MAX_TEXT_COPIES} copies are allowed"
        )


def _check_ids(core: tokenizers.Tokenizer) -> None:
    vocabulary = core.get_vocab(with_added_tokens=True)
    highest = max(vocabulary.values(), default=0)
    if highest > MAX_TOKEN_ID:
        raise ModelError(
            f"the tokenizer has the token id {highest}; the largest allowed id is {MAX_TOKEN_ID}"
        )
    longest = max(map(len, vocabulary), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise ModelError(
            f"the tokenizer has a token of {longest} characters; the limit is {MAX_TOKEN_CHARS}"
        )


def _check_model(core: tokenizers.Tokenizer) -> None:
    """Raise ModelError if the tokenizer's model could be slow for strings other than the probes."""
    model = core.model
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(model, field, None) or ""
        if len(affix) > MAX_AFFIX_CHARS:
            raise ModelError(
                f"{field} has {len(affix)} characters; at most {MAX_AFFIX_CHARS} are allowed"
            )
    word = getattr(model, "max_input_chars_per_word", 0)
    if word > MAX_WORD_CHARS:
        raise ModelError(f"max_input_chars_per_word is {word}; at most {MAX_WORD_CHARS} is allowed")
    if type(model).__name__ == "Unigram":
        _check_prefixes(core.get_vocab(with_added_tokens=False))


def _check_prefixes(vocabulary: Iterable[str]) -> None:
    """Raise ModelError if pieces that are prefixes of each other have too many bytes together."""
    chain: list[bytes] = []
    num_bytes = 0
    for piece in sorted(name.encode() for name in vocabulary):
        while chain and not piece.startswith(chain[-1]):
            num_bytes -= len(chain.pop())
        chain.append(piece)
        num_bytes += len(piece)
        if num_bytes > MAX_PREFIX_BYTES:
            raise ModelError(
                f"the vocabulary has a chain of {len(chain)} pieces, each a prefix of the next, "
                "with "
                f"{num_bytes} bytes; at most {MAX_PREFIX_BYTES} bytes are allowed"
            )


def _probe_encoding(core: tokenizers.Tokenizer, components: list[Mapping[str, Any]]) -> None:
    for text in _probes(components):
        num_tokens = len(_encode(core, text))
        maximum = MAX_GROWTH * MAX_TEXT_COPIES * len(text.encode()) + MAX_ADDED_CHARS
        if num_tokens > maximum:
            raise ModelError(
                f"the tokenizer created {num_tokens} tokens from {len(text)} characters; at most "
                f"{maximum} are allowed"
            )


def _encode(core: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        ids: list[int] = core.encode(text).ids
    except Exception:  # a text that cannot be encoded only affects its own request
        return []
    return ids


def _probes(components: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield probes: ordinary strings, long repetitions, and repetitions of pattern characters."""
    yield from _TEXTS
    for unit in _UNITS:
        yield unit * _UNIT_REPEATS + "!"
    patterns = [
        component["pattern"]
        for component in components
        if isinstance(component.get("pattern"), dict)
    ]
    sources = [str(source) for pattern in patterns for source in pattern.values()]
    for source in sources:
        yield source[:_UNIT_REPEATS] * 3
    chars = sorted(set("".join(map(_pattern_chars, sources))))[:_MAX_PROBED_CHARS]
    # A pattern may require several characters, so each probe contains all of them.
    for char in chars:
        yield char * _CHAR_REPEATS + "\x01" + "".join(chars)


def _pattern_chars(source: str) -> str:
    """Return the characters in a pattern: literal, escaped, or from the middle of a range."""
    codes = (int(a or b, 16) if a or b else int(c, 8) for a, b, c in _ESCAPE.findall(source))
    escaped = "".join(chr(code) for code in codes if code < 0xD800 or 0xDFFF < code < 0x110000)
    middles = "".join(
        chr((ord(first) + ord(last)) // 2) for first, last in _RANGE.findall(source + escaped)
    )
    return source + escaped + middles.encode("utf-8", "ignore").decode()


def _probe_decoding(core: tokenizers.Tokenizer) -> None:
    vocabulary = core.get_vocab(with_added_tokens=True)
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    random = Random(0)
    for number in range(_NUM_DECODES if names else 0):
        size = 1 if number % 2 else _DECODE_TOKENS
        sample = [random.choice(names) for _ in range(size)]
        text = core.decode([vocabulary[name] for name in sample], skip_special_tokens=False)
        maximum = MAX_GROWTH * sum(len(name) + 1 for name in sample) + MAX_ADDED_CHARS
        if len(text) > maximum:
            raise ModelError(
                f"the tokenizer decoded {size} tokens to {len(text)} characters; at most {maximum} "
                "are allowed"
            )
