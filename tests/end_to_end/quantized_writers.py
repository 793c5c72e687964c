"""Write quantized checkpoints with random codes, and compute the values that they represent.

Independent of the loader: codes are packed as one large integer for each row, and values are
computed from the definitions of the formats.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Written:
    """The config of a quantization, and a function that quantizes random weights of a shape."""

    config: dict[str, Any]
    quantize: Callable[[tuple[int, int], torch.Generator], tuple[Tensors, torch.Tensor]]
    skipped: tuple[str, ...] = field(default=("lm_head", "embed_tokens", "norm"))


def pack_row(codes: list[int], bits: int) -> list[int]:
    """Return signed 32-bit words with the codes, the first in the lowest bits."""
    number = sum(code << index * bits for index, code in enumerate(codes))
    words = [number >> 32 * k & 0xFFFFFFFF for k in range(-(-len(codes) * bits // 32))]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the last dimension of a matrix of codes."""
    rows = [pack_row(row, bits) for row in codes.tolist()]
    return torch.tensor(rows, dtype=torch.int32)


def _codes(shape: tuple[int, ...], bits: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=generator)


def _scales(shape: tuple[int, ...], bits: int, generator: torch.Generator, dtype: torch.dtype):
    return (torch.rand(shape, generator=generator) / (1 << bits) + 0.01).to(dtype)


def _values(codes, zeros, scales, groups) -> torch.Tensor:
    """Return (code - zero) * scale in the dtype of the scales. codes: [O, I]; others: [O, G]."""
    return (codes - zeros[:, groups]).to(scales.dtype) * scales[:, groups]


def gptq(
    bits: int = 4,
    group_size: int = 32,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    version: str = "gptq",
    tool: str = "",
    dtype: torch.dtype = torch.float16,
) -> Written:
    def quantize(shape, generator):
        num_outputs, num_inputs = shape
        size = num_inputs if group_size == -1 else group_size
        num_groups = -(-num_inputs // size)
        codes_OI = _codes(shape, bits, generator)
        zeros_OG = _codes((num_outputs, num_groups), bits, generator)
        if symmetric:
            zeros_OG.fill_(1 << bits - 1)
        scales_OG = _scales((num_outputs, num_groups), bits, generator, dtype)
        groups = torch.arange(num_inputs) // size
        if act_order:
            groups = groups[torch.randperm(num_inputs, generator=generator)]
        zero_words = pack(zeros_OG.T, bits)
        if version == "gptq" and bits == 3 and not tool:
            zero_words = pack((zeros_OG.T - 1) % 8, bits)
        elif version == "gptq":  # subtracted from whole words, so that a zero borrows from the next
            ones = pack(torch.ones_like(zeros_OG.T), bits).to(torch.int64)
            # Every three words with codes of 3 bits, GPTQModel subtracts them in reversed order.
            ones = ones.unflatten(1, (-1, 3)).flip(2).flatten(1) if bits == 3 else ones
            less = (zero_words.to(torch.int64) - ones) & 0xFFFFFFFF
            zero_words = torch.where(less >> 31 == 1, less - (1 << 32), less).to(torch.int32)
        tensors = {
            "qweight": pack(codes_OI, bits).T,
            "qzeros": zero_words,
            "scales": scales_OG.T,
            "g_idx": groups.to(torch.int32),
        }
        return tensors, _values(codes_OI, zeros_OG, scales_OG, groups)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": act_order,
        "sym": symmetric,
        "checkpoint_format": version,
        "meta": {"quantizer": [tool]} if tool else None,
    }
    return Written(config=config, quantize=quantize)


