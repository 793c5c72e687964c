"""The complete engine, with a worker in pure Python that generates a fixed text."""

import json
import logging
from array import array
from typing import ClassVar

import pytest

from dovetail import LLM, SamplingParams
from dovetail.config import EngineArgs
from dovetail.engine.llm_engine import LLMEngine
from dovetail.errors import CapacityError, EngineDeadError, RequestError, UserError
from dovetail.interfaces import ModelInfo, NoCacheSpec, WorkerBase
from dovetail.outputs import RequestOutputKind
from dovetail.result import ModelRunnerOutput
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

PIECE = "Two roads diverged — in a wood, and I "
GREEDY = SamplingParams(max_tokens=12, temperature=0)


class FixedTextWorker(WorkerBase):
    """A worker that generates the bytes of `PIECE` for every request."""

    made: ClassVar[list] = []

    def __init__(self, context):
        self.config, self.rows, self.ended = context.config, {}, 0
        FixedTextWorker.made.append(self)

    def init_device(self):
        pass

    def load_model(self):
        pass

    def get_model_info(self):
        hf_config = self.config.model.hf_config
        tasks = tuple(hf_config.get("tasks", ["generate"]))
        return ModelInfo(vocab_size=hf_config["vocab_size"], supported_tasks=tasks)

    def get_kv_cache_spec(self):
        return {"layer": NoCacheSpec(block_size=self.config.cache.block_size)}

    def determine_available_memory(self):
        raise AssertionError("the model has no KV cache, so no memory is measured")

    def initialize_cache(self, kv_cache_config):
        self.num_blocks = kv_cache_config.num_blocks
        if "melts" in self.config.model.hf_config:
            raise CapacityError("no room for the cache")

    def compile_or_warm_up_model(self):
        pass

    def execute_model(self, plan):
        self.plan = plan
        for row in plan.leaves:
            del self.rows[row]
        for request in plan.joins:
            self.rows[request.row] = len(request.token_ids) - request.num_prompt_tokens

    def sample_tokens(self, grammar=None):
        plan, text = self.plan, PIECE.encode()
        tokens = array("i")
        for row, samples in zip(plan.rows, plan.samples, strict=True):
            if samples:
                tokens.append(text[self.rows[row] % len(text)])
                self.rows[row] += 1
        return ModelRunnerOutput(step_id=plan.step_id, num_sampled=plan.samples, token_ids=tokens)

    def where(self):
        return "here"

    def shutdown(self):
        self.ended += 1


@pytest.fixture
def model(tmp_path):
    def write(**config):
        stated = {
            "architectures": ["FixedTextModel"],
            "vocab_size": 259,
            "max_position_embeddings": 64,
        }
        (tmp_path / "config.json").write_text(json.dumps(stated | config))
        return tmp_path

    return write


@pytest.fixture(params=[False, True], ids=["depth1", "depth2"])
def options(request):
    FixedTextWorker.made.clear()
    return {
        "platform": FakePlatform,
        "worker_cls": FixedTextWorker,
        "scheduler_cls": Scheduler,
        "tokenizer_mode": ByteTokenizer,
        "async_scheduling": request.param,
        "block_size": 4,
    }


@pytest.fixture
def engine(model, options):
    created = []

    def start(config=None, **changes):
        args = EngineArgs(model=model(**(config or {})), **(options | changes))
        created.append(LLMEngine.from_engine_args(args))
        return created[-1]

    yield start
    for item in created:
        item.shutdown()


