"""Tries a tokenizer in a bounded child: loads it, bounds what it can make of a text, uses it.

Refuses a tokenizer whose text can grow without proportion, by its components (replacements and
templates), and one that fails, or makes far too many tokens of a text, in a number of probes.
Crashes, excessive memory and time end the child, which `tokenizer_trial` reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from dovetail.errors import ModelError
from dovetail.tokenizers.core_building import build_core, is_panic

if TYPE_CHECKING:
    import tokenizers

MAX_TOKEN_ID = 2**31 - 2
MAX_TOKEN_CHARS = 1 << 14
MAX_GROWTH = 32
"""How many times longer the replacements together may make a text."""
MAX_ADDED_CHARS = 4096
"""Characters that components may put around a text or in place of a character."""
MAX_TEMPLATE_PIECES = 64
MAX_TEXT_COPIES = 4
"""How often the templates together may repeat the text's tokens."""
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
_NUM_DECODES = 64
_DECODE_TOKENS = 16


def check(request: Mapping[str, Any], blob: bytes) -> None:
    """Try the tokenizer in `blob`; raise ModelError with a phrase that says what is wrong.

    request: `added_tokens` and `special_texts` for `build_core`.
    """
    try:
        core = build_core(blob, request["added_tokens"], request["special_texts"])
        components = _components(core)
        _check_growth(components)
        _check_templates(components)
        _check_ids(core)
        _probe_encoding(core, components)
        _probe_decoding(core)
    except ModelError:
        raise
    except MemoryError:
        raise
    except BaseException as error:
        what = "the tokenizers library panics: " if is_panic(error) else ""
        raise ModelError(f"{what}{' '.join(str(error).split())[:300]}") from None


def _components(core: tokenizers.Tokenizer) -> list[Mapping[str, Any]]:
    """Return every component, sequences resolved, as tokenizer.json writes them."""
    found: list[Mapping[str, Any]] = []
    for place in _PLACES:
        part = getattr(core, place)
        waiting = [] if part is None else [json.loads(part.__getstate__())]
        while waiting:
            one = waiting.pop()
            parts = one.get(f"{place}s", one.get("pretokenizers", one.get("processors")))
            if one.get("type") == "Sequence" and isinstance(parts, list):
                waiting.extend(parts)
            else:
                found.append({**one, "place": place})
    return found


def _check_growth(components: list[Mapping[str, Any]]) -> None:
    growth = {place: 1.0 for place in _PLACES}
    added = 0
    for one in components:
        if one["type"] == "Replace":
            growth[one["place"]] *= _replacement_growth(one)
        elif one["type"] == "Prepend":
            added += len(one["prepend"])
    worst = max(growth.values())
    if worst > MAX_GROWTH or added > MAX_ADDED_CHARS:
        raise ModelError(
            f"its replacements make a text {worst:.3g} times as long, with {added} characters "
            f"before it; at most {MAX_GROWTH} times and {MAX_ADDED_CHARS} characters are allowed"
        )


def _replacement_growth(replace: Mapping[str, Any]) -> float:
    """Return an upper bound on how much longer a replacement makes a text."""
    shortest = len(replace["pattern"].get("String", ""))
    content = len(replace["content"])
    # A regex, or an empty pattern, may match nothing and be found between any two characters.
    return max(1.0, content / shortest if shortest else 1.0 if content <= 1 else 1 + content)


def _check_templates(components: list[Mapping[str, Any]]) -> None:
    copies, pieces = 1, 0
    for one in components:
        if one["type"] != "TemplateProcessing":
            continue
        single = one["single"]
        copies *= max(1, sum("Sequence" in piece for piece in single))
        pieces += len(single) + len(one["pair"])
        pieces += sum(len(token["ids"]) for token in one["special_tokens"].values())
    if copies > MAX_TEXT_COPIES or pieces > MAX_TEMPLATE_PIECES:
        raise ModelError(
            f"its templates have {pieces} pieces and repeat a text {copies} times; at most "
            f"{MAX_TEMPLATE_PIECES} pieces and {MAX_TEXT_COPIES} copies are allowed"
        )


def _check_ids(core: tokenizers.Tokenizer) -> None:
    vocabulary = core.get_vocab(with_added_tokens=True)
    highest = max(vocabulary.values(), default=0)
    if highest > MAX_TOKEN_ID:
        raise ModelError(f"it has the token id {highest}; ids may be up to {MAX_TOKEN_ID}")
    longest = max(map(len, vocabulary), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise ModelError(
            f"it has a token of {longest} characters; tokens may have {MAX_TOKEN_CHARS}"
        )


def _probe_encoding(core: tokenizers.Tokenizer, components: list[Mapping[str, Any]]) -> None:
    for text in _probes(components):
        num_tokens = len(_encode(core, text))
        most = MAX_GROWTH * MAX_TEXT_COPIES * len(text.encode()) + MAX_ADDED_CHARS
        if num_tokens > most:
            raise ModelError(f"it makes {num_tokens} tokens of {len(text)} characters")


def _encode(core: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        ids: list[int] = core.encode(text).ids
    except Exception:  # a text that the vocabulary cannot express is one request's fault
        return []
    return ids


def _probes(components: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield texts: ordinary ones, long runs, and runs of what the patterns look for."""
    yield from _TEXTS
    for unit in _UNITS:
        yield unit * _UNIT_REPEATS + "!"
    patterns = [one["pattern"] for one in components if isinstance(one.get("pattern"), dict)]
    sources = [str(source) for pattern in patterns for source in pattern.values()]
    for source in sources:
        yield source[:_UNIT_REPEATS] * 3
    for char in sorted(set("".join(sources)))[:_MAX_PROBED_CHARS]:
        yield char * _CHAR_REPEATS + "\x01"


def _probe_decoding(core: tokenizers.Tokenizer) -> None:
    vocabulary = core.get_vocab(with_added_tokens=True)
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    random = Random(0)
    for number in range(_NUM_DECODES if names else 0):
        size = 1 if number % 2 else _DECODE_TOKENS
        sample = [random.choice(names) for _ in range(size)]
        text = core.decode([vocabulary[name] for name in sample], skip_special_tokens=False)
        most = MAX_GROWTH * sum(len(name) + 1 for name in sample) + MAX_ADDED_CHARS
        if len(text) > most:
            raise ModelError(f"it makes {len(text)} characters of {size} tokens")
