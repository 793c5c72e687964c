"""The step trace: the content of its records, their limits, and the cost without a reader."""

import pytest

from dovetail.clock import ManualClock
from dovetail.engine.core import EngineCore
from dovetail.engine.step_trace import recorder
from dovetail.engine.step_trace.recorder import EXPIRY_NS, StepRecorder
from dovetail.engine.step_trace.records import MAX_STEPS
from dovetail.errors import EngineDeadError, UserError
from dovetail.interfaces import Ready
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams


class Executor:
    max_concurrent_steps = 1

    def __init__(self, worker):
        self.worker = worker

    def execute_model(self, plan):
        self.plan = plan
        return Ready(None)

    def sample_tokens(self, grammar=None):
        return Ready(self.worker.execute(self.plan))

    def shutdown(self):
        pass


@pytest.fixture
def make(drive):
    def build(**limits):
        driver = drive(**limits)
        return EngineCore(
            Executor(driver.worker),
            driver.scheduler,
            vocab_size=200,
            max_model_len=64,
            clock=ManualClock(),
        )

    return build


def add(core, name, prompt, max_tokens=4):
    core.add_request(
        EngineCoreRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens),
            max_tokens=max_tokens,
        )
    )


def run(core, num_steps=1000):
    for _ in range(num_steps):
        if not core.has_work():
            break
        core.step()


def expanded(trace):
    """Return the decoding requests of each step."""
    decodes, last = [], None
    for step in trace.steps:
        last = last if step.decodes is None else step.decodes
        decodes.append(last)
    return decodes


def test_a_trace_shows_chunks_decodes_and_ends(make):
    core = make(max_num_batched_tokens=8)
    assert core.read_steps().steps == ()
    add(core, "long", range(20))
    add(core, "short", (50, 51, 52), max_tokens=2)
    run(core)
    trace = core.read_steps()
    first, second, third, fourth, *rest = trace.steps
    assert first.joined == ((1, 20, 20),) and first.prefills == ((1, 0, 8),)
    assert second.prefills == ((1, 8, 8),) and not second.joined and second.decodes is None
    assert third.joined == ((2, 3, 3),) and third.prefills == ((1, 16, 4), (2, 0, 3))
    assert (third.num_tokens, third.num_new_tokens, third.num_running) == (7, 2, 2)
    assert fourth.decodes == (1, 2) and fourth.ended == ((2, "length"),)
    assert [step.decodes for step in rest] == [(1,), None]
    assert rest[-1].ended == ((1, "length"),)
    assert [step.number for step in trace.steps] == [1, 2, 3, 4, 5, 6]
    assert trace.num_new_tokens == 6 and trace.num_computed_tokens == 8 + 8 + 7 + 2 + 1 + 1
    assert trace.stats.num_running == 0 and trace.after == 0 and trace.num_steps == 6


def test_the_first_traced_chunk_starts_after_the_cached_prefix(make):
    core = make()
    core.read_steps()
    add(core, "a", range(12))
    run(core)
    add(core, "b", range(12))
    run(core)
    chunks = [chunk for step in core.read_steps().steps for chunk in step.prefills]
    assert chunks == [(1, 0, 12), (2, 8, 4)]


def test_a_resumed_request_is_traced_with_the_same_number(make):
    core = make(num_blocks=8)
    core.read_steps()
    for name in ("a", "b", "c"):
        add(core, name, range(ord(name), ord(name) + 6), max_tokens=12)
    run(core)
    trace = core.read_steps()
    preempted = [number for step in trace.steps for number in step.preempted]
    joined = [item for step in trace.steps for item in step.joined]
    assert preempted and len(preempted) == trace.stats.num_preemptions
    assert sorted(item[0] for item in joined) == sorted([1, 2, 3, *preempted])
    again = [known - prompt for number, prompt, known in joined[3:]]
    assert min(again) > 0, "a resumed request has generated tokens"
    ended = [item for step in trace.steps for item in step.ended]
    assert sorted(ended) == [(1, "length"), (2, "length"), (3, "length")]
    for step, decodes in zip(trace.steps, expanded(trace), strict=True):
        assert step.num_tokens == len(decodes) + sum(chunk[2] for chunk in step.prefills)


