"""The cases of the attention suite, and the choice of cases for a backend's capabilities.

Dimensions: H query heads, K key-value heads, D head size, B block size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil

from dovetail.interfaces.attention import (
    KV_LAYER_SCALES,
    MLA,
    ROTARY,
    AttentionCapabilities,
    AttentionRequirements,
)
from dovetail.interfaces.kv_cache import SCALE_BYTES, FullAttentionSpec, LatentAttentionSpec
from dovetail_devkit.comparison import TOLERANCES

CACHE_TOLERANCES = {"int8": 0.06, "fp8_e4m3": 0.25, "fp8_e5m2": 0.5}
"""Maximum error of results near 1, by element type of the cache."""

LARGEST_ROUNDED = 256
"""The largest head size for which these maximum errors apply."""

LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
"""The largest finite value of each element type of caches with per-layer scales."""
LIMITS = (2.0, 1.5)
"""Largest magnitudes of keys and of values in a cache with per-layer scales. They are smaller
than many keys and values, so that a backend that ignores the scales is detected."""


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One step to check, with the numbers of cached and new tokens of each request.

    runs: (context_len, query_len) of each request, in the order of the batch.
    rotary_dim: number of features of each head that the layer must rotate; 0 for none.
    scale_factor: scale of the scores, divided by head_size ** -0.5. It is not 1, so that a backend
        that ignores the scale is detected.
    cache_dtype: element type of the cache; "" for the model's dtype.
    has_layer_scales: whether the cache has per-layer scales instead of per-token scales.
    padding: unused bytes at the end of each block.
    value_size: the values are the first features of the keys; 0 for separate values.
    """

    runs: tuple[tuple[int, int], ...]
    dtype: str = "float32"
    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    sliding_window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    rotary_dim: int = 0
    scale_factor: float = 1.5
    cache_dtype: str = ""
    has_layer_scales: bool = False
    padding: int = 0
    value_size: int = 0
    seed: int = 0

    def __str__(self) -> str:
        """Return the case on one line, without default values."""
        shape = next((n for n, r in _shapes(self.block_size).items() if r == self.runs), "mixed")
        heads = f"H={self.num_heads}, K={self.num_kv_heads}, D={self.head_size}"
        window = f", window {self.sliding_window}" if self.sliding_window else ""
        cap = f", soft cap {self.soft_cap}" if self.soft_cap else ""
        rest = ", sinks" if self.sinks else ""
        rest += ", ALiBi" if self.alibi else ""
        rest += f", {self.rotary_dim} rotated" if self.rotary_dim else ""
        rest += f", cache of {self.cache_dtype}" if self.cache_dtype else ""
        rest += ", per-layer scales" if self.has_layer_scales else ""
        rest += f", padding {self.padding}" if self.padding else ""
        rest += f", values of {self.value_size} in the keys" if self.value_size else ""
        blocks = f"blocks of {self.block_size}"
        return f"{self.dtype}, {shape}, {blocks}, {heads}{window}{cap}{rest}, seed {self.seed}"

    @property
    def scale(self) -> float:
        """The attention-score multiplier, which is applied before the softmax."""
        return float(self.scale_factor * self.head_size**-0.5)

    @property
    def spec(self) -> FullAttentionSpec:
        """The KV-cache spec of the layer."""
        spec = FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.cache_dtype or self.dtype,
            sliding_window=self.sliding_window,
            scale_bytes=0 if self.has_layer_scales else SCALE_BYTES.get(self.cache_dtype, 0),
        )
        if not self.value_size:
            return spec
        return LatentAttentionSpec(**asdict(spec), value_size=self.value_size)

    @property
    def layer_scales(self) -> list[float]:
        """The scales of keys and of values. Only for a case with per-layer scales."""
        return [limit / LARGEST[self.cache_dtype] for limit in LIMITS]

    @property
    def features(self) -> frozenset[str]:
        """The features that the case requires of a backend."""
        used = {
            "sliding_window": self.sliding_window > 0,
            "soft_cap": self.soft_cap > 0,
            "sinks": self.sinks,
            "alibi": self.alibi,
            "padded_pages": self.padding > 0,
            KV_LAYER_SCALES: self.has_layer_scales,
            MLA: self.value_size > 0,
        }
        return frozenset(name for name, is_used in used.items() if is_used)

    def requirements(
        self, device_type: str, features: frozenset[str] = frozenset()
    ) -> AttentionRequirements:
        """Return the case's attention requirements. features: additional required features."""
        return AttentionRequirements(
            device_type=device_type,
            dtype=self.dtype,
            kv_cache_dtype=self.cache_dtype or self.dtype,
            head_size=self.head_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            features=self.features | features,
        )

    @property
    def tolerance(self) -> float:
        """Largest allowed error of a result near 1."""
        cache = self.cache_dtype
        return max(TOLERANCES[self.dtype], CACHE_TOLERANCES.get(cache) or TOLERANCES.get(cache, 0))


