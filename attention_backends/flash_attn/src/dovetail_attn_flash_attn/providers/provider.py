"""The interface of a provider: a library with FlashAttention kernels over a paged cache.

Dimensions: T tokens of the step, R requests, H query heads, K key-value heads, D head size,
N blocks, B block size, M width of a block table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

HALF_DTYPES = frozenset({"bfloat16", "float16"})
HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256})
"""The kernels support all multiples of 8 up to 256. Other sizes are padded to one of these."""

SLIDING_WINDOW, SOFT_CAP, SINKS = "sliding_window", "soft_cap", "sinks"

FP8 = "fp8_e4m3"
FP8_MODEL_DTYPE = "bfloat16"
"""With an fp8 cache, the kernels write results of this dtype."""

ADVICE = {
    SLIDING_WINDOW: "install a build of the provider with local attention",
    SOFT_CAP: "install provider 'vllm', or 'flash_attn' and set block_size to a multiple of 256",
    SINKS: "install provider 'vllm' or 'fa3', on a GPU of compute capability 9.0",
    FP8: "install provider 'vllm' or 'fa3', on a GPU of compute capability 9.0",
}
"""What the user can do if a feature is not supported."""


class ProviderError(Exception):
    """A provider cannot be used. The message states the cause and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The requirements of a model, a KV-cache group or a layer. Unknown values are 0 or empty.

    capability: compute capability · 10. driver: the newest CUDA version · 1000 that the driver
    supports. capability, driver, num_heads, block_size: 0 if unknown.
    features: ids such as "sliding_window", "soft_cap" and "sinks".
    """

    dtype: str
    kv_cache_dtype: str
    head_size: int
    capability: int
    driver: int = 0
    num_heads: int = 0
    block_size: int = 0
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What the kernels of a provider support on a device.

    capabilities: lowest and highest compute capability · 10. min_driver: as `Needs.driver`; 0 for
    any. kv_cache_dtypes: dtypes of the cache other than the dtype of the model.
    max_heads_with_sinks: maximum number of query heads of a layer with sinks; 0 for any. features:
    the supported ids of `Needs.features`.
    """

    capabilities: tuple[int, int]
    block_size_multiple: int
    features: frozenset[str]
    dtypes: frozenset[str] = HALF_DTYPES
    kv_cache_dtypes: frozenset[str] = frozenset()
    head_sizes: frozenset[int] = HEAD_SIZES
    min_driver: int = 0
    max_heads_with_sinks: int = 0

    def unmet(self, needs: Needs) -> list[str]:
        """Return one sentence, with the supported values, for each requirement that is not met."""
        causes = [*self._device_causes(needs), *self._dtype_causes(needs)]
        if needs.head_size not in self.head_sizes:
            causes.append(
                f"head size {needs.head_size} is not supported; supported: "
                f"{_listed(self.head_sizes)}"
            )
        multiple = self.block_size_multiple
        if needs.block_size % multiple:
            causes.append(
                f"block size {needs.block_size} is not supported; set block_size to a multiple of "
                f"{multiple}"
            )
        missing = sorted(needs.features - self.features)
        causes += [
            f"{feature} is not supported: {ADVICE.get(feature, 'choose another backend')}"
            for feature in missing
        ]
        maximum = self.max_heads_with_sinks
        if SINKS in needs.features and maximum and needs.num_heads > maximum:
            causes.append(f"sinks are supported for at most {maximum} query heads")
        return causes

    def _device_causes(self, needs: Needs) -> list[str]:
        causes = []
        minimum, greatest = self.capabilities
        if needs.capability and not minimum <= needs.capability <= greatest:
            needed = f"{minimum / 10}" if minimum == greatest else f"{minimum / 10} or newer"
            causes.append(
                f"the GPU has compute capability {needs.capability / 10}, but the kernels need "
                f"{needed}"
            )
        if needs.driver and needs.driver < self.min_driver:
            causes.append(
                f"the NVIDIA driver supports CUDA {_cuda_version(needs.driver)}, but the kernels "
                f"need CUDA {_cuda_version(self.min_driver)}: install a newer driver"
            )
        return causes

    def _dtype_causes(self, needs: Needs) -> list[str]:
        causes = []
        if needs.dtype not in self.dtypes:
            causes.append(
                f"dtype {needs.dtype} is not supported; supported: {_listed(self.dtypes)}"
            )
        cache = needs.kv_cache_dtype
        if cache == needs.dtype:
            return causes
        if cache not in self.kv_cache_dtypes:
            advice = f"{ADVICE[cache]}, or " if cache in ADVICE else ""
            causes.append(
                f"a KV cache of {cache} is not supported; {advice}set kv_cache_dtype='auto'"
            )
        elif needs.dtype != FP8_MODEL_DTYPE:
            causes.append(
                f"a KV cache of {cache} is supported for models in {FP8_MODEL_DTYPE} only; set "
                f"dtype='{FP8_MODEL_DTYPE}' or kv_cache_dtype='auto'"
            )
        elif SINKS in needs.features:
            causes.append(
                f"sinks with a KV cache of {cache} are untested; set kv_cache_dtype='auto'"
            )
        return causes


