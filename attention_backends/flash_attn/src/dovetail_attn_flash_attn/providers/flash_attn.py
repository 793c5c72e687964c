"""The `flash_attn` provider, which is the package flash-attn 2.x."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

import torch

from dovetail_attn_flash_attn.providers.call_terms import Call, arguments
from dovetail_attn_flash_attn.providers.provider import (
    SLIDING_WINDOW,
    SOFT_CAP,
    CallTensors,
    LayerShape,
    Provider,
    ProviderError,
    StepTensors,
    Support,
)
from dovetail_attn_flash_attn.providers.signatures import check_function

DISTRIBUTION = "flash-attn"
MODULE = "flash_attn"
LEAST_VERSION, NEXT_MAJOR = (2, 6), 3
FA2_CAPABILITIES = (80, 999)
BLOCK_SIZE_MULTIPLE = 256

FORWARD_NAMES: Mapping[str, str] = {
    "queries": "q",
    "keys": "k",
    "values": "v",
    "query_start": "cu_seqlens_q",
    "cu_key_lens": "cu_seqlens_k",
    "max_query_len": "max_seqlen_q",
    "max_key_len": "max_seqlen_k",
    "scale": "softmax_scale",
    "causal": "causal",
    "window_size": "window_size",
    "soft_cap": "softcap",
    "table": "block_table",
}


class FlashAttnProvider(Provider):
    """FlashAttention 2. Block sizes are multiples of 256. The function returns a new tensor."""

    name: ClassVar[str] = "flash_attn"
    install: ClassVar[str] = "pip install 'dovetail-attn-flash-attn[flash-attn]'"

    def __init__(self) -> None:
        self._forward: Callable[..., torch.Tensor] | None = None

    def find(self) -> None:
        """Raise ProviderError unless flash-attn 2.6 or newer, but not 3, is installed."""
        try:
            installed = version(DISTRIBUTION)
        except PackageNotFoundError:
            raise ProviderError(f"{DISTRIBUTION} is not installed: run {self.install}") from None
        numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
        if numbers < LEAST_VERSION or numbers[0] >= NEXT_MAJOR:
            raise ProviderError(
                f"{DISTRIBUTION} {installed} is installed, but 2.6 or a newer 2.x is needed: run "
                f"{self.install}"
            )

    def support(self, capability: int) -> Support:
        """Return what FlashAttention 2 supports on a device."""
        return Support(
            capabilities=FA2_CAPABILITIES,
            block_size_multiple=BLOCK_SIZE_MULTIPLE,
            features=frozenset({SLIDING_WINDOW, SOFT_CAP}),
        )

    def load(self, capability: int) -> None:
        """Import the function, and compare its signature."""
        if self._forward is not None:
            return
        try:
            function = import_module(MODULE).flash_attn_varlen_func
        except Exception as error:
            raise ProviderError(
                f"{DISTRIBUTION} cannot be imported ({error}); build it for torch "
                f"{torch.__version__}"
            ) from error
        check_function(self.name, function)
        self._forward = function

    def forward(
        self,
        shape: LayerShape,
        step: StepTensors,
        tensors: CallTensors,
        scheduler_metadata: torch.Tensor | None,
    ) -> None:
        """Call the function and copy its result."""
        assert self._forward is not None
        call = Call(shape=shape, step=step, tensors=tensors)
        tensors.out_THD.copy_(self._forward(**arguments(FORWARD_NAMES, call)))
