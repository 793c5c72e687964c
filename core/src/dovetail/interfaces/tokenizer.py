"""The contract of a tokenizer: text to ids and back. No tensors, no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar


class Tokenizer(ABC):
    """Text to token ids and back.

    Law. `decode` never fails on ids below `vocab_size`; bytes that are no UTF-8 become U+FFFD.
    Instances may be used from several threads.
    """

    CONTRACT: ClassVar[str] = "tokenizer"
    CONTRACT_VERSION: ClassVar[str] = "0.1"

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
