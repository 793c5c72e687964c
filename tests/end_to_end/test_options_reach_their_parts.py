"""Options of a user take effect in the whole engine.

Other tests cover each part separately. No part is replaced here: the tests observe what a user sees
(tokens, text, errors) and the statistics that a stat logger records of each step.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import fields

import pytest
import torch

from dovetail import LLM, AsyncLLM, SamplingParams
from dovetail.config import EngineArgs
from dovetail.errors import CapacityError, ConfigError, DovetailError, RequestError
from dovetail.interfaces import SchedulerStats
from dovetail_sched_fcfs import FCFSScheduler

PROMPT = [9, 8, 7, 6] * 10
"""A prompt of 40 tokens, which fill ten blocks."""


class Recorder:
    """A stat logger that stores the statistics of each step in `steps`."""

    steps: list[SchedulerStats] = []  # noqa: RUF012  # the tests read it

    def __init__(self, context):
        Recorder.steps = []

    def record(self, step):
        Recorder.steps.append(step.scheduler)

    def close(self):
        pass


def greedy(**changes):
    return SamplingParams(**({"max_tokens": 4, "temperature": 0, "ignore_eos": True} | changes))


def run(model_dir, options, prompts, params=None):
    """Return the token ids of each output and the statistics of all steps."""
    with LLM(model_dir, stat_loggers=[Recorder], **options) as llm:
        outputs = llm.generate(prompts, params or greedy())
    return [output.outputs[0].token_ids for output in outputs], list(Recorder.steps)


def other_prompt(number):
    return [20 + number, *PROMPT]


# --- the model ------------------------------------------------------------------------------------


def test_matmul_precision_sets_the_precision_of_torch(model_dir, options):
    for precision in ("medium", "highest"):
        with LLM(model_dir, **options, matmul_precision=precision):
            assert torch.get_float32_matmul_precision() == precision


@pytest.mark.costly
@pytest.mark.parametrize("override", [{"rope_theta": 50.0}, {"rms_norm_eps": 0.5}])
def test_hf_overrides_have_the_same_effect_as_config_json(model_dir, options, override, tmp_path):
    edited = tmp_path / "edited"
    shutil.copytree(model_dir, edited)
    config = json.loads((edited / "config.json").read_text("utf-8"))
    if "rope_theta" in override:
        config.pop("rope_parameters", None)
    (edited / "config.json").write_text(json.dumps(config | override), "utf-8")
    kwargs = {"rope_parameters": None, **override} if "rope_theta" in override else override
    plain, _ = run(model_dir, options, [PROMPT], greedy(max_tokens=12))
    from_option, _ = run(
        model_dir, options | {"hf_overrides": kwargs}, [PROMPT], greedy(max_tokens=12)
    )
    from_file, _ = run(edited, options, [PROMPT], greedy(max_tokens=12))
    assert from_option == from_file != plain


@pytest.mark.costly
def test_the_engine_seed_determines_samples_of_requests_without_a_seed(model_dir, options):
    sampled = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [PROMPT, other_prompt(1)]
    first, _ = run(model_dir, options | {"seed": 3}, prompts, sampled)
    again, _ = run(model_dir, options | {"seed": 3}, prompts, sampled)
    other, _ = run(model_dir, options | {"seed": 4}, prompts, sampled)
    assert first == again
    assert first[0] != other[0] and first[1] != other[1]


def test_max_model_len_ends_requests_of_that_length(model_dir, options):
    tokens, _ = run(model_dir, options | {"max_model_len": 44}, [PROMPT], greedy(max_tokens=None))
    assert len(tokens[0]) == 4


def test_max_logprobs_limits_the_logprobs_of_a_request(model_dir, options):
    with LLM(model_dir, max_logprobs=2, **options) as llm:
        (output,) = llm.generate(PROMPT, greedy(logprobs=2))
        assert len(output.outputs[0].logprobs[0]) in (2, 3)
        with pytest.raises(RequestError, match="logprobs"):
            llm.generate(PROMPT, greedy(logprobs=3))


@pytest.mark.parametrize("source", ["the model's", "none", "override"])
def test_sampling_defaults_come_from_the_configured_source(model_dir, options, source, tmp_path):
    edited = tmp_path / "edited"
    shutil.copytree(model_dir, edited)
    (edited / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3, "top_k": 1}))
    changes = {
        "the model's": {},
        "none": {"generation_config": "none"},
        "override": {"override_generation_config": {"top_k": 7}},
    }[source]
    with LLM(edited, **options, **changes) as llm:
        actual = llm.get_default_sampling_params().top_k
    assert actual == {"the model's": 1, "none": SamplingParams().top_k, "override": 7}[source]


# --- the start ----------------------------------------------------------------------------------


class WhereItRuns:
    """A worker extension that returns its process id."""

    def process_id(self):
        return os.getpid()


@pytest.mark.costly
@pytest.mark.parametrize("separate", [False, True])
def test_engine_process_runs_the_model_in_another_process(model_dir, options, separate):
    extension = f"{__name__}:WhereItRuns" if separate else WhereItRuns
    changes = {"engine_process": separate, "worker_extension_cls": extension}
    with LLM(model_dir, **(options | changes)) as llm:
        (process_id,) = llm.llm_engine.collective_rpc("process_id")
    assert (process_id != os.getpid()) == separate


def test_the_error_of_a_failed_start_names_the_phase(model_dir, options, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    (broken / "model.safetensors").write_bytes(b"")
    with pytest.raises(DovetailError) as raised:
        LLM(broken, **options)
    assert raised.value.phase == "load_model"


# --- a step ---------------------------------------------------------------------------------------


def test_max_num_seqs_limits_running_requests(model_dir, options):
    prompts = [other_prompt(number) for number in range(6)]
    _, steps = run(model_dir, options | {"max_num_seqs": 2}, prompts)
    assert max(step.num_running for step in steps) == 2
    _, steps = run(model_dir, options, prompts)
    assert max(step.num_running for step in steps) == 6


def test_max_num_batched_tokens_limits_a_step(model_dir, options):
    prompts = [other_prompt(number) for number in range(6)]
    _, steps = run(model_dir, options | {"max_num_batched_tokens": 24}, prompts)
    assert max(step.num_scheduled_tokens for step in steps) == 24


def test_long_prefill_token_threshold_splits_prompts(model_dir, options):
    _, steps = run(model_dir, options | {"long_prefill_token_threshold": 8}, [PROMPT])
    assert [step.num_scheduled_tokens for step in steps[:5]] == [8] * 5
    _, steps = run(model_dir, options, [PROMPT])
    assert steps[0].num_scheduled_tokens == 40


@pytest.mark.parametrize(("chunked", "first"), [(True, 60), (False, 40)])
def test_enable_chunked_prefill_decides_whether_a_prompt_is_split(
    model_dir, options, chunked, first
):
    limits = {"max_model_len": 60, "max_num_batched_tokens": 60, "enable_chunked_prefill": chunked}
    other = [11, 12, 13, 14] * 10
    _, steps = run(model_dir, options | limits, [PROMPT, other])
    assert steps[0].num_scheduled_tokens == first


@pytest.mark.parametrize("enabled", [True, False])
def test_enable_prefix_caching_decides_whether_blocks_are_reused(model_dir, options, enabled):
    with LLM(model_dir, stat_loggers=[Recorder], enable_prefix_caching=enabled, **options) as llm:
        for _ in range(2):
            llm.generate([PROMPT], greedy(max_tokens=1))
    assert Recorder.steps[-1].prefix_hits == (36 if enabled else 0)


def test_block_size_and_num_gpu_blocks_override_set_the_cache_shape(model_dir, options):
    sizes = options | {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 70}
    for block_size, used in ((4, 10), (8, 5)):
        _, steps = run(
            model_dir, sizes | {"block_size": block_size}, [PROMPT], greedy(max_tokens=1)
        )
        assert steps[0].num_blocks == 70
        assert steps[0].num_cached_blocks == used


def test_scheduler_cls_decides_which_request_runs_first(model_dir, options):
    prompts = [other_prompt(number) for number in range(4)]
    orders = {}
    for name in ("fcfs", "priority"):
        changes = {"scheduler_cls": name, "max_num_seqs": 1}
        with LLM(model_dir, **(options | changes)) as llm:
            outputs = llm.generate(prompts, greedy(), priority=[3, 2, 1, 0])
        ended = [output.metrics.finished_ns for output in outputs]
        orders[name] = sorted(range(4), key=ended.__getitem__)
    assert orders == {"fcfs": [0, 1, 2, 3], "priority": [3, 2, 1, 0]}


class CountingScheduler(FCFSScheduler):
    """Counts the plans in flight, which are scheduled and have no processed result yet."""

    num_out = max_outputs = 0

    def schedule(self):
        cls = CountingScheduler
        cls.num_out += 1
        cls.max_outputs = max(cls.max_outputs, cls.num_out)
        return super().schedule()

    def update_from_output(self, plan, output):
        CountingScheduler.num_out -= 1
        return super().update_from_output(plan, output)


@pytest.mark.parametrize(("asynchronous", "maximum"), [(False, 1), (True, 2)])
def test_async_scheduling_plans_one_step_ahead(model_dir, options, asynchronous, maximum):
    CountingScheduler.num_out = CountingScheduler.max_outputs = 0
    changes = {"scheduler_cls": CountingScheduler, "async_scheduling": asynchronous}
    run(model_dir, options | changes, [PROMPT, other_prompt(1)])
    assert CountingScheduler.max_outputs == maximum


# --- text -----------------------------------------------------------------------------------------


def test_skip_special_tokens_removes_special_tokens_from_the_text(llm):
    special = llm.get_tokenizer().encode("<|user|>")[-1:]
    for skip, text in ((True, ""), (False, "<|user|><|user|>")):
        params = greedy(max_tokens=2, allowed_token_ids=special, skip_special_tokens=skip)
        (output,) = llm.generate(PROMPT, params)
        assert output.outputs[0].text == text


def test_the_completions_of_a_request_with_n_above_one_differ(llm):
    params = SamplingParams(n=4, max_tokens=12, seed=3, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params)
    texts = [tuple(item.token_ids) for item in output.outputs]
    assert len(set(texts)) == 4
    (alone,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, seed=3, ignore_eos=True))
    assert tuple(alone.outputs[0].token_ids) == texts[0]


# --- statistics -----------------------------------------------------------------------------------


def test_every_statistic_is_updated(model_dir, options):
    """No statistic stays at zero in a run with preemptions, evictions, aborts and prefix hits."""
    few = options | {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 40}
    with LLM(model_dir, stat_loggers=[Recorder], **few) as llm:
        params = greedy(max_tokens=40)
        llm.generate([other_prompt(number) for number in range(4)], params)
        llm.generate([other_prompt(3)], greedy(max_tokens=1))
        engine = llm.llm_engine
        engine.add_request("leaves", PROMPT, params)
        engine.step()
        engine.abort_request(["leaves"])
        llm.generate([other_prompt(5)], greedy(max_tokens=1))
    steps, last = list(Recorder.steps), Recorder.steps[-1]
    largest = {
        field.name: max(getattr(step, field.name) for step in steps)
        for field in fields(SchedulerStats)
    }
    unused = {
        "num_illegal_actions",
        "policy_failures",
        "num_idle_steps",
        "num_drafts",
        "num_accepted",
    }
    assert {name for name, value in largest.items() if not value} == unused
    assert largest["num_blocks"] == 40 and 30 < largest["num_used_blocks"] <= 40
    assert largest["kv_cache_usage"] == largest["num_used_blocks"] / 40
    assert largest["num_running"] >= 2 and largest["num_waiting"] >= 1
    assert last.num_aborted == 1 and last.policy == "FCFSPolicy"
    assert 0 < last.prefix_hits < last.prefix_queries
    assert last.num_recomputed_tokens > 0 and last.num_preemptions > 0


# --- limits of the front end ----------------------------------------------------------------------


@pytest.mark.costly
def test_max_waiting_limits_waiting_requests(model_dir, options):
    async def add_requests():
        args = EngineArgs(model=str(model_dir), **(options | {"max_num_seqs": 2}))
        async with AsyncLLM(args.create_engine_config(), max_waiting=1) as llm:
            streams = [llm.generate(PROMPT, greedy(max_tokens=60)) for _ in range(4)]
            firsts = await asyncio.gather(
                *(anext(stream) for stream in streams), return_exceptions=True
            )
            for stream in streams:
                await stream.aclose()
            return firsts

    firsts = asyncio.run(add_requests())
    rejected = [first for first in firsts if isinstance(first, BaseException)]
    assert [type(item) for item in rejected] == [CapacityError]


# --- every option ---------------------------------------------------------------------------------


def test_the_error_for_an_option_value_of_a_wrong_type_names_the_option(model_dir):
    """Each option rejects a value of a type that no option accepts."""
    for name in EngineArgs.descriptions():
        with pytest.raises((ConfigError, ValueError), match=name):
            EngineArgs(**({"model": str(model_dir)} | {name: object()})).create_engine_config()