def standard_cases(capabilities: AttentionCapabilities) -> list[AttentionCase]:
    """Return the cases that cover the claimed `capabilities`.

    Each dtype is tested with prefills, chunks, decodes and mixed batches that end near block
    boundaries, for several block sizes; with 1, 4 or all query heads for each key-value head; with
    the claimed head sizes, or 64, 128, 80 and 33 if every size is claimed. Claimed windows, soft
    caps, sinks and ALiBi are tested separately and together. Fully and partly rotated heads and
    padded pages are tested if they are claimed, and keys that contain their values. Each cache
    dtype that is not a model dtype is tested with chunks, decodes and mixed batches.
    """
    multiple = capabilities.block_size_multiple
    block_size = multiple * ceil(16 / multiple)
    block_sizes = {block_size, 2 * block_size, 3 if multiple == 1 else multiple}
    head_sizes = sorted(capabilities.head_sizes) or [64, 128, 80, 33]
    windows = (1, 5, block_size, 1000) if "sliding_window" in capabilities.features else ()
    soft_caps = (1.5,) if "soft_cap" in capabilities.features else ()
    sinks = (True,) if "sinks" in capabilities.features else ()
    alibi = (True,) if "alibi" in capabilities.features else ()
    shapes = _shapes(block_size)
    mixed = shapes["mixed"]
    cases: list[AttentionCase] = []
    for dtype in sorted(capabilities.dtypes & (capabilities.kv_cache_dtypes or TOLERANCES.keys())):
        base = AttentionCase(
            runs=mixed, dtype=dtype, block_size=block_size, head_size=head_sizes[0]
        )
        for size in sorted(block_sizes):
            runs_of = _shapes(size).values()
            cases += [replace(base, runs=runs, block_size=size) for runs in runs_of]
        cases += [replace(base, num_heads=h, num_kv_heads=k) for h, k in ((4, 4), (6, 1), (6, 3))]
        cases += [replace(base, head_size=size) for size in head_sizes[1:]]
        cases += [replace(base, sliding_window=window) for window in windows]
        for runs in shapes.values():
            cases += [replace(base, runs=runs, sliding_window=window) for window in windows[1:2]]
            cases += [replace(base, runs=runs, soft_cap=cap) for cap in soft_caps]
            cases += [replace(base, runs=runs, sinks=True) for _ in sinks]
            cases += [replace(base, runs=runs, alibi=True) for _ in alibi]
        cases += [
            replace(base, sliding_window=window, soft_cap=cap, num_heads=6, num_kv_heads=1)
            for window in windows[1:2]
            for cap in soft_caps
        ]
        cases += [replace(case, sinks=True) for case in cases[-1:] for _ in sinks]
        cases += [replace(case, alibi=True) for case in cases[-1:] for _ in alibi]
        if ROTARY in capabilities.features:
            together = replace(cases[-1], block_size=max(block_sizes))
            cases += [_with_rotation(together), _with_rotation(base, 2)]
            cases += [_with_rotation(replace(base, runs=runs)) for runs in shapes.values()]
            cases += [_with_rotation(replace(base, head_size=size)) for size in head_sizes[1:]]
        if "padded_pages" in capabilities.features:
            cases += [replace(base, padding=64), replace(base, padding=192, runs=shapes["decodes"])]
        if MLA in capabilities.features:
            cases += _latent(base, shapes, head_sizes)
    for cache_dtype in sorted(capabilities.kv_cache_dtypes - capabilities.dtypes):
        cases += _of_cache(capabilities, cache_dtype)
    return [replace(case, seed=seed) for seed, case in enumerate(cases)]


