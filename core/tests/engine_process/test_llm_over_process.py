"""`LLM` and `LLMEngine` give the same results in-process and with an engine process."""

import json
import os
import signal
import threading
import time

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import DovetailError, EngineDeadError, RequestError, UserError
from dovetail.outputs import RequestOutputKind
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.hooks import FakeHooks
from dovetail_devkit.fakes.logits_processor import ARGUMENT, FakeLogitsProcessor
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.stat_logger import FakeStatLogger
from dovetail_devkit.fakes.tokenizer import ByteTokenizer


class RecordingHooks(FakeHooks):
    made = None

    def __init__(self, context):
        super().__init__(context)
        RecordingHooks.made = self


class Logged(FakeStatLogger):
    made = None

    def __init__(self, context):
        super().__init__(context)
        Logged.made = self


@pytest.fixture(params=[False, True], ids=["in process", "over a process"])
def make(request, parts, tmp_path, monkeypatch):
    created = []

    def build(**worker_config):
        names = [name for name in ("depth", "params") if name in worker_config]
        options = {name: worker_config.pop(name) for name in names}
        config = {"architectures": ["X"], "vocab_size": 300, "max_position_embeddings": 64}
        (tmp_path / "config.json").write_text(json.dumps(config | worker_config))
        created.append(
            LLM(
                str(tmp_path),
                engine_process=request.param,
                platform=FakePlatform,
                worker_cls=parts.UnappliedProcessorsWorker,
                scheduler_cls=Scheduler,
                tokenizer_mode=ByteTokenizer,
                logits_processors=(FakeLogitsProcessor,),
                stat_loggers=(Logged,),
                hooks=(RecordingHooks,),
                async_scheduling=options.get("depth", 1) == 2,
                max_num_seqs=4,
            )
        )
        return created[-1]

    yield build
    for item in created:
        item.shutdown()
        item.shutdown()


def greedy(max_tokens=6, **arguments):
    return SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, seed=1, **arguments
    )


SEEN = {}


def same_as_before(name, actual):
    """Check that both kinds of engines give the same result for the test `name`."""
    assert SEEN.setdefault(name, actual) == actual


def plain(output):
    return (
        output.request_id,
        output.prompt_token_ids,
        [
            (item.text, item.token_ids, item.finish_reason, item.stop_reason)
            for item in output.outputs
        ],
        output.num_cached_tokens,
        output.error,
        output.finished,
    )


@pytest.mark.costly
@pytest.mark.parametrize("depth", [1, 2])
def test_both_kinds_of_engines_give_the_same_outputs_and_statistics(make, depth):
    llm = make(depth=depth)
    prompts = ["one", "two and more", [7] * 30, "the fourth", "the fifth", "one"]
    params = [greedy(4 + number, n=1 + number % 2) for number in range(6)]
    outputs = llm.generate(prompts, params, priority=[0, 1, 2, 3, 4, 5])
    stats = llm.llm_engine.last_stats
    steps = [
        (step.scheduler.step_id, step.scheduler.num_scheduled_tokens, step.num_new_tokens)
        for step in Logged.made.steps
    ]
    counts = stats.num_running, stats.prefix_queries, stats.prefix_hits, stats.num_used_blocks
    same_as_before(f"answers {depth}", (list(map(plain, outputs)), steps, counts))
    assert sum(new for _, _, new in steps) == sum(
        len(output.token_ids) for out in outputs for output in out.outputs
    )


@pytest.mark.costly
def test_both_kinds_of_engines_reject_the_same_requests(make):
    llm = make()
    invalid = greedy(extra_args={ARGUMENT: "yes"})
    missing = greedy(min_tokens=2)
    prompts = ["a", "b", [], "d", "x" * 64, "f"]
    params = [greedy(), invalid, greedy(), greedy(), greedy(), missing]
    outputs = llm.generate(prompts, params, on_error="return")
    assert [out.error is None for out in outputs] == [True, False, False, True, False, False]
    assert "min_tokens=2 needs a worker with the capability 'min_tokens'" in outputs[-1].error
    errors = [(name, str(error)) for kind, (name, error) in recorded_errors()]
    with pytest.raises(RequestError, match="prompt 1: ") as caught:
        llm.generate(["a", "b"], [greedy(), invalid])
    assert caught.value.parameter == f"extra_args.{ARGUMENT}"
    assert not llm.llm_engine.has_unfinished_requests()
    alone = llm.generate("a", greedy())[0]
    same_as_before("refusals", (list(map(plain, outputs)), errors, str(caught.value), plain(alone)))
    assert llm.llm_engine.last_stats.num_running == 0


def recorded_errors():
    return [entry for entry in RecordingHooks.made.calls if entry[0] == "on_request_error"]


