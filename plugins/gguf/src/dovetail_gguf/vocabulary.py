"""Reads and checks the vocabulary in the metadata of a GGUF file (`tokenizer.ggml.*`).

Metadata is untrusted: counts and sizes are limited before a list is read, and lists must agree.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from dovetail.errors import ModelError, nearest
from dovetail.value_checks import shorten
from dovetail_gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from dovetail_gguf.reader import GGUFFile

logger = logging.getLogger(__name__)

MODELS = {"gpt2": "byte-level BPE", "llama": "BPE of SentencePiece"}
"""Supported values of `tokenizer.ggml.model`."""
MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
MAX_LIST_BYTES = 64 << 20
MAX_SPLITS = 1 << 23
"""Maximum total number of ways to split each piece in two, over all pieces."""

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
_SENTENCEPIECE_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
"""Default ids for files with a SentencePiece vocabulary that does not state ids."""


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


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A vocabulary. tokens, types, scores: by id. Scores are empty for byte-level BPE.

    merges: pairs in the order of their ranks. pre: None for SentencePiece. special_ids: by the name
    of the variable of chat templates ("bos_token").
    """

    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]
    pre: PreTokenizer | None
    special_ids: Mapping[str, int]
    adds_bos: bool
    adds_eos: bool
    adds_space_prefix: bool

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token."""
        return {token: number for number, token in enumerate(self.tokens)}


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Return the vocabulary. An invalid value raises a ModelError that names file and key."""
    source = _Metadata(file)
    model = source.value("model", str, default=None)
    if model not in MODELS:
        description = (
            "is missing" if model is None else f"is {shorten(model)}, which is not supported"
        )
        supported = ", ".join(f"{name} ({what})" for name, what in MODELS.items())
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model {description}. Supported: {supported}.\n"
            "Set the option tokenizer to a directory with a tokenizer.json, or skip_tokenizer_init."
        )
    tokens = source.strings("tokens", MAX_TOKENS)
    table = file.tensors.get("token_embd.weight")
    if table is not None and len(tokens) > table.shape[0]:
        raise source.rejection(
            f"tokens has {len(tokens)} tokens, but token_embd.weight has only {table.shape[0]} rows"
        )
    types = source.token_types(len(tokens))
    is_byte_level = model == "gpt2"
    pre = source.pre_tokenizer() if is_byte_level else None
    scores = [] if is_byte_level else source.scores(len(tokens))
    vocabulary = Vocabulary(
        tokens=tokens,
        types=types,
        scores=scores,
        merges=source.merges() if is_byte_level else (),
        pre=pre,
        special_ids=source.special_ids(len(tokens), {} if is_byte_level else _SENTENCEPIECE_IDS),
        adds_bos=source.value("add_bos_token", bool, default=pre is None or pre.adds_bos),
        adds_eos=source.value("add_eos_token", bool, default=False),
        adds_space_prefix=source.value("add_space_prefix", bool, default=not is_byte_level),
    )
    if len(vocabulary.ids) != len(tokens):
        twice = next(
            token for number, token in enumerate(tokens) if vocabulary.ids[token] != number
        )
        raise source.rejection(f"tokens has {shorten(twice)} twice")
    return vocabulary


class _Metadata:
    """Reads and checks the keys `tokenizer.ggml.*`."""

    def __init__(self, file: GGUFFile) -> None:
        self._path, self._metadata = file.path, file.metadata

    def rejection(self, problem: str) -> ModelError:
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
        values = self.list_of(key, str, maximum)
        if not values:
            raise self.rejection(f"{key} is missing or empty")
        return values

    def token_types(self, num_tokens: int) -> list[int]:
        return self._by_token(
            "token_type",
            int,
            num_tokens,
            _TOKEN_TYPES.__contains__,
            [TokenType.NORMAL] * num_tokens,
        )

    def scores(self, num_tokens: int) -> list[float]:
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
        pairs = []
        for merge in self.strings("merges", MAX_MERGES):
            cut = merge.find(" ", 1)
            if cut < 0:
                raise self.rejection(f"merges contains {shorten(merge)}, which is not a pair")
            pairs.append((merge[:cut], merge[cut + 1 :]))
        return pairs

    def special_ids(self, num_tokens: int, defaults: Mapping[str, int]) -> dict[str, int]:
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
