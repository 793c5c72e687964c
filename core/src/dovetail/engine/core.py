"""The engine core: schedule, execute, update. Requests in, columns of tokens out.

Depends on neither text nor tokenizers, and of each part only its contract. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dovetail.clock import MonotonicClock, sleep
from dovetail.engine.idle_wait import IdleWait
from dovetail.engine.input.params_checks import RequestRules
from dovetail.engine.input.request_checks import validate_core_request
from dovetail.engine.structured_output import StructuredOutput, check_structured_output
from dovetail.errors import (
    DovetailError,
    EngineDeadError,
    RequestError,
    StalledError,
    UserError,
)
from dovetail.executors.operation import check_callable_from_outside
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
from dovetail.value_checks import shorten

MAX_DRAIN_NS = 1_000_000_000
"""How long a reset waits, though no request is left, for what a KV connector stores."""

SLEEP_TAGS = {"weights", "kv_cache"}
"""Memory that a worker gives back while it sleeps."""


class EngineCore:
    """Drives a scheduler and an executor, one plan or two at a time. paused: how far, or None."""

    def __init__(
        self,
        executor: Executor,
        scheduler: SchedulerInterface,
        *,
        vocab_size: int,
        max_model_len: int,
        rules: RequestRules | None = None,
        structured_output: StructuredOutput | None = None,
    ) -> None:
        """rules: what requests may ask for. structured_output: a gate of the scheduler, too."""
        self.executor = executor
        self.scheduler = scheduler
        self.paused: PauseScope | None = None
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._rules = rules or RequestRules()
        self._structured = structured_output
        self._out: deque[tuple[SchedulerOutput, Handle[ModelRunnerOutput]]] = deque()
        self._unsampled: SchedulerOutput | None = None
        self._dead = False
        self._clock = MonotonicClock()
        self._idle = IdleWait(self._clock)
        self._stats_due = False
        self._last_stats: SchedulerStats | None = None
        self._asleep = False
        self._awake_tags: set[str] = set()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Check a request, whatever front end it came through, and take it in.

        Raises RequestError; every other request continues.
        """
        fault("core.add_request")
        self._check_alive()
        validate_core_request(
            request,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            worker_provides=self._rules.worker_provides,
            limits=self._rules.limits,
        )
        check_structured_output(request, self._structured)
        for check in self._rules.params_checks:
            check(request.sampling_params)
        self._idle.end()
        try:
            self.scheduler.add_request(request)
        except DovetailError:
            raise
        except Exception as error:
            raise self._scheduler_failed("a request was added", error) from error
        self._stats_due = True

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> dict[str, RequestError]:
        """Take requests in; return the refusals by id."""
        refused = {}
        for request in requests:
            try:
                self.add_request(request)
            except RequestError as error:
                refused[request.request_id] = error
        return refused

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests at once; return the ids that were alive."""
        fault("core.abort_requests")
        self._idle.end()
        ended = self.scheduler.abort_requests(request_ids)
        if self._structured is not None:
            self._structured.end(ended)
        self._stats_due = self._stats_due or bool(ended)
        return ended

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot go on, though nothing runs.

        A worker that is merely silent raises nothing: it may come back.
        """
        self._check_alive()
        with suppress(StalledError):
            self.executor.check_health()

    def has_work(self) -> bool:
        """Return whether a step could bring anything; whom a pause holds counts for nothing."""
        return bool(self._out) or self._wants_plan()

    def step_is_due(self) -> bool:
        """Return whether there is work, or statistics are out of date.

        Where requests came or were aborted since the last step, one more is due, even if it runs
        nothing: the statistics that it gives are those of now.
        """
        return self._stats_due or self.has_work()

    @property
    def wait_s(self) -> float:
        """Seconds until the next step is due, where there is work; 0.0 while requests run.

        More than 0 where the last steps ran nothing: all that is left waits for something that is
        done elsewhere. A step before is not wrong, but brings nothing. A request that is added or
        aborted, a pause and its end make a step due at once.
        """
        return self._idle.remaining_s

    def _wants_plan(self) -> bool:
        depth = self.scheduler.depth()
        return bool(depth.num_active or depth.num_transfers)

    def pause(self, scope: PauseScope) -> None:
        """Admit nobody new, or let nothing run, until `resume`; plans that are out end as ever."""
        self._check_alive()
        self._idle.end()
        self.paused = PauseScope(scope)
        self.scheduler.pause(self.paused)

    def resume(self) -> None:
        """Lift a pause; do nothing if there is none. Raises UserError while the workers sleep."""
        self._check_alive()
        if self._asleep:
            raise UserError("The engine sleeps; call wake_up instead of resume.")
        self._idle.end()
        self.scheduler.resume()
        self.paused = None

    def step(self) -> EngineCoreOutputs:
        """Plan a step, execute it and return what it gave.

        Raises EngineDeadError, with a digest of the plan, if the executor fails. From then on, and
        after anything else that broke off a step (Ctrl-C, say), every call does.
        """
        self._check_alive()
        self._dead = True  # until the step is done: what an interrupt leaves behind is unknown
        plan = self._schedule()
        self._execute(plan)
        outputs = self._update(plan, self._result(plan, self._sample(plan)))
        self._dead = False
        return outputs

    def step_with_batch_queue(self) -> EngineCoreOutputs | None:
        """Plan a step ahead of the one that is executed; return what the oldest gave, if it is due.

        Returns None when a plan was handed out and another one may follow before any result is
        needed. Tokens are the same as with `step`.
        """
        self._check_alive()
        self._dead = True  # as in `step`
        outputs = self._step_ahead()
        self._dead = False
        return outputs

    def _step_ahead(self) -> EngineCoreOutputs | None:
        depth = self.executor.max_concurrent_steps
        room = self._unsampled is None and len(self._out) < depth
        if room and (self._wants_plan() or (self._stats_due and not self._out)):
            plan = self._schedule()
            if self._execute(plan) and self._out:
                self._unsampled = plan  # its masks depend on the tokens that are under way
            else:
                self._out.append((plan, self._sample(plan)))
                if len(self._out) < depth:
                    return None
        return self._take_oldest() if self._out else None

    def _take_oldest(self) -> EngineCoreOutputs:
        """Return what the oldest plan gave; sample the plan that waited for it."""
        plan, handle = self._out.popleft()
        outputs = self._update(plan, self._result(plan, handle))
        if self._unsampled is not None and not self._out:
            plan, self._unsampled = self._unsampled, None
            self._out.append((plan, self._sample(plan)))
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False if requests are under way.

        What is still out, though all requests have ended, is taken in first: a step, and what a KV
        connector stores, within `MAX_DRAIN_NS`.
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
        return self.scheduler.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back: pause all, drop cached prefixes, let the workers sleep.

        Raises UserError if a worker does not provide "sleep", or requests are under way.
        """
        self._check_alive()
        if self._asleep:
            raise UserError("The engine sleeps already; call wake_up first.")
        if type(level) is not int or level not in (1, 2):
            raise UserError(f"level={shorten(level)} must be 1 or 2.")
        if "sleep" not in self._rules.worker_provides:
            raise UserError('The worker does not provide "sleep"; choose another worker_cls.')
        if not self.reset_prefix_cache():
            raise UserError("Requests are under way; let them end, or abort them, before sleep.")
        self.pause(PauseScope.ALL)
        self._asleep = True
        self.executor.collective_rpc("sleep", args=(level,))

    def wake_up(self, tags: tuple[str, ...] = ()) -> None:
        """Take memory again; with all of it (`tags` empty) requests run on.

        Raises UserError if the engine does not sleep, or for a tag that is not known.
        """
        self._check_alive()
        if not self._asleep:
            raise UserError("The engine does not sleep.")
        if unknown := set(tags) - SLEEP_TAGS:
            raise UserError(
                f"tags={shorten(sorted(unknown))}: only {sorted(SLEEP_TAGS)} are known."
            )
        self.executor.collective_rpc("wake_up", args=(tuple(tags),))
        self._awake_tags |= set(tags) or SLEEP_TAGS
        if self._awake_tags == SLEEP_TAGS:
            self._asleep, self._awake_tags = False, set()
            self.resume()

    def call_workers(
        self,
        operation: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; return the answers by rank.

        Raises UserError for what cannot be called, DovetailError for what the call raised.
        """
        if isinstance(operation, str):
            check_callable_from_outside(operation)
        elif not callable(operation):
            raise UserError(
                f"operation={shorten(operation)} must be the name of a worker's method, or a "
                "callable that is given the worker."
            )
        answers: list[Any] = self.executor.collective_rpc(operation, args=args, kwargs=kwargs)
        return answers

    def get_stats(self) -> SchedulerStats | None:
        """Return the scheduler's statistics of the latest step, None before the first."""
        return self._last_stats

    def shutdown(self) -> None:
        """End scheduler and executor. May be called twice."""
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
            raise self._scheduler_failed("a step was planned", error) from error

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
            if plan.empty and self._unsampled is None and all(one.empty for one, _ in self._out):
                self._idle.extend()
            return outputs
        except DovetailError:
            raise
        except Exception as error:
            raise self._scheduler_failed("a step was settled", error) from error

    def _scheduler_failed(self, when: str, error: Exception) -> EngineDeadError:
        """Return the error for a scheduler, or a policy in it, that broke: its state is unknown."""
        self._dead = True
        cls = type(self.scheduler)
        return EngineDeadError(
            f"the scheduler {cls.__module__}:{cls.__qualname__} failed when {when}: "
            f"{describe_failure(error)}; make a new engine, with another scheduler_cls"
        )

    def _execute(self, plan: SchedulerOutput) -> bool:
        """Start the model for `plan`; return whether grammars constrain what it samples."""
        try:
            fault("core.launch")
            self.executor.execute_model(plan)
        except Exception as error:
            raise self._died(plan, error) from error
        return self._structured is not None and self._structured.constrains(plan)

    def _sample(self, plan: SchedulerOutput) -> Handle[ModelRunnerOutput]:
        """Sample for `plan`, the last one that was executed, under the masks of its grammars."""
        mask = None if self._structured is None else self._structured.mask(plan)
        try:
            return self.executor.sample_tokens(mask)
        except Exception as error:
            raise self._died(plan, error) from error

    def _result(
        self, plan: SchedulerOutput, handle: Handle[ModelRunnerOutput]
    ) -> ModelRunnerOutput:
        try:
            fault("core.result")
            return handle.result()
        except Exception as error:
            raise self._died(plan, error) from error

    def _died(self, plan: SchedulerOutput, error: Exception) -> EngineDeadError:
        return EngineDeadError(f"a step failed: {error}", digest=plan.describe())

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDeadError("the engine is dead since a step failed; make a new one")
