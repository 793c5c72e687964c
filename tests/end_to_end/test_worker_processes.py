"""Worker processes give the same results and errors as a worker in this process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, EngineDeadError, WeightError
from dovetail_devkit.harnesses.process_tree import children_of, open_files_of, tcp_listeners_of

PROMPTS = [[5, 6, 7, 8, 9, 10], [50], [30, 31, 32] * 5]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.9, seed=3, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=7, temperature=0.9, seed=4, prompt_logprobs=2, ignore_eos=True),
]
NOTICE_S = 10.0

OWN_PARTS = """
from dovetail_torch.worker import TorchWorker

class OwnWorker(TorchWorker):
    num_steps = 0

    def execute_model(self, plan):
        OwnWorker.num_steps += 1
        super().execute_model(plan)

class Counts:
    def count(self):
        return self.num_steps

def twice(worker, more):
    return 2 * worker.num_steps + more
"""


def answers(llm):
    outputs = llm.generate(PROMPTS, PARAMS)
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
        for output in outputs
    ]


@pytest.fixture(scope="module")
def expected(llm):
    return answers(llm)


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "changes",
    [{}, {"async_scheduling": True}, {"async_scheduling": True, "engine_process": True}],
    ids=["one step", "two steps", "two steps, from a process"],
)
def test_worker_processes_return_the_same_tokens_and_logprobs(
    model_dir, options, expected, changes
):
    with LLM(model_dir, executor_backend="multiproc", **options, **changes) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected  # with a warm prefix cache
        assert llm.reset_prefix_cache()


def listeners_of(pid):
    """Return the addresses at which a process listens: TCP over IPv4 and IPv6, and unix sockets."""
    actual = sorted(tcp_listeners_of(pid))
    sockets = set(open_files_of(pid))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        columns = line.split()
        if int(columns[3], 16) & 0x10000 and f"socket:[{columns[6]}]" in sockets:
            actual.append(columns[-1])
    return actual


@pytest.mark.costly
def test_worker_processes_open_no_port_and_the_error_names_a_worker_that_is_killed(
    model_dir, options
):
    """One engine with two ranks for both checks, because its start is slow."""
    before = children_of(os.getpid())
    options = options | {"executor_backend": "mp", "tensor_parallel_size": 2}
    with LLM(model_dir, **options) as llm:
        assert answers(llm)
        workers = sorted(children_of(os.getpid()) - before)
        assert len(workers) == 2
        assert [listeners_of(pid) for pid in (os.getpid(), *workers)] == [[], [], []]
        os.kill(workers[1], signal.SIGKILL)
        message = rf"worker 1 \(process {workers[1]}\) ended by SIGKILL"
        end_s = time.monotonic() + NOTICE_S
        with pytest.raises(EngineDeadError, match=message):
            while time.monotonic() < end_s:
                llm.llm_engine.step()
                time.sleep(0.01)
        with pytest.raises(EngineDeadError, match=message):
            llm.generate(PROMPTS, PARAMS)


@pytest.mark.costly
@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_engine_stops_with_an_error_if_a_worker_is_killed(model_dir, options, num_workers):
    """Rank 1 is killed while rank 0 waits for it in an all-reduce."""
    before = children_of(os.getpid())
    options = options | {"executor_backend": "mp", "tensor_parallel_size": num_workers}
    with LLM(model_dir, async_scheduling=True, **options) as llm:
        pid = max(children_of(os.getpid()) - before)
        killed = []

        def kill():
            killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(0.2, kill)
        timer.start()
        endless = SamplingParams(max_tokens=240, temperature=0, ignore_eos=True)
        message = rf"worker {num_workers - 1} \(process {pid}\) ended by SIGKILL"
        with pytest.raises(EngineDeadError, match=message) as died:
            while True:
                llm.generate(PROMPTS, endless)
        assert time.monotonic() - killed[0] < NOTICE_S
        # The digest contains counts and positions, but no tokens.
        counts, *rows = died.value.digest.splitlines()
        pattern = (
            r"step \d+: \d+ scheduled requests with \d+ tokens, "
            r"\d+ new requests, \d+ released batch slots"
        )
        assert re.fullmatch(pattern, counts)
        assert all(re.fullmatch(r"  row \d+: positions \d+\.\.\d+", row) for row in rows)
        timer.join()
    assert children_of(os.getpid()) == before


@pytest.mark.costly
def test_a_user_defined_worker_runs_in_processes_with_its_extension(
    model_dir, options, expected, tmp_path, monkeypatch
):
    (tmp_path / "own_parts.py").write_text(OWN_PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"worker_cls": "own_parts:OwnWorker", "worker_extension_cls": "own_parts.Counts"}
    with LLM(model_dir, executor_backend="multiproc", **own, **options) as llm:
        assert answers(llm) == expected
        call = llm.llm_engine.collective_rpc
        (count,) = call("count")
        assert count == 12 and call("own_parts:twice", 1) == [25]
    from own_parts import OwnWorker

    assert OwnWorker.num_steps == 0  # the worker does not run in this process


@pytest.mark.costly
def test_the_error_for_truncated_weights_names_the_worker(model_dir, options, tmp_path):
    folder = shutil.copytree(model_dir, tmp_path / "torn")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(WeightError, match=r"worker 0 .* in load_model: .*model\.safetensors"):
        LLM(folder, executor_backend="multiproc", **options)


def test_an_executor_for_one_worker_rejects_two_workers(model_dir, options):
    with pytest.raises(ConfigError, match=r"2: the executor .* supports at most 1 worker"):
        LLM(model_dir, executor_backend="uniproc", tensor_parallel_size=2, **options)
