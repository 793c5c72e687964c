"""`AsyncLLM`: streams the outputs of requests in an event loop. The engine runs in its own process.

`AsyncLLM` starts the parts and has the methods for callers; `RequestStreamer` streams the outputs.
This module depends neither on scheduling nor on the messages to the engine's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TYPE_CHECKING, Any

from dovetail.clock import Clock, MonotonicClock
from dovetail.config import EngineArgs
from dovetail.engine.front_end import FrontEnd, FrontEndParts, UserRequest
from dovetail.engine.input.request_checks import (
    read_pause_scope,
    read_sleep_tags,
    request_id_chunks,
)
from dovetail.engine.messages.parsers import MessageParsers
from dovetail.engine.process.factory import ATTACH_TIMEOUT_S, attach_client, make_client
from dovetail.engine.step_trace.records import MAX_STEPS
from dovetail.engine.streaming.pooling import AsyncPoolingMethods
from dovetail.engine.streaming.request_streamer import MAX_TIMEOUT_S, RequestStreamer
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.errors import (
    ConfigError,
    EngineDeadError,
    StalledError,
    UnavailableError,
)
from dovetail.interfaces import PauseScope
from dovetail.outputs import RequestOutputKind
from dovetail.value_checks import check_number, shorten

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from dovetail.config import EngineConfig, RequestedConfig
    from dovetail.engine.channel import EngineFacts
    from dovetail.engine.client import AsyncEngineClient
    from dovetail.engine.step_trace.records import StepTrace
    from dovetail.engine.streaming.output_stream import OutputSink
    from dovetail.inputs import Prompt
    from dovetail.interfaces import IOProcessor, SchedulerStats, Tokenizer
    from dovetail.outputs import RequestOutput
    from dovetail.sampling_params import SamplingParams

MAX_WAITING = 1024
"""Default of `max_waiting`: completions that may wait in addition to the `max_num_seqs` running."""

MAX_SILENCE_S = 4.0
"""Default of `max_silence_s`: seconds without a heartbeat after which an engine is not ready."""


class AsyncLLM(AsyncPoolingMethods):
    """A model that serves many callers in one event loop: the loop in which it is first used.

    `AsyncLLM(model=…)`, with the options of `EngineArgs` as keywords, or
    `AsyncLLM.from_engine_args(EngineArgs(…))` starts the engine and blocks until it is ready.
    Then use `async for output in llm.generate(…)`. Use it with `async with`, or call `shutdown`.
    Not thread-safe: coroutines raise UserError in another thread or loop; only `shutdown` may be
    called from any thread. After the engine has failed, every coroutine raises EngineDeadError.
    client: the client of the engine's process.
    """

    def __init__(
        self,
        model: EngineConfig | RequestedConfig | str | Path,
        *,
        max_waiting: int = MAX_WAITING,
        rules: SupervisionRules | None = None,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        """Start the engine. If a part fails, raise a DovetailError that names it.

        model, options: as for `LLM`; or model is an existing configuration, without options.
        max_waiting: see `generate`. rules: when a failed engine is restarted; None for never. After
        a failure, unfinished requests end with "error", and calls raise UnavailableError until
        the next engine is ready.
        """
        config = _make_config(model, options)
        _check_max_waiting(max_waiting)
        if not isinstance(rules, SupervisionRules | None):
            raise ConfigError(f"rules={shorten(rules)} must be a SupervisionRules or None.")
        prepared = FrontEndParts.of(config)
        client = make_client(config, "async", rules=rules)
        self._assemble(client, lambda: prepared, max_waiting, clock)

    @classmethod
    def attach(
        cls,
        address: str,
        *,
        max_waiting: int = MAX_WAITING,
        timeout_s: float = ATTACH_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> AsyncLLM:
        """Attach to an engine that another process has started. Return a new front end for it.

        address: the `address` of the `AsyncLLM` that started it. timeout_s: how long to wait for
        the engine's response. This front end has its own requests, request ids and `max_waiting`;
        pausing, sleeping and resetting the prefix cache affect all front ends. `shutdown`, or the
        end of this process, ends only this front end's requests. Only the process that started the
        engine runs stat loggers. Raises ConfigError for an invalid address, EngineDeadError if no
        engine responds.
        """
        _check_max_waiting(max_waiting)
        llm = cls.__new__(cls)
        client = attach_client(address, "async", timeout_s=timeout_s)
        llm._assemble(client, lambda: FrontEndParts.of_engine(client.facts), max_waiting, clock)
        return llm

    def _assemble(
        self,
        client: AsyncEngineClient,
        prepare: Callable[[], FrontEndParts],
        max_waiting: int,
        clock: Clock | None,
    ) -> None:
        """Create the front end. Shut the client down if that fails."""
        self.client: AsyncEngineClient = client
        clock = clock or MonotonicClock()
        try:
            self._front = FrontEnd(prepare(), client.facts, clock)
        except BaseException:
            client.shutdown()
            raise
        max_requested = max_waiting + self.config.scheduler.max_num_seqs
        self._streamer = RequestStreamer(
            self._front, self.client, max_requested=max_requested, clock=clock
        )

    @classmethod
    def from_engine_args(
        cls,
        args: EngineArgs,
        *,
        max_waiting: int = MAX_WAITING,
        rules: SupervisionRules | None = None,
    ) -> AsyncLLM:
        """Start an engine with the options in `args`."""
        return cls(args.create_engine_config(), max_waiting=max_waiting, rules=rules)

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration of the engine."""
        return self.client.facts.config

    @property
    def address(self) -> str:
        """The path of the engine's socket. Other processes can pass it to `attach`.

        It changes with each restart of a supervised engine.
        """
        return self.client.address or ""

    @property
    def facts(self) -> EngineFacts:
        """The properties of the engine: configuration, sizes, and startup phases."""
        return self.client.facts

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request, prompt and output together."""
        return self.client.facts.max_model_len

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the loaded model supports."""
        return self.client.facts.model_info.supported_tasks

    @property
    def parsers(self) -> MessageParsers:
        """The parsers of tool calls and reasoning."""
        return self._front.parsers

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None with `skip_tokenizer_init`."""
        return self._front.tokenizer

    @property
    def io_processor(self) -> IOProcessor | None:
        """The plugin that `EngineArgs.io_processor` names, for the caller's use, or None."""
        return self._front.io_processor

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting requests."""
        return self._front.outputs.num_unfinished

    @property
    def last_stats(self) -> SchedulerStats | None:
        """The scheduler's statistics of the latest step, or None before the first step."""
        return self._streamer.last_stats

    def default_sampling_params(self) -> SamplingParams:
        """Return the model's default parameters, which apply to requests without parameters."""
        return self._front.inputs.default_params()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
        cache_salt: str = "",
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return an async generator of the request's outputs. The last one has `finished` set.

        The request is sent when the first output is requested. A slow reader gets the results of
        several steps in one output. Leaving the loop, or cancelling the task, aborts the
        request; a caller that keeps the generator must call its `aclose`.
        request_id: an id that no unfinished or unread request uses; "" for a generated id.
        timeout_s: seconds after which the request is aborted. A request that has no token by the
        prompt's `deadline_s` is aborted, too. The last output of an aborted request has the finish
        reason "abort", all tokens so far, and the cause in `error`. If the engine rejects a request
        that the front end accepted, the request's last output has the finish reason "error" and
        the cause in `error`. The generator raises RequestError that names the parameter;
        CapacityError if more than `max_num_seqs` + `max_waiting` completions would be unfinished
        or unread; EngineDeadError, after it has yielded all outputs that had arrived.
        """
        self._front.check_can_generate()
        user_request = UserRequest(
            request_id=request_id,
            prompt=prompt,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            output_kind=output_kind,
        )
        return self._streamer.serve(user_request, timeout_s)

    def generate_to(
        self,
        sink: OutputSink,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return outputs of kind DELTA as `generate` does, except those that `sink` takes.

        sink: gets each output except the last one, if the caller is waiting for the next output
        and the sink is ready. A sink needs less CPU time per output than the generator. If the
        sink raises an error, the generator raises UserError.
        """
        self._front.check_can_generate()
        user_request = UserRequest(
            request_id=request_id,
            prompt=prompt,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            output_kind=RequestOutputKind.DELTA,
        )
        return self._streamer.serve(user_request, timeout_s, sink)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests. Each reader gets a final output. Unknown ids are ignored."""
        self._streamer.begin()
        chunks: list[list[str]] = []
        for chunk in request_id_chunks(request_ids):
            if chunks:
                await asyncio.sleep(0)  # lets other tasks of the loop run
            chunks.append(chunk)
        for chunk in chunks:
            await self._streamer.end(chunk)

    async def pause(self, scope: PauseScope | str = PauseScope.ALL) -> None:
        """Pause the requests until `resume`. New requests are accepted, and wait.

        scope: "all": no request runs; or "new": running requests continue until they finish.
        Raises UserError for any other scope.
        """
        pause_scope = read_pause_scope(scope)
        self._streamer.begin()
        await self.client.pause(pause_scope)

    async def resume(self) -> None:
        """Continue after a pause. Do nothing if there is no pause."""
        self._streamer.begin()
        await self.client.resume()

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Return False if requests are unfinished."""
        self._streamer.begin()
        return await self.client.reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights and KV cache until `wake_up`. See `LLM.sleep`."""
        self._streamer.begin()
        await self.client.sleep(level)

    async def wake_up(self, tags: Iterable[str] = ()) -> None:
        """Allocate the memory of `tags` again. See `LLM.wake_up`."""
        self._streamer.begin()
        await self.client.wake_up(read_sleep_tags(tags))

    async def collective_rpc(self, operation: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker. Return the results by rank, as plain data."""
        self._streamer.begin()
        return await self.client.call_workers(operation, args, kwargs)

    async def read_steps(self, after: int = 0, max_steps: int = MAX_STEPS) -> StepTrace:
        """Return what each request did in the steps with numbers above `after`.

        The first call starts the recording, which ends if there is no call for 10 s.
        """
        self._streamer.begin()
        return await self.client.read_steps(after, max_steps)

    async def check_health(self, *, max_silence_s: float = MAX_SILENCE_S) -> None:
        """Raise EngineDeadError if the engine has failed, StalledError if it does not respond.

        max_silence_s: allowed time without a heartbeat; heartbeats continue during a long step.
        Raises UnavailableError while the engine is being restarted.
        """
        max_s = check_number("max_silence_s", max_silence_s, 0.0, MAX_TIMEOUT_S)
        self._streamer.begin()
        await self.client.check_alive()
        age_s = self.client.progress.age_s
        if age_s > max_s:
            raise StalledError(
                f"The engine has sent no heartbeat for {age_s:.1f} s; {max_s:g} s are "
                "allowed. Its process is stopped or gets no CPU time."
            )

    async def is_ready(self, *, max_silence_s: float = MAX_SILENCE_S) -> bool:
        """Return whether `check_health` raises no error."""
        try:
            await self.check_health(max_silence_s=max_silence_s)
        except (EngineDeadError, StalledError, UnavailableError):
            return False
        return True

    def shutdown(self) -> None:
        """Shut down the engine. Waiting callers get EngineDeadError. May be called twice.

        Blocks for at most a few seconds, until the engine's process has exited.
        """
        self._streamer.close(EngineDeadError("the engine was shut down; create a new one."))
        try:
            self._front.listeners.stop()
        finally:
            self.client.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


def _check_max_waiting(max_waiting: object) -> None:
    if type(max_waiting) is not int or max_waiting < 0:
        raise ConfigError(f"max_waiting={shorten(max_waiting)} must be an integer of at least 0.")


def _make_config(
    model: EngineConfig | RequestedConfig | str | Path, options: dict[str, Any]
) -> RequestedConfig:
    from dovetail.config import EngineConfig, RequestedConfig  # slow to import

    if not isinstance(model, (EngineConfig, RequestedConfig)):
        return EngineArgs.from_kwargs(model=model, **options).create_engine_config()
    if options:
        raise ConfigError(
            f"{next(iter(options))}={shorten(next(iter(options.values())))} cannot be combined "
            "with an EngineConfig; pass the path of a model with options, or only a configuration."
        )
    if isinstance(model, RequestedConfig):
        return model
    from dovetail.config.resolve import request_of

    return request_of(model)
