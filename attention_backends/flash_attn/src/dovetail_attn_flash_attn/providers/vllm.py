"""The `vllm` provider: the FlashAttention 2 and 3 kernels that a wheel of vLLM contains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from dovetail_attn_flash_attn.providers.call_terms import Call, arguments
from dovetail_attn_flash_attn.providers.fa3 import (
    FA3_CAPABILITIES,
    apply_sinks,
    loads_whole_pages,
    split_sinks,
)
from dovetail_attn_flash_attn.providers.provider import (
    FP8,
    SINKS,
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

MODULE = "vllm.vllm_flash_attn.flash_attn_interface"
FA2_CAPABILITIES = (80, 999)
BLOCK_SIZE_MULTIPLE = 16
MAX_HEADS_WITH_SINKS = 64

FORWARD_NAMES: dict[str, str] = {
    "queries": "q",
    "keys": "k",
    "values": "v",
    "out": "out",
    "max_query_len": "max_seqlen_q",
    "query_start": "cu_seqlens_q",
    "max_key_len": "max_seqlen_k",
    "key_lens": "seqused_k",
    "scale": "softmax_scale",
    "causal": "causal",
    "window_size": "window_size",
    "soft_cap": "softcap",
    "table": "block_table",
}
FA3_NAMES: Mapping[str, str] = FORWARD_NAMES | {
    "sinks": "s_aux",
    "key_scales": "k_descale",
    "value_scales": "v_descale",
    "scheduler_metadata": "scheduler_metadata",
    "num_splits": "num_splits",
}
SCHEDULER_METADATA_NAMES: Mapping[str, str] = {
    "num_rows": "batch_size",
    "max_query_len": "max_seqlen_q",
    "max_key_len": "max_seqlen_k",
    "num_heads": "num_heads_q",
    "num_kv_heads": "num_heads_kv",
    "head_size": "headdim",
    "key_lens": "cache_seqlens",
    "dtype": "qkv_dtype",
    "query_start": "cu_seqlens_q",
    "block_size": "page_size",
    "causal": "causal",
    "window_size": "window_size",
    "has_soft_cap": "has_softcap",
    "num_splits": "num_splits",
}


class VllmProvider(Provider):
    """FlashAttention 3 on compute capability 9.0, and FlashAttention 2 on other GPUs.

    Only FlashAttention 3 supports sinks.
    """

    name: ClassVar[str] = "vllm"
    install: ClassVar[str] = "pip install vllm"

    def __init__(self) -> None:
        self._forward: Callable[..., Any] | None = None
        self._scheduler_metadata: Callable[..., torch.Tensor] | None = None
        self._has_fa3 = False

    def find(self) -> None:
        """Raise ProviderError if vLLM is not installed, or has no kernels. Does not import it."""
        folder = _folder()
        if folder is None:
            raise ProviderError(f"vLLM is not installed: run {self.install}")
        if not (folder / "flash_attn_interface.py").is_file() or not _has_library(folder, 2):
            raise ProviderError(
                f"the installed vLLM has no FlashAttention kernels in {folder}: install a wheel "
                "for CUDA"
            )

    def support(self, capability: int) -> Support:
        """Return what FlashAttention 3 or 2 supports, depending on the GPU's version."""
        if self._version(capability) == 3:
            return Support(
                capabilities=FA3_CAPABILITIES,
                block_size_multiple=BLOCK_SIZE_MULTIPLE,
                features=frozenset({SLIDING_WINDOW, SOFT_CAP, SINKS}),
                kv_cache_dtypes=frozenset({FP8}),
                max_heads_with_sinks=MAX_HEADS_WITH_SINKS,
            )
        return Support(
            capabilities=FA2_CAPABILITIES,
            block_size_multiple=BLOCK_SIZE_MULTIPLE,
            features=frozenset({SLIDING_WINDOW, SOFT_CAP}),
        )

    def load(self, capability: int) -> None:
        """Import the kernels, and compare the signatures of both functions."""
        if self._forward is not None:
            return
        try:
            module = import_module(MODULE)
        except Exception as error:
            raise ProviderError(
                f"{MODULE} cannot be imported ({error}); install a vLLM wheel for torch "
                f"{torch.__version__}"
            ) from error
        number = self._version(capability)
        if not getattr(module, f"FA{number}_AVAILABLE"):
            cause = getattr(module, f"FA{number}_UNAVAILABLE_REASON")
            raise ProviderError(
                f"vLLM cannot load its FlashAttention {number} kernels ({cause}); install a vLLM "
                f"wheel for torch {torch.__version__}"
            )
        check_function(self.name, module.flash_attn_varlen_func)
        check_function(self.name, module.get_scheduler_metadata)
        self._scheduler_metadata = module.get_scheduler_metadata
        self._has_fa3 = self._finds_fa3()
        self._forward = module.flash_attn_varlen_func

    def has_scheduler_metadata(self, shape: LayerShape) -> bool:
        """Return whether the GPU runs FlashAttention 3."""
        return self._version(shape.capability) == 3

    def scheduler_metadata(self, shape: LayerShape, step: StepTensors) -> torch.Tensor:
        """Return the scheduler metadata of a step, computed once instead of in each layer."""
        assert self._scheduler_metadata is not None
        return self._scheduler_metadata(
            **arguments(SCHEDULER_METADATA_NAMES, Call(shape=shape, step=step))
        )

    def reads_whole_pages(self, shape: LayerShape, step: StepTensors) -> bool:
        """Return whether FlashAttention 3 loads whole blocks."""
        return self._version(shape.capability) == 3 and loads_whole_pages(shape, step)

    def forward(
        self,
        shape: LayerShape,
        step: StepTensors,
        tensors: CallTensors,
        scheduler_metadata: torch.Tensor | None,
    ) -> None:
        """Call the function, which writes the result itself."""
        assert self._forward is not None
        number = self._version(shape.capability)
        if number == 2:
            call = Call(shape=shape, step=step, tensors=tensors)
            self._forward(**arguments(FORWARD_NAMES, call), fa_version=2)
            return
        without, sinks_H = split_sinks(tensors)
        call = Call(shape=shape, step=step, tensors=without, scheduler_metadata=scheduler_metadata)
        keywords = arguments(FA3_NAMES, call)
        _, lse_HT = self._forward(**keywords, fa_version=3, return_softmax_lse=True)
        if sinks_H is not None:
            apply_sinks(tensors.out_THD, lse_HT, sinks_H)

    def _version(self, capability: int) -> int:
        """Return the version of FlashAttention that a GPU runs.

        capability: compute capability · 10. If it is unknown, returns 3 if possible, because
        FlashAttention 3 supports more features.
        """
        has_fa3 = self._has_fa3 if self._forward is not None else self._finds_fa3()
        return 3 if has_fa3 and capability in (0, FA3_CAPABILITIES[0]) else 2

    def _finds_fa3(self) -> bool:
        folder = _folder()
        return folder is not None and _has_library(folder, 3)


def _folder() -> Path | None:
    """Return the directory of the kernels in the installed vLLM, or None."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "vllm_flash_attn"


def _has_library(folder: Path, number: int) -> bool:
    return any(folder.glob(f"_vllm_fa{number}_C*"))
