"""Requests with random tokens in a paged cache. Tests run their steps and compare with float64."""

from __future__ import annotations

import torch

from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayerContext,
    RotaryArgs,
)
from dovetail.interfaces.kv_cache import SCALE_BYTES, FullAttentionSpec
from dovetail_attn_triton.backend import FP8, TritonAttentionBackend
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_devkit.ops.rotary import far_apart
from dovetail_devkit.suites.attention import reference_attention
from dovetail_ops_triton.availability import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BLOCK_SIZE = 16
FP8_OF_TORCH = {FP8: torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Rows:
    """Requests with random tokens and separate blocks. Unused parts of the cache contain NaN."""

    def __init__(self, lengths, *, cache_dtype="", window=0, padding=0, options=None, **changes):
        """kv_scales: the per-layer scales; if given, the cache has no per-token scales."""
        self.kv_scales = changes.get("kv_scales")
        shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64} | changes
        self.heads = (shape["num_heads"], shape["num_kv_heads"], shape["num_kv_heads"])
        self.dtype = shape.pop("dtype", torch.float32)
        name = cache_dtype or str(self.dtype).removeprefix("torch.")
        self.spec = FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=shape["num_kv_heads"],
            head_size=shape["head_size"],
            dtype=name,
            sliding_window=window,
            scale_bytes=SCALE_BYTES.get(name, 0) if self.kv_scales is None else 0,
        )
        generator = torch.Generator().manual_seed(len(lengths))
        size = (sum(self.heads), shape["head_size"])
        self.qkv = [
            torch.randn((n, *size), generator=generator).to(self.dtype).to(DEVICE) for n in lengths
        ]
        counts = [-(-n // BLOCK_SIZE) for n in lengths]
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        self.blocks = [[order.pop() for _ in range(count)] for count in counts]
        self.done = [0] * len(lengths)
        self.cos_sin_PR = None  # the cosine-sine table of the layer's rotation
        self.cache = self._new_cache(sum(counts) + 1, padding)
        self.scale = shape["head_size"] ** -0.5
        self.builder = TritonAttentionBackend.create_builder(
            AttentionGroupContext(
                spec=self.spec,
                device=DEVICE,
                max_num_seqs=len(lengths),
                max_num_batched_tokens=sum(lengths),
                max_model_len=max(lengths),
                options=options or {},
            )
        )
        self.layer_context = AttentionLayerContext(
            layer_name="layers.3.attn",
            scale=self.scale,
            dtype=self.dtype,
            device=DEVICE,
            sliding_window=window,
            **shape,
        )
        self.layer = TritonAttentionBackend.create_layer(self.layer_context)

    def _new_cache(self, num_blocks, padding):
        """Return a cache in which all bytes are 255 (NaN), with `padding` bytes between blocks."""
        dtype = FP8_OF_TORCH.get(self.spec.dtype, self.dtype)
        shape = TritonAttentionBackend.kv_cache_shape(num_blocks, self.spec)
        used = self.spec.page_size_bytes
        pages = torch.full((num_blocks, used + padding), 255, dtype=torch.uint8, device=DEVICE)
        return pages[:, :used].view(dtype).unflatten(1, shape[1:])

    def step(self, counts, layer=None):
        """Run the next `counts` tokens of each request (0 to omit it), and return the results."""
        runs = [(row, n) for row, n in enumerate(counts) if n]
        metadata = self.builder.build(self.batch(runs))
        return self.forward(runs, metadata, layer or self.layer)

    def forward(self, runs, metadata, layer):
        parts = [self.qkv[row][self.done[row] : self.done[row] + n] for row, n in runs]
        q, k, v = torch.cat(parts).split(self.heads, dim=1)
        out = torch.full(q.shape, torch.nan, dtype=self.dtype, device=DEVICE)
        rotary_args = ()
        if self.cos_sin_PR is not None:
            places = [place for row, n in runs for place in far_apart(self.done[row], n)]
            positions_T = torch.tensor(places, device=DEVICE)
            provided = {"positions_T": positions_T, "cos_sin_PR": self.cos_sin_PR}
            rotary_args = (RotaryArgs(ops=FakeOps(), **provided),)
        layer.forward(q, k, v, self.cache, metadata, out, *rotary_args)
        for row, n in runs:
            self.done[row] += n
        return out.split([n for _, n in runs])

    def batch(self, runs):
        seq_lens = [self.done[row] + n for row, n in runs]
        width = max(map(len, self.blocks))
        table = [self.blocks[row] + [0] * (width - len(self.blocks[row])) for row, _ in runs]
        slots = [
            self.blocks[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for row, n in runs
            for position in range(self.done[row], self.done[row] + n)
        ]
        query_lens = [n for _, n in runs]
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        return AttentionBatch(
            query_start_R1=starts.int().to(DEVICE),
            seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
            block_table_RM=torch.tensor(table, dtype=torch.int32, device=DEVICE),
            slot_mapping_T=torch.tensor(slots, device=DEVICE),
            query_lens=query_lens,
            seq_lens=seq_lens,
        )

    def kept(self, row):
        """Return the keys and values of a request in the cache, float64 [L, K, D] each."""
        num_kv_heads, head_size = self.spec.num_kv_heads, self.spec.head_size
        shape = (2, num_kv_heads, BLOCK_SIZE, head_size)
        if self.spec.scale_bytes:
            size = torch.Size(shape).numel()
            scales = self.cache[:, size:].view(torch.float32).unflatten(1, shape[:3])
            cache = self.cache[:, :size].float().unflatten(1, shape) * scales.unsqueeze(-1)
        elif self.kv_scales is not None:
            cache = self.cache.float() * self.kv_scales.view(2, 1, 1, 1)
        else:
            cache = self.cache
        both = cache[self.blocks[row]].double().permute(1, 0, 3, 2, 4).flatten(1, 2)
        return both[0, : self.done[row]], both[1, : self.done[row]]

    def want(self, row, num_tokens, **changes):
        """Return the expected results of a request's last tokens, from the cache's contents."""
        q = self.qkv[row][self.done[row] - num_tokens : self.done[row], : self.heads[0]]
        window = self.spec.sliding_window
        return reference_attention(
            q, *self.kept(row), scale=self.scale, sliding_window=window, **changes
        )


def assert_close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def num_splits(rows, counts):
    """Return the number of splits for each launch in the next step."""
    runs = [(row, n) for row, n in enumerate(counts) if n]
    metadata = rows.builder.build(rows.batch(runs))
    return [item.num_splits for item in metadata.passes(rows.layer._shape)]
