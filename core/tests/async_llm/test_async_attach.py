"""Several `AsyncLLM` objects attached to one engine have separate requests, ids and limits."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail import AsyncLLM, SamplingParams
from dovetail.errors import CapacityError, ConfigError, EngineDeadError

HERE = Path(__file__).parent
LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=3)
SHORT = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)


async def read(llm, prompt, params=SHORT, request_id=""):
    return [output async for output in llm.generate(prompt, params, request_id)][-1]


def token_ids(output):
    return output.outputs[0].token_ids


@pytest.fixture
def attached(bench, llm):
    other = AsyncLLM.attach(llm.address)
    yield other
    other.shutdown()
    other.shutdown()


def test_two_front_ends_can_use_the_same_request_ids(bench, llm, attached):
    async def both():
        expected = [token_ids(await read(llm, prompt)) for prompt in ("abc", "defg")]
        actual = await asyncio.gather(
            *(read(llm, "abc", request_id=f"r{n}") for n in range(6)),
            *(read(attached, "defg", request_id=f"r{n}") for n in range(6)),
        )
        assert [token_ids(item) for item in actual] == [expected[0]] * 6 + [expected[1]] * 6
        assert {item.request_id for item in actual} == {f"r{n}" for n in range(6)}
        await attached.check_health()

    bench.run(both())
    assert attached.config == llm.config and attached.address == llm.address
    assert attached.tokenizer is not None and attached.max_model_len == llm.max_model_len


def test_max_waiting_applies_to_each_front_end_separately(bench, llm):
    other = AsyncLLM.attach(llm.address, max_waiting=0)
    room = llm.config.scheduler.max_num_seqs

    async def ask():
        with pytest.raises(CapacityError, match=f"at most {room} are allowed"):
            await read(other, "abc", SamplingParams(n=room + 1, max_tokens=1))
        maximum = await read(llm, "abc", SamplingParams(n=room + 1, max_tokens=1))
        assert len(maximum.outputs) == room + 1

    bench.run(ask())
    other.shutdown()


def test_derived_seeds_differ_between_front_ends(bench, llm, attached):
    params = SamplingParams(max_tokens=1, temperature=1.0)
    first = llm._front.inputs.process("a", "abc", params)
    second = attached._front.inputs.process("a", "abc", params)
    assert first[0].seed != second[0].seed


def test_a_front_end_that_shuts_down_ends_only_its_own_requests(bench, llm):
    other = AsyncLLM.attach(llm.address)

    async def both():
        expected = token_ids(await read(llm, "abc", LONG))
        own = llm.generate("abc", LONG)
        reference = other.generate("abc", LONG)
        await anext(own), await anext(reference)
        other.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in reference:
                pass
        last = None
        async for output in own:
            last = output
        assert token_ids(last) == expected
        await llm.check_health()

    bench.run(both())


def test_an_attached_front_end_is_notified_when_the_engine_exits(bench):
    owner = bench.start(worker_config={"step_s": 0.01})
    other = AsyncLLM.attach(owner.address)

    async def serve():
        stream = other.generate("abc", LONG)
        await anext(stream)
        os.kill(owner.client.process_id, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass

    bench.run(serve())
    other.shutdown()


def test_an_invalid_address_or_option_is_rejected(llm):
    with pytest.raises(ConfigError, match="address="):
        AsyncLLM.attach("/nowhere")
    with pytest.raises(ConfigError, match="max_waiting"):
        AsyncLLM.attach(llm.address, max_waiting=-1)


@pytest.mark.costly
def test_the_documented_example_of_two_api_processes_runs(tmp_path):
    """Two API processes share one engine, as docs/processes.md shows."""
    page = (HERE.parents[2] / "docs" / "processes.md").read_text(encoding="utf-8")
    section = page.partition("## Several front ends")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    assert "AsyncLLM.attach" in code
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    process = subprocess.run(
        [sys.executable, str(tmp_path / "example.py")], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("\n") == 2, process.stdout
