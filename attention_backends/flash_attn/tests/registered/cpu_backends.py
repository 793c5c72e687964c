"""The backend with one provider, on a CPU that simulates a GPU.

The environment variable PROVIDER names the provider of this process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import fake_providers
import torch

from dovetail.interfaces.attention import AttentionCapabilities
from dovetail_attn_flash_attn.backend import (
    BLOCK_SIZE_MULTIPLE,
    COMMON_FEATURES,
    FlashAttentionBackend,
)
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

    def driver(self):
        return 0

    def is_rocm(self, architecture=""):
        return False


def capabilities_on(capability: int) -> AttentionCapabilities:
    """Return what the provider supports on a GPU of this compute capability · 10."""
    support = PROVIDER.support(capability)
    return AttentionCapabilities(
        dtypes=support.dtypes,
        device_types=frozenset({"cpu"}),
        kv_cache_dtypes=support.dtypes | support.kv_cache_dtypes,
        head_sizes=support.head_sizes,
        block_size_multiple=max(support.block_size_multiple, BLOCK_SIZE_MULTIPLE),
        features=support.features | COMMON_FEATURES,
    )


class OnCpu(FlashAttentionBackend):
    """The backend on a GPU of compute capability 9.0, with one provider."""

    providers: ClassVar[Sequence[Provider]] = (PROVIDER,)
    devices: ClassVar[DeviceFacts] = SimulatedGpu(90)
    capabilities: ClassVar[AttentionCapabilities] = capabilities_on(90)


class OnAmpere(OnCpu):
    """The backend on a GPU of compute capability 8.0."""

    devices = SimulatedGpu(80)
    capabilities = capabilities_on(80)


BACKENDS = (OnCpu, OnAmpere) if NAME == "vllm" else (OnCpu,)
IS_FA3 = NAME in ("vllm", "fa3")
BLOCK_SIZE = OnCpu.capabilities.block_size_multiple
HAS_LARGE_BLOCKS = BLOCK_SIZE >= 256
"""Cases with large blocks are slow, so `make test` runs fewer of them."""
