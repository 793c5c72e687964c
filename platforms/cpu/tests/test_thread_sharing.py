"""Two engines of one process share their threads: different numbers are reported."""

import gc
import os

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail_cpu import runtime
from dovetail_cpu.runtime import CPURuntime
from dovetail_cpu.threads import sharing
from dovetail_devkit.tiny_model import write_tiny_llama


@pytest.fixture(autouse=True)
def no_threads(monkeypatch):
    """Keep the threads of this process, which other tests use."""
    monkeypatch.setattr(runtime, "find_library", lambda: None)
    monkeypatch.setattr(runtime, "start_threads", lambda num_threads: None)


@pytest.fixture
def activate(caplog):
    """Return a function that activates a runtime and returns it with the warnings."""
    runtimes = []

    def make(num_threads):
        caplog.clear()
        runtimes.append(CPURuntime())
        runtimes[-1].activate(0, num_threads=num_threads)
        return runtimes[-1], [record.getMessage() for record in caplog.records]

    yield make
    for each in runtimes:
        each.release()


def test_a_second_engine_with_another_number_of_threads_is_reported(activate):
    first, warnings = activate(3)
    assert warnings == []
    _, warnings = activate(3)
    assert warnings == []
    _, (warning,) = activate(1)
    assert "num_threads=1 of this engine replaces num_threads=3" in warning
    first.release()


def test_an_engine_that_was_shut_down_has_no_threads(activate):
    first, _ = activate(3)
    first.release()
    assert activate(1)[1] == []


def test_a_runtime_without_references_has_no_threads(caplog):
    CPURuntime().activate(0, num_threads=3)
    second = CPURuntime()
    second.activate(0, num_threads=1)
    second.release()
    assert not caplog.records


def test_a_deleted_runtime_with_a_reference_cycle_has_no_threads(activate):
    gc.disable()
    try:
        deleted = CPURuntime()
        deleted.activate(0, num_threads=3)
        deleted.cycle = deleted
        del deleted
        assert activate(1)[1] == []
    finally:
        gc.enable()


def test_a_forked_child_has_no_threads_of_its_parents_engines(activate):
    first, _ = activate(3)
    if not (pid := os.fork()):
        os._exit(len(sharing._numbers))
    assert os.waitpid(pid, 0) == (pid, 0)
    assert list(sharing._numbers.values()) == [3]
    first.release()


def test_a_finalizer_may_shut_an_engine_down_while_another_one_starts(activate, monkeypatch):
    first, _ = activate(3)

    class Collecting(dict):
        """Runs the finalizer when the numbers of threads are read."""

        def copy(self):
            numbers = super().copy()
            first.release()
            return numbers

    monkeypatch.setattr(sharing, "_numbers", Collecting(sharing._numbers))
    assert activate(1)[1] == []


def test_shutting_an_engine_down_releases_its_threads(tmp_path, activate):
    options = {"skip_tokenizer_init": True, "linear_method": "torch", "num_gpu_blocks_override": 8}
    before = torch.get_num_threads()
    with LLM(str(write_tiny_llama(tmp_path)), num_threads=1, **options) as llm:
        llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(max_tokens=1), use_tqdm=False)
        other, (warning,) = activate(3)
        assert "num_threads=3 of this engine replaces num_threads=1" in warning
        other.release()
    assert activate(4)[1] == [] and torch.get_num_threads() == before