def _cuda_version(number: int) -> str:
    """Return a CUDA version as text: "13.1" for 13010."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _listed(values: frozenset[str] | frozenset[int]) -> str:
    return ", ".join(map(str, sorted(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The properties of a layer that a kernel call depends on.

    Layers of equal shape share scheduler metadata.

    window: number of tokens that a token attends to, itself included; 0 for all. dtype: the dtype
    of queries, keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    soft_cap: float
    window: int
    dtype: torch.dtype
    capability: int

    @property
    def window_size(self) -> tuple[int, int]:
        """Number of positions before and after its own that a query sees. -1 for all.

        Always a tuple: torch compares it with (-1, 0), and a list would not be causal.
        """
        return (self.window - 1 if self.window else -1, 0)


class StepTensors(Protocol):
    """The tensors of a step, on the device, int32. All layers of a KV-cache group share them.

    query_start_R1: cumulative number of queries. key_lens_R: number of listed positions of each
    request. cu_key_lens_R1: cumulative `key_lens_R`. table_RM: the listed blocks of each request.
    max_query_len: maximum number of queries of a request. max_key_len: M · B.
    num_splits: 0 if the kernels choose the number of splits; a fixed maximum for a graph.
    """

    block_size: int
    num_rows: int
    max_query_len: int
    num_splits: int

    @property
    def query_start_R1(self) -> torch.Tensor: ...  # noqa: D102, N802

    @property
    def key_lens_R(self) -> torch.Tensor: ...  # noqa: D102, N802

    @property
    def cu_key_lens_R1(self) -> torch.Tensor: ...  # noqa: D102, N802

    @property
    def table_RM(self) -> torch.Tensor: ...  # noqa: D102, N802

    @property
    def max_key_len(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTensors:
    """The tensors of one call.

    q_THD: the last stride is 1. keys_NBKD, values_NBKD: the cache; blocks may be strided.
    sinks_H: float32, or None. kv_scales: float32 [2], the scales of fp8 keys and values; None if
    they are not fp8. out_THD: contiguous; the call writes it.
    """

    q_THD: torch.Tensor
    keys_NBKD: torch.Tensor
    values_NBKD: torch.Tensor
    sinks_H: torch.Tensor | None
    kv_scales: torch.Tensor | None
    out_THD: torch.Tensor


class Provider(ABC):
    """A library with kernels. An object has no state except the imported functions.

    name: the value of the `provider` option. install: how to get a usable version.
    """

    name: ClassVar[str]
    install: ClassVar[str]

    @abstractmethod
    def find(self) -> None:
        """Raise ProviderError if no usable version is installed. Imports no kernels."""

    @abstractmethod
    def support(self, capability: int) -> Support:
        """Return what the installed version supports on a GPU, after `find` has succeeded.

        capability: compute capability · 10, or 0 if it is unknown.
        """

    @abstractmethod
    def load(self, capability: int) -> None:
        """Import the kernels and compare their signatures with the recorded ones.

        Raises ProviderError if the import fails or a signature differs. Later calls do nothing.
        """

    def has_scheduler_metadata(self, shape: LayerShape) -> bool:
        """Return whether `forward` needs scheduler metadata for layers of `shape`."""
        return False

    def scheduler_metadata(self, shape: LayerShape, step: StepTensors) -> torch.Tensor:
        """Return the scheduler metadata of the step for all layers of `shape`.

        Called only if `has_scheduler_metadata`. The result is int32. For a graph, its length
        depends only on `shape` and the number of requests.
        """
        raise NotImplementedError(f"provider {self.name!r} does not use scheduler metadata")

    def reads_whole_pages(self, shape: LayerShape, step: StepTensors) -> bool:
        """Return whether values after a request's last token must be finite."""
        return False

    @abstractmethod
    def forward(
        self,
        shape: LayerShape,
        step: StepTensors,
        tensors: CallTensors,
        scheduler_metadata: torch.Tensor | None,
    ) -> None:
        """Attend causally and write `tensors.out_THD`. Does not wait for the device."""

    def rejection(self, needs: Needs, *, load: bool) -> str:
        """Return why the provider does not meet `needs`, with a remedy, or "".

        load: whether to import the kernels if all other requirements are met.
        """
        try:
            self.find()
            causes = self.support(needs.capability).unmet(needs)
            if load and not causes:
                self.load(needs.capability)
        except ProviderError as error:
            causes = [str(error)]
        return f"provider {self.name!r}: {'; '.join(causes)}" if causes else ""
