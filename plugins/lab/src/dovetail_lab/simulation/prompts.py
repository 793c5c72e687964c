"""Creates the token ids of prompts, so that equal prefixes have equal tokens and others differ.

A prompt consists of segments of a fixed pattern; the first token of each segment identifies it. The
prefix cache hashes blocks with all tokens before them, so different first tokens are sufficient.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from dovetail_lab.workloads.workload import HASH_BLOCK_TOKENS, WorkloadRequest

STOP_TOKEN = 1
OUTPUT_TOKEN = 2
VOCAB_SIZE = 2**31 - 1

_FIRST_REQUEST = 1 << 30
"""First identity of requests; prefix blocks have smaller identities."""
_FIRST_PATTERN = 3


class Prompts:
    """Creates prompts when requests arrive, and keeps conversations until their last request.

    requests: the workload.
    """

    def __init__(self, requests: Sequence[WorkloadRequest]) -> None:
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        longest = max((request.num_prompt_tokens for request in requests), default=1)
        self._pattern = array("i", range(_FIRST_PATTERN, _FIRST_PATTERN + longest))
        self._num_children: dict[str, int] = {}
        for request in requests:
            if request.parent and not request.prefix_hashes:
                self._num_children[request.parent] = self._num_children.get(request.parent, 0) + 1
        self._conversations: dict[str, array[int]] = {}

    def make(self, request: WorkloadRequest) -> array[int]:
        """Return the prompt of a request, int32. Its parent must have ended."""
        prompt = self._chained(request) if request.prefix_hashes else self._continued(request)
        if request.request_id in self._num_children:
            self._conversations[request.request_id] = prompt + _output(request)
        return prompt

    def _chained(self, request: WorkloadRequest) -> array[int]:
        prompt = array("i")
        for identity in request.prefix_hashes:
            missing = request.num_prompt_tokens - len(prompt)
            if missing <= 0:
                break
            size = min(HASH_BLOCK_TOKENS, missing)
            prompt.append(_FIRST_PATTERN + identity % (_FIRST_REQUEST - _FIRST_PATTERN))
            prompt.extend(self._pattern[: size - 1])
        if missing := request.num_prompt_tokens - len(prompt):
            prompt.extend(self._unique(request, missing))
        return prompt

    def _continued(self, request: WorkloadRequest) -> array[int]:
        size = request.num_prompt_tokens
        if not request.parent:
            return self._unique(request, size)
        parent = request.parent
        prompt = self._conversations[parent][:size]
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._conversations[parent], self._num_children[parent]
        prompt.extend(self._unique(request, size - len(prompt)))
        return prompt

    def _unique(self, request: WorkloadRequest, size: int) -> array[int]:
        """Return `size` tokens that no other request has."""
        if not size:
            return array("i")
        tokens = self._pattern[:size]
        tokens[0] = _FIRST_REQUEST + self._numbers[request.request_id]
        return tokens


def _output(request: WorkloadRequest) -> array[int]:
    """Return the tokens that the simulator samples for a request."""
    tokens = array("i", (OUTPUT_TOKEN,)) * request.num_output_tokens
    if stops(request):
        tokens[-1] = STOP_TOKEN
    return tokens


def stops(request: WorkloadRequest) -> bool:
    """Return whether the request ends by a stop token, not by its length limit."""
    return request.num_output_tokens < request.max_tokens
