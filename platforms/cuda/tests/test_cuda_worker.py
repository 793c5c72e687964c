"""The whole life cycle of the CUDA worker on the fake device."""

import pytest

from dovetail_cuda.driver import Card, Driver
from dovetail_cuda.machine import Machine
from dovetail_cuda.platform import CUDAPlatform
from dovetail_cuda.worker import CUDAWorker
from dovetail_devkit.harnesses.fake_device_life import answers, keeps_its_contract, on_fake_device
from dovetail_torch.fake_device import DEVICE, install

pytest.importorskip("dovetail_models")
CARD = Card(uuid="GPU-1", name="a card", total_bytes=1 << 30, capability=(9, 0))
DRIVER = Driver(version="580", cuda=(13, 0), cards=(CARD,))
MACHINE = Machine(torch_version="2.11", toolkit="13.0", driver=DRIVER)
PLATFORM = on_fake_device(CUDAPlatform, MACHINE)


@pytest.fixture(autouse=True)
def device():
    install()
    DEVICE.reset(lag=25, seed=11)
    yield
    DEVICE.check()


def test_the_worker_meets_its_contract(tmp_path):
    keeps_its_contract(PLATFORM, CUDAWorker, tmp_path)


def test_an_engine_generates_tokens(tmp_path):
    answers(PLATFORM, CUDAWorker, tmp_path)
