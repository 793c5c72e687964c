"""Helpers for tests that run device workers on the fake device."""

from pathlib import Path

from dovetail import LLM, SamplingParams
from dovetail.interfaces import PlatformInfo
from dovetail_devkit.contexts import make_worker_context
from dovetail_devkit.suites.worker import check_worker
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_torch.fake_device import NAME
from dovetail_torch.fake_device.attention import NoWaitAttentionBackend
from dovetail_torch.fake_device.runtime import FakeDeviceRuntime
from dovetail_torch.fake_device.worker import StrictSteps

PARTS = {"attention_backend": NoWaitAttentionBackend, "ops": "torch"}


def on_fake_device(platform_cls, machine):
    """Return the platform of a fictitious machine with fake devices."""

    class OnFakeDevice(platform_cls):
        info = PlatformInfo(name=platform_cls.info.name, device_type=NAME)
        look = staticmethod(lambda: machine)

        def runtime(self):
            return FakeDeviceRuntime()

    return OnFakeDevice


def watched(worker_cls):
    """Return a subclass of the worker that asserts that steps do not wait for the device."""
    return type("WatchedWorker", (StrictSteps, worker_cls), {})


def keeps_its_contract(platform_cls, worker_cls, folder: Path) -> None:
    context = make_worker_context(write_tiny_llama(folder), platform_cls(), **PARTS)
    check_worker(watched(worker_cls), context)


def answers(platform_cls, worker_cls, folder: Path) -> None:
    llm = LLM(
        str(write_tiny_llama(folder)),
        platform=platform_cls,
        worker_cls=watched(worker_cls),
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
