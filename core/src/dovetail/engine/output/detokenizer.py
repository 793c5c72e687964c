"""Incremental detokenization of one request: returns the text that each new token makes final.

Two classes give the same text. If the tokenizer has the text of each token (`token_pieces`), pieces
are joined, and bytes of an incomplete character are held back. Otherwise a short window of tokens,
which begins with the end of the prompt, is decoded again for each token, and the part that was not
returned before is the new text; U+FFFD at the end is held back, because it may be an incomplete
character. Both process tokens one by one, so that the text does not depend on the number of tokens
in a call. This module does not depend on a vocabulary or stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from dovetail.interfaces.tokenizer import Tokenizer, TokenPieces

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 6
MAX_LOOK_BACK = 32
WINDOW_TOKENS = 16
"""Number of tokens at which the window is shortened, so that the cost per token does not grow."""
MAX_UNSETTLED_TOKENS = 8
"""Maximum tokens of an incomplete character: a character has at most 4 bytes, so 4 tokens."""
MAX_HELD_CHARS = 3
"""Maximum number of U+FFFD to hold back at the end of a long tail: one 4-byte character."""

_EACH_BYTE = "dovetail-replace-each-byte"


class Detokenizer(Protocol):
    """Turns the output tokens of one request into text, piece by piece.

    The pieces together are the text that `tokenizer.decode(prompt + output)` has after
    `tokenizer.decode(prompt)`. A character that begins in the prompt and ends in the output belongs
    to the output. Bytes that cannot become valid UTF-8 become U+FFFD.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next tokens. Return the text that is now final, which may be empty."""

    def flush(self) -> str:
        """Return the text that is held back. Call it once, after the last token."""


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
) -> Detokenizer:
    """Return a detokenizer for the output after a prompt."""
    pieces = tokenizer.token_pieces(skip_special_tokens=skip_special_tokens)
    if pieces is None:
        return WindowDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
    return PieceDetokenizer(pieces, prompt_token_ids)


class PieceDetokenizer:
    """A detokenizer for a tokenizer with a piece of text for each token."""

    __slots__ = ("_at_start", "_errors", "_pending", "_pieces", "_plain", "_prompts")

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int]) -> None:
        """Create a detokenizer for the output after a prompt."""
        self._pieces = pieces
        self._errors = _EACH_BYTE if pieces.each_byte else "replace"
        self._at_start = pieces.first is not None and not any(
            map(pieces.__getitem__, prompt_token_ids)
        )
        # The bytes of an incomplete character, and the text of those that belong to the prompt.
        self._pending = self._unfinished(prompt_token_ids)
        self._prompts = self._pending.decode("utf-8", self._errors)
        self._plain = not (self._pending or self._at_start)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next tokens. Return the text that is now final, which may be empty."""
        if not self._plain:
            return self._push_bytes(token_ids)
        if len(token_ids) == 1:
            piece = self._pieces[token_ids[0]]
            return piece if isinstance(piece, str) else self._push_bytes(token_ids)
        try:
            return "".join(map(self._pieces.__getitem__, token_ids))  # type: ignore[arg-type]
        except TypeError:  # a piece is bytes
            return self._push_bytes(token_ids)

    def flush(self) -> str:
        """Return the text that is held back. Call it once, after the last token."""
        rest, self._pending = self._pending.decode("utf-8", self._errors), b""
        return self._beyond_prompt(rest)

    def _push_bytes(self, token_ids: Sequence[int]) -> str:
        shown: list[str] = []
        for token in token_ids:
            piece = self._pieces[token]
            if not piece:
                continue
            if self._at_start and self._pieces.first is not None:
                self._at_start, piece = False, self._pieces.first(token)
            if isinstance(piece, str):
                if self._pending:
                    shown.append(self._pending.decode("utf-8", self._errors))
                    self._pending = b""
                shown.append(piece)
                continue
            content = self._pending + piece
            text, used = codecs.utf_8_decode(content, self._errors, False)
            self._pending = content[used:]
            shown.append(text)
        new = self._beyond_prompt("".join(shown))
        self._plain = not (self._pending or self._at_start)
        return new

    def _beyond_prompt(self, text: str) -> str:
        """Return `text` without the beginning that the prompt's text already has."""
        if not text or not self._prompts:
            return text
        prompts, self._prompts = self._prompts, ""
        return text.removeprefix(prompts)

    def _unfinished(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of the incomplete character at the end of `token_ids`."""
        tail = b""
        for token in reversed(token_ids[-MAX_LOOK_BACK:]):
            piece = self._pieces[token]
            if isinstance(piece, bytes):
                tail = piece + tail
            if len(tail) > MAX_HELD_CHARS or (piece and isinstance(piece, str)):
                break
        return tail[codecs.utf_8_decode(tail, "replace", False)[1] :]


class WindowDetokenizer:
    """A detokenizer for any tokenizer. Needs only `decode`."""

    __slots__ = (
        "_decode",
        "_ids",
        "_mark",
        "_num_whole_chars",
        "_prompt_text",
        "_sent",
        "_settled",
        "_skip",
        "_skipped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """Create a detokenizer for the output after a prompt. Only the prompt's end is read."""
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        tail = prompt_token_ids[-MAX_LOOK_BACK:]
        shown = [token for token in tail if token not in self._skipped]
        self._ids = shown[-NUM_CONTEXT_TOKENS:]
        is_cut = len(shown) > NUM_CONTEXT_TOKENS or len(prompt_token_ids) > MAX_LOOK_BACK
        num_whole = self._begin_at_character(is_cut=is_cut)
        text = self._decode_window()
        self._sent = len(text)
        # The prompt's text in the window, while the output may complete its last character; and the
        # number of characters before that last character.
        self._prompt_text = text if num_whole < len(self._ids) else ""
        self._num_whole_chars = len(
            self._decode(self._ids[:num_whole], skip_special_tokens=self._skip)
        )
        # The number of tokens in the window whose text is final; and an earlier value of this
        # number: the window can be cut there without splitting a character.
        self._settled = len(self._ids)
        self._mark = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next tokens. Return the text that is now final, which may be empty."""
        return "".join([self._push(token) for token in token_ids if token not in self._skipped])

    def flush(self) -> str:
        """Return the text that is held back. Call it once, after the last token."""
        text = self._window_text()
        new = text[self._sent :]
        self._sent = len(text)
        return new

    def _push(self, token: int) -> str:
        ids = self._ids
        ids.append(token)
        text = self._window_text()
        if text.endswith(REPLACEMENT):
            return self._push_unsettled(text)
        new = text[self._sent :]
        self._sent = len(text)
        self._settled = len(ids)
        self._prompt_text = ""
        if len(ids) >= WINDOW_TOKENS:
            self._cut_window()
        return new

    def _begin_at_character(self, *, is_cut: bool) -> int:
        """Drop the first tokens of the window if they are a part of a character.

        Returns the number of remaining tokens up to the last complete character. is_cut: whether
        the window may begin inside a character. With byte tokens an incomplete character at one
        end changes the text of complete ones next to it, so both ends are tried together.
        """
        length = len(self._ids)
        for num_broken in range(min(MAX_HELD_CHARS, length) + 1):
            for first in range(min(MAX_HELD_CHARS, length - num_broken) + 1 if is_cut else 1):
                ids = self._ids[first : length - num_broken]
                text = self._decode(ids, skip_special_tokens=self._skip)
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    del self._ids[:first]
                    return len(ids)
        return length

    def _decode_window(self) -> str:
        return self._decode(self._ids, skip_special_tokens=self._skip)

    def _window_text(self) -> str:
        """Decode the window. Return the prompt's last character again if the output completed it.

        In that case `_sent` is reduced.
        """
        text = self._decode_window()
        if self._prompt_text and not text.startswith(self._prompt_text):
            known = self._prompt_text.rstrip(REPLACEMENT)
            self._sent = self._num_whole_chars
            if text.startswith(known):  # otherwise the text of other characters changed too
                self._sent = max(self._sent, len(known))
            self._prompt_text = ""
        return text

    def _push_unsettled(self, text: str) -> str:
        """Return the text before the tail of U+FFFD. If the tail is long, keep only its end."""
        num_tail = len(text) - len(text.rstrip(REPLACEMENT))
        broken = len(self._ids) - self._settled > MAX_UNSETTLED_TOKENS
        num_held = min(num_tail, MAX_HELD_CHARS) if broken else num_tail
        end = max(self._sent, len(text) - num_held)
        new = text[self._sent : end]
        self._sent = end
        if broken and len(self._ids) >= 2 * WINDOW_TOKENS:
            # No boundary between characters is known, so the window is cut at any token.
            num_after = len(text) - end
            del self._ids[:-WINDOW_TOKENS]
            self._sent = max(0, len(self._decode_window()) - num_after)
            self._settled = 0
            self._mark = 0
            self._prompt_text = ""
        return new

    def _cut_window(self) -> None:
        """Drop the tokens before `_mark`, and set `_mark` to the end of the window."""
        if self._mark:
            del self._ids[: self._mark]
            self._sent = len(self._decode_window())
        self._mark = self._settled = len(self._ids)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)
