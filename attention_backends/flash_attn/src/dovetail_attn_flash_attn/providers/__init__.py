"""The providers, in the order in which they are tried."""

from __future__ import annotations

from dovetail_attn_flash_attn.providers.fa3 import Fa3Provider
from dovetail_attn_flash_attn.providers.flash_attn import FlashAttnProvider
from dovetail_attn_flash_attn.providers.provider import Provider
from dovetail_attn_flash_attn.providers.torch_varlen import TorchProvider
from dovetail_attn_flash_attn.providers.vllm import VllmProvider

PROVIDERS: tuple[Provider, ...] = (
    VllmProvider(),
    Fa3Provider(),
    FlashAttnProvider(),
    TorchProvider(),
)