def test_an_aborted_request_is_not_traced_as_preempted(make):
    core = make()
    core.read_steps()
    add(core, "a", range(5), max_tokens=50)
    add(core, "b", range(20, 25), max_tokens=50)
    run(core, 3)
    core.abort_requests(["a"])
    run(core, 2)
    steps = core.read_steps().steps
    assert [item for step in steps for item in step.ended] == [(1, "abort")]
    assert not any(step.preempted for step in steps) and steps[-1].num_running == 1


def test_requests_that_started_before_the_trace_are_shown(make):
    core = make()
    add(core, "a", range(5), max_tokens=6)
    add(core, "b", range(20, 25), max_tokens=50)
    run(core, 3)
    core.read_steps()
    run(core, 6)
    trace = core.read_steps()
    assert set(expanded(trace)[0]) == {1, 2} and not trace.steps[0].joined
    assert [item for step in trace.steps for item in step.ended] == [(1, "")]
    assert not any(step.preempted for step in trace.steps)


def test_a_reader_of_a_trace_gets_each_record_once(make):
    core = make()
    core.read_steps()
    add(core, "a", range(5), max_tokens=30)
    numbers, after = [], 0
    while core.has_work():
        run(core, 3)
        trace = core.read_steps(after, 2)
        assert trace.after == after and len(trace.steps) <= 2
        assert trace.steps[0].decodes is not None, "each trace can be read alone"
        numbers += [step.number for step in trace.steps]
        after = numbers[-1]
    numbers += [step.number for step in core.read_steps(after).steps]
    assert numbers == list(range(1, 31))
    restarted = core.read_steps(1000)
    assert restarted.after == 0 and len(restarted.steps) == 30


def test_the_oldest_records_of_a_trace_are_dropped(make, monkeypatch):
    core = make()
    core.read_steps()
    monkeypatch.setattr(recorder, "MAX_ENTRIES", 40)
    add(core, "a", range(5), max_tokens=50)
    run(core)
    trace = core.read_steps(3)
    assert trace.num_steps == 50 and trace.after == 31
    assert [step.number for step in trace.steps] == list(range(32, 51))
    monkeypatch.setattr(recorder, "MAX_READ_ENTRIES", 10)
    steps = core.read_steps(3).steps
    assert steps[0].decodes == (1,) and all(step.decodes is None for step in steps[1:])
    assert len(steps) == 9, "a decode that repeats is not counted again"


def test_no_step_is_recorded_without_a_reader(make):
    core = make()
    scheduler = core.scheduler
    add(core, "a", range(5), max_tokens=50)
    run(core, 5)
    assert core.scheduler is scheduler
    before = core.read_steps()
    assert isinstance(core.scheduler, StepRecorder)
    run(core, 5)
    core._clock.advance(EXPIRY_NS + 1)
    run(core, 5)
    assert core.scheduler is scheduler, "the recording ends by itself"
    again = core.read_steps(before.num_steps)
    assert again.started_ns > before.started_ns and again.num_steps == 0


def test_the_error_of_a_recorded_scheduler_names_its_class(make, monkeypatch):
    core = make()
    name = type(core.scheduler).__name__
    core.read_steps()
    monkeypatch.setattr(core.scheduler.scheduler, "schedule", lambda: 1 // 0)
    with pytest.raises(EngineDeadError, match=rf":{name} failed when a step was planned"):
        core.step()


@pytest.mark.parametrize(
    ("after", "max_steps"), [(-1, 5), (0, 0), (0, MAX_STEPS + 1), (True, 5), (0, None)]
)
def test_invalid_arguments_of_a_step_trace_are_rejected(make, after, max_steps):
    with pytest.raises(UserError, match=r"after=|max_steps="):
        make().read_steps(after, max_steps)
