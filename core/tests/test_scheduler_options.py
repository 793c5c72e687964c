"""Options of the scheduler take effect: pipeline depth, drafts and encoder inputs."""

from dataclasses import replace

import pytest

from dovetail import LLM, SamplingParams
from dovetail.config import EngineArgs
from dovetail.engine.start import start_engine
from dovetail.errors import ConfigError, PluginError, RequestError
from dovetail.interfaces import AdmissionGate
from dovetail.request import EncoderInput
from dovetail.scheduling import Scheduler
from dovetail_devkit import FAKES
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.fakes.worker import FakeWorker
from dovetail_devkit.rows.state import encode, predict_token
from dovetail_devkit.suites.scheduler import make_request

PARAMS = SamplingParams(max_tokens=20, seed=3, temperature=1.0, detokenize=False, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4], list(range(30)), [1, 2, 3], [9] * 7, [5, 6]]
VOCAB = 97


class PlainWorker(FakeWorker):
    """A worker without drafts and without an encoder."""

    provides = frozenset({"logprobs"})


class CountingWorker(FakeWorker):
    """A worker that counts the steps that compute tokens."""

    num_steps = 0

    def execute_model(self, plan):
        type(self).num_steps += not plan.empty
        super().execute_model(plan)


def options(folder, **changes):
    return {
        **SMALL_ENGINE,
        "model": write_fake_config(folder),
        "platform": FAKES["platform"],
        "worker_cls": FAKES["worker"],
        "skip_tokenizer_init": True,
        **changes,
    }


def start(folder, **changes):
    return start_engine(EngineArgs(**options(folder, **changes)).create_engine_config())


def expected(prompt, num_tokens, seed=PARAMS.seed, encoded=None):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(predict_token(tokens, seed, VOCAB, encoded))
    return tokens[len(prompt) :]


def generate(folder, **changes):
    with LLM(**options(folder, **changes)) as llm:
        return [list(item.outputs[0].token_ids) for item in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_tokens_are_the_same_at_every_depth_with_and_without_drafts(tmp_path, depth, drafts):
    tokens = generate(tmp_path, pipeline_depth=depth, num_lookahead_tokens=drafts)
    assert tokens == [expected(prompt, PARAMS.max_tokens) for prompt in PROMPTS]


@pytest.mark.parametrize("depth", [2, 4])
def test_the_configured_number_of_steps_is_in_flight(tmp_path, depth):
    started = start(tmp_path, pipeline_depth=depth)
    core = started.core
    try:
        assert started.config.scheduler.async_scheduling
        core.add_request(make_request("a", [1, 2, 3], max_tokens=9))
        for _ in range(depth - 1):
            assert core.step_with_batch_queue() is None
        assert len(core.step_with_batch_queue().token_ids) == 1
    finally:
        core.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_reduce_the_number_of_steps(tmp_path, depth):
    counts = []
    for drafts in (0, 3):
        CountingWorker.num_steps = 0
        generate(
            tmp_path, pipeline_depth=depth, num_lookahead_tokens=drafts, worker_cls=CountingWorker
        )
        counts.append(CountingWorker.num_steps)
    assert counts[1] < 0.8 * counts[0]


@pytest.mark.parametrize(
    ("arguments", "depth", "ahead"),
    [
        ({}, 1, False),
        ({"async_scheduling": True}, 2, True),
        ({"pipeline_depth": 3}, 3, True),
        ({"pipeline_depth": 1, "async_scheduling": False}, 1, False),
    ],
)
def test_two_options_can_set_the_pipeline_depth(tmp_path, arguments, depth, ahead):
    started = start(tmp_path, **arguments)
    started.core.shutdown()
    scheduler = started.config.scheduler
    assert (scheduler.pipeline_depth, scheduler.async_scheduling) == (depth, ahead)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_depth": 5}, "pipeline_depth=5"),
        ({"pipeline_depth": 0}, "pipeline_depth=0"),
        ({"pipeline_depth": 2, "async_scheduling": False}, "conflict with each other"),
        ({"pipeline_depth": 1, "async_scheduling": True}, "conflict with each other"),
        ({"num_lookahead_tokens": -1}, "num_lookahead_tokens=-1"),
        ({"encoder_cache_tokens": 4}, "no effect without max_num_encoder_tokens"),
        ({"num_lookahead_tokens": 2, "worker_cls": PlainWorker}, "does not declare 'drafts'"),
        ({"max_num_encoder_tokens": 2, "worker_cls": PlainWorker}, "does not declare 'encoder'"),
    ],
)
def test_an_option_without_worker_support_is_rejected(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, **arguments)


