"""The engine core: schedule, execute, process results.

The input is requests, and the output is columns of tokens. This module handles no text and no
tokenizer, and uses each part only through its contract. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dovetail.clock import Clock, MonotonicClock, sleep
from dovetail.engine.idle_wait import IdleWait
from dovetail.engine.input.params_checks import RequestRules
from dovetail.engine.input.request_checks import (
    SLEEP_TAGS,
    CoreRequestChecker,
    check_sleep_level,
    read_sleep_tags,
)
from dovetail.engine.step_trace.recorder import StepRecorder
from dovetail.engine.step_trace.records import MAX_STEPS, StepTrace
from dovetail.engine.structured_output import StructuredOutput, check_structured_output
from dovetail.errors import DovetailError, EngineDeadError, RequestError, StalledError, UserError
from dovetail.executors.operation import call_from_outside
from dovetail.faults import fault
from dovetail.interfaces import (
    EngineCoreOutputs,
    Executor,
    Handle,
    PauseScope,
    SchedulerInterface,
    SchedulerStats,
)
from dovetail.plan import SchedulerOutput
from dovetail.plugins.containment import describe_failure
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput

MAX_DRAIN_NS = 1_000_000_000
"""How long a reset of the prefix cache waits for the KV connector to store blocks."""


class EngineCore:
    """Runs a scheduler and an executor. paused: the scope of the pause, or None without a pause."""

    def __init__(
        self,
        executor: Executor,
        scheduler: SchedulerInterface,
        *,
        vocab_size: int,
        max_model_len: int,
        rules: RequestRules | None = None,
        structured_output: StructuredOutput | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Create the core.

        structured_output: if given, it is also a gate of the scheduler.
        clock: the scheduler's clock; None for the monotonic clock of the machine.
        """
        self.executor = executor
        self.scheduler = scheduler
        self.paused: PauseScope | None = None
        self._rules = rules or RequestRules()
        self._checker = CoreRequestChecker(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            worker_provides=self._rules.worker_provides,
            limits=self._rules.limits,
        )
        self._structured = structured_output
        self._out: deque[tuple[SchedulerOutput, Handle[ModelRunnerOutput]]] = deque()
        self._unsampled: SchedulerOutput | None = None
        self._clock = clock or MonotonicClock()
        self._idle = IdleWait(self._clock)
        self._dead = self._stats_due = self._is_shut_down = False
        self._last_stats: SchedulerStats | None = None
        self.asleep: tuple[int, tuple[str, ...]] | None = None  # level, tags allocated again

    def add_request(self, request: EngineCoreRequest) -> None:
        """Check a request from any front end, and add it.

        Raises RequestError for an invalid request; other requests are not affected.
        """
        fault("core.add_request")
        self._check_alive()
        self._checker.check(request)
        check_structured_output(request, self._structured)
        self._rules.check(request)
        self._idle.end()
        try:
            self.scheduler.add_request(request)
        except DovetailError:
            raise
        except Exception as error:
            raise self.scheduler_failed("a request was added", error) from error
        self._stats_due = True

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> dict[str, RequestError]:
        """Add requests. Return the rejections by id."""
        rejected = {}
        for request in requests:
            try:
                self.add_request(request)
            except RequestError as error:
                rejected[request.request_id] = error
        return rejected

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Abort requests immediately. Return the ids that existed."""
        fault("core.abort_requests")
        self._idle.end()
        ended = self.scheduler.abort_requests(request_ids)
        if self._structured is not None:
            self._structured.end(ended)
        self._stats_due = self._stats_due or bool(ended)
        return ended

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine has failed, even if no request is running.

        Missing heartbeats of a worker raise no error, because the worker may recover.
        """
        self._check_alive()
        with suppress(StalledError):
            self.executor.check_health()

    def has_work(self) -> bool:
        """Return whether a step could produce outputs. Requests held by a pause do not count."""
        return bool(self._out) or self._can_plan()

    def step_is_due(self) -> bool:
        """Return whether there is work, or statistics are out of date.

        After requests were added or aborted one more step is due, even if no request runs: it
        updates the statistics.
        """
        return self._stats_due or self.has_work()

    @property
    def wait_s(self) -> float:
        """Seconds until the next step is due, if there is work. 0.0 while requests run.

        More than 0 if no request ran in the last steps: all requests wait for external work. An
        earlier step is allowed, but produces nothing. A step is due immediately when a request is
        added or aborted, or a pause begins or ends.
        """
        return self._idle.remaining_s

    def _can_plan(self) -> bool:
        depth = self.scheduler.depth()
        return bool(depth.num_active or depth.num_transfers)

    def pause(self, scope: PauseScope) -> None:
        """Hold new requests, or all requests, until `resume`. Plans in flight complete normally."""
        self._check_alive()
        self._idle.end()
        self.paused = PauseScope(scope)
        self.scheduler.pause(self.paused)

    def resume(self) -> None:
        """Continue after a pause, if there is one. Raises UserError while the workers sleep."""
        self._check_alive()
        if self.asleep is not None:
            raise UserError("The engine is asleep; call wake_up instead of resume.")
        self._idle.end()
        self.scheduler.resume()
        self.paused = None

    def step(self) -> EngineCoreOutputs:
        """Plan and execute a step, and return its outputs.

        Raises EngineDeadError, with a summary of the plan, if the executor fails. After that, or
        after another interruption of a step (such as Ctrl-C), every call raises EngineDeadError.
        """
        self._check_alive()
        self._dead = True  # remains True if the step is interrupted: the state is unknown
        plan = self._schedule()
        self._execute(plan)
        outputs = self._update(plan, self._result(plan, self._sample(plan)))
        self._dead = False
        return outputs

    def step_with_batch_queue(self) -> EngineCoreOutputs | None:
        """Plan a step while another one is executed. Return the oldest step's outputs, if due.

        Returns None if a plan was sent and another one may follow before a result is needed. The
        tokens are the same as with `step`.
        """
        self._check_alive()
        self._dead = True  # remains True if the step is interrupted, as in `step`
        outputs = self._step_ahead()
        self._dead = False
        return outputs

    def _step_ahead(self) -> EngineCoreOutputs | None:
        depth = self.executor.max_concurrent_steps
        room = self._unsampled is None and len(self._out) < depth
        if room and (self._can_plan() or (self._stats_due and not self._out)):
            plan = self._schedule()
            if self._execute(plan) and self._out:
                self._unsampled = plan  # its masks depend on pending tokens
            else:
                self._out.append((plan, self._sample(plan)))
                if len(self._out) < depth:
                    return None
        return self._take_oldest() if self._out else None

    def _take_oldest(self) -> EngineCoreOutputs:
        """Return the outputs of the oldest plan. Then sample for the plan that waited for them."""
        plan, handle = self._out.popleft()
        outputs = self._update(plan, self._result(plan, handle))
        if self._unsampled is not None and not self._out:
            plan, self._unsampled = self._unsampled, None
            self._out.append((plan, self._sample(plan)))
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Return False if requests are unfinished.

        After the last request has ended, first waits for the step in flight and for the stores of a
        KV connector, at most for `MAX_DRAIN_NS`.
        """
        self._check_alive()
        end_ns = self._clock.now_ns() + MAX_DRAIN_NS
        while self._clock.now_ns() < end_ns:
            depth = self.scheduler.depth()
            if depth.num_running + depth.num_waiting:
                break
            if self._out:
                self._take_oldest()
            elif depth.num_transfers:
                sleep(self.wait_s)
                self.step()
            else:
                break
            self._stats_due = True  # the outputs of these steps, with their statistics, are dropped
        return self.scheduler.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free device memory: pause all requests, drop cached prefixes, put the workers to sleep.

        Raises UserError if a worker does not provide "sleep", sleep mode is not enabled, or
        requests are unfinished. If a worker fails, raises its error; then call `wake_up`.
        """
        self._check_alive()
        if self.asleep is not None:
            raise UserError("The engine is already asleep; call wake_up first.")
        check_sleep_level(level)
        if "sleep" not in self._rules.worker_provides:
            raise UserError('The worker does not provide "sleep"; choose another worker_cls.')
        if not self._rules.sleep_enabled:
            raise UserError("Sleep mode is not enabled; set enable_sleep_mode=True.")
        if not self.reset_prefix_cache():
            raise UserError("Some requests are unfinished; wait for them or abort them first.")
        self.pause(PauseScope.ALL)
        self.asleep = level, ()
        self.executor.collective_rpc("sleep", args=(level,))

    def wake_up(self, tags: tuple[str, ...] = ()) -> None:
        """Allocate memory again. If all of it is allocated (`tags` empty), requests continue.

        Raises UserError if the engine is not asleep, or for an unknown tag, and CapacityError if a
        worker gets too little memory; the engine then stays asleep, and the call can be repeated.
        """
        self._check_alive()
        if self.asleep is None:
            raise UserError("The engine is not asleep.")
        tags = read_sleep_tags(tags)
        self.executor.collective_rpc("wake_up", args=(tags,))
        level, awake = self.asleep
        awake = tuple(sorted({*awake, *(tags or SLEEP_TAGS)}))
        self.asleep = (level, awake) if len(awake) < len(SLEEP_TAGS) else None
        if self.asleep is None:
            self.resume()

    def call_workers(
        self,
        operation: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker. Return the results in the order of the ranks.

        Raises UserError if the method cannot be called, DovetailError if the call fails.
        """
        return call_from_outside(self.executor, operation, args, kwargs)

    def get_stats(self) -> SchedulerStats | None:
        """Return the scheduler's statistics of the latest step, None before the first."""
        return self._last_stats

    def read_steps(self, after: int = 0, max_steps: int = MAX_STEPS) -> StepTrace:
        """Return the records with numbers above `after`. The first call starts the recording."""
        self._check_alive()
        if not isinstance(self.scheduler, StepRecorder):
            restore = partial(setattr, self, "scheduler")
            self.scheduler = StepRecorder(self.scheduler, self._clock, restore)
        return self.scheduler.read(after, max_steps, self._last_stats)

    def shutdown(self) -> None:
        """Shut scheduler and executor down. May be called twice."""
        self._is_shut_down = True
        self._out.clear()
        try:
            fault("core.shutdown")
            self.scheduler.shutdown()
        finally:
            if self._structured is not None:
                self._structured.shutdown()
            self.executor.shutdown()

    def _schedule(self) -> SchedulerOutput:
        try:
            fault("core.schedule")
            plan = self.scheduler.schedule()
            if not plan.empty:
                self._idle.end()
            return plan
        except DovetailError:
            raise
        except Exception as error:
            raise self.scheduler_failed("a step was planned", error) from error

    def _update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        try:
            fault("core.update")
            self._stats_due = False
            structured = self._structured
            if structured is not None and (errors := structured.run_errors(plan, result)):
                result = replace(result, errors={**result.errors, **errors})
            outputs = self.scheduler.update_from_output(plan, result)
            self._last_stats = outputs.stats
            if structured is not None:
                structured.accept(outputs)
            if (
                plan.empty
                and self._unsampled is None
                and all(output.empty for output, _ in self._out)
            ):
                self._idle.extend()
            return outputs
        except DovetailError:
            raise
        except Exception as error:
            raise self.scheduler_failed("a step's result was processed", error) from error

    def scheduler_failed(self, when: str, error: Exception) -> EngineDeadError:
        """Stop the engine after the scheduler raised an exception. Return the error to raise."""
        self._dead = True
        scheduler = self.scheduler
        cls = type(scheduler.scheduler if isinstance(scheduler, StepRecorder) else scheduler)
        return EngineDeadError(
            f"the scheduler {cls.__module__}:{cls.__qualname__} failed when {when}: "
            f"{describe_failure(error)}. Create a new engine with another scheduler_cls"
        )

    def _execute(self, plan: SchedulerOutput) -> bool:
        """Start to execute the model for `plan`. Return whether grammars constrain its samples."""
        try:
            fault("core.launch")
            self.executor.execute_model(plan)
        except Exception as error:
            raise self._failed(plan, error) from error
        return self._structured is not None and self._structured.constrains(plan)

    def _sample(self, plan: SchedulerOutput) -> Handle[ModelRunnerOutput]:
        """Sample for `plan`, the last executed one, with the masks of its grammars."""
        mask = None if self._structured is None else self._structured.mask(plan)
        try:
            return self.executor.sample_tokens(mask)
        except Exception as error:
            raise self._failed(plan, error) from error

    def _result(
        self, plan: SchedulerOutput, handle: Handle[ModelRunnerOutput]
    ) -> ModelRunnerOutput:
        try:
            fault("core.result")
            return handle.result()
        except Exception as error:
            raise self._failed(plan, error) from error

    def _failed(self, plan: SchedulerOutput, error: Exception) -> EngineDeadError:
        return EngineDeadError(f"a step failed: {error}", digest=plan.describe())

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down; create a new one.")
        if self._dead:
            raise EngineDeadError("the engine has failed in an earlier step; create a new one")
