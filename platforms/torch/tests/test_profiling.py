"""The torch profiler of a worker."""

import gzip
import json

import pytest
import torch

from dovetail import LLM
from dovetail.errors import ConfigError, DovetailError
from dovetail_torch.profiling import PROFILE_VARIABLE, Profiler


@pytest.fixture
def profiles(tmp_path, monkeypatch):
    """A function that returns the events of each profile."""
    folder = tmp_path / "profiles"
    monkeypatch.setenv(PROFILE_VARIABLE, str(folder))

    def read():
        files = sorted(folder.iterdir())
        return [json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] for file in files]

    return read


def test_a_profile_contains_the_operations_between_start_and_stop(profiles):
    profiler = Profiler()
    for _ in range(2):
        profiler.start()
        torch.ones(3) @ torch.ones(3)
        profiler.stop()
    assert len(profiles()) == 2
    for events in profiles():
        assert any(event.get("name") == "aten::dot" for event in events)


def test_a_profile_cannot_be_started_twice_or_stopped_before_it_is_started(profiles):
    profiler = Profiler()
    with pytest.raises(ConfigError, match="No profile is being recorded"):
        profiler.stop()
    profiler.start()
    with pytest.raises(ConfigError, match="already being recorded"):
        profiler.start()
    profiler.stop()


def test_an_engine_records_a_profile_on_request(profiles):
    with LLM("demo", attention_backend="torch") as llm:
        rpc = llm.llm_engine.collective_rpc
        rpc("profile", True)
        llm.generate(["Hello"])
        rpc("profile", False)
        with pytest.raises(DovetailError, match="No profile"):
            rpc("profile", False)
        assert llm.generate(["Hello"])[0].outputs[0].token_ids
    (events,) = profiles()
    assert len(events) > 100


def test_a_profile_directory_of_an_unknown_user_is_rejected(monkeypatch):
    monkeypatch.setenv(PROFILE_VARIABLE, "~no-such-user/x")
    with pytest.raises(ConfigError, match=f"{PROFILE_VARIABLE}=.*home directory .* not known"):
        Profiler().start()