def awq(group_size: int = 32) -> Written:
    def quantize(shape, generator):
        num_outputs, num_inputs = shape
        num_groups = num_inputs // group_size
        codes_OI = _codes(shape, 4, generator)
        zeros_OG = _codes((num_outputs, num_groups), 4, generator)
        scales_OG = _scales((num_outputs, num_groups), 4, generator, torch.float16)
        order = [8 * block + place for block in range(num_outputs // 8) for place in AWQ_ORDER]
        tensors = {
            "qweight": pack(codes_OI.T[:, order], 4),
            "qzeros": pack(zeros_OG.T[:, order], 4),
            "scales": scales_OG.T,
        }
        groups = torch.arange(num_inputs) // group_size
        return tensors, _values(codes_OI, zeros_OG, scales_OG, groups)

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
    }
    return Written(config=config, quantize=quantize)


def fp8_blocks(block: int = 32) -> Written:
    def quantize(shape, generator):
        weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        grid = [-(-size // block) for size in shape]
        scales = torch.rand(grid, generator=generator) / 4 + 0.01
        rows, columns = (torch.arange(size) // block for size in shape)
        return {"weight": weight, "weight_scale_inv": scales}, weight.float() * scales[rows][
            :, columns
        ]

    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }
    return Written(config=config, quantize=quantize)


def fp8_tensor() -> Written:
    def quantize(shape, generator):
        weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.tensor(0.125 + torch.rand((), generator=generator).item() / 8)
        tensors = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
        return tensors, weight.float() * scale

    return Written(config={"quant_method": "fp8", "activation_scheme": "static"}, quantize=quantize)


def _compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def packed_integers(
    bits: int = 4,
    group_size: int = 32,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Written:
    def quantize(shape, generator):
        num_outputs, num_inputs = shape
        num_groups = 1 if group_size == -1 else num_inputs // group_size
        codes_OI = _codes(shape, bits, generator)
        scales_OG = _scales((num_outputs, num_groups), bits, generator, dtype)
        zeros_OG = torch.full((num_outputs, num_groups), 1 << bits - 1)
        tensors = {
            "weight_packed": pack(codes_OI, bits),
            "weight_scale": scales_OG,
            "weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            zeros_OG = _codes((num_outputs, num_groups), bits, generator)
            tensors["weight_zero_point"] = pack(zeros_OG.T, bits).T
        groups = torch.arange(num_inputs) // (num_inputs // num_groups)
        return tensors, _values(codes_OI, zeros_OG, scales_OG, groups)

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "group_size": group_size,
        "strategy": "group" if group_size != -1 else "channel",
    }
    return Written(config=_compressed("pack-quantized", weights), quantize=quantize)


def rows_of_integers() -> Written:
    def quantize(shape, generator):
        weight = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
        scales = _scales((shape[0], 1), 8, generator, torch.bfloat16)
        return {"weight": weight, "weight_scale": scales}, weight.to(scales.dtype) * scales

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return Written(config=_compressed("int-quantized", weights), quantize=quantize)


def rows_of_floats() -> Written:
    def quantize(shape, generator):
        weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        scales = _scales((shape[0], 1), 4, generator, torch.bfloat16)
        return {"weight": weight, "weight_scale": scales}, weight.to(scales.dtype) * scales

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    return Written(config=_compressed("float-quantized", weights), quantize=quantize)


def fp4(kind: str) -> Written:
    group = 16 if kind == "nvfp4" else 32

    def quantize(shape, generator):
        codes = _codes(shape, 4, generator)
        table = torch.tensor([*FP4, *(-value for value in FP4)])
        grid = (shape[0], shape[1] // group)
        columns = torch.arange(shape[1]) // group
        low, high = codes[:, ::2], codes[:, 1::2]
        tensors = {"weight_packed": (low + 16 * high).to(torch.uint8)}
        if kind == "nvfp4":
            stored = (torch.rand(grid, generator=generator) * 100 + 1).to(torch.float8_e4m3fn)
            whole = torch.tensor([640.0])
            tensors |= {"weight_scale": stored, "weight_global_scale": whole}
            scales = stored.float() / whole
        else:
            stored = torch.randint(120, 126, grid, generator=generator).to(torch.uint8)
            tensors["weight_scale"] = stored
            scales = 2.0 ** (stored.float() - 127)
        return tensors, table[codes] * scales[:, columns]

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group}
    return Written(config=_compressed(f"{kind}-pack-quantized", weights), quantize=quantize)


NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)


def bitsandbytes_blocks(kind: str = "nf4", *, nested: bool = False, block: int = 64) -> Written:
    def quantize(shape, generator):
        codes = _codes((shape[0] * shape[1],), 4, generator)
        num_blocks = -(-len(codes) // block)
        table = torch.tensor(NF4)
        state = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "float32",
            "shape": list(shape),
        }
        tensors = {"weight.quant_map": table}
        if nested:
            maxima_codes = _codes((num_blocks,), 8, generator)
            numbers = torch.rand(256, generator=generator) * 2 - 1
            whole = torch.rand(-(-num_blocks // 256), generator=generator) / 8
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            tensors |= {
                "weight.absmax": maxima_codes.to(torch.uint8),
                "weight.nested_absmax": whole,
                "weight.nested_quant_map": numbers,
            }
            maxima = numbers[maxima_codes] * whole[torch.arange(num_blocks) // 256] + 0.25
        else:
            maxima = torch.rand(num_blocks, generator=generator) / 4
            tensors["weight.absmax"] = maxima
        text = json.dumps(state).encode()
        tensors |= {
            "weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(text), dtype=torch.uint8),
        }
        values = table[codes] * maxima[torch.arange(len(codes)) // block]
        return tensors, values.view(shape)

    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "llm_int8_skip_modules": ["lm_head"],
    }
    return Written(config=config, quantize=quantize)


def bitsandbytes_rows() -> Written:
    def quantize(shape, generator):
        codes = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
        maxima = torch.rand(shape[0], generator=generator)
        tensors = {"weight": codes, "SCB": maxima, "weight_format": torch.tensor(0).to(torch.uint8)}
        return tensors, codes * maxima[:, None] * (1 / 127)

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    return Written(config=config, quantize=quantize)


FORMATS: dict[str, Written] = {
    "gptq": gptq(),
    "gptq_symmetric": gptq(symmetric=True),
    "gptq_v2": gptq(version="gptq_v2"),
    "gptq_act_order": gptq(act_order=True),
    "gptq_one_group": gptq(group_size=-1),
    "gptq_2_bits": gptq(2),
    "gptq_3_bits": gptq(3),
    "gptq_3_bits_gptqmodel": gptq(3, tool="gptqmodel:2.1.0"),
    "gptq_3_bits_v2": gptq(3, version="gptq_v2"),
    "gptq_8_bits": gptq(8),
    "gptq_8_bits_symmetric": gptq(8, symmetric=True),
    "gptq_bfloat16": gptq(symmetric=True, dtype=torch.bfloat16),
    "awq": awq(),
    "bitsandbytes_nf4": bitsandbytes_blocks(),
    "bitsandbytes_fp4_nested": bitsandbytes_blocks("fp4", nested=True),
    "bitsandbytes_int8": bitsandbytes_rows(),
    "fp8_blocks": fp8_blocks(),
    "fp8_uneven_blocks": fp8_blocks(block=24),
    "fp8_tensor": fp8_tensor(),
    "packed_4_bits": packed_integers(),
    "packed_4_bits_zeros": packed_integers(symmetric=False),
    "packed_8_bits_rows": packed_integers(8, -1),
    "packed_3_bits": packed_integers(3),
    "rows_of_integers": rows_of_integers(),
    "rows_of_floats": rows_of_floats(),
    "nvfp4": fp4("nvfp4"),
    "mxfp4": fp4("mxfp4"),
}


def write(plain: Path, folder: Path, written: Written, seed: int = 5) -> tuple[Path, Path]:
    """Quantize the linear layers of the checkpoint `plain` with random codes.

    Returns the quantized checkpoint, and an unquantized checkpoint with the same values.
    """
    generator = torch.Generator().manual_seed(seed)
    quantized, values = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        values[name] = weight
        if weight.ndim != 2 or any(part in name for part in written.skipped):
            quantized[name] = weight
            continue
        tensors, values[name] = written.quantize(tuple(weight.shape), generator)
        values[name] = values[name].float()
        prefix = name.removesuffix("weight")
        quantized |= {f"{prefix}{leaf}": tensor for leaf, tensor in tensors.items()}
    folders = []
    for kind, tensors in (("quantized", quantized), ("values", values)):
        target = folder / kind
        shutil.copytree(plain, target)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, target / "model.safetensors")
        folders.append(target)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = written.config
    (folders[0] / "config.json").write_text(json.dumps(config))
    return folders[0], folders[1]
