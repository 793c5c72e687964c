"""Random plans on the fake device have the same results, no hidden wait and no fault."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from dovetail_devkit.harnesses.runner_harness import Model
from dovetail_devkit.harnesses.runner_programs import NUM_BLOCKS, Program, play
from dovetail_torch.fake_device import DEVICE, NAME, FlightError, HiddenWaitError, install
from dovetail_torch.fake_device.attention import NoWaitAttentionBackend
from dovetail_torch.fake_device.runtime import FakeDeviceRuntime
from dovetail_torch.runner.device_parts import DeviceParts
from dovetail_torch.runner.late_output import FetchRing
from dovetail_torch.runner.staging import Staging


@pytest.fixture
def watched():
    install()
    DEVICE.reset()
    runtime = FakeDeviceRuntime()
    runtime.activate(0, num_threads=None)
    yield DeviceParts(asynchronous=runtime.asynchronous())
    with suppress(FlightError):  # raised after tests with faults
        DEVICE.reset()
    DEVICE.reset()


class OnDevice(Model):
    """A version of the test model that does not copy numbers from the fake device to the host."""

    def __init__(self):
        super().__init__()
        self.embedding_VD = self.embedding_VD.to(NAME)
        self.head_DV = self.head_DV.to(NAME)

    def forward(self, input_ids_T, positions_T, attention):
        x_T1D = self.embedding_VD.index_select(0, input_ids_T).unsqueeze(1)
        return self.attention(x_T1D, x_T1D, x_T1D, attention)


class Strict:
    """A runner whose steps must not wait."""

    def __init__(self, runner):
        self.runner = runner

    def execute_model(self, plan):
        with DEVICE.strict():
            self.runner.execute_model(plan)

    def sample_tokens(self, grammar=None):
        with DEVICE.strict():
            return self.runner.sample_tokens(grammar)


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("seed", "depth", "lag"), [(0, 1, None), (1, 2, 30), (2, 5, None)])
def test_random_plans_give_the_same_results_and_the_host_never_waits(
    runner_of, watched, seed, depth, lag
):
    program = Program(seed, 30)
    backend = NoWaitAttentionBackend
    expected = play(runner_of(Model(), backend, num_blocks=NUM_BLOCKS), program)
    DEVICE.reset(lag=lag, seed=seed)
    runner = runner_of(OnDevice(), backend, watched, NUM_BLOCKS, NAME)
    assert play(Strict(runner), program, depth) == expected
    DEVICE.check()


def watched_play(runner_of, watched):
    runner = runner_of(OnDevice(), NoWaitAttentionBackend, watched, NUM_BLOCKS, NAME)
    play(Strict(runner), Program(3, 12), depth=3)
    DEVICE.check()


def test_staging_rings_with_few_slots_are_sufficient(runner_of, watched, monkeypatch):
    monkeypatch.setitem(Staging.__init__.__kwdefaults__, "slot_bytes", 256)
    monkeypatch.setitem(Staging.__init__.__kwdefaults__, "num_slots", 2)
    monkeypatch.setitem(FetchRing.__init__.__kwdefaults__, "num_slots", 1)
    watched_play(runner_of, watched)


def test_a_copy_to_the_device_that_reuses_a_slot_too_early_is_detected(
    runner_of, watched, monkeypatch
):
    monkeypatch.setitem(Staging.__init__.__kwdefaults__, "slot_bytes", 256)
    monkeypatch.setitem(Staging.__init__.__kwdefaults__, "num_slots", 2)
    past = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(type(watched.asynchronous), "record", lambda self: past)
    with pytest.raises(FlightError):
        watched_play(runner_of, watched)


def test_a_copy_to_the_host_that_reuses_a_slot_too_early_is_detected(
    runner_of, watched, monkeypatch
):
    monkeypatch.setitem(FetchRing.__init__.__kwdefaults__, "num_slots", 1)
    real = FetchRing.fetch

    def fetch(self, sources, finish):
        self._owners[0] = None
        return real(self, sources, finish)

    monkeypatch.setattr(FetchRing, "fetch", fetch)
    with pytest.raises(FlightError):
        watched_play(runner_of, watched)


def test_a_hidden_wait_is_detected(runner_of, watched, monkeypatch):
    monkeypatch.setattr(OnDevice, "compute_logits", lambda self, x: x * float(x.sum()))
    runner = runner_of(OnDevice(), NoWaitAttentionBackend, watched, NUM_BLOCKS, NAME)
    with pytest.raises(HiddenWaitError, match="test_watched_programs"):
        play(Strict(runner), Program(0, 5))
