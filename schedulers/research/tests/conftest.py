"""A simulation in virtual time: the core's scheduler, arriving jobs, and steps with a cost.

There is no model: each job defines the length of its output. The output ends with a stop token, so
no scheduler knows the length in advance. Times are integers; the simulation never sleeps or
measures time.
"""

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from dovetail.clock import ManualClock
from dovetail.interfaces import SchedulerContext, SchedulerLimits
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler
from dovetail_devkit.scheduler.random_programs import make_kv_cache

STOP, WORD = 1, 2
MS = 1_000_000


def pytest_generate_tests(metafunc):
    """Parametrize a module's tests with the rows (policy, mutant, check) of its table MUTANTS.

    Each check must pass for its policy and fail for each of its mutants.
    """
    table = getattr(metafunc.module, "MUTANTS", ())
    if {"policy", "check"} <= set(metafunc.fixturenames):
        guarantees = dict.fromkeys((policy, check) for policy, _, check in table)
        metafunc.parametrize(("policy", "check"), guarantees)
    elif {"mutant", "check"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("mutant", "check"), [(mutant, check) for _, mutant, check in table])


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request of the simulation.

    prompt: a number of tokens, or token ids. output: the real output length. expected: the declared
    output length; 0 if none is declared. max_tokens: 0 for the value of `output`.
    """

    name: str
    prompt: object = 8
    output: int = 8
    arrival_ns: int = 0
    tenant: str = ""
    deadline_ns: int = 0
    expected: object = 0
    max_tokens: int = 0

    def request(self, number):
        ids = self.prompt
        if isinstance(ids, int):
            ids = [
                100_000 + number,
                *range(10, 9 + ids),
            ]  # the first token is different for each job
        extra = {"expected_tokens": self.expected} if self.expected else {}
        return EngineCoreRequest(
            request_id=self.name,
            prompt_token_ids=array("i", ids),
            sampling_params=SamplingParams(extra_args=extra),
            max_tokens=self.max_tokens or self.output,
            stop_token_ids=frozenset({STOP}),
            arrival_ns=self.arrival_ns,
            tenant=self.tenant,
            deadline_ns=self.deadline_ns,
        )


@dataclass(frozen=True, kw_only=True)
class World:
    """The limits and costs of a simulation.

    step_ns: fixed cost of a step. prompt_ns, decode_ns: additional cost of each prompt token and of
    each decode.
    """

    seats: int = 8
    budget: int = 2048
    blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 8192
    caching: bool = False
    chunked: bool = True
    step_ns: int = 6 * MS
    prompt_ns: int = 35_000
    decode_ns: int = 20_000
    until_ns: int = 1 << 62
    options: dict = field(default_factory=dict)

    def cost(self, prompt_tokens, decodes):
        return self.step_ns + prompt_tokens * self.prompt_ns + decodes * self.decode_ns

    def service(self, job):
        """Return the time that a job takes if no other job runs."""
        return self.cost(job.prompt, 0) + (job.output - 1) * self.cost(0, 1)


@dataclass(slots=True)
class JobTimes:
    """The simulated times of a job: its first admission and each of its output tokens."""

    job: Job
    admitted_ns: int = -1
    token_ns: list = field(default_factory=list)
    num_cached: int = 0
    finished: bool = False

    @property
    def done_ns(self):
        assert self.finished, f"{self.job.name} has not finished"
        return self.token_ns[-1]

    @property
    def latency_ns(self):
        return self.done_ns - self.job.arrival_ns

    @property
    def max_gap_ns(self):
        pairs = zip(self.token_ns, self.token_ns[1:], strict=False)
        return max((after - before for before, after in pairs), default=0)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the simulation.

    before: names of the jobs that had a batch slot before the step. runs: one entry (job name,
    first position, number of tokens, whether it sampled) for each scheduled job.
    """

    start_ns: int
    before: frozenset
    joined: tuple
    runs: tuple

    def decodes(self):
        """Return the names of jobs that computed one token and were admitted in an earlier step."""
        return [n for n, _, tokens, _ in self.runs if tokens == 1 and n not in self.joined]

    def prompts(self):
        return [run for run in self.runs if run[0] not in set(self.decodes())]


