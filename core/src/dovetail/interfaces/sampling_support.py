"""Where each field of `SamplingParams` is implemented, and the capability ids of workers.

A field is implemented by the engine (`ENGINE_FIELDS`), by every worker (`WORKER_FIELDS`), or by
workers that declare its capability id (`SAMPLING_CAPABILITIES`). The engine rejects a request that
needs an id that its worker does not declare.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dovetail.sampling_params import SamplingParams

ENGINE_FIELDS = frozenset(
    {
        "detokenize",
        "extra_args",
        "ignore_eos",
        "include_stop_str_in_output",
        "max_tokens",
        "n",
        "reasoning",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "truncate_prompt_tokens",
    }
)
"""Fields that front end, scheduler and logits processors implement; workers may ignore them."""

WORKER_FIELDS = frozenset({"temperature", "seed", "structured_outputs"})
"""Fields that every worker implements, `structured_outputs` by applying bit masks."""

SAMPLING_CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "presence_penalty": "penalties",
        "frequency_penalty": "penalties",
        "repetition_penalty": "penalties",
        "logit_bias": "logit_bias",
        "allowed_token_ids": "allowed_token_ids",
        "bad_words": "bad_words",
        "min_tokens": "min_tokens",
        "logprobs": "logprobs",
        "prompt_logprobs": "prompt_logprobs",
    }
)
"""Maps a field name to the capability id that a worker declares for it."""

FULL_SAMPLING = frozenset(SAMPLING_CAPABILITIES.values())
"""The capability ids of a worker that implements every field."""

_OFF = SamplingParams()
_ONLY_RANDOM = frozenset({"top_k", "top_p", "min_p"})
"""Fields without effect on greedy requests."""


def missing_capability(params: SamplingParams, provides: frozenset[str]) -> tuple[str, str] | None:
    """Return the first field of `params` that needs an id not in `provides`, and that id.

    Returns None for fields with their default or an empty value. top_k, top_p and min_p of a greedy
    request need no capability.
    """
    if provides >= FULL_SAMPLING:
        return None
    for name, capability in SAMPLING_CAPABILITIES.items():
        if capability in provides or (params.greedy and name in _ONLY_RANDOM):
            continue
        value = getattr(params, name)
        if value not in (getattr(_OFF, name), (), {}):
            return name, capability
    return None
