"""Log-probabilities in the formats of the two APIs, encoded position by position.

Each position is encoded when it is added, so that a long response with many log-probabilities can
be encoded in short pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from dovetail.interfaces import Tokenizer
from dovetail.logprobs import Logprob, TokenLogprobs

LOWEST = -9999.0
"""The value that represents minus infinity, which JSON cannot contain."""

WORK_PER_SLICE = 1024
"""Number of log-probabilities that are encoded before other tasks of the event loop run."""

_encode = msgspec.json.encode


class TokenTexts:
    """The strings and bytes of tokens.

    as_ids: show tokens as "token_id:5". hides_special: whether special tokens are not part of the
    text of a response.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, as_ids: bool = False, hides_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        hidden = tokenizer is not None and hides_special
        self._hidden = tokenizer.special_token_ids if tokenizer and hidden else frozenset()

    def text(self, token: int) -> str:
        """Return the text of a token. Incomplete characters are shown in hexadecimal."""
        piece = self._piece(token)
        if self._as_ids:
            return f"token_id:{token}"
        if isinstance(piece, str):
            return piece
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text. Can take long, so call it in a thread."""
        if self._tokenizer is None or not text:
            return 0
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def bytes_of(self, token: int) -> list[int]:
        """Return the bytes of a token."""
        piece = self._piece(token)
        return list(piece.encode("utf-8", "replace") if isinstance(piece, str) else piece)

    def num_chars(self, token: int) -> int:
        """Return how many characters of a text begin in a token."""
        if token in self._hidden:
            return 0
        piece = self._piece(token)
        if isinstance(piece, str):
            return len(piece)
        return sum(byte & 0xC0 != 0x80 for byte in piece)  # all but continuation bytes

    def _piece(self, token: int) -> str | bytes:
        if self._tokenizer is None:
            return ""
        pieces = self._tokenizer.token_pieces(skip_special_tokens=False)
        return self._tokenizer.decode([token]) if pieces is None else pieces[token]


class CompletionLogprobs:
    """The `logprobs` field of /v1/completions. offset: characters of the text before it."""

    def __init__(self, texts: TokenTexts, offset: int = 0) -> None:
        self.offset = offset
        self._texts = texts
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[msgspec.Raw | None] = []
        self._offsets: list[int] = []

    def add(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a position. `logprobs` is None for the first token of a prompt."""
        text = self._texts.text(token)
        self._tokens.append(text)
        self._offsets.append(self.offset)
        self.offset += self._texts.num_chars(token)
        if logprobs is None:
            self._logprobs.append(None)
            self._top.append(None)
            return
        self._logprobs.append(finite(logprobs[token].logprob))
        top = {self._texts.text(item): finite(entry.logprob) for item, entry in logprobs.items()}
        self._top.append(msgspec.Raw(_encode(top)))

    def body(self) -> dict[str, Any]:
        """Return the field."""
        return {
            "text_offset": self._offsets,
            "token_logprobs": self._logprobs,
            "tokens": self._tokens,
            "top_logprobs": self._top,
        }


class ChatLogprobs:
    """The `logprobs` field of /v1/chat/completions. num_top: alternatives at each position."""

    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        self._content: list[msgspec.Raw] = []

    def add(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a position."""
        logprobs = logprobs or {}
        ranked = sorted(
            (entry.rank, item, entry)
            for item, entry in logprobs.items()
            if entry.rank is not None and entry.rank <= self._num_top
        )
        own = logprobs.get(token)
        self._content.append(
            msgspec.Raw(
                _encode(
                    {
                        **self._entry(token, LOWEST if own is None else own.logprob),
                        "top_logprobs": [
                            self._entry(item, entry.logprob) for _, item, entry in ranked
                        ],
                    }
                )
            )
        )

    def body(self) -> dict[str, Any]:
        """Return the field."""
        return {"content": self._content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._texts.text(token),
            "logprob": finite(logprob),
            "bytes": self._texts.bytes_of(token),
        }


async def add_all(
    block: CompletionLogprobs | ChatLogprobs,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
) -> None:
    """Add positions in slices, between which other tasks of the event loop run."""
    work = 0
    for token, entries in zip(token_ids, logprobs, strict=False):
        block.add(token, entries)
        work += 1 + len(entries or ())
        if work >= WORK_PER_SLICE:
            work = 0
            await asyncio.sleep(0)


async def prompt_logprobs_body(
    logprobs: Sequence[TokenLogprobs | None], texts: TokenTexts
) -> list[msgspec.Raw | None]:
    """Return the `prompt_logprobs` field: for each token None, or its entries by token id."""
    body: list[msgspec.Raw | None] = []
    work = 0
    for entries in logprobs:
        body.append(None if entries is None else msgspec.Raw(_encode(_by_id(entries, texts))))
        work += 1 + len(entries or ())
        if work >= WORK_PER_SLICE:
            work = 0
            await asyncio.sleep(0)
    return body


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can contain."""
    return max(logprob, LOWEST)


def _by_id(entries: dict[int, Logprob], texts: TokenTexts) -> dict[str, Any]:
    return {
        str(token): {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": texts.text(token),
        }
        for token, entry in entries.items()
    }
