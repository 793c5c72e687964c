"""What a prompt may be. Knows no tokenizer and no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, taken as they are: no BOS is added."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
