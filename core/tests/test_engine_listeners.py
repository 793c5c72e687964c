"""Hooks, stat loggers and IO processors of a complete engine without tensors."""

import logging
from array import array
from typing import ClassVar

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, PluginError, PluginLoadError, RequestError
from dovetail.interfaces import EngineCoreOutputs, Finished
from dovetail.request import FinishReason
from dovetail.scheduling import Scheduler
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.fakes.hooks import FakeHooks
from dovetail_devkit.fakes.io_processor import FakeIOProcessor
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.stat_logger import FakeStatLogger
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_devkit.fakes.worker import FakeWorker

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, seed=1)


class InstanceRecorder:
    """A base class of listeners that records all instances by class."""

    made: ClassVar[dict] = {}

    def __init__(self, context):
        super().__init__(context)
        InstanceRecorder.made.setdefault(type(self), []).append(self)


class RecordingHooks(InstanceRecorder, FakeHooks):
    pass


class Logged(InstanceRecorder, FakeStatLogger):
    pass


class Worker(InstanceRecorder, FakeWorker):
    pass


@pytest.fixture(params=[False, True], ids=["depth1", "depth2"])
def make(request, tmp_path):
    InstanceRecorder.made = {}
    created = []

    def build(**options):
        arguments = SMALL_ENGINE | {
            "platform": FakePlatform,
            "worker_cls": Worker,
            "executor_backend": "uniproc",
            "scheduler_cls": Scheduler,
            "tokenizer_mode": ByteTokenizer,
            "async_scheduling": request.param,
        }
        model = write_fake_config(tmp_path, vocab_size=300)
        created.append(LLM(model, **(arguments | options)))
        return created[-1]

    yield build
    for item in created:
        item.shutdown()


def notified(cls=RecordingHooks):
    (listener,) = InstanceRecorder.made[cls]
    return [name for name, _ in listener.calls], listener


def test_hooks_are_notified_of_all_engine_events(make):
    with make(hooks=[RecordingHooks]) as llm:
        names, listener = notified()
        assert names == ["on_engine_start"]
        assert listener.calls[0][1] is llm.llm_engine.config  # the resolved configuration
        (output,) = llm.generate("say", GREEDY)
    llm.shutdown()
    names, listener = notified()
    assert names[0] == "on_engine_start" and names[-1] == "on_engine_stop"
    assert names.count("on_engine_stop") == 1
    steps = [message for name, message in listener.calls if name == "on_step"]
    assert sum(step.num_new_tokens for step in steps) == len(output.outputs[0].token_ids) == 6
    assert sum(step.num_finished for step in steps) == 1
    assert not any(step.num_failed for step in steps)
    times = [step.now_ns for step in steps]
    assert times == sorted(times) and len(set(names)) == 3


def test_an_engine_without_listeners_makes_no_extra_calls(make):
    """Without listeners, the engine reads outputs from the client directly."""
    silent = make().llm_engine
    assert silent._next_outputs == silent._get_outputs

    class Starts:
        def __init__(self, context):
            pass

        def on_engine_start(self):
            pass

    started = make(hooks=[Starts]).llm_engine
    assert started._next_outputs == started._get_outputs


def test_stat_loggers_are_notified_of_each_step_and_are_closed(make):
    with make(stat_loggers=[Logged]) as llm:
        llm.generate(["one", "another"], GREEDY)
        (listener,) = InstanceRecorder.made[Logged]
        assert listener.context.start_ns <= listener.steps[0].now_ns
        assert sum(step.num_new_tokens for step in listener.steps) == 12
        ids = [step.scheduler.step_id for step in listener.steps]
        assert ids == list(range(len(ids)))
        assert not listener.num_closed
    assert listener.num_closed == 1


def counts(stats):
    return stats.num_running, stats.num_waiting, stats.num_used_blocks


def test_statistics_are_up_to_date_when_no_request_runs(make):
    with make(stat_loggers=[Logged]) as llm:
        engine, (listener,) = llm.llm_engine, InstanceRecorder.made[Logged]
        long = SamplingParams(max_tokens=30, ignore_eos=True)

        def check(*counts_expected):
            assert counts(engine.last_stats)[: len(counts_expected)] == counts_expected
            assert listener.steps[-1].scheduler == engine.last_stats

        for name in "abc":
            engine.add_request(name, "say", long)
        for _ in range(3):
            engine.step()
        check(3, 0)
        engine.abort_request("a")
        engine.abort_request(["b", "c"])
        check(0, 0, 0)
        engine.pause()
        engine.add_request("d", "say", long)
        engine.add_request("e", "say", long)
        engine.step()
        engine.step()
        check(0, 2, 0)
        engine.abort_request(["d", "e"])
        check(0, 0, 0)
        engine.resume()
        long = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
        (whole,) = llm.generate("say", long)
        check(0, 0, 0)
        stop = SamplingParams(
            max_tokens=30, ignore_eos=True, seed=1, stop=whole.outputs[0].text[4:6]
        )
        (stopped,) = llm.generate("say", stop)
        assert len(stopped.outputs[0].token_ids) < 30
        check(0, 0, 0)


