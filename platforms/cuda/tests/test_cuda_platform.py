"""The CUDA platform on simulated machines: its capabilities, and reasons why CUDA is unusable."""

import ctypes
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from dovetail.errors import CapacityError, ConfigError, PluginError
from dovetail.plugins import PluginRegistry
from dovetail.plugins.selection import choose_platform
from dovetail_cuda.driver import Card, Driver, read_driver
from dovetail_cuda.machine import VISIBLE, Machine, describe, look, reasons_against
from dovetail_cuda.platform import CUDAPlatform
from dovetail_devkit.contexts import make_config, write_fake_config
from dovetail_devkit.suites.platform import check_platform
from dovetail_torch.accelerator.torch_build import TorchBuild

GIB = 1 << 30
H200 = Card(uuid="GPU-aa1", name="NVIDIA H200", total_bytes=141 * GIB, capability=(9, 0))
T4 = Card(uuid="GPU-ab2", name="Tesla T4", total_bytes=15 * GIB, capability=(7, 5))
P100 = Card(uuid="GPU-c3", name="Tesla P100", total_bytes=16 * GIB, capability=(6, 0))
PARTITION = replace(H200, uuid="MIG-5f", name="NVIDIA H200 MIG 1g.18gb", total_bytes=18 * GIB)
DRIVER = Driver(version="580.159", cuda=(13, 0), cards=(H200,))
MACHINE = Machine(torch_version="2.11.0", toolkit="13.0", driver=DRIVER)


def with_cards(*cards, visible=None):
    return replace(MACHINE, driver=replace(DRIVER, cards=cards), visible=visible)


def platform_on(machine):
    class PlatformOnMachine(CUDAPlatform):
        look = staticmethod(lambda: machine)

    return PlatformOnMachine


def test_the_platform_meets_its_contract_with_and_without_devices():
    check_platform(CUDAPlatform)
    check_platform(platform_on(with_cards(H200, T4)))


REFUSED = {
    "built without": (replace(MACHINE, toolkit=""), r"built without CUDA: install a torch build"),
    "no torch": (replace(MACHINE, torch_version="", toolkit=""), "torch is not installed"),
    "no driver": (
        replace(MACHINE, driver=None, driver_problem="no NVIDIA driver was found"),
        "no NVIDIA driver",
    ),
    "old driver": (
        replace(MACHINE, driver=replace(DRIVER, version="535.104", cuda=(12, 2))),
        r"CUDA 13\.0, but the driver 535\.104 supports only CUDA 12\.2 or older: install a driver",
    ),
    "no card": (with_cards(), "finds no device"),
    "hidden": (with_cards(H200, visible=""), rf"{VISIBLE}='' selects none of the 1 devices"),
    "old card": (with_cards(H200, P100), r"P100 has compute capability 6\.0, .* needs 7\.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_reason_why_cuda_is_unusable_is_reported_with_advice(name):
    machine, expected = REFUSED[name]
    probe = platform_on(machine).probe()
    assert not probe.usable and re.search(expected, " ".join(probe.reasons))


def test_all_reasons_why_cuda_is_unusable_are_reported_together():
    machine = replace(MACHINE, toolkit="", driver=None, driver_problem="no driver")
    assert len(reasons_against(machine)) == 2


def test_the_probe_of_a_usable_machine_describes_its_devices():
    probe = platform_on(MACHINE).probe()
    assert probe.usable
    assert probe.reasons == ("NVIDIA H200, 141.0 GiB, compute capability 9.0, driver 580.159",)
    assert describe(replace(MACHINE, driver=None)) == ()


def test_a_driver_for_an_older_minor_version_of_cuda_is_sufficient():
    for toolkit, cuda in (("12.8", (12, 2)), ("12.8", (13, 0)), ("13.2", (13, 0))):
        machine = replace(MACHINE, toolkit=toolkit, driver=replace(DRIVER, cuda=cuda))
        assert reasons_against(machine) == ()


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA H200", "Tesla T4"]),
        ("1", ["Tesla T4"]),
        ("1, 0", ["Tesla T4", "NVIDIA H200"]),
        ("GPU-ab2", ["Tesla T4"]),
        ("GPU-aa,7,0", ["NVIDIA H200"]),
        ("GPU-a", []),
        ("-1", []),
        ("", []),
        ("MIG-5f", ["NVIDIA H200 MIG 1g.18gb"]),
        ("MIG-77", []),
    ],
)
def test_environment_variables_select_and_order_cards(visible, names):
    machine = with_cards(H200, T4, visible=visible)
    machine = replace(machine, driver=replace(machine.driver, partitions=(PARTITION,)))
    assert [card.name for card in machine.cards] == names


def test_a_card_that_the_driver_cannot_describe_is_rejected_only_if_it_is_visible():
    lost = Card(uuid="", name="device 1", total_bytes=0, capability=(0, 0), problem="error 15")
    (reason,) = reasons_against(with_cards(H200, lost))
    assert reason == f"device 1 cannot be used: error 15; or hide it with {VISIBLE}"
    assert reasons_against(with_cards(H200, lost, visible="0")) == ()


def test_the_card_with_the_lowest_compute_capability_determines_the_capabilities():
    newest = platform_on(MACHINE)().capabilities()
    assert {"dtype.bfloat16", "dtype.fp8_e4m3", "pin_memory", "collectives"} <= newest
    assert "graphs" not in newest
    a100 = replace(H200, capability=(8, 0))
    result = platform_on(with_cards(H200, a100))().capabilities()
    assert "dtype.bfloat16" in result and "dtype.fp8_e4m3" not in result
    assert "dtype.bfloat16" not in platform_on(with_cards(a100, T4))().capabilities()


