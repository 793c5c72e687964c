"""Compares the outputs of one request with the outputs that it gets without other requests.

This module uses the request and the functions of `dovetail_devkit.rows.state`, but no plan and no
other request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from dovetail.interfaces.scheduler import Finished
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.result import LogprobColumns
from dovetail_devkit.expectation import expect
from dovetail_devkit.rows.state import encode, predict_tokens


class RequestLedger:
    """The expected and received outputs of one request.

    request: the request that is checked.
    due: all tokens that the request must get.
    reason, stop_reason: the expected finish reason.
    tokens: the tokens received so far.
    prompt_positions: prompt tokens with received log-probabilities.
    failing: the expected error message; "" if the request must not fail.
    """

    def __init__(self, request: EngineCoreRequest, *, max_model_len: int, vocab_size: int) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.prompt_positions: list[int] = []
        self.failing = ""
        self.due, self.reason = _generate_alone(request, max_model_len, vocab_size)
        named = request.sampling_params.stop_token_ids or ()
        stopped = self.reason is FinishReason.STOP and self.due[-1] in named
        self.stop_reason = self.due[-1] if stopped else None

    def take(self, tokens: Sequence[int], logprobs: LogprobColumns | None) -> None:
        """Check new tokens, with their log-probabilities if requested."""
        name, num_got = self.request.request_id, len(self.tokens)
        expect(bool(tokens), f"the outputs contain the request {name}, but no new token for it")
        expected = self.due[num_got : num_got + len(tokens)]
        expect(
            list(tokens) == expected,
            f"{name} got {list(tokens)} after {num_got} tokens; without other requests it gets "
            f"{expected}",
        )
        self.tokens.extend(tokens)
        num_logprobs = self.request.sampling_params.logprobs
        if num_logprobs is None:
            expect(logprobs is None, f"{name} got log-probabilities, but has logprobs=None")
            return
        expect(
            logprobs is not None,
            f"{name} has logprobs={num_logprobs}, but got no log-probabilities",
        )
        if logprobs is not None:
            expect(
                logprobs.token_ids[:: 1 + num_logprobs].tolist() == list(tokens),
                f"{name} got log-probabilities that do not belong to its tokens",
            )

    def take_prompt(self, logprobs: LogprobColumns) -> None:
        """Check log-probabilities of further prompt tokens."""
        num_logprobs, name = self.request.sampling_params.prompt_logprobs, self.request.request_id
        expect(
            num_logprobs is not None, f"{name} got prompt_logprobs, but has prompt_logprobs=None"
        )
        self.prompt_positions.extend(logprobs.token_ids[:: 1 + (num_logprobs or 0)])
        expected = list(self.request.prompt_token_ids)[1 : 1 + len(self.prompt_positions)]
        expect(
            self.prompt_positions == expected,
            f"{name} must get prompt_logprobs for each of its prompt tokens once, in order",
        )

    def begin(self, num_cached_tokens: int | None, *, caching: bool) -> None:
        """Check num_cached_tokens, which is sent with the first tokens."""
        name, length = self.request.request_id, len(self.request.prompt_token_ids)
        if num_cached_tokens is None:
            raise AssertionError(
                f"the outputs with the first token of {name} must have its num_cached_tokens"
            )
        maximum = length - 1 if caching else 0
        expect(
            0 <= num_cached_tokens <= maximum,
            f"{name} has num_cached_tokens={num_cached_tokens}; expected 0 to {maximum}",
        )
        if self.request.sampling_params.prompt_logprobs is not None:
            expect(
                len(self.prompt_positions) == length - 1,
                f"{name} got a token before the prompt_logprobs of its whole prompt",
            )

    def fail(self, message: str) -> None:
        """Expect the request to end with an error before its first token."""
        self.failing = message
        self.due, self.reason, self.stop_reason = [], FinishReason.ERROR, None

    def close(self, ending: Finished) -> None:
        """Check the tokens, the finish reason and the error message of a finished request."""
        name = self.request.request_id
        expect(
            ending.message == self.failing,
            f"{name} ended with the message {ending.message!r}; expected {self.failing!r}",
        )
        expect(
            self.tokens == self.due,
            f"{name} ended after {len(self.tokens)} tokens; expected {len(self.due)} tokens",
        )
        expect(
            (ending.reason, ending.stop_reason) == (self.reason, self.stop_reason),
            f"{name} ended with the reason {ending.reason} and stop_reason={ending.stop_reason!r}; "
            f"expected {self.reason} and {self.stop_reason!r}",
        )


def _generate_alone(
    request: EngineCoreRequest, max_model_len: int, vocab_size: int
) -> tuple[list[int], FinishReason]:
    prompt = request.prompt_token_ids
    maximum = min(request.max_tokens, max_model_len - len(prompt))
    encoded = encode(request.encoder_inputs)
    tokens: list[int] = []
    for token in islice(predict_tokens(prompt, request.seed, vocab_size, encoded), maximum):
        tokens.append(token)
        if token in request.stop_token_ids and len(tokens) >= request.sampling_params.min_tokens:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH
