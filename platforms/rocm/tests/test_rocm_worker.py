"""The whole life cycle of the ROCm worker on the fake device."""

import pytest

from dovetail_devkit.harnesses.fake_device_life import answers, keeps_its_contract, on_fake_device
from dovetail_rocm.driver import Card, Driver
from dovetail_rocm.machine import Machine
from dovetail_rocm.platform import ROCmPlatform
from dovetail_rocm.worker import ROCmWorker
from dovetail_torch.fake_device import DEVICE, install

pytest.importorskip("dovetail_models")
CARD = Card(uuid="GPU-1", architecture="gfx942", total_bytes=1 << 30)
MACHINE = Machine(torch_version="2.11", toolkit="7.0", driver=Driver(version="", cards=(CARD,)))
PLATFORM = on_fake_device(ROCmPlatform, MACHINE)


@pytest.fixture(autouse=True)
def device():
    install()
    DEVICE.reset(lag=25, seed=11)
    yield
    DEVICE.check()


def test_the_worker_meets_its_contract(tmp_path):
    keeps_its_contract(PLATFORM, ROCmWorker, tmp_path)


def test_an_engine_generates_tokens(tmp_path):
    answers(PLATFORM, ROCmWorker, tmp_path)
