"""`lab explain` and `lab diff`: a policy's view and actions in a step, and the reasons."""

from array import array

import pytest

from dovetail.cli import main
from dovetail.clock import ManualClock
from dovetail.decision_log import DecisionRecorder, RecordedScheduler
from dovetail.errors import PluginError
from dovetail.interfaces import SchedulerContext, SchedulerLimits
from dovetail.plugins import PluginPolicy, PluginRegistry
from dovetail.plugins.construction import construct
from dovetail.plugins.selection import choose_scheduler
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.scheduler.random_programs import make_kv_cache
from dovetail_lab.inspection.explanation import describe_actions, explain_request
from dovetail_lab.inspection.observed_replay import observe_step

MS = 1_000_000


class Recording:
    """A recorded scheduler with blocks of four tokens, to which a test adds requests."""

    def __init__(self, path, policy="fcfs", *, seats=2, budget=16, blocks=33):
        self.path, self.clock = path, ManualClock(7 * MS)
        registry = PluginRegistry(policy=PluginPolicy(trust_local_code=True))
        scheduler_cls, policy_cls = choose_scheduler(registry, policy)
        limits = SchedulerLimits(
            max_num_seqs=seats, max_num_batched_tokens=budget, max_model_len=40
        )
        context = SchedulerContext(
            limits=limits,
            kv_cache=make_kv_cache(num_blocks=blocks, block_size=4),
            clock=self.clock,
            policy=policy_cls,
        )
        recorder = DecisionRecorder(path, scheduler_cls, context)
        created = construct("scheduler", scheduler_cls, recorder.context)
        self.scheduler = RecordedScheduler(created, recorder)

    def add(self, name, length=5, max_tokens=3, **fields):
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=array("i", [ord(name[0]) * 100 + i for i in range(length)]),
            sampling_params=SamplingParams(max_tokens=max_tokens),
            max_tokens=max_tokens,
            **fields,
        )
        self.scheduler.add_request(request)

    def step(self, count=1):
        for _ in range(count):
            self.clock.advance(2 * MS)
            plan = self.scheduler.schedule()
            tokens = array("i", [8]) * sum(plan.samples)
            output = ModelRunnerOutput(
                step_id=plan.step_id, num_sampled=plan.samples, token_ids=tokens
            )
            self.scheduler.update_from_output(plan, output)

    def close(self):
        self.scheduler.shutdown()
        return self.path


def text_of(path, step, request, **options):
    return " ".join(explain_request(observe_step(path, step, **options), request))


@pytest.fixture
def log(tmp_path):
    """Record a log with three requests and two batch slots. "c" waits for a slot until step 3."""
    recording = Recording(tmp_path / "run.log")
    for name in "abc":
        recording.add(name, priority=-ord(name))
    recording.step(3)
    recording.add("d")
    recording.step(3)
    return recording.close()


def test_explain_reports_a_request_that_waits_for_a_batch_slot(log):
    text = text_of(log, 0, "c")
    assert "position 3 of 3" in text and "no batch slot was free" in text
    assert "rank 2" in text


def test_explain_reports_a_request_that_ran(log):
    assert "It was admitted and computed 5 tokens" in text_of(log, 0, "a")
    assert "was running and was scheduled: it computed 1 token." in text_of(log, 1, "a")


def test_requests_that_have_not_arrived_or_have_ended_are_reported(log):
    assert text_of(log, 0, "d") == "d had not arrived before step 0."
    assert text_of(log, 5, "a") == "a had ended before step 5."


def test_the_explanation_of_a_request_behind_a_denied_request_names_the_cause(tmp_path):
    recording = Recording(tmp_path / "run.log", seats=4, blocks=9)
    recording.add("a", length=16, max_tokens=8)
    recording.step()
    recording.add("b", length=20)
    recording.add("c", length=2)
    recording.step()
    path = recording.close()
    text = text_of(path, 1, "b")
    assert "b was denied: it needs about 4 more KV blocks, and 3 were free" in text
    text = text_of(path, 1, "c")
    assert "position 2 of 2" in text
    assert "The policy did not try it: b, which is before it in the order, was denied" in text
    assert "KV blocks" in text


