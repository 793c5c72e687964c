"""The backend with one provider, on a CPU that simulates a GPU.

The environment variable PROVIDER names the provider of this process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import fake_providers
import torch

from dovetail.interfaces.attention import AttentionCapabilities
from dovetail_attn_flash_attn.backend import FlashAttentionBackend, capabilities_of
from dovetail_attn_flash_attn.device_facts import DeviceFacts
from dovetail_attn_flash_attn.providers import PROVIDERS
from dovetail_attn_flash_attn.providers.provider import Provider

CPU = torch.device("cpu")
NAME = os.environ["PROVIDER"]

_folder = tempfile.TemporaryDirectory()
fake_providers.INSTALLERS[NAME](Path(_folder.name))
(PROVIDER,) = (provider for provider in PROVIDERS if provider.name == NAME)


class SimulatedGpu(DeviceFacts):
    """A CPU with the compute capability of a GPU."""

    device_type = "cpu"

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def capability(self, device):
        return self._capability

    def required_capability(self, requirements):
        return self._capability

    def is_rocm(self, architecture=""):
        return False


class OnCpu(FlashAttentionBackend):
    """The backend on a GPU of compute capability 9.0, with one provider."""

    providers: ClassVar[Sequence[Provider]] = (PROVIDER,)
    devices: ClassVar[DeviceFacts] = SimulatedGpu(90)
    capabilities: ClassVar[AttentionCapabilities] = replace(
        capabilities_of(PROVIDER.support(90)), device_types=frozenset({"cpu"})
    )


class OnAmpere(OnCpu):
    """The backend on a GPU of compute capability 8.0."""

    devices = SimulatedGpu(80)
    capabilities = replace(capabilities_of(PROVIDER.support(80)), device_types=frozenset({"cpu"}))


BACKENDS = (OnCpu, OnAmpere) if NAME == "vllm" else (OnCpu,)
IS_FA3 = NAME in ("vllm", "fa3")
BLOCK_SIZE = OnCpu.capabilities.block_size_multiple
