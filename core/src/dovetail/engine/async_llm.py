"""`AsyncLLM`: prompts in, streams of answers out, in an event loop; the engine in its own process.

Starts the parts and names what callers can do; how requests are served is the desk's. Knows
neither scheduling nor how the engine's process is spoken with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TYPE_CHECKING, Any

from dovetail.clock import Clock, MonotonicClock
from dovetail.config import EngineArgs
from dovetail.engine.front_end import FrontEnd, FrontEndParts, UserRequest
from dovetail.engine.input.request_checks import read_pause_scope, request_id_chunks
from dovetail.engine.process.attached_engine import ATTACH_TIMEOUT_S
from dovetail.engine.process.factory import attach_client, make_client
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
    from dovetail.engine.client import AsyncEngineClient
    from dovetail.inputs import Prompt
    from dovetail.interfaces import IOProcessor, SchedulerStats, Tokenizer
    from dovetail.outputs import RequestOutput
    from dovetail.sampling_params import SamplingParams

MAX_WAITING = 1024
"""Completions that may be asked for beyond those that run (`max_num_seqs`), unless said."""

MAX_SILENCE_S = 4.0
"""How long an engine may be silent before it is called not ready, unless said."""


class AsyncLLM:
    """A model that answers many callers at a time, in one event loop: the first that uses it.

    `AsyncLLM(model=…)`, with the options of `EngineArgs` as keywords, or
    `AsyncLLM.from_engine_args(EngineArgs(…))` starts the engine, which blocks until it is ready;
    then `async for output in llm.generate(…)`. Use it with `async with`, or call `shutdown`.
    Not thread-safe: coroutines raise UserError in another thread or loop; only `shutdown` may be
    called from any thread. Once the engine is dead, every coroutine raises EngineDeadError.
    client: speaks with the engine's process.
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
        """Start the engine; raise a DovetailError that names the part at fault.

        model, options: as for `LLM`; or a configuration that was made before, without options.
        max_waiting: see `generate`. rules: when an engine that dies is started again; None for
        never. What was under way ends with "error" then, and calls raise UnavailableError until
        the next engine is ready.
        """
        config = _make_config(model, options)
        _check_max_waiting(max_waiting)
        if not isinstance(rules, SupervisionRules | None):
            raise ConfigError(f"rules={shorten(rules)} must be a SupervisionRules, or None.")
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
        """Return one more front end of an engine that another process has started.

        address: the `address` of the `AsyncLLM` that started it. timeout_s: how long to wait for
        the engine's answer. Requests are this front end's own, and so are their ids and its
        `max_waiting`; pause, prefix cache and sleep are the engine's. `shutdown`, or the end of
        this process, ends this front end's requests and nothing else. The owner alone runs the
        stat loggers. Raises ConfigError for an address that is not one, EngineDeadError if no
        engine answers.
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
        """Put the front end together; shut the client down if that fails."""
        self.client: AsyncEngineClient = client
        clock = clock or MonotonicClock()
        try:
            self._front = FrontEnd(prepare(), client.facts, clock)
        except BaseException:
            client.shutdown()
            raise
        max_asked = max_waiting + self.config.scheduler.max_num_seqs
        self._streamer = RequestStreamer(self._front, self.client, max_asked=max_asked, clock=clock)

    @classmethod
    def from_engine_args(
        cls,
        args: EngineArgs,
        *,
        max_waiting: int = MAX_WAITING,
        rules: SupervisionRules | None = None,
    ) -> AsyncLLM:
        """Start an engine from flat options."""
        return cls(args.create_engine_config(), max_waiting=max_waiting, rules=rules)

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration, resolved."""
        return self.client.facts.config

    @property
    def address(self) -> str:
        """Where other processes can `attach` to this engine: the path of its socket.

        A supervised engine has another one after each restart.
        """
        return self.client.address or ""

    @property
    def max_model_len(self) -> int:
        """Tokens of a request, prompt and output together."""
        return self.client.facts.max_model_len

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the loaded model can be asked for."""
        return self.client.facts.model_info.supported_tasks

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if the engine was made without one."""
        return self._front.tokenizer

    @property
    def io_processor(self) -> IOProcessor | None:
        """What `EngineArgs.io_processor` named, for the caller to use; or None."""
        return self._front.io_processor

    @property
    def num_unfinished(self) -> int:
        """How many requests the engine works on or has waiting."""
        return self._front.outputs.num_unfinished

    @property
    def last_stats(self) -> SchedulerStats | None:
        """The scheduler's statistics of the latest step, or None before the first."""
        return self._streamer.last_stats

    def default_sampling_params(self) -> SamplingParams:
        """Return what a request gets that brings no parameters: the model's own defaults."""
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
        """Return the outputs of one request as an async generator, the last of them `finished`.

        The request is taken in when the first output is requested. A reader who comes late gets in
        one output what has come since. Leaving the loop, or cancelling the task, aborts the
        request; who keeps the generator calls its `aclose`.
        request_id: in use until the last output is out; "" for one of its own. timeout_s: seconds
        after which the request is ended; it is likewise ended if it has no first token by the
        prompt's `deadline_s`. Its last output has the finish reason "abort" then, what there was,
        and why in `error`. A request that only the engine can refuse ends in an output with
        the finish reason "error", and why in `error`.
        Raises, out of the generator, RequestError that names the parameter; CapacityError if more
        than `max_num_seqs` + `max_waiting` completions would be asked for and not yet read to
        their end; EngineDeadError, after the outputs that were there.
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

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; their readers get a last output. Unknown ids are ignored."""
        self._streamer.begin()
        chunks: list[list[str]] = []
        for chunk in request_id_chunks(request_ids):
            if chunks:
                await asyncio.sleep(0)  # others have a turn
            chunks.append(chunk)
        for chunk in chunks:
            await self._streamer.end(chunk)

    async def pause(self, scope: PauseScope | str = PauseScope.ALL) -> None:
        """Hold requests where they are until `resume`; others may come and wait meanwhile.

        scope: "all": nothing runs; or "new": those that have begun run on to their end. Raises
        UserError for any other scope.
        """
        pause_scope = read_pause_scope(scope)
        self._streamer.begin()
        await self.client.pause(pause_scope)

    async def resume(self) -> None:
        """Lift a pause; do nothing if there is none."""
        self._streamer.begin()
        await self.client.resume()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False if requests are under way."""
        self._streamer.begin()
        return await self.client.reset_prefix_cache()

    async def collective_rpc(self, operation: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker by name; return the answers, plain data, by rank."""
        self._streamer.begin()
        return await self.client.call_workers(operation, args, kwargs)

    async def check_health(self, *, max_silence_s: float = MAX_SILENCE_S) -> None:
        """Raise EngineDeadError if the engine is dead, StalledError if it does not respond.

        max_silence_s: for how long it may show none; a long step is not silence. Raises
        UnavailableError while it is started again.
        """
        most_s = check_number("max_silence_s", max_silence_s, 0.0, MAX_TIMEOUT_S)
        self._streamer.begin()
        await self.client.check_alive()
        age_s = self.client.progress.age_s
        if age_s > most_s:
            raise StalledError(
                f"the engine has shown no heartbeat for {age_s:.1f} s; {most_s:g} s are "
                "allowed. It is stopped, or starved of processor time."
            )

    async def is_ready(self, *, max_silence_s: float = MAX_SILENCE_S) -> bool:
        """Return whether `check_health` has nothing to say."""
        try:
            await self.check_health(max_silence_s=max_silence_s)
        except (EngineDeadError, StalledError, UnavailableError):
            return False
        return True

    def shutdown(self) -> None:
        """End the engine; whoever waits gets EngineDeadError. May be called twice.

        Blocks until its process is gone, some seconds at most.
        """
        self._streamer.close(EngineDeadError("the engine was shut down; make a new one."))
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
        raise ConfigError(f"max_waiting={shorten(max_waiting)} must be an integer from 0.")


def _make_config(
    model: EngineConfig | RequestedConfig | str | Path, options: dict[str, Any]
) -> RequestedConfig:
    from dovetail.config import EngineConfig, RequestedConfig  # not before an engine is made

    if not isinstance(model, (EngineConfig, RequestedConfig)):
        return EngineArgs.from_kwargs(model=model, **options).create_engine_config()
    if options:
        raise ConfigError(
            f"{next(iter(options))}={shorten(next(iter(options.values())))} is given beside an "
            "EngineConfig; give the path of a model with options, or a configuration alone."
        )
    if isinstance(model, RequestedConfig):
        return model
    from dovetail.config.resolve import request_of

    return request_of(model)
