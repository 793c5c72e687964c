"""The machine's limit for a case: the time of its reads or of its arithmetic, whichever is longer.

The model of a case: first all prompts are computed at the speed of the GEMM probe. Then each step
computes one token of every running request; it must read all weights once and the cache of its
requests, and multiply. A step takes the longer of both times. Attention counts as arithmetic in
prompts and as reading in decodes. Norms, rotary embedding and sampling take no time in this model.
Weight sizes come from the headers of the files.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from cases import Case

BITS_OF = {"bf16": 16.0, "int8": 8.0, "int4": 4.5}
"""Bits per weight; for int4 with one 16-bit scale per 32 weights."""

GEMM_OF = {
    "bf16": "bf16_gflops",
    "int8": "int8_gflops",
    "int4": "int8_gflops",
    "gguf": "int8_gflops",
}
"""Maps a format to the probe that limits its matrix products."""

CACHE_BYTES = 2
"""Bytes of one value in the cache."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model.

    layer_weights, head_weights: numbers of weights, without experts. expert_weights: weights of
    all experts of all layers. expert_share: the share of a layer's experts that a token uses.
    num_layers: layers with attention. file_bits: bits per weight of a GGUF file, or 0.
    """

    layer_weights: int
    head_weights: int
    expert_weights: int = 0
    expert_share: float = 1.0
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    file_bits: float = 0.0

    @classmethod
    def of(cls, path: Path) -> ModelShape:
        """Read the sizes of the matrices of a model directory or a GGUF file."""
        return cls._of_file(path) if path.is_file() else cls._of_directory(path)

    @classmethod
    def _of_file(cls, path: Path) -> ModelShape:
        from dovetail_gguf.model_config import read_config
        from dovetail_gguf.reader import GGUFFile

        file = GGUFFile(path)
        config = read_config(file)
        infos = {name: info for name, info in file.tensors.items() if len(info.shape) > 1}
        head = infos.get("output.weight", infos["token_embd.weight"])
        read = [info for name, info in infos.items() if name.startswith("blk.")] + [head]
        num_weights = sum(math.prod(info.shape) for info in read)
        return cls(
            layer_weights=num_weights - math.prod(head.shape),
            head_weights=math.prod(head.shape),
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_size=config["head_dim"],
            file_bits=8 * sum(info.num_bytes for info in read) / num_weights,
        )

    @classmethod
    def _of_directory(cls, folder: Path) -> ModelShape:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        shapes: dict[str, list[int]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            shapes |= _tensor_shapes(path)
        # Experts may be stacked in one tensor.
        matrices = {
            name: math.prod(rows)
            for name, rows in shapes.items()
            if len(rows) == 2 or (len(rows) == 3 and ".experts." in name)
        }
        embedding = next(size for name, size in matrices.items() if "embed" in name)
        head = next((size for name, size in matrices.items() if "lm_head" in name), 0)
        experts = sum(size for name, size in matrices.items() if ".experts." in name)
        # Recurrent layers have no KV cache. Their states are not counted.
        heads = config.get("num_attention_heads") or 0
        kinds = config.get("layer_types") or [""] * config["num_hidden_layers"]
        num_layers = sum(kind != "linear_attention" for kind in kinds) if heads else 0
        return cls(
            layer_weights=sum(matrices.values()) - embedding - head - experts,
            head_weights=head or embedding,
            expert_weights=experts,
            expert_share=config["num_experts_per_tok"] / config["num_experts"] if experts else 1.0,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // max(1, heads),
        )

    def step_bytes(self, weights: str, num_tokens: int = 1) -> float:
        """Return the bytes of weights that a step with `num_tokens` tokens reads in a format.

        The tokens select their experts independently of each other.
        """
        share = 1 - (1 - self.expert_share) ** num_tokens
        num_weights = self.layer_weights + self.head_weights + share * self.expert_weights
        return num_weights * (self.file_bits or BITS_OF[weights]) / 8

    @property
    def token_weights(self) -> float:
        """Return the number of layer weights that one token uses."""
        return self.layer_weights + self.expert_share * self.expert_weights

    @property
    def token_cache_bytes(self) -> int:
        """Return the cache bytes of one token."""
        return 2 * CACHE_BYTES * self.num_layers * self.num_kv_heads * self.head_size


@dataclass(frozen=True, kw_only=True)
class MachineLimits:
    """read_bytes_s: bytes read per second; flops_s: float or integer operations per second."""

    read_bytes_s: float
    flops_s: float

    @classmethod
    def of(cls, probes: dict[str, float], weights: str) -> MachineLimits | None:
        """Return the limits that a probe measured for a format, or None if torch was missing."""
        if GEMM_OF[weights] not in probes:
            return None
        return cls(read_bytes_s=probes["read_gbps"] * 1e9, flops_s=probes[GEMM_OF[weights]] * 1e9)


def prompt_seconds(case: Case, shape: ModelShape, weights: str, limits: MachineLimits) -> float:
    """Return the minimum time for all prompts of a case, including the first token of each."""
    num_tokens, num_requests = sum(case.prompt_lens), len(case.prompt_lens)
    products = 2 * (shape.token_weights * num_tokens + shape.head_weights * num_requests)
    # Causal attention: length² / 2 products for the scores and for the values, 2 operations each.
    pairs = sum(length * length for length in case.prompt_lens)
    attention = 2 * pairs * shape.num_layers * shape.num_heads * shape.head_size
    reading = shape.step_bytes(weights, num_tokens) / limits.read_bytes_s
    return max(reading, (products + attention) / limits.flops_s)


def decode_seconds(case: Case, shape: ModelShape, weights: str, limits: MachineLimits) -> float:
    """Return the minimum time for all tokens after the first of each request."""
    num_weights = shape.token_weights + shape.head_weights
    total = 0.0
    for step in range(1, max(case.output_lens)):
        running = [
            prompt + step
            for prompt, length in zip(case.prompt_lens, case.output_lens, strict=True)
            if length > step
        ]
        num_bytes = shape.step_bytes(weights, len(running)) + sum(running) * shape.token_cache_bytes
        num_flops = 2 * num_weights * len(running)
        total += max(num_bytes / limits.read_bytes_s, num_flops / limits.flops_s)
    return total


def _tensor_shapes(path: Path) -> dict[str, list[int]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