def run(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_the_output_of_a_text_prompt_contains_text(engine):
    llm_engine = engine()
    llm_engine.add_request("a", "say", GREEDY)
    *early, last = run(llm_engine)
    assert last.finished and last.prompt == "say"
    assert last.prompt_token_ids == [256, *b"say"]
    assert last.outputs[0].text == PIECE[:12]
    assert last.outputs[0].finish_reason == "length"
    assert [out.outputs[0].text for out in early] == [PIECE[:n] for n in range(1, 12)]
    times = last.metrics
    assert 0 < times.arrival_ns <= times.admitted_ns <= times.first_token_ns <= times.finished_ns
    llm_engine.add_request("b", "say", GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
    assert [out.outputs[0].text for out in run(llm_engine)] == [PIECE[:12]]


def test_concatenated_delta_outputs_equal_the_text_and_have_no_partial_characters(engine):
    llm_engine = engine()
    long = SamplingParams(max_tokens=len(PIECE.encode()), temperature=0)
    llm_engine.add_request("a", "say", long, output_kind=RequestOutputKind.DELTA)
    outputs = run(llm_engine)
    pieces = [completion.text for out in outputs for completion in out.outputs]
    assert "".join(pieces) == PIECE and not any("\ufffd" in piece for piece in pieces)
    tokens = [
        token for out in outputs for completion in out.outputs for token in completion.token_ids
    ]
    assert bytes(tokens).decode() == PIECE
    assert [out.finished for out in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_stop_string_also_ends_the_request_in_the_engine_core(engine):
    llm_engine = engine()
    llm_engine.add_request("a", "say", SamplingParams(max_tokens=50, stop=["roads"], temperature=0))
    last = run(llm_engine)[-1]
    assert last.outputs[0].text == "Two " and last.outputs[0].stop_reason == "roads"
    assert len(last.outputs[0].token_ids) == len("Two roads")
    llm_engine.add_request("b", "say", GREEDY)
    assert run(llm_engine)[-1].request_id == "b"
    assert llm_engine.last_stats.num_running == 0


def test_the_eos_token_ends_the_request_unless_ignored(engine):
    class Short(ByteTokenizer):
        EOS = ord("r")

    llm_engine = engine(tokenizer_mode=Short)
    llm_engine.add_request("a", "say", GREEDY)
    llm_engine.add_request("b", "say", SamplingParams(max_tokens=6, ignore_eos=True))
    last = {out.request_id: out.outputs[0] for out in run(llm_engine) if out.finished}
    assert last["a"].text == "Two " and last["a"].finish_reason == "stop"
    assert last["a"].stop_reason is None
    assert last["b"].text == "Two ro"


def test_an_aborted_request_returns_its_partial_output(engine):
    llm_engine = engine()
    llm_engine.add_request("a", "say", SamplingParams(max_tokens=40, temperature=0))
    llm_engine.add_request("b", "say", GREEDY)
    for _ in range(5):
        llm_engine.step()
    llm_engine.abort_request(["a", "unknown"])
    assert llm_engine.has_unfinished_requests()
    outputs = run(llm_engine)
    assert outputs[0].request_id == "a" and outputs[0].finished
    assert outputs[0].outputs[0].finish_reason == "abort"
    assert PIECE.startswith(outputs[0].outputs[0].text) and outputs[0].outputs[0].text
    assert outputs[-1].outputs[0].text == PIECE[:12]
    llm_engine.abort_request("a")
    assert not llm_engine.has_unfinished_requests()


def test_several_completions_are_returned_in_one_output(engine):
    llm_engine = engine()
    llm_engine.add_request("a", "say", SamplingParams(n=3, max_tokens=4))
    last = run(llm_engine)[-1]
    assert [completion.index for completion in last.outputs] == [0, 1, 2]
    assert {completion.text for completion in last.outputs} == {PIECE[:4]}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("prompt", "params", "parameter"),
    [
        ([], None, "prompt"),
        ([999], None, "prompt"),
        ("x" * 64, None, "prompt"),
        ("say", SamplingParams(logprobs=21), "logprobs"),
        ("say", "hot", "params"),
    ],
)
def test_a_rejected_request_leaves_no_state(engine, prompt, params, parameter):
    llm_engine = engine()
    llm_engine.add_request("a", "say", GREEDY)
    llm_engine.step()
    with pytest.raises(RequestError) as rejection:
        llm_engine.add_request("bad", prompt, params)
    assert rejection.value.parameter == parameter
    llm_engine.add_request("bad", "say", GREEDY)  # the rejected id is not in use
    done = {out.request_id: out.outputs[0].text for out in run(llm_engine) if out.finished}
    assert done == {"a": PIECE[:12], "bad": PIECE[:12]}


def test_an_unknown_output_kind_is_rejected(engine):
    llm_engine = engine()
    with pytest.raises(RequestError, match=r"'delta'.*RequestOutputKind\.DELTA") as rejection:
        llm_engine.add_request("a", "say", GREEDY, output_kind="delta")
    assert rejection.value.parameter == "output_kind"
    assert not llm_engine.has_unfinished_requests()


def test_a_request_id_in_use_is_rejected_and_the_first_request_continues(engine):
    llm_engine = engine()
    llm_engine.add_request("a", "say", GREEDY)
    with pytest.raises(RequestError, match="'a' is in use"):
        llm_engine.add_request("a", "say")
    assert run(llm_engine)[-1].outputs[0].text == PIECE[:12]


def test_if_the_core_rejects_one_completion_the_whole_request_is_aborted(engine):
    def reject(self, request):
        if request.request_id.endswith("#1"):
            raise RequestError("not this one")
        Scheduler.add_request(self, request)

    llm_engine = engine(
        scheduler_cls=type("RejectingScheduler", (Scheduler,), {"add_request": reject})
    )
    with pytest.raises(RequestError, match="not this one"):
        llm_engine.add_request("a", "say", SamplingParams(n=2))
    assert not llm_engine.has_unfinished_requests() and not llm_engine.client.core.has_work()


def test_the_error_for_a_model_that_does_not_support_text_generation_lists_its_tasks(engine):
    llm_engine = engine({"tasks": ["embed"]})
    assert llm_engine.supported_tasks == ("embed",)
    with pytest.raises(
        UserError, match="FixedTextModel does not support text generation; it supports: embed"
    ):
        llm_engine.add_request("a", "say")


def test_without_a_tokenizer_prompts_and_outputs_are_token_ids(engine):
    llm_engine = engine(skip_tokenizer_init=True)
    llm_engine.add_request("a", [1, 2], GREEDY)
    last = run(llm_engine)[-1]
    assert bytes(last.outputs[0].token_ids) == PIECE.encode()[:12] and last.outputs[0].text == ""
    with pytest.raises(RequestError, match="has no tokenizer"):
        llm_engine.add_request("b", "say")


def test_an_engine_returns_statistics_and_worker_results(engine):
    llm_engine = engine()
    assert llm_engine.last_stats is None
    llm_engine.add_request("a", "say it again and again", GREEDY)
    run(llm_engine)
    assert llm_engine.last_stats.num_waiting == 0 and llm_engine.last_stats.prefix_queries == 23
    assert llm_engine.collective_rpc("where") == ["here"]
    assert llm_engine.reset_prefix_cache()
    assert llm_engine.step() == []


# --- start and end ----------------------------------------------------------------------------


def test_the_cache_size_is_limited_to_the_memory_that_requests_can_use(engine):
    engine(max_num_seqs=2, max_model_len=10)
    assert FixedTextWorker.made[-1].num_blocks == 2 * 3 + 1


def test_a_small_cache_lowers_max_model_len_with_a_warning(engine, caplog):
    with caplog.at_level(logging.WARNING):
        llm_engine = engine(num_gpu_blocks_override=4)
    assert llm_engine.max_model_len == 16
    assert "max_model_len is 16 instead of 64" in caplog.text
    llm_engine.add_request("a", [1] * 10, SamplingParams(max_tokens=None))
    assert len(run(llm_engine)[-1].outputs[0].token_ids) == 6


def test_a_max_model_len_set_by_the_user_must_fit_into_the_cache(engine):
    with pytest.raises(CapacityError, match="max_model_len=17 needs 6 KV blocks"):
        engine(num_gpu_blocks_override=4, max_model_len=17)
    assert FixedTextWorker.made[-1].ended == 1


def test_a_failed_start_shuts_the_workers_down(engine):
    with pytest.raises(CapacityError, match="no room for the cache"):
        engine({"melts": True})
    assert FixedTextWorker.made[-1].ended == 1


def test_a_failed_engine_rejects_further_requests(engine, monkeypatch):
    llm_engine = engine()
    llm_engine.add_request("a", "say", GREEDY)
    llm_engine.step()
    monkeypatch.setattr(FixedTextWorker.made[-1], "rows", None)
    with pytest.raises(EngineDeadError, match="step "):
        run(llm_engine)
    with pytest.raises(EngineDeadError, match="create a new one"):
        llm_engine.step()
    with pytest.raises(EngineDeadError):
        llm_engine.add_request("b", "say")


# --- LLM --------------------------------------------------------------------------------------


@pytest.fixture
def llm(model, options):
    with LLM(model(), **options) as opened_llm:
        yield opened_llm
    opened_llm.shutdown()  # a second shutdown has no effect
    assert FixedTextWorker.made[-1].ended == 1


def test_outputs_are_in_the_order_of_the_prompts(llm):
    params = [SamplingParams(max_tokens=n, temperature=0) for n in (7, 1, 4)]
    outputs = llm.generate(["a", [1, 2], {"prompt_token_ids": [5]}], params)
    assert [out.outputs[0].text for out in outputs] == [PIECE[:7], PIECE[:1], PIECE[:4]]
    assert llm.generate([], GREEDY) == []


def test_one_rejected_prompt_rejects_the_generate_call_and_leaves_no_state(llm):
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
        llm.generate(["a", [], "b"], GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate("a", GREEDY)[0].outputs[0].text == PIECE[:12]


def test_a_rejected_prompt_can_be_returned_as_an_error_output(llm):
    valid, bad, also = llm.generate(["a", [], "b"], GREEDY, on_error="return")
    assert bad.outputs == [] and bad.finished and "empty" in bad.error
    assert valid.outputs[0].text == also.outputs[0].text == PIECE[:12] and valid.error is None


@pytest.mark.parametrize("name", ["sampling_params", "priority"])
def test_the_numbers_of_parameters_and_prompts_must_be_equal(llm, name):
    kwargs = {"sampling_params": [GREEDY, GREEDY], "priority": [1, 2]}[name]
    with pytest.raises(RequestError, match=f"2 {name} were given for 1 prompt;") as rejection:
        llm.generate(["a"], **{name: kwargs})
    assert rejection.value.parameter == name