@pytest.mark.costly
def test_stop_strings_and_aborts_end_requests_in_the_engine(make):
    llm = make()
    engine = llm.llm_engine
    text = llm.generate("say", greedy(30))[0].outputs[0].text
    stop = text[5:8]
    engine.add_request("a", "say", greedy(50, stop=[stop]), output_kind=RequestOutputKind.DELTA)
    engine.add_request("b", "other", greedy(40))
    engine.add_request("c", "third", greedy(50))
    collected = []
    while engine.has_unfinished_requests():
        collected += engine.step()
        if any(out.request_id == "b" for out in collected):
            engine.abort_request("c")
    last = {out.request_id: out.outputs[0].finish_reason for out in collected if out.finished}
    assert last == {"a": "stop", "b": "length", "c": "abort"}
    assert "".join(out.outputs[0].text for out in collected if out.request_id == "a") == text[:5]
    engine.add_request("a", "say", greedy(9))  # the id of the finished request can be used again
    (*_, again) = run(engine)
    assert len(again.outputs[0].token_ids) == 9 and text.startswith(again.outputs[0].text)
    assert engine.reset_prefix_cache() and engine.step() == []


def run(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


@pytest.mark.costly
def test_an_engine_can_be_paused_and_resumed(make):
    llm = make()
    engine = llm.llm_engine
    engine.pause("all")
    engine.add_request("a", "say", greedy())
    assert engine.paused == "all" and engine.step() == []
    with pytest.raises(UserError, match="is paused"):
        llm.generate("say", greedy())
    engine.resume()
    assert engine.paused is None and len(run(engine)[-1].outputs[0].token_ids) == 6


@pytest.mark.costly
def test_workers_execute_methods_called_by_name(make):
    engine = make().llm_engine
    assert engine.collective_rpc("echo", 1, key="x") == [[[1], {"key": "x"}]]
    if engine.config.parallel.engine_process:
        with pytest.raises(UserError, match="Pass the name of a worker"):
            engine.collective_rpc(lambda worker: 1)
    else:
        assert engine.collective_rpc(lambda worker: worker.echo(2)) == [[[2], {}]]
    own = ("shutdown", "execute_model", "sleep", "wake_up", "determine_available_memory")
    for name in (*own, "_private", "__class__", "no name"):
        with pytest.raises(UserError, match="is internal to the engine"):
            engine.collective_rpc(name)
    with pytest.raises(DovetailError, match="not today"):
        engine.collective_rpc("raise_value_error")


@pytest.mark.costly
def test_a_failed_step_stops_the_engine_and_the_error_contains_a_summary_of_the_plan(make):
    llm = make(fails_at=3)
    with pytest.raises(EngineDeadError, match="the chip melted") as caught:
        llm.generate(["secret", "other"], greedy(20))
    assert caught.value.digest.startswith("step 3: 2 scheduled requests")
    assert "secret" not in str(caught.value) and str(list(b"secret")[:3])[1:-1] not in str(
        caught.value
    )
    same_as_before("digest", caught.value.digest)
    with pytest.raises(EngineDeadError):
        llm.generate("again", greedy())
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.costly
def test_generate_raises_an_error_when_the_engine_is_killed(make):
    llm = make(step_s=0.01)
    if not llm.llm_engine.config.parallel.engine_process:
        pytest.skip("there is no other process to kill")
    engine = llm.llm_engine
    engine.add_request("a", "say", greedy(50))
    engine.step()
    os.kill(engine.client.process_id, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        run(engine)
    assert time.monotonic() - start < 2
    engine.abort_request("a")
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        llm.generate("again", greedy())


@pytest.mark.costly
def test_the_error_for_a_class_that_another_process_cannot_import_names_the_class(parts, tmp_path):
    class Hidden(parts.ControlledWorker):
        pass

    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "vocab_size": 300}))
    options = {"platform": FakePlatform, "worker_cls": Hidden, "skip_tokenizer_init": True}
    with pytest.raises(DovetailError, match="Hidden"):
        LLM(str(tmp_path), engine_process=True, **options)


@pytest.mark.costly
def test_an_interrupt_ends_the_generate_call_but_not_the_engine(make):
    llm = make(step_s=0.005)
    expected = llm.generate("say", greedy())[0].outputs[0].token_ids
    typing = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    typing.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["say"] * 8, greedy(50))
    typing.join()
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate("say", greedy())[0].outputs[0].token_ids == expected
    assert llm.llm_engine.last_stats.num_running == 0


@pytest.mark.costly
@pytest.mark.parametrize("depth", [1, 2])
def test_statistics_are_up_to_date_after_the_last_abort(make, depth):
    engine = make(depth=depth, step_s=0.005).llm_engine
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    for _ in range(2):
        for name in "ab":
            engine.add_request(name, "say", params)
        while engine.last_stats is None or engine.last_stats.num_running < 2:
            engine.step()
        time.sleep(0.1)  # outputs of an engine process may still be in transit
        engine.abort_request("a")
        engine.abort_request("b")
        stats = engine.last_stats
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        assert Logged.made.steps[-1].scheduler == stats
