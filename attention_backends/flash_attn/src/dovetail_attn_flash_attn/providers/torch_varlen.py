"""The `torch` provider: torch's own copy of FlashAttention 2, through `varlen_attn_out`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar

import torch

from dovetail_attn_flash_attn.providers.call_terms import Call, arguments
from dovetail_attn_flash_attn.providers.provider import (
    SLIDING_WINDOW,
    CallTensors,
    LayerShape,
    Provider,
    ProviderError,
    StepTensors,
    Support,
)
from dovetail_attn_flash_attn.providers.signatures import check_function

MODULE = "torch.nn.attention.varlen"
FUNCTION = "varlen_attn_out"
FA2_CAPABILITIES = (80, 999)
BLOCK_SIZE_MULTIPLE = 256
OWN_KERNELS = (None, "FA2")

FORWARD_NAMES: Mapping[str, str] = {
    "out": "out",
    "queries": "query",
    "keys": "key",
    "values": "value",
    "query_start": "cu_seq_q",
    "cu_key_lens": "cu_seq_k",
    "key_lens": "seqused_k",
    "max_key_len": "max_k",
    "scale": "scale",
    "window_size": "window_size",
    "table": "block_table",
}

LEAST_MAX_QUERIES = 2
"""Smallest value that is passed as `max_q`. With 1, the kernel code reorders the heads and may
write the result to a copy."""


class TorchProvider(Provider):
    """FlashAttention 2 in torch 2.13 or newer. Block sizes are multiples of 256."""

    name: ClassVar[str] = "torch"
    install: ClassVar[str] = "install torch 2.13 or newer"

    def __init__(self) -> None:
        self._forward: Callable[..., Any] | None = None

    def find(self) -> None:
        """Raise ProviderError if torch has no such function, or uses another package's kernels."""
        function = _function()
        if function is None:
            raise ProviderError(
                f"torch {torch.__version__} has no {FUNCTION} with block tables: {self.install}"
            )
        active = torch.nn.attention.current_flash_attention_impl()
        if active not in OWN_KERNELS:
            raise ProviderError(
                f"{active} is active in torch, which is untested: call torch.nn.attention."
                "restore_flash_attention_impl(), or use provider 'fa3'"
            )

    def support(self, capability: int) -> Support:
        """Return what torch's FlashAttention 2 supports on a device."""
        return Support(
            capabilities=FA2_CAPABILITIES,
            block_size_multiple=BLOCK_SIZE_MULTIPLE,
            features=frozenset({SLIDING_WINDOW}),
        )

    def load(self, capability: int) -> None:
        """Compare the function's signature."""
        function = _function()
        if function is None:
            raise ProviderError(f"torch {torch.__version__} has no {FUNCTION}: {self.install}")
        check_function(self.name, function)
        self._forward = function

    def forward(
        self,
        shape: LayerShape,
        step: StepTensors,
        tensors: CallTensors,
        scheduler_metadata: torch.Tensor | None,
    ) -> None:
        """Call the function, which writes the result itself.

        The number of splits is 1: with more, the kernel does not write all rows (pytorch #194167).
        """
        assert self._forward is not None
        keywords = arguments(FORWARD_NAMES, Call(shape=shape, step=step, tensors=tensors))
        self._forward(
            **keywords,
            max_q=max(LEAST_MAX_QUERIES, step.max_query_len),
            enable_gqa=True,
            num_splits=1,
        )


def _function() -> Callable[..., Any] | None:
    """Return torch's function, or None if this version does not support block tables."""
    try:
        function: Callable[..., Any] = getattr(import_module(MODULE), FUNCTION)
    except (ImportError, AttributeError):
        return None
    return function if "block_table" in signature(function).parameters else None
