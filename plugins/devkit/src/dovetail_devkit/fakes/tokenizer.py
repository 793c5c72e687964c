"""A fake tokenizer: one token per byte, and a few special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.errors import RequestError
from dovetail.interfaces.tokenizer import Tokenizer, TokenPieces

SPECIAL_TEXTS = {256: "<bos>", 257: "<eos>", 258: "<pad>"}


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes of UTF-8. 256 is BOS, 257 EOS, 258 padding."""

    BOS = 256
    EOS = 257

    def __init__(self, *, add_bos: bool = True) -> None:
        """add_bos: whether `encode` adds BOS at the start when it adds special tokens."""
        self._add_bos = add_bos
        self._pieces = {skip: TokenPieces(partial(_piece, skip)) for skip in (False, True)}

    @classmethod
    def from_directory(cls, path: Path) -> ByteTokenizer:
        """Return a tokenizer. No files are read from `path`."""
        return cls()

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary: the largest id plus 1."""
        return 259

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self.EOS

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` omits with `skip_special_tokens`."""
        return frozenset(SPECIAL_TEXTS)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes of `text`, after BOS if requested.

        Special tokens in `text` are not recognized: their strings are encoded as bytes.
        """
        try:
            ids = list(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: {error}.", parameter="prompt"
            ) from error
        return [self.BOS, *ids] if add_special_tokens and self._add_bos else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text. Bytes that are not UTF-8 become U+FFFD, and unknown ids are omitted."""
        pieces = []
        for token in token_ids:
            if token < 256:
                pieces.append(bytes((token,)))
            elif not skip_special_tokens:
                pieces.append(SPECIAL_TEXTS.get(token, "").encode())
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_pieces(self, *, skip_special_tokens: bool) -> TokenPieces | None:
        """Return ASCII characters as text, other bytes as bytes."""
        return self._pieces[skip_special_tokens]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return one line "role: content" per message. Ignores templates and variables."""
        if not messages:
            raise RequestError(
                "messages is empty; pass at least one message.", parameter="messages"
            )
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


def _piece(skip_special_tokens: bool, token: int) -> str | bytes:
    if token < 128:
        return chr(token)
    if token < 256:
        return bytes((token,))
    return "" if skip_special_tokens else SPECIAL_TEXTS.get(token, "")
