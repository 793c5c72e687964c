"""The engine in a process of its own, called from one thread.

The engine runs on while nobody asks for outputs, until `MAX_UNREAD_MESSAGES` have come of it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from dovetail.config import RequestedConfig
from dovetail.engine.process.client import EngineClient, EngineFacts, Operation
from dovetail.engine.process.engine_process import EngineProcess, Progress, error_of
from dovetail.engine.process.outgoing import Acknowledger
from dovetail.errors import DovetailError, EngineDeadError, RequestError, UserError
from dovetail.interfaces import EngineCoreOutputs, Finished, PauseScope
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.transport.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Add,
    AddBatch,
    Answer,
    Call,
    FromEngine,
    Outputs,
    Pause,
    Question,
    Refused,
    ResetPrefixCache,
    Resume,
    engine_reader,
    pack,
)
from dovetail.transport.wire_types import wire_request
from dovetail.value_checks import shorten

V = TypeVar("V")

_BATCH_BYTES = MAX_MESSAGE_BYTES // 4
_BATCH_REQUESTS = 4096
"""Requests that are handed over together go in lots of about so many bytes and requests, so that
the answer, which may refuse all of them, is within a message's limit too."""


class SyncMPClient(EngineClient):
    """`EngineClient` of an engine in a process. process: that one."""

    def __init__(self, config: RequestedConfig) -> None:
        """Start the process; raise the DovetailError that its start raised."""
        self.process = EngineProcess(config)
        self.facts = EngineFacts.of(self.process.ready)
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._acknowledger = Acknowledger(self.process)
        self._num_calls = 0

    @property
    def error(self) -> DovetailError | None:
        """What the engine died of."""
        return self.process.error

    @property
    def progress(self) -> Progress:
        """How far the engine has come, as of what was read of it."""
        return self.process.progress

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; its refusal, if any, comes with the outputs."""
        self.process.send(Add(request.request_id, wire_request(request)))

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> dict[str, RequestError]:
        """Send requests, and wait for what the engine says of them."""
        refused: dict[str, RequestError] = {}
        for batch in batches(requests, refused):
            refused |= refusals_of(self._ask(AddBatch(self._next_call(), batch)))
        return refused

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; of a dead engine none is left."""
        gone = frozenset(request_ids)
        if not gone or self.error is not None:
            return
        with suppress(EngineDeadError):  # the next call tells
            self._ask(Abort(tuple(gone), self._next_call()))
        self._outputs = deque(without(one, gone) for one in self._outputs)

    def get_outputs(self, timeout_s: float | None = None) -> EngineCoreOutputs | None:
        """Return the next outputs."""
        if self._outputs:
            return self._outputs.popleft()
        message = self.process.receive(timeout_s)
        while isinstance(message, Answer):  # to a question that was broken off
            message = self.process.receive(timeout_s)
        return None if message is None else self._take(message)

    def pause(self, scope: PauseScope) -> None:
        """Hold requests."""
        self._ask(Pause(self._next_call(), scope))
        self.paused = scope

    def resume(self) -> None:
        """Lift a pause."""
        self._ask(Resume(self._next_call()))
        self.paused = None

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        return bool(self._ask(ResetPrefixCache(self._next_call())))

    def call_workers(
        self,
        operation: Operation,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker."""
        answer: list[Any] = self._ask(call_of(self._next_call(), operation, args, kwargs))
        return answer

    def find_end(self) -> DovetailError | None:
        """Return what the engine died of, or None if it lives; outputs before it are kept.

        Not while another thread calls this client.
        """
        if not self.process.has_ended():
            return None
        try:
            while (message := self.process.receive(0)) is not None:
                if not isinstance(message, Answer):
                    self._outputs.append(outputs_of(message))
        except DovetailError as error:
            return error
        return None

    def restore_pause(self, scope: PauseScope) -> None:
        """Pause a new engine, without waiting for its answer: what is sent later comes later."""
        self.process.send(Pause(0, scope))
        self.paused = scope

    def shutdown(self) -> None:
        """End the process."""
        self.process.close()

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def _take(self, message: FromEngine) -> EngineCoreOutputs:
        outputs = outputs_of(message)
        if isinstance(message, Outputs):
            self._acknowledger.took_one()
        return outputs

    def _ask(self, question: Question) -> Any:
        """Return the answer; outputs that come before it, or with it, are kept."""
        self.process.send(question)
        while True:
            message = self.process.receive()
            if message is None:
                continue
            if not isinstance(message, Answer):
                self._outputs.append(self._take(message))
            for answer in answers_of(message):
                if answer.call == question.call:
                    return answer_value(answer)


def answers_of(message: FromEngine) -> tuple[Answer, ...]:
    """Return the answers that a message is or brings."""
    if isinstance(message, Answer):
        return (message,)
    return message.answers if isinstance(message, Outputs) else ()


def call_of(
    number: int, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Call:
    """Return the message for an operation.

    Raises UserError for one that is not named, MessageError for what cannot travel.
    """
    if not isinstance(operation, str):
        raise UserError(
            f"{shorten(operation)} cannot be called in the engine's process: only names cross. "
            "Give the name of a worker's method (worker_extension_cls adds methods), or leave "
            "engine_process out."
        )
    call = Call(number, operation, tuple(args), dict(kwargs or {}))
    engine_reader().read(pack(call))  # what the engine would not read it would not answer
    return call


def batches(
    requests: Sequence[EngineCoreRequest], refused: dict[str, RequestError]
) -> Iterator[tuple[tuple[str, bytes], ...]]:
    """Yield requests as they travel; note in `refused` those that cannot."""
    batch: list[tuple[str, bytes]] = []
    num_bytes = 0
    for request in requests:
        try:
            content = wire_request(request)
        except RequestError as error:
            refused[request.request_id] = error
            continue
        if batch and (num_bytes + len(content) > _BATCH_BYTES or len(batch) >= _BATCH_REQUESTS):
            yield tuple(batch)
            batch, num_bytes = [], 0
        batch.append((request.request_id, content))
        num_bytes += len(content)
    if batch:
        yield tuple(batch)


def refusals_of(told: Iterable[tuple[str, str, str]]) -> dict[str, RequestError]:
    """Return what the engine has answered to requests that came together."""
    return {name: RequestError(reason, parameter=field) for name, reason, field in told}


def outputs_of(message: FromEngine) -> EngineCoreOutputs:
    """Return the outputs that a message brings; raise EngineDeadError for one that has none."""
    if isinstance(message, Outputs):
        return message.columns()
    if isinstance(message, Refused):
        finished = Finished(
            request_id=message.request_id, reason=FinishReason.ERROR, message=message.reason
        )
        return EngineCoreOutputs(finished=(finished,))
    raise EngineDeadError(f"the engine sent a {type(message).__name__} that nobody asked for.")


def answer_value(answer: Answer) -> Any:
    """Return what a call gave, or raise the error that it raised."""
    if answer.error_kind:
        raise error_of(answer.error_kind, answer.error)
    return answer.value


def without(outputs: EngineCoreOutputs, request_ids: Collection[str]) -> EngineCoreOutputs:
    """Return the outputs without what they say of these requests."""
    names: list[str] = []
    counts, tokens = array("i"), array("i")
    end = 0
    for name, count in zip(outputs.request_ids, outputs.num_new_tokens, strict=True):
        start, end = end, end + count
        if name not in request_ids:
            names.append(name)
            counts.append(count)
            tokens.extend(outputs.token_ids[start:end])
    return replace(
        outputs,
        request_ids=names,
        num_new_tokens=counts,
        token_ids=tokens,
        finished=tuple(one for one in outputs.finished if one.request_id not in request_ids),
        logprobs=_others(outputs.logprobs, request_ids),
        prompt_logprobs=_others(outputs.prompt_logprobs, request_ids),
        num_cached_tokens=_others(outputs.num_cached_tokens, request_ids),
    )


def _others(told: Mapping[str, V], request_ids: Collection[str]) -> dict[str, V]:
    return {name: value for name, value in told.items() if name not in request_ids}