class Simulation:
    """Runs jobs under a policy until all are done or `World.until_ns` is reached."""

    def __init__(self, policy, jobs, world):
        self.world, self.clock = world, ManualClock()
        self.scheduler = Scheduler(
            SchedulerContext(
                limits=SchedulerLimits(
                    max_num_seqs=world.seats,
                    max_num_batched_tokens=world.budget,
                    max_model_len=world.max_model_len,
                    enable_chunked_prefill=world.chunked,
                    enable_prefix_caching=world.caching,
                ),
                kv_cache=make_kv_cache(num_blocks=world.blocks + 1, block_size=world.block_size),
                clock=self.clock,
                policy=policy,
                policy_options=world.options,
                strict=True,
            )
        )
        self.fates = {job.name: JobTimes(job) for job in jobs}
        self.steps, self.stats = [], None
        self._coming = sorted(jobs, key=lambda job: job.arrival_ns)[::-1]
        self._rows, self._num_arrived = {}, 0
        while (self._coming or self._alive()) and self.now_ns < world.until_ns:
            self._arrive()
            self._step()

    @property
    def now_ns(self):
        return self.clock.now_ns()

    def __getitem__(self, name):
        return self.fates[name]

    def mean_ns(self):
        """Return the mean latency of the jobs in ns."""
        return sum(fate.latency_ns for fate in self.fates.values()) / len(self.fates)

    def _alive(self):
        depth = self.scheduler.depth()
        return depth.num_waiting + depth.num_running

    def _arrive(self):
        if not self._alive():
            self.clock.advance(max(0, self._coming[-1].arrival_ns - self.now_ns))
        while self._coming and self._coming[-1].arrival_ns <= self.now_ns:
            self._num_arrived += 1
            self.scheduler.add_request(self._coming.pop().request(self._num_arrived))

    def _step(self):
        start_ns, before = self.now_ns, frozenset(self._rows.values())
        plan = self.scheduler.schedule()
        assert not plan.empty, f"the plan is empty, but {self._alive()} requests are unfinished"
        for row in plan.leaves:
            del self._rows[row]
        for new in plan.joins:
            self._rows[new.row] = new.request_id
            fate = self.fates[new.request_id]
            fate.admitted_ns = start_ns if fate.admitted_ns < 0 else fate.admitted_ns
        names = [self._rows[row] for row in plan.rows]
        step = Step(
            start_ns=start_ns,
            before=before & frozenset(self._rows.values()),
            joined=tuple(new.request_id for new in plan.joins),
            runs=tuple(zip(names, plan.starts, plan.num_tokens, plan.samples, strict=True)),
        )
        num_decodes = len(step.decodes())
        self.clock.advance(self.world.cost(plan.total_num_tokens - num_decodes, num_decodes))
        self.steps.append(step)
        self._settle(plan, names)

    def _settle(self, plan, names):
        tokens = array("i")
        for name in (name for name, samples in zip(names, plan.samples, strict=True) if samples):
            fate = self.fates[name]
            fate.token_ns.append(self.now_ns)
            tokens.append(STOP if len(fate.token_ns) == fate.job.output else WORD)
        output = ModelRunnerOutput(step_id=plan.step_id, num_sampled=plan.samples, token_ids=tokens)
        outputs = self.scheduler.update_from_output(plan, output)
        if not plan.step_id % 16 or not self._alive():
            self.scheduler.check_integrity()
        self.stats = outputs.stats
        for name, num_cached in outputs.num_cached_tokens.items():
            self.fates[name].num_cached = num_cached
        for end in outputs.finished:
            self.fates[end.request_id].finished = True


def play(policy, jobs, **world):
    return Simulation(policy, jobs, World(**world))


@pytest.fixture(scope="session")
def lab():
    """The simulation: `lab.Job`, `lab.World`, `lab.play(policy, jobs, **world)`, `lab.MS`."""
    return SimpleNamespace(Job=Job, World=World, play=play, MS=MS)