def test_encoder_inputs_are_encoded_within_the_configured_budget(tmp_path):
    started = start(tmp_path, max_num_encoder_tokens=4, scheduler_cls=Scheduler)
    core = started.core
    content = tuple(
        EncoderInput(position=first, num_tokens=4, content_hash=bytes([first])) for first in (2, 8)
    )
    prompt = list(range(14))
    requested = make_request("a", prompt, max_tokens=3)
    try:
        core.add_request(replace(requested, encoder_inputs=content))
        large = (EncoderInput(position=0, num_tokens=5, content_hash=b"x"),)
        with pytest.raises(RequestError, match="5 encoder tokens in one step, but only 4 fit"):
            core.add_request(replace(requested, request_id="b", encoder_inputs=large))
        steps = []
        while core.has_work():
            steps.append(core.step())
    finally:
        core.shutdown()
    # The second encoder input waits for the second step: each step encodes four tokens.
    assert [len(step.token_ids) for step in steps] == [0, 1, 1, 1]
    assert [step.stats.num_scheduled_tokens for step in steps] == [8, 6, 1, 1]
    tokens = [token for step in steps for token in step.token_ids]
    assert tokens == expected(prompt, 3, requested.seed, encode(content))


class SlowGate(AdmissionGate):
    """A gate that holds requests with the adapter "slow" for three steps and rejects "bad"."""

    def __init__(self, context):
        self.num_steps = context.options.get("num_steps", 3)
        self.held = {}
        self.ended = False

    def holds(self, request):
        adapter = request.sampling_params.extra_args.get("adapter")
        if adapter:
            self.held[request.request_id] = [adapter, 0]
        return bool(adapter)

    def take_ready(self):
        ready = []
        for name, entry in list(self.held.items()):
            entry[1] += 1
            if entry[0] == "slow" and entry[1] > self.num_steps:
                ready.append(name)
                del self.held[name]
        return ready

    def take_failed(self):
        failed = [name for name, (adapter, _) in self.held.items() if adapter == "bad"]
        for name in failed:
            del self.held[name]
        return [(name, "there is no such adapter") for name in failed]

    def forget(self, request_id):
        self.held.pop(request_id, None)


def run_gated(folder, **changes):
    """Run an ordinary request and held requests. Return name and message as each request ends."""
    with LLM(**options(folder, admission_gates=[SlowGate], **changes)) as llm:
        engine, ended = llm.llm_engine, []
        for name, adapter in (("late", "never"), ("slow", "slow"), ("bad", "bad"), ("plain", "")):
            params = replace(PARAMS, extra_args={"adapter": adapter})
            engine.add_request(name, [1, 2, 3], params)
        while engine.has_unfinished_requests():
            ended += [item for item in engine.step() if item.finished]
    parts = [(item.request_id, item.outputs[0]) for item in ended]
    return [(name, part.finish_reason, list(part.token_ids)) for name, part in parts]


@pytest.mark.parametrize("ahead", [False, True], ids=["depth 1", "depth 2"])
def test_an_admission_gate_of_a_plugin_holds_only_its_own_requests(tmp_path, ahead):
    ended = run_gated(tmp_path, admission_timeout_s=0.2, async_scheduling=ahead)
    tokens = expected([1, 2, 3], PARAMS.max_tokens)
    assert [name for name, _, _ in ended] == ["bad", "plain", "slow", "late"]
    assert ended[0][1:] == ("error", []) and ended[3][1:] == ("error", [])
    assert ended[1][1:] == ended[2][1:] == ("length", tokens)


class CountingGate(SlowGate):
    num_shutdowns = 0

    def shutdown(self):
        type(self).num_shutdowns += 1


class BrokenGate(SlowGate):
    def __init__(self, context):
        raise OSError("no connection")


def test_a_gate_that_cannot_be_created_shuts_down_the_gates_before_it(tmp_path):
    with pytest.raises(PluginError, match="no connection"):
        start(tmp_path, admission_gates=[CountingGate, BrokenGate])
    assert CountingGate.num_shutdowns == 1


def test_admission_gates_need_a_scheduler_that_supports_them(tmp_path):
    with pytest.raises(ConfigError, match="does not declare 'gates'"):
        start(tmp_path, admission_gates=[SlowGate], scheduler_cls=FAKES["scheduler"])
