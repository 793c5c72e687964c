"""The contract of a tokenizer: text to ids and back. No tensors, no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar


class TokenPieces(dict[int, str | bytes]):
    """What each token adds to a text: characters, or bytes that are not whole characters.

    Entries are made when they are first read. first: returns what a token adds that begins a text,
    where that differs; else None. each_byte: whether every byte that is not UTF-8 becomes a U+FFFD
    of its own, and not every broken sequence of bytes.
    """

    __slots__ = ("_find", "each_byte", "first")

    def __init__(
        self,
        find: Callable[[int], str | bytes],
        *,
        first: Callable[[int], str | bytes] | None = None,
        each_byte: bool = False,
    ) -> None:
        """find: returns the piece of any id; the empty string for one that adds nothing."""
        super().__init__()
        self._find = find
        self.first = first
        self.each_byte = each_byte

    def __missing__(self, token: int) -> str | bytes:
        """Make the piece of a token and keep it."""
        piece = self[token] = self._find(token)
        return piece


class Tokenizer(ABC):
    """Text to token ids and back.

    Contract. `decode` never fails on ids below `vocab_size`; bytes that are no UTF-8 become U+FFFD.
    Instances may be used from several threads.
    """

    CONTRACT: ClassVar[str] = "tokenizer"
    CONTRACT_VERSION: ClassVar[str] = "0.2"

    @classmethod
    @abstractmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Load from a model directory; raise ModelError naming the file if it cannot.

        A plugin with an options model takes the keyword `options=None`: a mapping, validated.
        """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""

    @property
    @abstractmethod
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""

    @property
    @abstractmethod
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out when told to skip special tokens."""

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`."""

    def token_pieces(self, *, skip_special_tokens: bool) -> TokenPieces | None:
        """Return what each token adds to a text; None if that depends on its neighbours.

        Law: the pieces of a sequence, joined and read as UTF-8, are what `decode` gives for it,
        except where it is not UTF-8. Streaming with pieces costs a look-up a token; without them
        `decode` is called for each token. The same object is returned each time.
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
        """Render a conversation to the prompt text, in a sandbox; raise RequestError if it fails.

        messages: mappings with "role" and "content". chat_template: instead of the model's own.
        """