def test_a_step_sent_in_several_messages_is_recorded_once(make):
    with make(stat_loggers=[Logged]) as llm:
        listeners, (listener,) = llm.llm_engine._listeners, InstanceRecorder.made[Logged]
        llm.generate("say", GREEDY)
        stats, num_steps = llm.llm_engine.last_stats, len(listener.steps)
        ending = Finished(request_id="a", reason=FinishReason.LENGTH)
        listeners.notify(EngineCoreOutputs(token_ids=array("i", [1, 2])))
        listeners.notify(EngineCoreOutputs(token_ids=array("i", [3]), finished=(ending,)))
        assert len(listener.steps) == num_steps
        listeners.notify(EngineCoreOutputs(stats=stats))
        assert len(listener.steps) == num_steps + 1
        assert (listener.steps[-1].num_new_tokens, listener.steps[-1].num_finished) == (3, 1)


def test_tokens_do_not_depend_on_listeners(make):
    with make() as llm:
        expected = llm.generate("say", GREEDY)[0].outputs[0].token_ids
    with make(stat_loggers=[Logged], hooks=[RecordingHooks]) as llm:
        assert llm.generate("say", GREEDY)[0].outputs[0].token_ids == expected


def test_a_listener_that_raises_is_reported_once_and_disabled(make, caplog):
    class FailingHooks(RecordingHooks):
        def on_step(self, step):
            super().on_step(step)
            raise RuntimeError("tired")

    class FailingLogger(Logged):
        def record(self, step):
            raise OSError("disk full")

    with make(stat_loggers=[FailingLogger, Logged], hooks=[FailingHooks, RecordingHooks]) as llm:
        with caplog.at_level(logging.WARNING):
            (output,) = llm.generate("say", GREEDY)
        assert len(output.outputs[0].token_ids) == 6
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == 2
        assert "FailingLogger failed and was closed: OSError: disk full" in warnings[0]
        assert "'" in warnings[1] and "failed in on_step: RuntimeError: tired" in warnings[1]
        (jam,), (well,) = InstanceRecorder.made[FailingLogger], InstanceRecorder.made[Logged]
        assert jam.num_closed == 1 and len(well.steps) >= 6
        assert [name for name, _ in notified(FailingHooks)[1].calls].count("on_step") == 1
        assert notified()[0].count("on_step") == len(well.steps)


def test_rejected_and_failed_requests_are_reported_to_listeners(make, monkeypatch):
    with make(hooks=[RecordingHooks]) as llm:
        with pytest.raises(RequestError):
            llm.generate([[5] * 500], GREEDY)
        message = [message for name, message in notified()[1].calls if name == "on_request_error"]
        (name, error), *_ = message
        assert name == "0" and error.parameter == "prompt"
        # This engine never fails a running request; another scheduler may.
        core = llm.llm_engine.client.core
        update = core.scheduler.update_from_output

        def fail(plan, output):
            outputs = update(plan, output)
            for ending in outputs.finished:
                object.__setattr__(ending, "reason", FinishReason.ERROR)
                object.__setattr__(ending, "message", "lost its cache")
            return outputs

        monkeypatch.setattr(core.scheduler, "update_from_output", fail)
        (output,) = llm.generate("say", GREEDY)
        assert output.error == "lost its cache"
        entries = notified()[1].calls
        (*_, (name, error)) = [message for hook, message in entries if hook == "on_request_error"]
        assert (name, str(error)) == ("1", "lost its cache")
        assert sum(message.num_failed for hook, message in entries if hook == "on_step") == 1


def test_an_engine_start_that_a_hook_aborts_is_undone(make):
    class Rejects(FakeHooks):
        def on_engine_start(self, config):
            raise RuntimeError("not today")

    with pytest.raises(PluginError, match=r"Rejects' failed in on_engine_start: .*not today"):
        make(hooks=[RecordingHooks, Rejects], stat_loggers=[Logged])
    assert notified()[0] == ["on_engine_start", "on_engine_stop"]
    assert InstanceRecorder.made[Logged][0].num_closed == 1
    assert InstanceRecorder.made[Worker][0].calls[-1] == "shutdown"


def test_the_error_for_a_listener_that_cannot_be_constructed_names_it(make):
    class ExitsInConstructor(FakeStatLogger):
        def __init__(self, context):
            raise SystemExit("no")

    with pytest.raises(PluginLoadError, match="ExitsInConstructor"):
        make(stat_loggers=[Logged, ExitsInConstructor])
    assert InstanceRecorder.made[Logged][0].num_closed == 1
    assert InstanceRecorder.made[Worker][0].calls[-1] == "shutdown"
    for option in ("stat_loggers", "hooks"):
        with pytest.raises(ConfigError, match=rf"{option} \w+ .* twice"):
            make(**{option: [Logged] * 2 if option == "stat_loggers" else [RecordingHooks] * 2})


def test_prompts_and_outputs_are_processed_by_the_io_processor(make):
    with make(io_processor=FakeIOProcessor) as llm:
        texts = ["say", "something", "x" * 200]
        first, second, long = llm.process(texts, GREEDY, use_tqdm=False)
        expected = llm.generate(["say", "something"], GREEDY)
        assert [first, second] == [
            (text, item.outputs[0].text) for text, item in zip(texts, expected, strict=False)
        ]
        assert long == (texts[2], None)  # this prompt is rejected; the others are served
        with pytest.raises(RequestError, match="prompt 2"):
            llm.process(texts, GREEDY, on_error="raise")
        with pytest.raises(RequestError, match="must be a list of strings"):
            llm.process(3)
        assert llm.process([]) == []
    with make() as llm, pytest.raises(ConfigError, match="io_processor="):
        llm.process(["say"])
