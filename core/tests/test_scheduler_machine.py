"""The scheduler as a state machine: it follows its contract under any sequence of calls.

`SchedulerDriver` checks every call against the contract and compares the tokens of every request
with a run of the request alone. After each call, the scheduler checks its own integrity.
"""

from dataclasses import replace
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dovetail.interfaces import PauseScope, Policy
from dovetail.scheduling import Scheduler
from dovetail_devkit.scheduler.program import SchedulerDriver
from dovetail_devkit.scheduler.random_programs import random_program, random_request


class Priority(Policy):
    preempts = True

    def rank(self, request, view):
        return request.priority, request.sequence

    def victim(self, running, view):
        return max(running, key=lambda item: (item.priority, item.sequence))


class Shortest(Policy):
    """A policy with a rank that changes with every call."""

    static_rank = False

    def rank(self, request, view):
        return view.num_uncomputed_tokens(request), request.sequence


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**32),
        depth=st.sampled_from([1, 2, 3, 4]),
        num_drafts=st.sampled_from([0, 3]),
        num_encoder_tokens=st.sampled_from([0, 6]),
        holds=st.booleans(),
        connected=st.booleans(),
        policy=st.sampled_from([None, Priority, Shortest]),
    )
    def start(self, seed, depth, num_drafts, num_encoder_tokens, holds, connected, policy):
        program = random_program(seed)
        limits = replace(
            program.limits,
            num_lookahead_tokens=num_drafts,
            max_num_encoder_tokens=num_encoder_tokens,
            encoder_cache_tokens=num_encoder_tokens * 2,
        )
        program = replace(program, limits=limits, depth=depth, holds=holds, connected=connected)
        self.driver = SchedulerDriver(
            Scheduler, program, policy=policy, after_step=Scheduler.check_integrity
        )
        self.num_added = 0

    @rule(seed=st.integers(0, 2**32))
    def add(self, seed):
        limits = self.driver.limits
        self.driver.add(random_request(Random(seed), f"r{self.num_added}", limits))
        self.num_added += 1

    @precondition(lambda self: self.driver.alive)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.driver.alive)))
        self.driver.abort([name, "nobody"])

    @precondition(lambda self: self.driver.holds.gate.held)
    @rule(data=st.data(), fails=st.booleans())
    def open_gate(self, data, fails):
        name = data.draw(st.sampled_from(sorted(self.driver.holds.gate.held)))
        self.driver.open_gate(name, fails=fails)

    @precondition(lambda self: self.driver.num_out < self.driver.program.depth)
    @rule(times=st.integers(1, 3))
    def schedule(self, times):
        for _ in range(times):
            if self.driver.num_out == self.driver.program.depth:
                self.driver.settle()
            self.driver.schedule()

    @precondition(lambda self: self.driver.num_out)
    @rule()
    def settle(self):
        self.driver.settle()

    @rule(scope=st.sampled_from(PauseScope))
    def pause(self, scope):
        self.driver.pause(scope)

    @rule()
    def resume(self):
        self.driver.resume()

    @rule()
    def reset(self):
        self.driver.reset()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()
            self.driver.scheduler.shutdown()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
