"""The types of prompts. They do not depend on a tokenizer or model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class PromptTraits(TypedDict, total=False):
    """Optional fields of a prompt for the prefix cache and the scheduler.

    cache_salt: cached prefixes are shared only with prompts of the same salt. tenant: the tenant of
    the request, for policies that are fair to tenants. deadline_s: seconds from now until the
    deadline of the first token, for policies that use it. `AsyncLLM` aborts a request that has no
    token by then.
    """

    cache_salt: str
    tenant: str
    deadline_s: float


class TextPrompt(PromptTraits):
    """A prompt as text."""

    prompt: str


class TokensPrompt(PromptTraits):
    """A prompt as token ids. No BOS is added."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
