"""`bench/long_context.py` with fake engines whose responses take a known time."""

import json
import sys
from types import SimpleNamespace
from typing import ClassVar

import long_context
import pytest

NO_PROCESS = 1 << 30


class FakeEngine(long_context.Contender):
    """Takes 2 s for the prompt and a constant time for each further token."""

    def __init__(self, token_s, pid=NO_PROCESS):
        self._token_s, self.prompts, self.is_closed, self.pid = token_s, [], False, pid

    def seconds(self, prompt, num_tokens):
        self.prompts.append(prompt)
        return 2.0 + self._token_s * (num_tokens - 1)

    def close(self):
        self.is_closed = True


class FakeChild:
    """Records the adapter's module and what it is asked."""

    started: ClassVar[list["FakeChild"]] = []

    def __init__(self, python, module):
        self.python, self.module, self.pid = python, module, NO_PROCESS
        FakeChild.started.append(self)

    def ask(self, operation, deadline_s, **arguments):
        self.loaded = arguments
        return {}


@pytest.fixture
def engines(monkeypatch, tmp_path):
    by_name = {"dovetail": FakeEngine(0.010), "llamacpp": FakeEngine(0.025)}
    monkeypatch.setattr(long_context, "contenders_of", lambda requested, model: by_name)
    monkeypatch.setattr(long_context, "settle", lambda pids: None)
    command = ["long_context.py", "--context", "300", "--rounds", "2", "--model", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    return by_name


@pytest.fixture
def checkpoint(tmp_path):
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "tiny-gguf-int8.gguf").touch()
    return model


def test_the_time_of_a_step_excludes_prefill(engines, capsys):
    long_context.main()
    printed = capsys.readouterr().out
    assert "dovetail: 10.00 ms per step" in printed
    assert "llamacpp: 25.00 ms per step" in printed
    assert "context 300, cache auto: 2.50 x llamacpp" in printed


def test_every_engine_gets_the_same_prompt_each_time_and_is_closed(engines):
    long_context.main()
    prompts = [prompt for engine in engines.values() for prompt in engine.prompts]
    assert len(prompts) == 10
    assert len(prompts[0]) == 300
    assert prompts == prompts[:1] * 10
    assert all(engine.is_closed for engine in engines.values())


def test_an_engine_is_measured_while_the_others_are_idle_and_disturbances_are_shown(
    engines, monkeypatch, capsys
):
    engines["dovetail"].pid, engines["llamacpp"].pid = 7, 8
    waited = []
    monkeypatch.setattr(long_context, "settle", waited.append)

    class BusyMachine:
        def __init__(self, idle):
            self._disturbed = idle == [8]

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def seen(self):
            return {"disturbed": self._disturbed}

    monkeypatch.setattr(long_context, "Watch", BusyMachine)
    long_context.main()
    assert waited == [[8], [7]] * 2
    printed = capsys.readouterr().out
    assert "dovetail: 10.00 ms per step (10.0 - 10.0, disturbed in 2 of 2 rounds)" in printed
    assert "llamacpp: 25.00 ms per step (25.0 - 25.0)" in printed


def test_each_engine_keeps_its_cache_in_the_requested_format(checkpoint, monkeypatch):
    monkeypatch.setattr(long_context, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "started", [])
    requested = SimpleNamespace(
        context=8192,
        cache="int8",
        threads=2,
        plain=False,
        llamacpp_python="/llama/python",
        llamacpp_backend="/llama/libggml-cpu-zen4.so",
        openvino_python="/ov/python",
        openvino_model=checkpoint / "ir",
    )
    assert list(long_context.contenders_of(requested, checkpoint)) == [
        "dovetail",
        "llamacpp",
        "openvino",
    ]
    ours, llamacpp, openvino = FakeChild.started
    assert ours.loaded["options"]["kv_cache_dtype"] == "int8"
    assert (llamacpp.python, openvino.python) == ("/llama/python", "/ov/python")
    assert llamacpp.module == "peers.engine_llamacpp"
    assert llamacpp.loaded["model"] == f"{checkpoint}-gguf-int8.gguf"
    assert llamacpp.loaded["options"]["type_k"] == long_context.GGML_Q8_0
    assert llamacpp.loaded["options"]["backend"] == "/llama/libggml-cpu-zen4.so"
    assert openvino.loaded["model"] == str(checkpoint / "ir")
    assert openvino.loaded["options"] == {"KV_CACHE_PRECISION": "u8"}


@pytest.mark.parametrize(
    ("context", "is_raised"), [(4096 - long_context.ROOM, False), (8192, True)]
)
def test_the_maximum_of_positions_is_raised_only_if_the_checkpoint_has_fewer(
    checkpoint, context, is_raised
):
    options = long_context.our_options(checkpoint, context, "auto")
    length = context + long_context.ROOM
    assert options["max_model_len"] == length
    raised = {"max_position_embeddings": length} if is_raised else None
    assert options.get("hf_overrides") == raised


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--openvino-python", "x"], "--openvino-python needs --openvino-model"),
        (["--shape", "x"], "--shape x: choose from .*llama-160m"),
    ],
)
def test_unusable_arguments_are_named(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["long_context.py", *arguments])
    with pytest.raises(SystemExit, match=message):
        long_context.main()
