"""The whole life cycle of the XPU worker on the fake device."""

import pytest

from dovetail_devkit.harnesses.fake_device_life import answers, keeps_its_contract, on_fake_device
from dovetail_torch.fake_device import DEVICE, install
from dovetail_xpu.platform import Machine, XPUPlatform
from dovetail_xpu.worker import XPUWorker

pytest.importorskip("dovetail_models")
MACHINE = Machine(torch_version="2.11", toolkit="2025", has_loader=True, num_nodes=1)


class Platform(on_fake_device(XPUPlatform, MACHINE)):
    def total_memory_bytes(self, local_rank=0):
        return DEVICE.memory.total_bytes


@pytest.fixture(autouse=True)
def device():
    install()
    DEVICE.reset(lag=25, seed=11)
    yield
    DEVICE.check()


def test_the_worker_meets_its_contract(tmp_path):
    keeps_its_contract(Platform, XPUWorker, tmp_path)


def test_an_engine_generates_tokens(tmp_path):
    answers(Platform, XPUWorker, tmp_path)