def test_explain_reports_a_request_without_token_budget(tmp_path):
    recording = Recording(tmp_path / "run.log", seats=4, budget=8)
    recording.add("a", length=20)
    recording.add("b", length=20)
    recording.step(2)
    path = recording.close()
    assert "computed 8 tokens" in text_of(path, 0, "a")
    assert "computed 8 tokens, 4 of its tokens remain for later" in text_of(path, 1, "a")
    assert "0 tokens of the step's budget were left" in text_of(path, 1, "b")


def test_explain_reports_a_preempted_request(tmp_path):
    recording = Recording(tmp_path / "run.log", seats=4, budget=32, blocks=9)
    recording.add("a", length=15, max_tokens=20)
    recording.add("b", length=15, max_tokens=20)
    recording.step(4)
    path = recording.close()
    texts = [text_of(path, step, "b") for step in range(4)]
    assert any("the policy chose it as the victim, because there were" in t for t in texts)


HOLDING = """
from dovetail.interfaces import CONTINUE, Hold, Policy, Run

class Holding(Policy):
    work_conserving = False

    def plan(self, view):
        if view.step_id == 1:
            yield Hold(view.running[0])
            return
        yield CONTINUE
        for request in list(view.waiting)[:1]:
            yield Run(request)
"""


def test_explain_reports_a_held_request_and_a_plan_that_ends_early(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HOLDING)
    recording = Recording(tmp_path / "run.log", "./mine.py:Holding")
    for name in "abc":
        recording.add(name)
    recording.step(2)
    path = recording.close()
    with pytest.raises(PluginError, match="trust"):
        observe_step(path, 1)
    text = text_of(path, 0, "b", trust_local_code=True)
    assert "although 11 tokens of the budget and 1 batch slots were left: its plan ended" in text
    assert "The policy held it" in text_of(path, 1, "a", trust_local_code=True)


def test_an_observed_step_shows_the_waiting_order_and_every_action(log):
    result = observe_step(log, 0)
    assert [item.request_id for item in result.view.waiting] == ["a", "b", "c"]
    assert describe_actions(result.view) == [
        "continue: 0 tokens [16 tokens, 2 slots, 32 blocks left]",
        "run a: 5 tokens [16 tokens, 2 slots, 32 blocks left]",
        "run b: 5 tokens [11 tokens, 1 slots, 30 blocks left]",
        "run c: denied: seats [6 tokens, 0 slots, 28 blocks left]",
    ]
    assert result.granted == {"a": 5, "b": 5}


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "vtc", "sarathi", "mlfq"])
def test_observing_a_step_does_not_change_the_plans(policy, tmp_path):
    recording = Recording(tmp_path / "run.log", policy, blocks=12)
    for number in range(12):
        recording.add(f"{'abcdefghijkl'[number]}", length=4 + number, tenant=f"t{number % 2}")
        recording.step()
    recording.step(10)
    path = recording.close()
    for step in range(0, 22, 3):
        assert observe_step(path, step).view.step_id == step


def test_explain_prints_the_reason_for_a_request_or_all_actions_of_a_step(log, capsys):
    assert main(["lab", "explain", str(log), "0", "c"]) == 0
    output = capsys.readouterr().out
    assert "c was waiting at position 3 of 3" in output
    assert "0 running, 3 waiting; 16 of 16 tokens, 2 of 2 batch slots and 32 blocks" in output
    assert "run c: denied: seats" in output


def test_the_diff_command_shows_the_first_different_step_with_both_views(log, capsys):
    assert main(["lab", "diff", str(log), "priority"]) == 1
    output = capsys.readouterr().out
    assert "The first 0 steps are equal. Step 0 differs:" in output
    assert "a: 5 tokens with" in output and "c: 0 tokens with" in output
    assert output.count("slots and 32 blocks of 4 tokens free") == 2
    assert main(["lab", "diff", str(log), "fcfs"]) == 0
    assert "the same 6 plans" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["99"], "step 99 is not in the log: it has 6 steps"),
        (["0", "zz"], "request 'zz' did not arrive before step 0"),
        (["3", "--scheduler", "priority"], "makes a different plan in step 0"),
        (["0", "--scheduler", "prioritty"], "Did you mean 'priority'"),
    ],
)
def test_invalid_arguments_of_explain_are_rejected(arguments, message, log, capsys):
    assert main(["lab", "explain", str(log), *arguments]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
