"""The `fa3` provider: a wheel that registers FlashAttention 3 as `torch.ops.flash_attn_3`.

The operator is called directly, because the Python function of the wheel cannot write to `out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import ClassVar

import torch

from dovetail_attn_flash_attn.providers.call_terms import Call, arguments
from dovetail_attn_flash_attn.providers.provider import (
    FP8,
    HALF_DTYPES,
    HEAD_SIZES,
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
from dovetail_attn_flash_attn.providers.signatures import check_operator

NAMESPACE = "flash_attn_3"
EXTENSION = "flash_attn_3._C"
CONFIG_MODULES = ("flash_attn_config", "flash_attn_3.flash_attn_config")
WITH_SINKS = "tokenspeed-fa3"
"""The distribution whose operator has the argument `sinks`."""

DRIVER_WITH_SINKS = 13000
"""The oldest driver that supports this distribution, which contains the CUDA 13 runtime."""

FA3_CAPABILITIES = (90, 90)
"""The kernels are compiled for sm_90a, which runs on compute capability 9.0 only."""

KERNEL_HEAD_SIZES = (64, 96, 128, 192, 256)
LEAST_TILE = 64
"""Smallest number of keys, and of queries of a key-value head, that a kernel processes at once."""

FORWARD_NAMES: dict[str, str] = {
    "queries": "q",
    "keys": "k",
    "values": "v",
    "out": "out",
    "query_start": "cu_seqlens_q",
    "key_lens": "seqused_k",
    "max_query_len": "max_seqlen_q",
    "max_key_len": "max_seqlen_k",
    "table": "page_table",
    "scale": "softmax_scale",
    "causal": "is_causal",
    "window_left": "window_size_left",
    "window_right": "window_size_right",
    "soft_cap": "softcap",
    "scheduler_metadata": "scheduler_metadata",
    "num_splits": "num_splits",
    "key_scales": "k_descale",
    "value_scales": "v_descale",
}
SCHEDULER_METADATA_NAMES: Mapping[str, str] = {
    "num_rows": "batch_size",
    "max_query_len": "max_seqlen_q",
    "max_key_len": "max_seqlen_k",
    "num_heads": "num_heads",
    "num_kv_heads": "num_heads_k",
    "head_size": "headdim",
    "dtype": "qkv_dtype",
    "key_lens": "seqused_k",
    "query_start": "cu_seqlens_q",
    "block_size": "page_size",
    "causal": "is_causal",
    "window_left": "window_size_left",
    "window_right": "window_size_right",
    "has_soft_cap": "has_softcap",
    "num_splits": "num_splits",
}


class Fa3Provider(Provider):
    """FlashAttention 3 from a wheel such as tokenspeed-fa3. Supports every block size."""

    name: ClassVar[str] = "fa3"
    install: ClassVar[str] = "pip install 'dovetail-attn-flash-attn[fa3]'"

    def __init__(self) -> None:
        self._is_loaded = False
        self._has_splits = True

    def find(self) -> None:
        """Raise ProviderError if there is no wheel, or if its build has no paged cache."""
        if not _is_registered() and find_spec(NAMESPACE) is None:
            raise ProviderError(
                f"no package registers torch.ops.{NAMESPACE}: run {self.install}, on a GPU of "
                "compute capability 9.0"
            )
        for flag in ("PAGEDKV", "VARLEN"):
            if _is_disabled(flag):
                raise ProviderError(
                    f"the installed build was compiled with FLASHATTENTION_DISABLE_{flag}, so it "
                    f"has no paged cache: run {self.install}"
                )

    def support(self, capability: int) -> Support:
        """Return what the installed build supports, according to its flags."""
        features = set()
        if not _is_disabled("LOCAL"):
            features.add(SLIDING_WINDOW)
        if not _is_disabled("SOFTCAP"):
            features.add(SOFT_CAP)
        if _has_sinks():
            features.add(SINKS)
        return Support(
            capabilities=FA3_CAPABILITIES,
            block_size_multiple=1,
            features=frozenset(features),
            kv_cache_dtypes=frozenset(() if _is_disabled("FP8") else (FP8,)),
            dtypes=HALF_DTYPES - {"float16"} if _is_disabled("FP16") else HALF_DTYPES,
            head_sizes=frozenset(size for size in HEAD_SIZES if not _is_disabled(_flag(size))),
            min_driver=DRIVER_WITH_SINKS if _is_installed(WITH_SINKS) else 0,
        )

    def load(self, capability: int) -> None:
        """Import the extension, and compare the schemas of its operators."""
        if self._is_loaded:
            return
        if not _is_registered():
            try:
                import_module(EXTENSION)
            except Exception as error:
                raise ProviderError(
                    f"{EXTENSION} cannot be imported ({error}); install a wheel for torch "
                    f"{torch.__version__}"
                ) from error
        for operator in ("fwd", "get_scheduler_metadata"):
            check_operator(self.name, NAMESPACE, operator)
        self._has_splits = not _is_disabled("SPLIT")
        self._is_loaded = True

    def has_scheduler_metadata(self, shape: LayerShape) -> bool:
        """Return True."""
        return True

    def scheduler_metadata(self, shape: LayerShape, step: StepTensors) -> torch.Tensor:
        """Return the scheduler metadata of a step, computed once instead of in each layer."""
        keywords = arguments(SCHEDULER_METADATA_NAMES, Call(shape=shape, step=step))
        keywords |= {"headdim_v": shape.head_size, "num_splits": self._splits(step)}
        metadata: torch.Tensor = torch.ops.flash_attn_3.get_scheduler_metadata(**keywords)
        return metadata

    def reads_whole_pages(self, shape: LayerShape, step: StepTensors) -> bool:
        """Return whether the kernel loads whole blocks, and multiplies masked values by 0."""
        return loads_whole_pages(shape, step)

    def forward(
        self,
        shape: LayerShape,
        step: StepTensors,
        tensors: CallTensors,
        scheduler_metadata: torch.Tensor | None,
    ) -> None:
        """Call the operator, which writes the result itself."""
        names = FORWARD_NAMES if tensors.sinks_H is None else FORWARD_NAMES | {"sinks": "sinks"}
        without, sinks_H = split_sinks(tensors)
        call = Call(shape=shape, step=step, tensors=without, scheduler_metadata=scheduler_metadata)
        keywords = arguments(names, call) | {"num_splits": self._splits(step)}
        _, lse_HT, *_ = torch.ops.flash_attn_3.fwd(**keywords)
        if sinks_H is not None:
            apply_sinks(tensors.out_THD, lse_HT, sinks_H)

    def _splits(self, step: StepTensors) -> int:
        return step.num_splits if self._has_splits else 1


def loads_whole_pages(shape: LayerShape, step: StepTensors) -> bool:
    """Return whether FA3 may load blocks as a whole, by TMA.

    It does so if the block size is a multiple of the kernel's tile and the queries of a key-value
    head fill more than a tile. The tile depends on the layer; its minimum size is `LEAST_TILE`.
    """
    num_queries = step.max_query_len * (shape.num_heads // shape.num_kv_heads)
    return step.block_size >= LEAST_TILE and num_queries > LEAST_TILE


def split_sinks(tensors: CallTensors) -> tuple[CallTensors, torch.Tensor | None]:
    """Return the tensors of a kernel call, and the sinks that must be applied to its result.

    The kernels round sinks to bfloat16. The error would be larger than that of float16 results, so
    `apply_sinks` adds the sinks of such layers in float32.
    """
    if tensors.sinks_H is None or tensors.out_THD.dtype == torch.bfloat16:
        return tensors, None
    return replace(tensors, sinks_H=None), tensors.sinks_H


def apply_sinks(out_THD: torch.Tensor, lse_HT: torch.Tensor, sinks_H: torch.Tensor) -> None:
    """Rescale an attention output so that its softmax denominator includes the sinks.

    out_THD: the output computed without sinks, changed in place. lse_HT: float32, the natural
    logarithm of the sum of the exponentials of the scores.
    """
    out_THD.mul_(torch.sigmoid(lse_HT.T - sinks_H)[:, :, None])


def _flag(head_size: int) -> str:
    """Return the name of the build flag of the kernel for a head size."""
    return f"HDIM{min(size for size in KERNEL_HEAD_SIZES if size >= head_size)}"


def _is_registered() -> bool:
    return hasattr(getattr(torch.ops, NAMESPACE), "fwd")


def _has_sinks() -> bool:
    if _is_registered():
        schema = torch.ops.flash_attn_3.fwd.default._schema
        return any(argument.name == "sinks" for argument in schema.arguments)
    return _is_installed(WITH_SINKS)


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _is_disabled(flag: str) -> bool:
    """Return whether the build lacks a part. A build without flags has all parts."""
    for name in CONFIG_MODULES:
        parent = name.partition(".")[0]
        if find_spec(parent) is not None and find_spec(name) is not None:
            flags: Mapping[str, object] = import_module(name).CONFIG["build_flags"]
            return bool(flags.get(f"FLASHATTENTION_DISABLE_{flag}", False))
    return False
