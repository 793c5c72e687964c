"""Random sequences of scheduler calls under every policy, with extreme options, checked against the
contract."""

from dataclasses import replace
from random import Random

import pytest

from dovetail.plugins import PluginRegistry
from dovetail.scheduling import Scheduler
from dovetail_devkit.scheduler import program as scheduler_program
from dovetail_devkit.scheduler.playing import play
from dovetail_devkit.scheduler.program import SchedulerDriver
from dovetail_devkit.scheduler.random_programs import random_program
from dovetail_sched_research.aging import AgingPolicy
from dovetail_sched_research.sarathi import SarathiPolicy

NUM_PROGRAMS = 12
OPTIONS = {
    "dlpm": [{"quantum": 3.0}],
    "edf": [{}, {"preempt": False}],
    "hrrn": [{"predictor": "bucketed:2"}],
    "lpm": [{"max_wait_s": 0.003}],
    "mlfq": [{"max_batch": 2, "quantum": 1, "promote_s": 0.02, "preempt": on} for on in (0, 1)],
    "on_time": [{"step_ms": 0.01}, {}],
    "sarathi": [{"chunk": 3}, {"chunk": 1}],
    "sjf": [{"predictor": "noisy:1"}],
    "srpt": [{"hysteresis": 1.0}],
    "vtc": [{"weights": {"a": 3.0}}],
}
NAMES = [
    "dlpm",
    "edf",
    "hrrn",
    "lpm",
    "mlfq",
    "on_time",
    "orca",
    "prefill_first",
    "sarathi",
    "sjf",
    "srpt",
]
CASES = [
    (name, arguments) for name in [*NAMES, "static", "vtc"] for arguments in OPTIONS.get(name, [{}])
]


@pytest.fixture(autouse=True)
def add_optional_fields(monkeypatch):
    """Add tenants, deadlines and declared output lengths to the requests of the programs."""
    plain = scheduler_program.random_request

    def rich(rng, name, limits):
        request, own = plain(rng, name, limits), Random(f"{name} {rng.random()}")
        extra = {"expected_tokens": own.randint(1, 12)}
        return replace(
            request,
            tenant=own.choice("abc"),
            deadline_ns=own.choice((0, own.randint(1, 60_000_000))),
            sampling_params=replace(request.sampling_params, extra_args=extra),
        )

    monkeypatch.setattr(scheduler_program, "random_request", rich)


def with_options(policy_cls, arguments):
    """Return a subclass with fixed options, because `SchedulerDriver` creates policies without
    options."""

    def made(self, options=None):
        policy_cls.__init__(self, arguments)

    return type(policy_cls.__name__, (policy_cls,), {"__init__": made} if arguments else {})


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_every_policy_meets_its_contract_in_random_scheduler_calls(name, arguments):
    policy_cls = with_options(PluginRegistry().load("policy", name), arguments)
    num_preemptions = play_all(policy_cls)
    assert not num_preemptions or name not in ("orca", "static")


def test_an_aging_policy_meets_its_contract_in_random_scheduler_calls():
    wrapped = type("Wrapped", (AgingPolicy,), {"inner_cls": SarathiPolicy, "max_wait_s": 0.004})
    assert play_all(wrapped) > 0


def play_all(policy_cls):
    num_preemptions = 0
    for seed in range(NUM_PROGRAMS):
        program = random_program(seed)
        driver = SchedulerDriver(
            Scheduler,
            program,
            policy=policy_cls,
            after_step=lambda scheduler: scheduler.check_integrity(),
        )
        play(program, driver)
        if not program.connected:  # failed loads count as preemptions under any policy
            num_preemptions += driver.last_stats.num_preemptions
    return num_preemptions
