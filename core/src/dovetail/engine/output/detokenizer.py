"""Incremental detokenization of one request: each new token to the text that it makes certain.

Two ways to the same text. Where the tokenizer tells what each token adds (`token_pieces`), pieces
are joined, and bytes that may still become a character are kept back. Otherwise a short window of
tokens, begun with the prompt's tail, is decoded again for each token, and what goes beyond the text
already given is new; a tail of U+FFFD is held back, since it may be half a character. Both take
the tokens one by one, so that the text does not depend on how many come at a time.
Depends on no vocabulary and no stop strings.
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
"""The window is cut when it has this many tokens, so that a token costs the same at any length."""
MAX_UNSETTLED_TOKENS = 8
"""A character has at most 4 bytes, so at most 4 tokens; a longer broken tail is not a character."""
MAX_HELD_CHARS = 3
"""What may still become a character of 4 bytes, after a tail that is broken for good."""

_EACH_BYTE = "dovetail-replace-each-byte"


class Detokenizer(Protocol):
    """Turns the output tokens of one request into text, piece by piece.

    The pieces together are what `tokenizer.decode(prompt + output)` has beyond
    `tokenizer.decode(prompt)`; a character that the prompt begins and the output completes is the
    output's. Bytes that are no UTF-8 become U+FFFD as soon as that is certain.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now, which may be empty."""

    def flush(self) -> str:
        """Return what is held back; call it once, after the last token."""


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
) -> Detokenizer:
    """Return a detokenizer of the output that follows a prompt."""
    pieces = tokenizer.token_pieces(skip_special_tokens=skip_special_tokens)
    if pieces is None:
        return WindowDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
    return PieceDetokenizer(pieces, prompt_token_ids)


class PieceDetokenizer:
    """A detokenizer for tokens each of which adds its own piece to the text."""

    __slots__ = ("_at_start", "_errors", "_pending", "_pieces", "_plain", "_prompts")

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int]) -> None:
        """Begin after the prompt, of which only the ends are looked at."""
        self._pieces = pieces
        self._errors = _EACH_BYTE if pieces.each_byte else "replace"
        self._at_start = pieces.first is not None and not any(
            map(pieces.__getitem__, prompt_token_ids)
        )
        # Bytes of a character that is not complete yet, and what the prompt's own text shows for
        # those of them that are the prompt's.
        self._pending = self._unfinished(prompt_token_ids)
        self._prompts = self._pending.decode("utf-8", self._errors)
        self._plain = not (self._pending or self._at_start)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now, which may be empty."""
        if not self._plain:
            return self._push_bytes(token_ids)
        if len(token_ids) == 1:
            piece = self._pieces[token_ids[0]]
            return piece if isinstance(piece, str) else self._push_bytes(token_ids)
        try:
            return "".join(map(self._pieces.__getitem__, token_ids))  # type: ignore[arg-type]
        except TypeError:  # there are bytes among them
            return self._push_bytes(token_ids)

    def flush(self) -> str:
        """Return what is held back; call it once, after the last token."""
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
        """Return `text` without what the prompt's own text shows of it."""
        if not text or not self._prompts:
            return text
        prompts, self._prompts = self._prompts, ""
        return text.removeprefix(prompts)

    def _unfinished(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes at the end that begin a character and do not complete it."""
        tail = b""
        for token in reversed(token_ids[-MAX_LOOK_BACK:]):
            piece = self._pieces[token]
            if isinstance(piece, bytes):
                tail = piece + tail
            if len(tail) > MAX_HELD_CHARS or (piece and isinstance(piece, str)):
                break
        return tail[codecs.utf_8_decode(tail, "replace", False)[1] :]


class WindowDetokenizer:
    """A detokenizer for any tokenizer, by `decode` alone."""

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
        """Begin after the prompt, of which only the tail is looked at."""
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
        # The window's text before the output, while a character that it begins may be completed,
        # and how much of it stands before that character.
        self._prompt_text = text if num_whole < len(self._ids) else ""
        self._num_whole_chars = len(
            self._decode(self._ids[:num_whole], skip_special_tokens=self._skip)
        )
        # Tokens of the window up to which the text is certain; and an earlier such place, where
        # the window can be cut without cutting a character.
        self._settled = len(self._ids)
        self._mark = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now, which may be empty."""
        return "".join([self._push(token) for token in token_ids if token not in self._skipped])

    def flush(self) -> str:
        """Return what is held back; call it once, after the last token."""
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
        """Drop tokens so that the window begins with a character; return how many end with one.

        is_cut: whether it may begin inside a character. With byte tokens a broken character at
        either end spoils whole ones beside it, so both ends are tried together.
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
        """Decode the window; give back the prompt's broken tail where the output completes it."""
        text = self._decode_window()
        if self._prompt_text and not text.startswith(self._prompt_text):
            known = self._prompt_text.rstrip(REPLACEMENT)
            self._sent = self._num_whole_chars
            if text.startswith(known):  # else other characters were spoiled with the broken one
                self._sent = max(self._sent, len(known))
            self._prompt_text = ""
        return text

    def _push_unsettled(self, text: str) -> str:
        """Give what stands before the tail of U+FFFD; of a long tail, all that is broken."""
        num_tail = len(text) - len(text.rstrip(REPLACEMENT))
        broken = len(self._ids) - self._settled > MAX_UNSETTLED_TOKENS
        num_held = min(num_tail, MAX_HELD_CHARS) if broken else num_tail
        end = max(self._sent, len(text) - num_held)
        new = text[self._sent : end]
        self._sent = end
        if broken and len(self._ids) >= 2 * WINDOW_TOKENS:
            # Nothing here is certain to be the border of a character: cut anywhere.
            num_after = len(text) - end
            del self._ids[:-WINDOW_TOKENS]
            self._sent = max(0, len(self._decode_window()) - num_after)
            self._settled = 0
            self._mark = 0
            self._prompt_text = ""
        return new

    def _cut_window(self) -> None:
        """Drop the tokens before the mark and set the mark here."""
        if self._mark:
            del self._ids[: self._mark]
            self._sent = len(self._decode_window())
        self._mark = self._settled = len(self._ids)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)
