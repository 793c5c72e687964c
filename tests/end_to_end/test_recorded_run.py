"""A real engine's decision log: off by default, and replayed without the model."""

from __future__ import annotations

import pytest

from dovetail import LLM, SamplingParams
from dovetail.clock import ManualClock
from dovetail.decision_log import LogReader, RecordedScheduler
from dovetail.errors import ConfigError, RequestError
from dovetail_lab.replay import replay_log
from dovetail_lab.summary import LogObserver, summarize

PROMPTS = ["What is 27 + 58?", "Spell planet.", "What is 4 + 9?", "Count from 3 to 9."] * 2
TIGHT = {
    "num_threads": 1,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "block_size": 4,
    "num_gpu_blocks_override": 24,
    "max_model_len": 64,
    "use_tqdm_on_load": False,
}


@pytest.mark.costly
@pytest.mark.parametrize("scheduler", ["fcfs", "priority", "srpt"])
@pytest.mark.parametrize("ahead", [False, True], ids=["depth 1", "depth 2"])
def test_the_log_of_a_demo_model_run_replays_byte_for_byte(scheduler, ahead, tmp_path):
    path = tmp_path / "run.log"
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    options = {**TIGHT, "scheduler_cls": scheduler, "async_scheduling": ahead}
    with LLM("demo", decision_log=path, **options) as llm:
        outputs = llm.generate(PROMPTS, params)
        with pytest.raises(RequestError):
            llm.generate("one two " * 99, params)
        llm.generate(PROMPTS[:2], params)
    actual = replay_log(LogReader(path), clock=ManualClock())
    assert actual.difference is None and not actual.truncated
    summary = summarize(LogReader(path), LogObserver())
    assert actual.num_steps == summary.num_steps > 24 and actual.num_requests == len(PROMPTS) + 2
    assert summary.num_sampled >= sum(len(output.outputs[0].token_ids) for output in outputs)
    assert summary.num_cached_tokens, "the second round must hit prefixes of the first"
    assert actual.covered_ns > 0
    assert summary.header.limits.max_num_seqs == 3


def test_no_decision_log_is_written_by_default(model_dir, options):
    with LLM(model_dir, **options) as llm:
        assert not isinstance(llm.llm_engine.client.core.scheduler, RecordedScheduler)


def test_a_run_that_cannot_be_recorded_is_rejected_before_loading(model_dir, options, tmp_path):
    path = tmp_path / "run.log"
    with pytest.raises(ConfigError, match=r"decision_log=.*kv_connector='some'"):
        LLM(model_dir, decision_log=path, kv_connector="some", **options)
    with pytest.raises(ConfigError, match="decision_log=5"):
        LLM(model_dir, decision_log=5, **options)
    assert not path.exists()


def test_an_engine_does_not_start_if_its_decision_log_cannot_be_written(
    model_dir, options, tmp_path
):
    with pytest.raises(ConfigError, match=r"decision_log=.*cannot be written"):
        LLM(model_dir, decision_log=tmp_path / "nowhere" / "run.log", **options)
