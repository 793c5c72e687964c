"""Runs random sequences of scheduler calls (`random_programs`) and checks every step.

A program consists of arrivals, aborts, pauses, resets, plans and results, generated from a seed. It
checks the complete contract of `SchedulerInterface`: a strict `RowModel` executes the plans, and
each request must get the tokens that it would get alone. This module uses only the contract of the
scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from dovetail.clock import ManualClock
from dovetail.interfaces.policy import Policy
from dovetail.interfaces.scheduler import (
    EngineCoreOutputs,
    PauseScope,
    SchedulerContext,
    SchedulerInterface,
    SchedulerStats,
)
from dovetail.plan import SchedulerOutput
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail_devkit.expectation import expect
from dovetail_devkit.fakes.kv_connector import FakeSchedulerSide
from dovetail_devkit.rows.groups import make_rows
from dovetail_devkit.scheduler.column_types import (
    check_depth_types,
    check_outputs_types,
    check_plan_types,
)
from dovetail_devkit.scheduler.draft_rules import DraftChecker
from dovetail_devkit.scheduler.hold_rules import HoldChecker
from dovetail_devkit.scheduler.random_programs import (
    VOCAB_SIZE,
    Program,
    make_kv_cache,
    random_program,
    random_request,
)
from dovetail_devkit.scheduler.request_ledger import RequestLedger
from dovetail_devkit.scheduler.step_accounts import StepAccounts

STEP_NS = 1_000_000

__all__ = [
    "AfterStep",
    "Program",
    "SchedulerDriver",
    "make_kv_cache",
    "random_program",
    "random_request",
]

AfterStep = Callable[[SchedulerInterface], None]


def _do_nothing(scheduler: SchedulerInterface) -> None:
    """The default of `after_step`: do nothing."""


class SchedulerDriver:
    """Drives one scheduler and checks it after every call.

    alive: expected and received outputs of the requests that have not ended or been aborted. plans:
    all plans so far. num_cached: reported num_cached_tokens by request id. conserves_work: whether
    the policy declares that each step runs a request if one can run. last_stats: the latest
    statistics, or None.
    """

    def __init__(
        self,
        scheduler_cls: type[SchedulerInterface],
        program: Program,
        *,
        policy: type[Policy] | None = None,
        after_step: AfterStep = _do_nothing,
    ) -> None:
        """after_step: called with the scheduler after each call."""
        self.clock = ManualClock()
        self.program = program
        self.drafts = DraftChecker(program.limits.num_lookahead_tokens)
        self.holds = HoldChecker(connected=program.connected)
        gated = program.holds and "gates" in scheduler_cls.provides
        self.connected = program.connected and "kv_connector" in scheduler_cls.provides
        self.limits = program.limits
        if "encoder" not in scheduler_cls.provides:
            self.limits = replace(self.limits, max_num_encoder_tokens=0, encoder_cache_tokens=0)
        self.scheduler = scheduler_cls(
            SchedulerContext(
                limits=self.limits,
                kv_cache=program.kv_cache,
                clock=self.clock,
                policy=policy,
                seed=program.seed,
                strict=True,
                gates=[self.holds.gate] if gated else (),
                kv_connector=FakeSchedulerSide() if self.connected else None,
            )
        )
        self.alive: dict[str, RequestLedger] = {}
        self.plans: list[SchedulerOutput] = []
        self._rows = make_rows(self.limits, program.kv_cache, VOCAB_SIZE, connected=self.connected)
        self._out: deque[tuple[SchedulerOutput, str, ModelRunnerOutput]] = deque()
        self._last_named: dict[int, int] = {}
        self._executed = -1
        self.num_cached: dict[str, int] = {}
        self.last_stats: SchedulerStats | None = None
        self._accounts = StepAccounts()
        self.conserves_work = policy is None or policy.work_conserving
        self._after_step = after_step

    @property
    def num_out(self) -> int:
        """The number of plans in flight."""
        return len(self._out)

    def add(self, request: EngineCoreRequest) -> None:
        """Add a request that can run."""
        self.scheduler.add_request(request)
        self._accounts.add(request.request_id)
        self.holds.add(request.request_id)
        self.alive[request.request_id] = RequestLedger(
            request, max_model_len=self.limits.max_model_len, vocab_size=VOCAB_SIZE
        )
        self._check_depth()

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests. Some of them may have ended before."""
        expected = [name for name in dict.fromkeys(request_ids) if name in self.alive]
        actual = self.scheduler.abort_requests(request_ids)
        expect(
            sorted(actual) == sorted(expected),
            f"abort_requests returns {actual}; expected {expected}",
        )
        for name in expected:
            del self.alive[name]
        self._check_depth()

    def pause(self, scope: PauseScope) -> None:
        """Pause the scheduler."""
        self.scheduler.pause(scope)
        self.holds.scope = scope
        self._check_depth()

    def resume(self) -> None:
        """Resume the scheduler, which may be paused."""
        self.scheduler.resume()
        self.holds.scope = None
        self._check_depth()

    def open_gate(self, request_id: str, *, fails: bool = False) -> None:
        """Open the gate for a held request, or let the request fail."""
        if fails:
            self.holds.gate.fail(request_id, f"requested failure: {request_id}")
            self.alive[request_id].fail(f"requested failure: {request_id}")
        else:
            self.holds.gate.open(request_id)

    def reset(self) -> None:
        """Reset the prefix cache.

        All unused blocks are poisoned, to detect reads of earlier content.
        """
        idle = not self.alive and not self._out and not self.scheduler.depth().num_transfers
        done = self.scheduler.reset_prefix_cache()
        expect(done or not idle, "reset_prefix_cache returns False, although no block is in use")
        if done:
            self._rows.poison()

    def schedule(self) -> SchedulerOutput:
        """Call `schedule`, and execute the plan."""
        self.clock.advance(STEP_NS)
        plan = self.scheduler.schedule()
        check_plan_types(plan)
        due = self.plans[-1].step_id + 1 if self.plans else plan.step_id
        expect(plan.step_id == due, f"the plan has step_id={plan.step_id}; expected {due}")
        self._check_rows(plan)
        could = [name for name in self.holds.may_run(self.alive) if not self.alive[name].failing]
        moving = self.scheduler.depth().num_transfers
        if not self._out and could and self.conserves_work and not moving:
            expect(not plan.empty, f"the plan has no runs, although the requests {could} can run")
        self.holds.planned(plan, self.alive)
        self.drafts.planned(plan)
        self._rows.execute(plan)
        self._check_pieces(plan)
        self._check_salts()
        self._accounts.take(plan)
        self._out.append((plan, repr(plan), self._rows.sample()))
        self.plans.append(plan)
        self._check_depth()
        return plan

    def settle(self) -> EngineCoreOutputs:
        """Pass the result of the oldest plan in flight to the scheduler."""
        plan, fingerprint, result = self._out.popleft()
        expect(repr(plan) == fingerprint, "the scheduler changed a plan after it returned the plan")
        self.drafts.settled(plan, result)
        self._accounts.settle(plan, result)
        outputs = self.scheduler.update_from_output(plan, result)
        self._executed = plan.step_id
        check_outputs_types(outputs)
        self._take(outputs)
        self._check_stats(outputs, plan)
        self._check_depth()
        return outputs

    def drain(self) -> None:
        """Open all gates, resume, and run until all requests have ended.

        Raise AssertionError if they have not ended after a number of steps.
        """
        self.resume()
        for name in list(self.holds.gate.held):
            self.open_gate(name)
        maximum = 20 + 4 * sum(
            len(ledger.request.prompt_token_ids) + len(ledger.due) for ledger in self.alive.values()
        )
        for _ in range(maximum):
            moving = self.scheduler.depth().num_transfers
            if not self.alive and not self._out and not moving:
                break
            if (self.alive or moving) and len(self._out) < self.program.depth:
                self.schedule()
            if len(self._out) == self.program.depth or not (self.alive or moving):
                self.settle()
        expect(
            not self.alive,
            f"the requests {sorted(self.alive)} have not ended after {maximum} more steps",
        )
        depth = self.scheduler.depth()
        left = depth.num_waiting + depth.num_running
        expect(not left, f"all requests have ended, but depth() counts {left} requests")

    def _take(self, outputs: EngineCoreOutputs) -> None:
        names, counts = outputs.request_ids, outputs.num_new_tokens
        expect(
            len(set(names)) == len(names) == len(counts),
            f"the outputs have request_ids={names}, with num_new_tokens={list(counts)}; expected "
            "one entry per request in both",
        )
        expect(
            sum(counts) == len(outputs.token_ids),
            f"the outputs have {len(outputs.token_ids)} token_ids, but "
            f"num_new_tokens={list(counts)}",
        )
        for name, columns in outputs.prompt_logprobs.items():
            self._ledger(name).take_prompt(columns)
        end = 0
        for name, count in zip(names, counts, strict=True):
            start, end = end, end + count
            ledger = self._ledger(name)
            cached = outputs.num_cached_tokens.get(name)
            if not ledger.tokens:
                ledger.begin(cached, caching=self.limits.enable_prefix_caching)
                self.num_cached[name] = cached or 0
            else:
                expect(
                    cached is None,
                    f"the outputs report num_cached_tokens of {name} a second time",
                )
            ledger.take(outputs.token_ids[start:end], outputs.logprobs.get(name))
        for ending in outputs.finished:
            self._ledger(ending.request_id).close(ending)
            del self.alive[ending.request_id]
        late = [name for name, ledger in self.alive.items() if ledger.tokens == ledger.due]
        expect(
            not late,
            f"the requests {late} have received their last token, but are not in `finished`",
        )

    def _ledger(self, name: str) -> RequestLedger:
        if name not in self.alive:
            raise AssertionError(
                f"the outputs contain {name}, a request that has ended or was never added"
            )
        return self.alive[name]

    def _check_rows(self, plan: SchedulerOutput) -> None:
        """Check that a row is reused only after the last plan with this row has been executed."""
        for request in plan.joins:
            last = self._last_named.get(request.row, -1)
            expect(
                last <= self._executed,
                f"step {plan.step_id} reuses row {request.row}, but step {last} also runs this "
                f"row and was not executed yet; the last executed step is {self._executed}",
            )
            expect(
                request.request_id in self.alive,
                f"the plan admits {request.request_id}, which has ended or was never added",
            )
        for row in (*plan.rows, *(request.row for request in plan.joins)):
            self._last_named[row] = plan.step_id

    def _check_pieces(self, plan: SchedulerOutput) -> None:
        """Check that scheduled tokens are within the limits, and that chunks are enabled if any."""
        limits = self.limits
        longest = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
        runs = zip(plan.rows, plan.starts, plan.num_tokens, plan.samples, strict=True)
        for row, start, count, samples in runs:
            expect(
                start + count < limits.max_model_len,
                f"row {row} computes position {start + count - 1}, so the next token would exceed "
                f"max_model_len={limits.max_model_len}",
            )
            expect(
                count <= longest,
                f"row {row} computes {count} tokens in one step, but the limits allow {longest}",
            )
            whole = samples or len(self._rows.rows[row].tokens) > limits.max_num_batched_tokens
            expect(
                bool(whole) or limits.enable_chunked_prefill,
                f"row {row} computes a chunk of a prompt, but enable_chunked_prefill is False",
            )
        expect(
            len(self._rows.rows) <= limits.max_num_seqs,
            f"{len(self._rows.rows)} rows are in use, but max_num_seqs is {limits.max_num_seqs}",
        )

    def _check_salts(self) -> None:
        """Check that rows share blocks only if prefix caching is on and their salts are equal."""
        shared = self._rows.shared_blocks()
        expect(
            not shared or self.limits.enable_prefix_caching,
            "several rows share a block, but enable_prefix_caching is False",
        )
        for (_, block), rows in shared.items():
            names = [self._rows.rows[row].request.request_id for row in rows]
            salts = {self.alive[n].request.cache_salt for n in names if n in self.alive}
            expect(
                len(salts) < 2,
                f"the requests {names} share block {block}, but have different salts",
            )

    def _check_depth(self) -> None:
        depth = self.scheduler.depth()
        check_depth_types(depth)
        expect(
            depth.num_waiting + depth.num_running == len(self.alive),
            f"depth() counts {depth.num_waiting} waiting and {depth.num_running} running requests, "
            f"but {len(self.alive)} requests have not ended",
        )
        expect(
            depth.num_running <= self.limits.max_num_seqs,
            f"depth() counts {depth.num_running} running requests, but max_num_seqs is "
            f"{self.limits.max_num_seqs}",
        )
        self.holds.check_depth(depth, len(self.alive))
        self._after_step(self.scheduler)

    def _check_stats(self, outputs: EngineCoreOutputs, plan: SchedulerOutput) -> None:
        stats = outputs.stats
        if stats is None:
            return
        depth = self.scheduler.depth()
        for name, value, due in (
            ("step_id", stats.step_id, plan.step_id),
            ("num_waiting", stats.num_waiting, depth.num_waiting),
            ("num_running", stats.num_running, depth.num_running),
            ("num_scheduled_tokens", stats.num_scheduled_tokens, plan.total_num_tokens),
        ):
            expect(value == due, f"the statistics have {name}={value}; expected {due}")
        self._check_usage(stats)
        is_allowed = self.limits.enable_prefix_caching or not stats.prefix_queries
        expect(
            is_allowed,
            f"the statistics have prefix_queries={stats.prefix_queries}, but prefix caching is off",
        )
        self._accounts.check(stats)
        idle = stats.num_idle_steps if self.conserves_work else 0
        expect(
            not idle,
            f"the policy declares work_conserving, but {idle} steps ran no request although one "
            "could run",
        )
        self.last_stats = stats

    def _check_usage(self, stats: SchedulerStats) -> None:
        """Check that kv_cache_usage counts the blocks of running requests and is 0 at the end."""
        held = self._rows.held_blocks(self.alive)
        # A failed load removes blocks of a row that is not released yet.
        minimum = 0 if self.connected else len(held) / (self.program.kv_cache.num_blocks - 1)
        moving = self.scheduler.depth().num_transfers
        maximum = 1.0 if self.alive or self._out or moving else 0.0
        expect(
            minimum - 1e-9 <= stats.kv_cache_usage <= maximum,
            f"the statistics have kv_cache_usage={stats.kv_cache_usage}; expected {minimum} to "
            f"{maximum}",
        )
