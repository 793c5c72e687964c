"""Every kind of extension of an engine, separately and together, with a random model."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, ContractError, RequestError
from dovetail_io_jsonl import write_rows

PROMPT = "The quick brown fox"


class Weights:
    """A worker extension that reads the model."""

    def count_parameters(self):
        return sum(parameter.numel() for parameter in self._model.parameters())


class Renames:
    def load_model(self):
        raise AssertionError("never called")


class LifeCycleHooks:
    """Hooks that record their calls."""

    events: list[str] = []  # noqa: RUF012  # one test reads it

    def __init__(self, context):
        LifeCycleHooks.events = []

    def on_engine_start(self, config):
        LifeCycleHooks.events.append(config.model.architecture)

    def on_step(self, step):
        LifeCycleHooks.events.append("step")

    def on_engine_stop(self):
        LifeCycleHooks.events.append("stop")


def greedy(**extra_args):
    params = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
    return SamplingParams(**params, extra_args=extra_args)


def has_repeats(token_ids, size=2):
    grams = list(zip(*(token_ids[start:] for start in range(size)), strict=False))
    return len(set(grams)) < len(grams)


@pytest.fixture(params=[False, True], ids=["depth1", "depth2"])
def settings(request, options):
    return options | {"async_scheduling": request.param}


@pytest.mark.costly
def test_a_logits_processor_acts_only_on_requests_that_use_it(model_dir, settings, llm):
    mates = [PROMPT, "Sphinx of black quartz", "Paged attention"] * 3
    plain = [item.outputs[0].token_ids for item in llm.generate(mates, greedy())]
    assert any(map(has_repeats, plain))
    # Few blocks: some requests are preempted and must continue unchanged.
    few = settings | {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 60}
    with LLM(model_dir, logits_processors=["no_repeat_ngram"], **few) as opened_llm:
        asking = [greedy(no_repeat_ngram_size=2) if i % 3 else greedy() for i in range(len(mates))]
        actual = [item.outputs[0].token_ids for item in opened_llm.generate(mates, asking)]
        stats = opened_llm.llm_engine.last_stats
        with pytest.raises(RequestError, match="no_repeat_ngram_size"):
            opened_llm.generate(PROMPT, greedy(no_repeat_ngram_size=-3))
        alone = [opened_llm.generate(mates[i], asking[i])[0].outputs[0].token_ids for i in (1, 2)]
    assert stats.num_preemptions > 0
    for index, (token_ids, before) in enumerate(zip(actual, plain, strict=True)):
        if index % 3:
            ids = llm.get_tokenizer().encode(mates[index])
            assert not has_repeats([*ids, *token_ids]) or has_repeats(ids)
        else:
            assert token_ids == before
    assert actual[1] == alone[0] and actual[2] == alone[1]
    assert actual[1] == actual[4] == actual[7]


def test_requests_in_a_json_lines_file_are_processed(model_dir, settings, tmp_path, llm):
    rows = [
        {"id": "plain", "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        {"id": "long", "prompt": "fox " * 400},
    ]
    write_rows(tmp_path / "in.jsonl", rows)
    with LLM(model_dir, io_processor="jsonl", **settings) as opened_llm:
        content = opened_llm.process(tmp_path / "in.jsonl", greedy())
        with pytest.raises(RequestError, match="line 1: a row cannot have the field 'promt'"):
            opened_llm.process('{"promt": "a"}')
    (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert content[0] == {
        "id": "plain",
        "text": expected.outputs[0].text,
        "finish_reason": "length",
    }
    assert [row["id"] for row in content] == ["plain", 1, "long"]
    assert "max_model_len" in content[2]["error"]


@pytest.mark.costly
def test_the_jsonl_stat_logger_writes_statistics(model_dir, settings, tmp_path):
    path = tmp_path / "stats.jsonl"
    kwargs = {"jsonl": {"path": str(path), "interval_s": 0}}
    with LLM(model_dir, stat_loggers=["jsonl"], plugin_options=kwargs, **settings) as llm:
        llm.generate([PROMPT, "Sphinx"], greedy())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(line["num_steps"] for line in lines) == len(lines) >= 48
    assert sum(line["num_finished"] for line in lines) == 2
    assert max(line["num_running"] for line in lines) == 2
    assert all(earlier["time_s"] <= later["time_s"] for earlier, later in pairwise(lines))
    with pytest.raises(ConfigError, match="interval"):
        LLM(
            model_dir, stat_loggers=["jsonl"], plugin_options={"jsonl": {"interval": 1}}, **settings
        )


def test_worker_extensions_and_hooks_are_called(model_dir, settings):
    with LLM(model_dir, worker_extension_cls=Weights, hooks=[LifeCycleHooks], **settings) as llm:
        (count,) = llm.llm_engine.collective_rpc("count_parameters")
        assert count > 10_000
        llm.generate(PROMPT, greedy())
    assert LifeCycleHooks.events[0] == "LlamaForCausalLM" and LifeCycleHooks.events[-1] == "stop"
    assert LifeCycleHooks.events.count("step") >= 48
    with pytest.raises(ContractError, match="load_model is also a member of"):
        LLM(model_dir, worker_extension_cls=Renames, **settings)


@pytest.mark.costly
def test_all_extensions_together_change_no_token(model_dir, settings, llm):
    (expected,) = llm.generate(PROMPT, greedy())
    with LLM(
        model_dir,
        logits_processors=["no_repeat_ngram"],
        io_processor="jsonl",
        stat_loggers=["jsonl"],
        hooks=[LifeCycleHooks],
        worker_extension_cls=Weights,
        plugin_options={"jsonl": {"interval_s": 1000}},
        **settings,
    ) as opened_llm:
        (actual,) = opened_llm.generate(PROMPT, greedy())
    assert actual.outputs[0].token_ids == expected.outputs[0].token_ids