def _latent(
    base: AttentionCase, shapes: Mapping[str, tuple[tuple[int, int], ...]], head_sizes: list[int]
) -> list[AttentionCase]:
    """Return cases of multi-head latent attention, including one with a single query head."""
    size = head_sizes[0]
    latent = replace(base, num_kv_heads=1, head_size=size, value_size=size - size // 4)
    return [
        *(replace(latent, runs=runs) for runs in shapes.values()),
        replace(latent, num_heads=1, value_size=1),
        replace(latent, num_heads=5, value_size=size),
        replace(latent, num_heads=3, head_size=head_sizes[-1], value_size=head_sizes[-1] - 7),
    ]


def other_cache_cases(capabilities: AttentionCapabilities) -> list[AttentionCase]:
    """Return cases for claimed caches with a dtype that differs from the model's dtype."""
    cases = [
        case
        for cache_dtype in sorted(capabilities.kv_cache_dtypes & capabilities.dtypes)
        for case in _of_cache(capabilities, cache_dtype)
    ]
    return [replace(case, seed=1000 + seed) for seed, case in enumerate(cases)]


def _of_cache(capabilities: AttentionCapabilities, cache_dtype: str) -> list[AttentionCase]:
    """Return cases for a cache dtype with each other model dtype."""
    multiple, sizes = capabilities.block_size_multiple, sorted(capabilities.head_sizes) or [64, 80]
    block_size = multiple * ceil(16 / multiple)
    shapes = _shapes(block_size)
    cases: list[AttentionCase] = []
    for dtype in sorted(capabilities.dtypes - {cache_dtype}):
        base = AttentionCase(
            runs=shapes["mixed"],
            dtype=dtype,
            cache_dtype=cache_dtype,
            block_size=block_size,
            head_size=sizes[0],
        )
        cases += [replace(base, runs=shapes[name]) for name in ("mixed", "chunks", "decodes")]
        # The scale of a token grows with its number of features, and with it the rounding error.
        largest = max((size for size in sizes if size <= LARGEST_ROUNDED), default=sizes[0])
        cases += [replace(base, head_size=largest, num_heads=6, num_kv_heads=1)]
        if MLA in capabilities.features:
            latent = replace(base, num_kv_heads=1, value_size=sizes[0] - sizes[0] // 4)
            cases += [replace(latent, runs=shapes[name]) for name in ("mixed", "decodes")]
        if "sliding_window" in capabilities.features:
            cases.append(replace(base, sliding_window=5))
        if ROTARY in capabilities.features:
            cases.append(_with_rotation(base))
        if KV_LAYER_SCALES in capabilities.features and cache_dtype in LARGEST:
            scaled = replace(base, has_layer_scales=True)
            cases += [replace(scaled, runs=shapes[name]) for name in ("mixed", "decodes")]
    return cases


def _with_rotation(case: AttentionCase, part: int = 1) -> AttentionCase:
    """Return `case` with rotary embedding in the layer. part: 1 / part of each head is rotated."""
    return replace(case, rotary_dim=case.head_size // part // 2 * 2)


def _shapes(block_size: int) -> dict[str, tuple[tuple[int, int], ...]]:
    b = block_size
    lengths = (1, b - 1, b, b + 1, 2 * b + 3)
    return {
        "one prefill": ((0, b + 1),),
        "prefills": tuple((0, length) for length in lengths),
        "chunks": ((b, 5), (b - 1, 2), (3, b + 2), (2 * b + 1, b - 1), (1, 2)),
        "one decode": ((2 * b, 1),),
        "equal decodes": ((b, 1),) * 3,
        "decodes": (*((length - 1, 1) for length in lengths), (21 * b, 1), (b, 1), (5, 1)),
        "mixed": ((b, 1), (0, 7), (b + 3, 4), (0, 1), (2 * b - 1, 1), (1, b), (b, 1), (0, 2 * b)),
    }
