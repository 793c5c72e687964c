"""The XPU worker's whole life on the fake device: all of it but the device itself."""

import pytest

from dovetail import LLM, SamplingParams
from dovetail.interfaces import PlatformInfo
from dovetail.testing.contexts import make_worker_context
from dovetail.testing.tiny_model import write_tiny_llama
from dovetail.testing.worker import check_worker
from dovetail_torch.fake_device import DEVICE, NAME, install
from dovetail_torch.fake_device.attention import NoWaitAttentionBackend
from dovetail_torch.fake_device.runtime import FakeDeviceRuntime
from dovetail_torch.fake_device.worker import StrictSteps
from dovetail_xpu.platform import Machine, XPUPlatform
from dovetail_xpu.worker import XPUWorker

pytest.importorskip("dovetail_models")
MACHINE = Machine(torch_version="2.11", toolkit="2025", has_loader=True, num_nodes=1)


class OnFakeDevice(XPUPlatform):
    """The platform of a machine that is made up, whose devices are fake ones."""

    info = PlatformInfo(name="xpu", device_type=NAME)
    look = staticmethod(lambda: MACHINE)

    def total_memory_bytes(self, local_rank=0):
        return DEVICE.memory.total_bytes

    def runtime(self):
        return FakeDeviceRuntime()


class WatchedWorker(StrictSteps, XPUWorker):
    pass


@pytest.fixture(autouse=True)
def device():
    install()
    DEVICE.reset(lag=25, seed=11)
    yield
    DEVICE.check()


PARTS = {"attention_backend": NoWaitAttentionBackend, "ops": "torch"}


def test_the_worker_keeps_its_contract(tmp_path):
    context = make_worker_context(write_tiny_llama(tmp_path), OnFakeDevice(), **PARTS)
    check_worker(WatchedWorker, context)


def test_an_engine_answers(tmp_path):
    llm = LLM(
        str(write_tiny_llama(tmp_path)),
        platform=OnFakeDevice,
        worker_cls=WatchedWorker,
        skip_tokenizer_init=True,
        max_model_len=64,
        num_gpu_blocks_override=16,
        async_scheduling=True,
        **PARTS,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([[5, 6, 7], [9]], params, use_tqdm=False)
    llm.shutdown()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]
