"""The engine with an explicit step loop: add requests, call `step`, get outputs.

Connects the engine core with text: an input processor before it, an output processor behind it.
Calls the core through an `EngineClient`, whatever process the core runs in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dovetail.clock import MonotonicClock
from dovetail.config import EngineArgs
from dovetail.engine.client import EngineClient
from dovetail.engine.front_end import CheckedRequest, FrontEnd, FrontEndParts, UserRequest
from dovetail.engine.input.request_checks import (
    read_pause_scope,
    read_request_ids,
    read_sleep_tags,
)
from dovetail.engine.process.factory import make_client
from dovetail.engine.process.outgoing import MAX_UNREAD_MESSAGES
from dovetail.engine.thread_guard import ThreadGuard, one_thread_at_a_time
from dovetail.errors import DovetailError, RequestError
from dovetail.interfaces import PauseScope
from dovetail.outputs import RequestOutputKind
from dovetail.value_checks import invalid, shorten

if TYPE_CHECKING:
    from dovetail.config import RequestedConfig
    from dovetail.inputs import Prompt
    from dovetail.interfaces import EngineCoreOutputs, SchedulerStats
    from dovetail.outputs import RequestOutput
    from dovetail.request import EngineCoreRequest
    from dovetail.sampling_params import SamplingParams


_MAX_WAIT_S = 0.2
"""How long a step waits for an engine in another process; Ctrl-C is checked in between."""

_MAX_LATE_STEPS = 2 * MAX_UNREAD_MESSAGES
_MAX_EMPTY = 2
_SETTLE_WAIT_S = 0.05
"""Limits after the last request has ended: maximum steps to process, maximum empty steps (a KV
connector may need many to store blocks), and seconds to wait for each step."""


class LLMEngine:
    """An engine whose requests run only while `step` is called.

    Several threads may call it: one call runs at a time, the others wait. `guard` is the lock; a
    thread that calls `step` in a loop gets the outputs of all threads' requests.
    client: the client of the engine core, in this or another process. front: the front end.
    """

    def __init__(self, config: RequestedConfig) -> None:
        """Start the engine. If a part fails, raise a DovetailError that names it."""
        self.guard = ThreadGuard()
        prepared = FrontEndParts.of(config, starts_engine=not config.parallel.engine_process)
        self.plugins = prepared.plugins
        self.tokenizer = prepared.tokenizer
        self.client: EngineClient = make_client(
            config, "sync" if config.parallel.engine_process else "inproc", plugins=self.plugins
        )
        info = self.client.facts
        self.config = info.config
        self.max_model_len = info.max_model_len
        self.vocab_size = info.model_info.vocab_size
        self.last_stats: SchedulerStats | None = None
        self._ended_early: list[RequestOutput] = []
        self._settling = False
        try:
            self.front = FrontEnd(prepared, info, MonotonicClock())
        except BaseException:
            self.client.shutdown()
            raise
        self.io_processor = self.front.io_processor
        self._outputs, self._listeners = self.front.outputs, self.front.listeners
        self._next_outputs = self._listeners.watch(self._get_outputs)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Start an engine from flat options."""
        return cls(args.create_engine_config())

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the loaded model supports."""
        return self.client.facts.model_info.supported_tasks

    def default_sampling_params(self) -> SamplingParams:
        """Return the model's default parameters, which apply to requests without parameters."""
        return self.front.inputs.default_params()

    @one_thread_at_a_time
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> None:
        """Add a request.

        Raises RequestError, naming the parameter, if the request is invalid; other requests
        continue. With `engine_process`, a rejection by the scheduler or a logits processor is
        reported with the outputs instead: the request ends with "error". `add_requests` waits for
        such a rejection and returns it.
        """
        user_request = UserRequest(
            request_id=request_id,
            prompt=prompt,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            output_kind=output_kind,
        )
        try:
            checked, requests = self.front.make(user_request)
            with self._aborting_on_error(requests):
                for request in requests:
                    self.client.add_request(request)
                self.front.register(checked, requests)
        except RequestError as error:
            self._report_rejected(user_request.request_id, error)
            raise

    @one_thread_at_a_time
    def add_requests(self, user_request: Sequence[UserRequest]) -> dict[str, RequestError]:
        """Add requests before the next step. Return the rejections by request id.

        A request is rejected as a whole; all other requests continue. Raises RequestError, before
        any request is added, if an id is not a string or occurs twice.
        """
        _check_different(user_request)
        rejected: dict[str, RequestError] = {}
        created: list[tuple[CheckedRequest, list[EngineCoreRequest]]] = []
        for core_request in user_request:
            try:
                created.append(self.front.make(core_request))
            except RequestError as error:
                rejected[core_request.request_id] = error
        ready = [request for _, requests in created for request in requests]
        with self._aborting_on_error(ready):
            late = self.client.add_requests(ready)
            to_abort: list[str] = []
            for checked, requests in created:
                core_ids = [request.request_id for request in requests]
                reasons = [late[core_id] for core_id in core_ids if core_id in late]
                if reasons:
                    rejected[checked.user_request.request_id] = reasons[0]
                    to_abort += core_ids
                else:
                    self.front.register(checked, requests)
        self._abort(to_abort)
        for request_id, rejection in rejected.items():
            self._report_rejected(request_id, rejection)
        return rejected

    @one_thread_at_a_time
    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs that are due, including finished ones.

        With `engine_process` the engine steps on its own: wait briefly for its next outputs.
        """
        outputs, self._ended_early = self._ended_early, []
        core_outputs = self._next_outputs()
        if core_outputs is not None:
            self.last_stats = core_outputs.stats or self.last_stats
            processed = self._outputs.process(core_outputs)
            if processed.to_abort:
                self._abort(processed.to_abort)
            elif not self._outputs.num_unfinished and not _is_idle(self.last_stats):
                self._settle()
            outputs += processed.request_outputs
        return outputs

    @one_thread_at_a_time
    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests. The next step returns their final outputs. Unknown ids are ignored."""
        processed = self._outputs.abort(read_request_ids(request_ids))
        self._abort(processed.to_abort)
        self._ended_early += processed.request_outputs

    @one_thread_at_a_time
    def discard_ended(self, request_ids: Iterable[str]) -> None:
        """Drop the final outputs of these aborted requests."""
        unwanted = set(read_request_ids(request_ids))
        self._ended_early = [out for out in self._ended_early if out.request_id not in unwanted]

    @one_thread_at_a_time
    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has outputs left to return."""
        return bool(self._outputs.num_unfinished or self._ended_early)

    @property
    def paused(self) -> PauseScope | None:
        """The scope of the pause, or None."""
        return self.client.paused

    @one_thread_at_a_time
    def pause(self, scope: PauseScope | str = PauseScope.ALL) -> None:
        """Pause the requests until `resume`. Requests can still be added and aborted.

        scope: "all": no request runs, and all requests keep batch slots and blocks; or "new":
        running requests continue until they finish, and no other request starts. During a pause,
        `step` returns soon if there is nothing to do. Raises UserError for any other scope.
        """
        self.client.pause(read_pause_scope(scope))

    @one_thread_at_a_time
    def resume(self) -> None:
        """Continue after a pause. Do nothing if there is no pause."""
        self.client.resume()

    @one_thread_at_a_time
    def collective_rpc(
        self, operation: str | Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call a method of every worker. Return the results in the order of the ranks.

        operation: the operation's name; without `engine_process` also a callable, which gets the
        worker.
        """
        return self.client.call_workers(operation, args, kwargs)

    @one_thread_at_a_time
    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Return False if requests are unfinished."""
        return self.client.reset_prefix_cache()

    @one_thread_at_a_time
    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights and KV cache until `wake_up`. See `LLM.sleep`."""
        self.client.sleep(level)

    @one_thread_at_a_time
    def wake_up(self, tags: Iterable[str] = ()) -> None:
        """Allocate the memory of `tags` again, or all memory if empty. See `LLM.wake_up`."""
        self.client.wake_up(read_sleep_tags(tags))

    @one_thread_at_a_time
    def shutdown(self) -> None:
        """Shut the engine down. May be called twice."""
        try:
            self._listeners.stop()
        finally:
            self.client.shutdown()

    def _get_outputs(self) -> EngineCoreOutputs | None:
        """Return the outputs of the next step. Wait only if a request could get outputs."""
        if self._settling:
            return self.client.get_outputs(_SETTLE_WAIT_S)
        waited_for = self._outputs.num_unfinished and not self._ended_early
        return self.client.get_outputs(_MAX_WAIT_S if waited_for else 0)

    def _abort(self, core_ids: list[str]) -> None:
        self.client.abort_requests(core_ids)
        if core_ids and not self._outputs.num_unfinished:
            self._settle()

    def _settle(self) -> None:
        """Process the core's last steps after the last request has ended.

        `step` is not called then; the statistics would otherwise still count requests or blocks.
        """
        num_empty = 0
        self._settling = True
        try:
            for _ in range(_MAX_LATE_STEPS):
                core_outputs = self._next_outputs()
                if core_outputs is None or not (
                    core_outputs.stats and core_outputs.stats.num_scheduled_tokens
                ):
                    num_empty += 1
                if core_outputs is not None:
                    self.last_stats = core_outputs.stats or self.last_stats
                if num_empty > _MAX_EMPTY or (
                    core_outputs is not None and _is_idle(core_outputs.stats)
                ):
                    break
        except DovetailError:
            pass  # the next call raises the error
        finally:
            self._settling = False

    def _report_rejected(self, request_id: object, error: RequestError) -> None:
        if isinstance(request_id, str):  # listeners require a string
            self._listeners.request_failed(request_id, error)

    @contextmanager
    def _aborting_on_error(self, requests: Sequence[EngineCoreRequest]) -> Iterator[None]:
        """Abort these requests in the core if registration in this `with` block fails."""
        try:
            yield
        except BaseException:
            self._abort([request.request_id for request in requests])
            raise


def _check_different(user_request: Sequence[UserRequest]) -> None:
    """Raise RequestError unless the ids are different strings."""
    request_ids: set[str] = set()
    for request in user_request:
        if not isinstance(request.request_id, str):
            raise invalid("request_id", request.request_id, "a string")
        if request.request_id in request_ids:
            raise RequestError(
                f"request_id={shorten(request.request_id)} occurs twice in one call; use a "
                "different id for each request.",
                parameter="request_id",
            )
        request_ids.add(request.request_id)


def _is_idle(stats: SchedulerStats | None) -> bool:
    """Whether the statistics show no unfinished request, or True without statistics."""
    return stats is None or not (stats.num_running or stats.num_waiting or stats.num_used_blocks)
