"""A scheduler and a strict worker in pure Python that checks every plan.

Each cache slot contains a checksum of all tokens up to its position. Before it computes tokens, the
worker compares the slots that the request reads with the checksums of its tokens. So it finds a
stale block, a wrong prefix hit or a skipped position immediately. The next token is computed from
the checksum, so equal prefixes give equal tokens.
"""

from array import array
from collections import deque
from zlib import crc32

import pytest

from dovetail.clock import ManualClock
from dovetail.interfaces import (
    KVCacheConfig,
    KVCacheGroup,
    NoCacheSpec,
    SchedulerContext,
    SchedulerLimits,
)
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler
from dovetail_devkit.harnesses.plugin_site import count_as_member, plugin_site

__all__ = ["count_as_member", "plugin_site"]  # fixtures

FIRST_TOKEN = 100
NUM_TOKENS = 50


def fold(checksum):
    return FIRST_TOKEN + checksum % NUM_TOKENS


def checksums(tokens):
    collected, last = [], 0
    for token in tokens:
        last = crc32(token.to_bytes(4, "little"), last)
        collected.append(last)
    return collected


def continuation(prompt, num_tokens):
    """Return the tokens that the strict worker generates for a prompt that runs alone."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(fold(checksums(tokens)[-1]))
    return tokens[len(prompt) :]


class StrictWorker:
    """A worker that executes plans and checks the contracts of plans and workers."""

    def __init__(self, block_size, num_blocks):
        self.block_size, self.num_blocks = block_size, num_blocks
        self.tokens, self.computed, self.blocks = {}, {}, {}
        self.names, self.generations, self.slots = {}, {}, {}
        self.last_step = -1

    def execute(self, plan):
        assert plan.step_id == self.last_step + 1, "plans are not in order"
        self.last_step = plan.step_id
        for row in plan.leaves:
            del self.tokens[row], self.computed[row], self.blocks[row], self.names[row]
        for request in plan.joins:
            self._join(request)
        self._grow(plan.blocks[0])
        runs = zip(plan.rows, plan.starts, plan.num_tokens, plan.samples, strict=True)
        sampled = array("i", [token for run in runs for token in self._run(*run)])
        return ModelRunnerOutput(step_id=plan.step_id, num_sampled=plan.samples, token_ids=sampled)

    def _join(self, request):
        row = request.row
        assert row not in self.tokens, "two requests share a row"
        assert request.generation > self.generations.get(row, 0)
        self.generations[row] = request.generation
        self.names[row] = request.request_id
        self.tokens[row], self.blocks[row] = list(request.token_ids), []
        self.computed[row] = None

    def _grow(self, columns):
        first = 0
        for row, count in zip(columns.rows, columns.counts, strict=True):
            ids = columns.block_ids[first : first + count]
            assert all(0 < block < self.num_blocks for block in ids)
            self.blocks[row] += ids
            first += count

    def _run(self, row, start, count, samples):
        tokens, blocks, size = self.tokens[row], self.blocks[row], self.block_size
        known, end = self.computed[row], start + count
        assert known in (None, start), "positions are skipped or computed twice"
        assert end <= len(tokens), "a run contains unknown tokens"
        assert end <= len(blocks) * size, "the run has no blocks"
        sums = checksums(tokens[:end])
        where = [(blocks[index // size], index % size) for index in range(end)]
        for index in range(start):
            assert self.slots.get(where[index]) == sums[index], "the cache is stale"
        for index in range(start, end):
            self.slots[where[index]] = sums[index]
        self.computed[row] = end
        assert samples == (end == len(tokens)), "a step must sample after the last known token only"
        if not samples:
            return []
        tokens.append(fold(sums[-1]))
        return [tokens[-1]]


class Driver:
    """A scheduler under test. `settle` executes the oldest plan and processes its result."""

    def __init__(
        self,
        *,
        num_blocks=100,
        block_size=4,
        cls=Scheduler,
        policy=None,
        strict=False,
        seed=0,
        gates=(),
        **limits,
    ):
        kwargs = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256} | limits
        group = KVCacheGroup(layer_names=(), spec=NoCacheSpec(block_size=block_size))
        self.clock = ManualClock()
        self.limits = SchedulerLimits(**kwargs)
        self.scheduler = cls(
            SchedulerContext(
                limits=self.limits,
                kv_cache=KVCacheConfig(num_blocks=num_blocks + 1, groups=(group,)),
                clock=self.clock,
                policy=policy,
                strict=strict,
                seed=seed,
                gates=gates,
            )
        )
        self.worker = StrictWorker(block_size, num_blocks + 1)
        self.out = deque()
        self.tokens, self.reasons, self.cached = {}, {}, {}
        self.stats = None

    def add(self, name, prompt, *, max_tokens=4, stop=(), params=None, **fields):
        """Add a request. prompt: token ids, or the length of a prompt with unique token ids."""
        if isinstance(prompt, int):
            first = sum(map(ord, name)) * 1000
            prompt = [first + index for index in range(prompt)]
        self.scheduler.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=tuple(prompt),
                sampling_params=params or SamplingParams(max_tokens=max_tokens),
                max_tokens=max_tokens,
                stop_token_ids=frozenset(stop),
                **fields,
            )
        )
        self.tokens[name] = []
        return list(prompt)

    def plan(self):
        """Make a plan and return (first position, number of tokens) of each request, by name."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert plan.total_num_tokens <= self.limits.max_num_batched_tokens
        assert plan.num_requests <= self.limits.max_num_seqs
        self.out.append(plan)
        names = {request.row: request.request_id for request in self.scheduler._state.running}
        runs = zip(plan.rows, plan.starts, plan.num_tokens, strict=True)
        return {names[row]: (start, count) for row, start, count in runs}

    def settle(self):
        """Execute the oldest plan, process its result, and return the scheduler's outputs."""
        plan = self.out.popleft()
        outputs = self.scheduler.update_from_output(plan, self.worker.execute(plan))
        self.scheduler.check_integrity()
        end = 0
        for name, count in zip(outputs.request_ids, outputs.num_new_tokens, strict=True):
            self.tokens[name] += outputs.token_ids[end : end + count]
            end += count
        for ended in outputs.finished:
            assert ended.request_id not in self.reasons, "a request finished twice"
            self.reasons[ended.request_id] = str(ended.reason)
        self.cached |= outputs.num_cached_tokens
        self.stats = outputs.stats
        return outputs

    def step(self):
        """Run one complete step. Return the scheduled tokens of each request as `plan` does."""
        runs = self.plan()
        self.settle()
        return runs

    def run(self, *, depth=1, limit=500):
        """Step until all requests are finished. Return the number of steps."""
        for number in range(limit):
            left = self.scheduler.depth()
            busy = left.num_running or left.num_waiting
            if busy:
                self.plan()
            elif not self.out:
                return number
            if len(self.out) >= depth or not busy:
                self.settle()
        raise AssertionError(f"not done after {limit} steps")

    def running(self):
        return [request.request_id for request in self.scheduler._state.running]

    def waiting(self):
        self.scheduler._host.begin_step()  # requests that were just preempted wait again
        return [request.request_id for request in self.scheduler._host.waiting]


@pytest.fixture
def drive():
    """Make a driver: `drive(num_blocks=…, max_num_seqs=…, policy=…)`."""
    return Driver


@pytest.fixture
def alone():
    """Return the function `alone(prompt, num_tokens)`, which returns the expected tokens."""
    return continuation
