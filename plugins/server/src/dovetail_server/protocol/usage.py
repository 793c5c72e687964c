"""The token counts of a response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.outputs import PoolingRequestOutput, RequestOutput


@dataclass(slots=True)
class Usage:
    """Token counts of all prompts of a request."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0

    def add_prompt(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """Count the tokens of a prompt. Must be called once for each prompt."""
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.num_cached_tokens

    def body(self) -> dict[str, Any]:
        """Return the `usage` field of a response."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
