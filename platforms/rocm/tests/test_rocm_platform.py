"""The ROCm platform on simulated driver files and machines."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dovetail.errors import CapacityError, ConfigError, PluginError
from dovetail_devkit.suites.platform import check_platform
from dovetail_rocm import machine as machine_module
from dovetail_rocm.driver import Card, Driver, architecture_of, read_driver
from dovetail_rocm.machine import Machine, describe, look, reasons_against
from dovetail_rocm.platform import ROCmPlatform
from dovetail_rocm.runtime import ROCmRuntime, has_code
from dovetail_torch.accelerator.runtime import AcceleratorRuntime
from dovetail_torch.accelerator.torch_build import TorchBuild

GIB = 1 << 30
FIRST = Card(uuid="GPU-00000000deadbeef", architecture="gfx942", total_bytes=192 * GIB)
SECOND = Card(uuid="GPU-0000000000000002", architecture="gfx90a", total_bytes=64 * GIB)
MACHINE = Machine(
    torch_version="2.11",
    toolkit="7.0.51831",
    driver=Driver(version="6.14", cards=(FIRST, SECOND)),
)


def write_node(root, number, *, banks=(), **properties):
    folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    folder.mkdir(parents=True)
    lines = {"mem_banks_count": len(banks)} | properties
    (folder / "properties").write_text("".join(f"{k} {v}\n" for k, v in lines.items()))
    for index, (heap, size) in enumerate(banks):
        bank = folder / f"mem_banks/{index}"
        bank.mkdir(parents=True)
        (bank / "properties").write_text(f"heap_type {heap}\nsize_in_bytes {size}\nflags 0\n")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/version").write_text("6.14\n")
    write_node(tmp_path, 0, cpu_cores_count=64, simd_count=0, banks=[(0, 512 * GIB)])
    write_node(
        tmp_path,
        10,
        simd_count=440,
        gfx_target_version=90010,
        unique_id=2,
        banks=[(2, 64 * GIB)],
    )
    write_node(
        tmp_path,
        9,
        simd_count=1216,
        gfx_target_version=90402,
        unique_id=0xDEADBEEF,
        banks=[(1, 191 * GIB), (2, GIB), (0, 7)],
    )
    return tmp_path


def platform_on(machine):
    class Here(ROCmPlatform):
        look = staticmethod(lambda: machine)

    return Here


def test_the_driver_reports_devices_in_the_order_of_their_nodes(root):
    assert read_driver(root) == MACHINE.driver


@pytest.mark.parametrize(
    ("version", "name"),
    [(90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100"), (120001, "gfx1201"), (0, "gfx000")],
)
def test_the_architecture_is_derived_from_the_target_version_of_the_driver(version, name):
    assert architecture_of(version) == name


def test_unreadable_or_malformed_files_hide_only_their_device(root):
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "9/properties").write_bytes(b"\xff\xfe simd\nsimd_count many\ngfx_target_version")
    (nodes / "notes").mkdir()
    (nodes / "11").mkdir()
    assert read_driver(root).cards == (SECOND,)
    (nodes / "10/mem_banks/0/properties").unlink()
    assert read_driver(root).cards == (replace(SECOND, total_bytes=0),)


def test_a_missing_driver_and_missing_permissions_are_reported(root):
    (root / "dev/kfd").chmod(0)
    if os.geteuid():
        with pytest.raises(PluginError, match="groups `render` and `video`"):
            read_driver(root)
    (root / "dev/kfd").unlink()
    with pytest.raises(PluginError, match=r"no AMD driver was found.*amdgpu.*--device /dev/kfd"):
        read_driver(root)


def test_the_platform_meets_its_contract_with_and_without_a_device():
    check_platform(ROCmPlatform)
    check_platform(platform_on(MACHINE))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"torch_version": "", "toolkit": ""}, "torch is not installed"),
        ({"toolkit": ""}, "built without ROCm: install a torch build for ROCm"),
        ({"driver": None, "driver_problem": "no driver; install it"}, "no driver; install it"),
        (
            {"driver": Driver(version="", cards=())},
            "finds no device: check the output of `rocminfo`",
        ),
        ({"inner": "7"}, "HIP_VISIBLE_DEVICES='7' select none of the 2 devices"),
        ({"outer": ""}, "ROCR_VISIBLE_DEVICES='' and"),
    ],
)
def test_each_reason_why_a_device_is_unusable_is_reported(change, expected):
    probe = platform_on(replace(MACHINE, **change)).probe()
    assert not probe.usable and len(probe.reasons) == 1 and expected in probe.reasons[0]


@pytest.mark.parametrize(
    ("outer", "inner", "cards"),
    [
        (None, None, (FIRST, SECOND)),
        ("1", None, (SECOND,)),
        ("1,0", "1", (FIRST,)),
        ("GPU-00000000DEADBEEF", None, (FIRST,)),
        ("0,gpu-9,1", None, (FIRST,)),
        (None, "1,-1,0", (SECOND,)),
        (None, "²", ()),
    ],
)
def test_only_visible_devices_are_used(outer, inner, cards):
    assert replace(MACHINE, outer=outer, inner=inner).cards == cards


def test_the_probe_reads_the_driver_the_torch_build_and_the_environment(monkeypatch):
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    build = TorchBuild(version="2.11", toolkit="7.0.51831")
    assert look(lambda: MACHINE.driver, lambda field: build if field == "hip" else None) == MACHINE
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert look(lambda: MACHINE.driver, lambda field: build).inner == "0"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert look(lambda: MACHINE.driver, lambda field: build).inner == "1"

    def fail():
        raise PluginError("why")

    assert look(fail, lambda field: build).driver_problem == "why"


def test_usable_devices_are_described():
    assert describe(MACHINE)[0] == "gfx942, 192.0 GiB, driver 6.14"
    assert reasons_against(MACHINE) == ()
    plain = replace(MACHINE, driver=Driver(version="", cards=(SECOND,)))
    assert describe(plain) == ("gfx90a, 64.0 GiB, the kernel's driver",)


@pytest.mark.parametrize(("name", "has"), [("gfx942", True), ("gfx1100", True), ("gfx906", False)])
def test_bfloat16_needs_matrix_units_on_every_device(name, has):
    driver = Driver(version="", cards=(FIRST, replace(SECOND, architecture=name)))
    platform = platform_on(replace(MACHINE, driver=driver))()
    assert ("dtype.bfloat16" in platform.capabilities()) == has
    assert not any(item.startswith("dtype.fp8") for item in platform.capabilities())


def test_unsupported_configurations_are_rejected():
    def config(ranks, dtype):
        return SimpleNamespace(
            parallel=SimpleNamespace(tensor_parallel_size=ranks),
            cache=SimpleNamespace(kv_cache_dtype=dtype),
        )

    platform = platform_on(MACHINE)()
    assert platform.problems(config(2, "bfloat16")) == []
    ranks, cache = platform.problems(config(3, "fp8_e4m3"))
    assert "exceeds the number of devices (2)" in ranks and "not supported on ROCm" in cache
    assert platform.total_memory_bytes(1) == 64 * GIB
    with pytest.raises(CapacityError, match="Device 2 was requested"):
        platform.total_memory_bytes(2)


@pytest.mark.parametrize("name", ["sm_90", "gfx", "gfx94", "gfx942 ", "GFX942", "gfx94z", "9" * 99])
def test_unknown_architectures_are_rejected(name):
    with pytest.raises(ConfigError, match="specify the name of an AMD target, such as gfx942"):
        ROCmPlatform.assume(name)


def test_an_assumed_device_needs_no_driver(monkeypatch):
    monkeypatch.setattr(machine_module, "read_driver", None)
    platform = ROCmPlatform.assume("gfx942")
    assert platform.assumed == "gfx942" and "dtype.bfloat16" in platform.capabilities()


def test_code_with_features_runs_on_devices_with_these_features():
    device = "gfx942:sramecc+:xnack-"
    assert has_code(["gfx90a", "gfx942"], device)
    assert has_code(["gfx942:xnack-"], device) and not has_code(["gfx942:xnack+"], device)
    assert not has_code(["sm_90", "gfx940"], device) and not has_code([], device)


def test_a_device_for_which_torch_has_no_code_is_rejected(monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setattr(AcceleratorRuntime, "activate", lambda *_, **__: device)
    properties = SimpleNamespace(gcnArchName="gfx1030")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A card")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx942"])
    with pytest.raises(PluginError, match=r"A card is of architecture gfx1030.* gfx942 only"):
        ROCmRuntime().activate(0, num_threads=None)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx1030"])
    assert ROCmRuntime().activate(0, num_threads=None) == device
