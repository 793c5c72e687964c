"""Which fields of `SamplingParams` a worker implements, and by which capability id it says so.

Every field belongs to one of three: the engine does it (`ENGINE_FIELDS`), every worker does it
(`WORKER_FIELDS`), or a worker does it that declares a capability id (`SAMPLING_CAPABILITIES`).
The engine refuses a request that needs an id which its worker does not declare.
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
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "truncate_prompt_tokens",
    }
)
"""Fields that front end, scheduler and logits processors do; a worker need not read them."""

WORKER_FIELDS = frozenset({"temperature", "seed", "structured_output"})
"""Fields that every worker implements; the last one by the bit masks that it is given."""

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
"""Field to the capability id of the workers that implement it."""

FULL_SAMPLING = frozenset(SAMPLING_CAPABILITIES.values())
"""The capability ids of a worker that implements every field."""

_OFF = SamplingParams()
_ONLY_RANDOM = frozenset({"top_k", "top_p", "min_p"})
"""Fields without effect on greedy requests."""


def missing_capability(params: SamplingParams, provides: frozenset[str]) -> tuple[str, str] | None:
    """Return the first field of `params` that needs an id not in `provides`, and that id.

    A field at its default, an empty list, and a truncation of a greedy request need nothing.
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