def test_total_memory_is_reported_for_each_card():
    platform = platform_on(with_cards(H200, T4))()
    assert platform.total_memory_bytes() == 141 * GIB
    assert platform.total_memory_bytes(1) == 15 * GIB
    with pytest.raises(CapacityError, match="Device 2"):
        platform.total_memory_bytes(2)


def test_unsupported_configurations_are_rejected(tmp_path):
    write_fake_config(tmp_path, num_attention_heads=8)
    h200, t4 = platform_on(MACHINE)(), platform_on(with_cards(T4))()
    with pytest.raises(ConfigError, match="bfloat16"):
        make_config(tmp_path, t4, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8_e4m3' needs .* 8\.9.* has 7\.5"):
        make_config(tmp_path, t4, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 exceeds the number of devices"):
        make_config(tmp_path, h200, tensor_parallel_size=2)
    config = make_config(tmp_path, h200, kv_cache_dtype="fp8")
    assert config.cache.gpu_memory_utilization == 0.9 and config.scheduler.async_scheduling
    assert not make_config(tmp_path, h200, async_scheduling=False).scheduler.async_scheduling


def test_cuda_is_preferred_to_the_cpu_if_usable(monkeypatch):
    pytest.importorskip("dovetail_cpu")
    monkeypatch.setattr(CUDAPlatform, "look", staticmethod(lambda: MACHINE))
    assert isinstance(choose_platform(PluginRegistry(), "auto"), CUDAPlatform)
    rejected = replace(MACHINE, toolkit="")
    monkeypatch.setattr(CUDAPlatform, "look", staticmethod(lambda: rejected))
    assert choose_platform(PluginRegistry(), "auto").info.name == "cpu"
    with pytest.raises(PluginError, match="built without CUDA"):
        choose_platform(PluginRegistry(), "cuda")


class FakeLibrary:
    """The management library of a machine with one card. failing: the function that fails."""

    def __init__(self, failing=""):
        self.open, self.failing = 0, failing

    def __getattr__(self, name):
        if name == self.failing:
            return lambda *_: 9
        if name.startswith("do_"):
            raise AttributeError(name)
        return getattr(self, f"do_{name}", lambda *_: 0)

    def do_nvmlInit_v2(self):  # noqa: N802 - the library's name
        self.open += 1
        return 0

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def do_nvmlSystemGetCudaDriverVersion_v2(self, number):  # noqa: N802
        number._obj.value = 12040
        return 0

    def do_nvmlDeviceGetCount_v2(self, number):  # noqa: N802
        number._obj.value = 1
        return 0

    def do_nvmlSystemGetDriverVersion(self, text, size):  # noqa: N802
        text.value = b"550.54"
        return 0

    def do_nvmlDeviceGetMemoryInfo(self, handle, memory):  # noqa: N802
        memory._obj.total = 24 * GIB
        return 0

    def do_nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):  # noqa: N802
        major._obj.value, minor._obj.value = 8, 9
        return 0

    def do_nvmlDeviceGetName(self, handle, text, size):  # noqa: N802
        assert size.value == len(text)
        text.value = b"NVIDIA L4"
        return 0

    def do_nvmlDeviceGetUUID(self, handle, text, size):  # noqa: N802
        text.value = b"GPU-1"
        return 0


def test_the_management_library_is_shut_down_after_its_query():
    library = FakeLibrary()
    card = Card(uuid="GPU-1", name="NVIDIA L4", total_bytes=24 * GIB, capability=(8, 9))
    assert read_driver(library) == Driver(version="550.54", cuda=(12, 4), cards=(card,))
    assert library.open == 0


def test_an_error_of_the_driver_is_reported():
    library = FakeLibrary("nvmlInit_v2")
    read = partial(read_driver, library)
    machine = look(read, lambda _: TorchBuild(version="2", toolkit="13.0"))
    assert "nvmlInit_v2 failed with error 9" in machine.driver_problem


@pytest.mark.parametrize(
    "failing", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetCudaComputeCapability"]
)
def test_an_error_of_one_card_is_reported_with_the_card(failing):
    library = FakeLibrary(failing)
    (card,) = read_driver(library).cards
    assert f"{failing} failed with error 9" in card.problem
    assert library.open == 0


def test_without_a_driver_the_reason_names_the_missing_library(monkeypatch):
    def reject(name):
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", reject)
    with pytest.raises(PluginError, match=r"libnvidia-ml\.so\.1 cannot be loaded.*install one"):
        read_driver()


def test_the_probe_reads_the_torch_build_and_the_environment(monkeypatch):
    monkeypatch.setenv(VISIBLE, "3")
    machine = look(
        lambda partitions: DRIVER, lambda field: TorchBuild(version="2.11", toolkit=field)
    )
    assert machine == replace(MACHINE, torch_version="2.11", toolkit="cuda", visible="3")


def test_probing_does_not_import_torch():
    code = (
        "import sys; from dovetail_cuda.platform import CUDAPlatform; CUDAPlatform.probe(); "
        "print('torch' in sys.modules)"
    )
    environment = SimpleNamespace(**os.environ).__dict__
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=30
    )
    assert done.stdout.strip() == "False", done.stderr
