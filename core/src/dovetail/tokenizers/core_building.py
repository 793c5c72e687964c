"""Creates the `tokenizers` object of a model directory from the contents of its files.

The same code runs in the bounded child that tests a tokenizer and in the engine's process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.errors import RequestError

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\ufffd"
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def build_core(
    content: bytes, added_tokens: Sequence[Mapping[str, Any]], special_texts: Iterable[str]
) -> tokenizers.Tokenizer:
    """Load a tokenizer.json and prepare the tokenizer with `prepare_core`.

    Errors of the library are raised unchanged. They may have any class, including PanicException,
    which is not a subclass of Exception.
    """
    import tokenizers

    core = tokenizers.Tokenizer.from_buffer(content)
    prepare_core(core, added_tokens, special_texts)
    return core


def load_core(content: bytes | Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Load the content of a tokenizer.json: its bytes, or the object that JSON would describe.

    An object's BPE vocabulary is passed to the library without JSON, which takes half the time.
    """
    import tokenizers

    if isinstance(content, bytes):
        return tokenizers.Tokenizer.from_buffer(content)
    if content["model"]["type"] != "BPE":
        return tokenizers.Tokenizer.from_buffer(as_json(content))
    model = {name: value for name, value in content["model"].items() if value is not None}
    empty = {"type": model.pop("type"), "vocab": {}, "merges": []}
    core = tokenizers.Tokenizer.from_buffer(
        as_json({**content, "model": empty, "added_tokens": []})
    )
    core.model = tokenizers.models.BPE(**model)
    core.add_tokens(
        [
            tokenizers.AddedToken(entry["content"], **_flags(entry))
            for entry in content["added_tokens"]
        ]
    )
    return core


def as_json(content: Mapping[str, Any]) -> bytes:
    """Return an object as the bytes of a tokenizer.json. Lone surrogates become "?"."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


def count_ids(core: tokenizers.Tokenizer) -> int:
    """Return the largest id plus 1, added tokens included."""
    return max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def prepare_core(
    core: tokenizers.Tokenizer,
    added_tokens: Sequence[Mapping[str, Any]],
    special_texts: Iterable[str],
) -> None:
    """Disable padding and truncation, add tokens, and mark special tokens.

    added_tokens: entries of `added_tokens_decoder`; those that tokenizer.json lacks are added.
    special_texts: tokens to be marked special.
    """
    import tokenizers

    core.no_padding()
    core.no_truncation()
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    # One call for all tokens, because each call rebuilds the search for added tokens.
    core.add_tokens(
        [
            tokenizers.AddedToken(entry["content"], **_flags(entry))
            for entry in added_tokens
            if entry["content"] not in known
        ]
    )
    added = core.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    named = [text for text in dict.fromkeys(special_texts) if text not in special]
    core.add_special_tokens([text for text in named if core.token_to_id(text) is not None])


class PanicGuard:
    """A tokenizer whose `decode` returns U+FFFD for a sequence that makes the library panic."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, or U+FFFD if the library panics."""
        try:
            text: str = self._core.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not is_panic(error):
                raise
            return REPLACEMENT
        return text


def is_panic(error: BaseException) -> bool:
    """Return whether `error` reports a panic of the library's Rust code.

    The class of such an error is not a subclass of Exception.
    """
    return type(error).__name__ == "PanicException"


def _flags(entry: Mapping[str, Any]) -> dict[str, bool]:
    return {flag: bool(entry[flag]) for flag in ADDED_TOKEN_FLAGS if flag in entry}


def unencodable(error: BaseException) -> BaseException:
    """Return the RequestError for a text that cannot be encoded, or an interrupt unchanged."""
    if not isinstance(error, Exception) and not is_panic(error):
        return error
    message = " ".join(str(error).split())[:200]
    return RequestError(f"the tokenizer cannot encode this text: {message}.", parameter="prompt")
