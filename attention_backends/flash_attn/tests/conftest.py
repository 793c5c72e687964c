"""Simulated GPUs and installed providers, for tests of rejections."""

from __future__ import annotations

from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch

from dovetail_attn_flash_attn import device_facts
from dovetail_attn_flash_attn.providers import PROVIDERS, fa3, flash_attn, torch_varlen, vllm


@pytest.fixture(autouse=True)
def one_thread():
    """Use one torch thread: the tensors are small, and the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Simulate which providers are installed. Loading them always succeeds."""
    loaded = []

    def pretend(*names, version="2.8.3", libraries=(2, 3), flags=(), has_sinks=True):
        package = tmp_path / f"vllm {len(list(tmp_path.iterdir()))}"
        folder = package / "vllm_flash_attn"
        folder.mkdir(parents=True)
        (folder / "flash_attn_interface.py").touch()
        for number in libraries:
            (folder / f"_vllm_fa{number}_C.abi3.so").touch()
        spec = ModuleSpec("vllm", None, is_package=True)
        spec.submodule_search_locations = [str(package)]
        monkeypatch.setattr(vllm, "find_spec", lambda name: spec if "vllm" in names else None)
        importable = {fa3.NAMESPACE, "flash_attn_config"} if "fa3" in names else set()
        monkeypatch.setattr(fa3, "find_spec", lambda name: name if name in importable else None)
        config = {"build_flags": {f"FLASHATTENTION_DISABLE_{flag}": True for flag in flags}}
        monkeypatch.setattr(fa3, "import_module", lambda name: SimpleNamespace(CONFIG=config))
        monkeypatch.setattr(fa3, "version", distribution("3.0.0", "fa3" in names and has_sinks))
        monkeypatch.setattr(flash_attn, "version", distribution(version, "flash_attn" in names))
        function = object() if "torch" in names else None
        monkeypatch.setattr(torch_varlen, "_function", lambda: function)

    for provider in PROVIDERS:
        name = provider.name
        monkeypatch.setattr(provider, "load", lambda capability, name=name: loaded.append(name))
    pretend()
    pretend.loaded = loaded
    return pretend


def distribution(text, is_installed):
    def version(name):
        if not is_installed:
            raise flash_attn.PackageNotFoundError(name)
        return text

    return version


def write_version(version, pointer):
    """Write `version`, as the driver's `cuDriverGetVersion` does. Return 0 for success."""
    pointer._obj.value = version
    return 0


@pytest.fixture
def gpu(monkeypatch, installed):
    """Simulate a GPU with a given compute capability, and the CUDA version of its driver."""

    def pretend(capability, driver=13000):
        library = SimpleNamespace(cuDriverGetVersion=partial(write_version, driver))
        monkeypatch.setattr(device_facts, "CDLL", lambda name: library)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        pair = divmod(capability, 10)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pair)

    pretend(90)
    return pretend
