"""What a prompt may be. Depends on no tokenizer and no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class PromptTraits(TypedDict, total=False):
    """What may stand beside a prompt, for caches and schedulers.

    cache_salt: cached prefixes are shared only with prompts of the same salt. tenant: on whose
    account it runs, for policies that share out by tenant. deadline_s: seconds from now until its
    first token is due, for policies that look at it; `AsyncLLM` ends it if there is none by then.
    """

    cache_salt: str
    tenant: str
    deadline_s: float


class TextPrompt(PromptTraits):
    """A prompt as text."""

    prompt: str


class TokensPrompt(PromptTraits):
    """A prompt as token ids, taken as they are: no BOS is added."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
