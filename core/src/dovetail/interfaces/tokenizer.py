"""The contract of a tokenizer: it converts text to token ids and back, without tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dovetail.errors import RequestError


class TokenPieces(dict[int, str | bytes]):
    """The piece of text of each token: a str, or bytes if they are not whole characters.

    Entries are computed when they are first read.
    first: a function that returns the piece of a token at the start of a text; None if the piece is
    the same there.
    each_byte: whether every byte that is not UTF-8 becomes one U+FFFD; otherwise every invalid
    sequence of bytes becomes one.
    """

    __slots__ = ("_find", "each_byte", "first")

    def __init__(
        self,
        find: Callable[[int], str | bytes],
        *,
        first: Callable[[int], str | bytes] | None = None,
        each_byte: bool = False,
    ) -> None:
        """Create the mapping.

        find: a function that returns the piece of an id, possibly the empty string.
        """
        super().__init__()
        self._find = find
        self.first = first
        self.each_byte = each_byte

    def __missing__(self, token: int) -> str | bytes:
        """Compute the piece of a token and cache it."""
        piece = self[token] = self._find(token)
        return piece


class Tokenizer(ABC):
    """Converts text to token ids and back.

    Contract: `decode` never fails for ids below `vocab_size`. Bytes that are not UTF-8 become
    U+FFFD. Instances may be used by several threads.
    """

    CONTRACT: ClassVar[str] = "tokenizer"
    CONTRACT_VERSION: ClassVar[str] = "0.4"

    @classmethod
    @abstractmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Load from a model directory. Raise ModelError, naming the file, on failure.

        If the plugin has an options model, this method must accept the keyword `options=None`: the
        validated options as a mapping.
        """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The largest id plus 1, added tokens included."""

    @property
    @abstractmethod
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, or None."""

    @property
    @abstractmethod
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` omits with `skip_special_tokens`."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The strings of named special tokens, such as "eos_token" to "</s>"."""
        return {}

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The sources of the model's chat templates by name, such as "default"."""
        return {}

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`."""

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the ids of two texts with special tokens, and the position where type 1 starts.

        The position is 0 if the tokenizer gives all tokens the same type. Raises RequestError if
        the tokenizer cannot encode pairs.
        """
        raise RequestError(
            f"The tokenizer {type(self).__name__} cannot encode a pair of texts; use another "
            "tokenizer_mode.",
            parameter="prompt",
        )

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`."""

    def token_pieces(self, *, skip_special_tokens: bool) -> TokenPieces | None:
        """Return the piece of text of each token, or None if it depends on neighboring tokens.

        Contract: The pieces of a sequence, joined and decoded as UTF-8, equal the result of
        `decode`, except for bytes that are not UTF-8. Streaming with pieces needs one look-up per
        token; without them `decode` is called for each token. All calls return the same object.
        """
        return None

    @abstractmethod
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation to the prompt text in a sandbox. Raise RequestError on failure.

        messages: mappings with "role" and "content". chat_template: replaces the model's template.
        """
