"""Ctrl-C during `LLM.generate`: between steps, within a step, and as a real signal."""

import signal

import pytest

from dovetail import LLM, SamplingParams
from dovetail.engine.output.output_processor import OutputProcessor
from dovetail.errors import EngineDeadError
from dovetail.scheduling import Scheduler
from dovetail_devkit.contexts import write_fake_config
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.worker import FakeWorker

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, seed=3)
PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture
def llm(tmp_path):
    with LLM(
        str(write_fake_config(tmp_path)),
        platform=FakePlatform,
        worker_cls=FakeWorker,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
    ) as opened_llm:
        yield opened_llm


@pytest.fixture
def expected(llm):
    return llm.generate([7, 8], GREEDY)[0].outputs[0].token_ids


def interrupted(llm, monkeypatch, target, name):
    """Replace the method `name` of `target` by one that raises KeyboardInterrupt. Generate."""

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(target, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)


def test_an_interrupt_between_steps_aborts_the_requests(llm, expected, monkeypatch):
    interrupted(llm, monkeypatch, OutputProcessor, "process")
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate([7, 8], GREEDY)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("target", "name"),
    [(FakeWorker, "sample_tokens"), (Scheduler, "schedule"), (Scheduler, "update_from_output")],
)
def test_an_interrupt_during_a_step_produces_no_wrong_tokens(llm, monkeypatch, target, name):
    interrupted(llm, monkeypatch, target, name)
    assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="create a new one"):
        llm.generate([7, 8], GREEDY)


def test_ctrl_c_waits_for_the_running_step_and_the_engine_stays_usable(llm, expected, monkeypatch):
    sample = FakeWorker.sample_tokens

    def press(*arguments):
        signal.raise_signal(signal.SIGINT)
        return sample(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(FakeWorker, "sample_tokens", press)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate([7, 8], GREEDY)[0].outputs[0].token_ids == expected
