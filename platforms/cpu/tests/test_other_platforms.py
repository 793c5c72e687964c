"""The CPU worker on an unsupported platform: the error names the worker and the platform."""

import pytest

from dovetail import LLM
from dovetail.errors import PluginError
from dovetail.interfaces import PlatformInfo
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.tiny_model import write_tiny_llama


def platform(device_type, runtime=None):
    info = PlatformInfo(name="npu", device_type=device_type)
    return type("NPU", (FakePlatform,), {"info": info, "runtime": lambda self: runtime})


@pytest.mark.parametrize(
    ("platform_cls", "report"),
    [
        (platform("npu"), "worker 'cpu' was requested on the platform 'npu', .* it supports cpu"),
        (platform("cpu"), r"CPUWorker cannot run on the platform 'npu': its runtime\(\) returned"),
        (platform("cpu", 5), r"platform 'npu': its runtime\(\) returned 5"),
    ],
)
def test_the_error_for_a_worker_of_another_platform_names_the_worker_and_the_platform(
    platform_cls, report, tmp_path
):
    options = {**SMALL_ENGINE, "worker_cls": "cpu", "skip_tokenizer_init": True}
    options["scheduler_cls"] = "dovetail.scheduling:Scheduler"
    with pytest.raises(PluginError, match=report):
        LLM(write_tiny_llama(tmp_path), platform=platform_cls, **options)
