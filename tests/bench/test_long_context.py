"""`bench/long_context.py` with fake engines whose responses take a known time."""

import sys

import long_context
import pytest


class FakeEngine(long_context.Contender):
    """Takes 2 s for the prompt and a constant time for each further token."""

    def __init__(self, token_s):
        self._token_s, self.prompts, self.is_closed = token_s, [], False

    def seconds(self, prompt, num_tokens):
        self.prompts.append(prompt)
        return 2.0 + self._token_s * (num_tokens - 1)

    def close(self):
        self.is_closed = True


@pytest.fixture
def engines(monkeypatch, tmp_path):
    by_name = {"dovetail": FakeEngine(0.010), "llamacpp": FakeEngine(0.025)}
    monkeypatch.setattr(long_context, "contenders_of", lambda requested, model: by_name)
    command = ["long_context.py", "--context", "300", "--rounds", "2", "--model", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    return by_name


def test_the_time_of_a_step_excludes_prefill(engines, capsys):
    long_context.main()
    printed = capsys.readouterr().out
    assert "dovetail: 10.00 ms per step" in printed
    assert "llamacpp: 25.00 ms per step" in printed
    assert "context 300, cache auto: 2.50 x llama.cpp" in printed


def test_every_engine_gets_the_same_prompt_each_time_and_is_closed(engines):
    long_context.main()
    prompts = [prompt for engine in engines.values() for prompt in engine.prompts]
    assert len(prompts) == 10
    assert len(prompts[0]) == 300
    assert prompts == prompts[:1] * 10
    assert all(engine.is_closed for engine in engines.values())
