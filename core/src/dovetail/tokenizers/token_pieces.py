"""Finds the text of each token in a tokenizer.json, if it does not depend on neighbors.

The type of the decoder shows whether the text of a token depends on its neighbors. The decoder also
yields the pieces. As a check, joined pieces are compared with the tokenizer's `decode` for random
sequences; if any text differs, the pieces are not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from dovetail.interfaces.tokenizer import TokenPieces
from dovetail.tokenizers.core_building import REPLACEMENT, PanicGuard

NUM_SAMPLES = 48
SAMPLE_TOKENS = 12
_ANCHORS = 4096
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BEFORE_FUSE = ("Replace", "Metaspace", "ByteFallback")


def make_token_pieces(core: PanicGuard, skipped: frozenset[int]) -> TokenPieces | None:
    """Return the pieces, or None if the text of a token depends on its neighbors.

    skipped: ids without text.
    """
    steps = _decoder_steps(core)
    if steps is None:
        return None
    pieces: TokenPieces | None = None
    before = ""
    if [step["type"] for step in steps] == ["ByteLevel"]:
        pieces = _byte_level_pieces(core, skipped)
        anchor = None
    elif _joins_tokens(steps) and (anchor := _find_anchor(core, skipped)) is not None:
        pieces = _text_pieces(core, skipped, anchor, _has_byte_tokens(steps))
        before = core.decode([anchor])
    if pieces is None or not _agrees(core, pieces, skipped, anchor, before):
        return None
    return pieces


def _decoder_steps(core: PanicGuard) -> list[Mapping[str, Any]] | None:
    """Return the decoder's steps in order, or None for a decoder without a description."""
    if core.decoder is None:
        return []
    try:
        state = json.loads(core.decoder.__getstate__())
    except Exception:  # the library raises Exception for a decoder written in Python
        return None
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _joins_tokens(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether no token's text depends on its neighbors, except at the start of a text."""
    kinds = [step["type"] for step in steps]
    if kinds in ([], ["WordPiece"]):
        return True
    fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    after = steps[fused + 1 :]
    return all(kind in _BEFORE_FUSE for kind in kinds[:fused]) and all(
        step["type"] == "Strip" and step["start"] <= 1 and not step["stop"] for step in after
    )


def _has_byte_tokens(steps: Sequence[Mapping[str, Any]]) -> bool:
    return any(step["type"] == "ByteFallback" for step in steps)


def _find_anchor(core: PanicGuard, skipped: frozenset[int]) -> int | None:
    """Return a token of ASCII letters, which `_text_pieces` decodes before each other token."""
    special = core.get_added_tokens_decoder()
    for token in range(min(core.get_vocab_size(), _ANCHORS)):
        name = core.id_to_token(token) or ""
        plain = name.isascii() and name.isalpha() and token not in skipped and token not in special
        if plain and core.decode([token]).isalpha():
            return token
    return None


def _byte_level_pieces(core: PanicGuard, skipped: frozenset[int]) -> TokenPieces:
    bytes_of = _byte_level_alphabet()

    def find(token: int) -> str | bytes:
        name = None if token in skipped else core.id_to_token(token)
        if name is None:
            return ""
        if all(character in bytes_of for character in name):
            raw = bytes(bytes_of[character] for character in name)
        else:
            raw = name.encode()
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    return TokenPieces(find)


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary represents."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _text_pieces(
    core: PanicGuard, skipped: frozenset[int], anchor: int, byte_tokens: bool
) -> TokenPieces:
    num_before = len(core.decode([anchor]))

    def raw_byte(token: int) -> bytes | None:
        """Return the byte of a byte token, or None if the byte is an ASCII character."""
        match = _BYTE_TOKEN.fullmatch(core.id_to_token(token) or "") if byte_tokens else None
        value = int(match[1], 16) if match else 0
        return bytes((value,)) if value >= 0x80 else None

    def find(token: int) -> str | bytes:
        if token in skipped:
            return ""
        text: str = core.decode([anchor, token], skip_special_tokens=False)[num_before:]
        return raw_byte(token) or text

    def first(token: int) -> str | bytes:
        if token in skipped:
            return ""
        text: str = core.decode([token], skip_special_tokens=False)
        return raw_byte(token) or text

    return TokenPieces(find, first=first, each_byte=byte_tokens)


def _agrees(
    core: PanicGuard,
    pieces: TokenPieces,
    skipped: frozenset[int],
    anchor: int | None,
    before: str,
) -> bool:
    """Return whether joined pieces equal the decoded text for random sequences."""
    size, random = core.get_vocab_size(), Random(0)  # listing the vocabulary takes long
    for _ in range(NUM_SAMPLES):
        sample = [random.randrange(size) for _ in range(SAMPLE_TOKENS)]
        shown = [token for token in sample if token not in skipped]
        whole = core.decode(
            shown if anchor is None else [anchor, *shown], skip_special_tokens=False
        )
        if pieces.each_byte and REPLACEMENT in whole:
            continue  # next to invalid bytes the decoder also replaces valid characters
        parts = (pieces[token] for token in sample)
        joined = b"".join(p if isinstance(p, bytes) else p.encode() for p in parts)
        if before + joined.decode("utf-8", "replace") != whole:
            return False
    return True
