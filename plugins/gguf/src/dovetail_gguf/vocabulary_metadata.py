"""Reads and checks the keys `tokenizer.ggml.*` of a GGUF file.

Metadata is untrusted: counts and sizes are limited before a list is read.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from dovetail.errors import ModelError, nearest
from dovetail.value_checks import shorten
from dovetail_gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from dovetail_gguf.reader import GGUFFile

logger = logging.getLogger(__name__)

MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
MAX_LIST_BYTES = 64 << 20
MAX_CHARSMAP_BYTES = 4 << 20

SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
"""Map of chat-template variables to the keys of their ids (files use the spelling "seperator")."""


class TokenType(IntEnum):
    """The types in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_TOKEN_TYPES = frozenset(map(int, TokenType))


class VocabularyMetadata:
    """Reads and checks the keys `tokenizer.ggml.*`."""

    def __init__(self, file: GGUFFile) -> None:
        self._path, self._metadata = file.path, file.metadata

    def rejection(self, problem: str) -> ModelError:
        """Return the error for `problem`, which starts with the name of a key."""
        return ModelError(f"{self._path}: tokenizer.ggml.{problem}.")

    def value(self, key: str, kind: type, *, default: Any) -> Any:
        """Return a scalar or a string of the type `kind`, or `default` if it is absent."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return default
        if type(value) is not kind:
            raise self.rejection(f"{key} is {shorten(value)}; it must be of type {kind.__name__}")
        return value

    def list_of(self, key: str, kind: type, maximum: int) -> list[Any] | None:
        """Return a list of up to `maximum` values of the type `kind`, or None if it is absent."""
        full = f"tokenizer.ggml.{key}"
        if full not in self._metadata:
            return None
        count, num_bytes = self._metadata.count(full), self._metadata.num_bytes(full)
        if count is None:
            raise self.rejection(f"{key} is {shorten(self._metadata[full])}; it must be a list")
        if count > maximum or num_bytes > MAX_LIST_BYTES:
            raise self.rejection(
                f"{key} has {count} values in {num_bytes} bytes; the limits are {maximum} values "
                f"and {MAX_LIST_BYTES} bytes",
            )
        values: list[Any] = self._metadata[full]
        if values and type(values[0]) is not kind:  # all elements have the same type
            raise self.rejection(
                f"{key} has {shorten(values[0])}; its values must be {kind.__name__}"
            )
        return values

    def strings(self, key: str, maximum: int) -> list[str]:
        """Return a list of strings, which must not be empty."""
        values = self.list_of(key, str, maximum)
        if not values:
            raise self.rejection(f"{key} is missing or empty")
        return values

    def token_types(self, num_tokens: int) -> list[int]:
        """Return the type of each token. Without the key, all tokens are normal."""
        return self._by_token(
            "token_type",
            int,
            num_tokens,
            _TOKEN_TYPES.__contains__,
            [TokenType.NORMAL] * num_tokens,
        )

    def scores(self, num_tokens: int) -> list[float]:
        """Return the score of each token."""
        return self._by_token("scores", float, num_tokens, math.isfinite, None)

    def _by_token(
        self,
        key: str,
        kind: type,
        num_tokens: int,
        is_valid: Callable[[Any], bool],
        default: list[Any] | None,
    ) -> list[Any]:
        values = self.list_of(key, kind, MAX_TOKENS)
        if values is None:
            values = default
        if values is None:
            raise self.rejection(f"{key} is missing")
        if len(values) != num_tokens:
            raise self.rejection(f"{key} has {len(values)} values for {num_tokens} tokens")
        for number, value in enumerate(values):
            if not is_valid(value):
                raise self.rejection(f"{key} has the value {value} for the token {number}")
        return values

    def merges(self) -> list[tuple[str, str]]:
        """Return the pairs of byte-level BPE, in the order of their ranks."""
        pairs = []
        for merge in self.strings("merges", MAX_MERGES):
            cut = merge.find(" ", 1)
            if cut < 0:
                raise self.rejection(f"merges contains {shorten(merge)}, which is not a pair")
            pairs.append((merge[:cut], merge[cut + 1 :]))
        return pairs

    def charsmap(self) -> bytes:
        """Return the normalization of SentencePiece; b"" if the file has none."""
        values = self.list_of("precompiled_charsmap", int, MAX_CHARSMAP_BYTES) or []
        for value in values:
            if not -128 <= value <= 255:  # files have int8 or uint8
                raise self.rejection(f"precompiled_charsmap has the value {value}, not a byte")
        return bytes(value & 0xFF for value in values)

    def special_ids(self, num_tokens: int, defaults: Mapping[str, int]) -> dict[str, int]:
        """Return the ids of special tokens by the name of the variable of chat templates."""
        token_ids = {}
        for name, key in SPECIAL_TOKENS.items():
            token = self.value(key, int, default=defaults.get(name))
            if token is None:
                continue
            if not 0 <= token < num_tokens:
                raise self.rejection(f"{key} is {token}, but there are {num_tokens} tokens")
            token_ids[name] = token
        return token_ids

    def pre_tokenizer(self) -> PreTokenizer:
        """Return the rule by which byte-level BPE splits a text into words."""
        name = self.value("pre", str, default=None)
        if name is None:
            logger.warning(
                "%s does not state tokenizer.ggml.pre. The pre-tokenizer 'default' is used, which "
                "may be wrong; convert the model again.",
                self._path,
            )
            name = "default"
        if name not in PRE_TOKENIZERS:
            raise ModelError(
                f"{self._path}: tokenizer.ggml.pre is {shorten(name)}, which is not supported."
                f"{nearest(name[:80], PRE_TOKENIZERS)}\nSupported: {', '.join(PRE_TOKENIZERS)}.\n"
                "Set the option tokenizer to a directory with a tokenizer.json."
            )
        return PRE_TOKENIZERS[name]
