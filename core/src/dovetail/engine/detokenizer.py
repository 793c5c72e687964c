"""Incremental detokenisation of one request: each new token to the text that it makes certain.

The text of a token depends on its neighbours: a character may be spread over tokens, and a decoder
may treat the first token of a text in a way of its own (a leading space is dropped). So a short
window of tokens, begun with the prompt's tail, is decoded anew each time, and what goes beyond the
text already given is new. A tail of U+FFFD is held back, since it may be half a character.
Uses `Tokenizer.decode` only; knows no vocabulary and no stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 6
MAX_LOOK_BACK = 32
WINDOW_TOKENS = 16
"""The window is cut when it has this many tokens, so that a token costs the same at any length."""
MAX_UNSETTLED_TOKENS = 8
"""A character has at most 4 bytes, so at most 4 tokens; a longer broken tail is no character."""
MAX_HELD_CHARS = 3
"""What may still become a character of 4 bytes, after a tail that is broken for good."""


class Detokenizer:
    """Turns the output tokens of one request into text, piece by piece.

    The pieces together are what `tokenizer.decode(prompt + output)` has beyond
    `tokenizer.decode(prompt)`, wherever the one begins with the other.
    """

    __slots__ = ("_decode", "_ids", "_mark", "_sent", "_settled", "_skip", "_skipped")

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
        self._ids = [token for token in tail if token not in self._skipped][-NUM_CONTEXT_TOKENS:]
        text = self._decode_window()
        for _ in range(3):
            if not text.startswith(REPLACEMENT):
                break
            # The window begins inside a character; with byte tokens that spoils what follows.
            del self._ids[:1]
            text = self._decode_window()
        self._sent = len(text)
        # Tokens of the window up to which the text is certain; and an earlier such place, where
        # the window can be cut without cutting a character.
        self._settled = len(self._ids)
        self._mark = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now, which may be empty."""
        ids = self._ids
        if self._skipped:
            ids.extend([token for token in token_ids if token not in self._skipped])
        else:
            ids.extend(token_ids)
        text = self._decode_window()
        if text.endswith(REPLACEMENT):
            return self._push_unsettled(text)
        new = text[self._sent :]
        self._sent = len(text)
        self._settled = len(ids)
        if len(ids) >= WINDOW_TOKENS:
            self._cut_window()
        return new

    def flush(self) -> str:
        """Return what is held back; call it once, after the last token."""
        text = self._decode_window()
        new = text[self._sent :]
        self._sent = len(text)
        return new

    def _decode_window(self) -> str:
        return self._decode(self._ids, skip_special_tokens=self._skip)

    def _push_unsettled(self, text: str) -> str:
        """Give what stands before the tail of U+FFFD; of a long tail, all that cannot mend."""
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
        return new

    def _cut_window(self) -> None:
        """Drop the tokens before the mark and set the mark here."""
        if self._mark:
            del self._ids[: self._mark]
            self._sent = len(self._decode_window())
        self._mark = self._settled = len(self._ids)


def detokenize(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
    """Return the whole text of an output at once: what a Detokenizer gives in pieces."""
    stream = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
    return stream.push(output_token_ids) + stream.flush()
