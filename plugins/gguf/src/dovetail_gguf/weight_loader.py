"""The weight loader `gguf`: fills a model from the tensors of a GGUF file.

A layer that computes with quantized blocks (`BlockWeight`) receives the unchanged blocks of the
mapped file; all other weights are dequantized, some rows at a time. The converter of llama.cpp
permutes the rows of query and key projections of some architectures; this module restores their
order.
Dimensions: O output features, I input features, B bytes of a row.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import ClassVar

import torch
from torch import nn

from dovetail.errors import ModelError, WeightError
from dovetail.interfaces.weight_loader import WeightLoader, WeightLoaderContext
from dovetail_gguf.dequantize import dequantize, plain_tensor
from dovetail_gguf.model_config import get_architecture, read_config
from dovetail_gguf.open_files import open_file
from dovetail_gguf.reader import GGUFFile, TensorInfo, find_file
from dovetail_gguf.tensor_names import IGNORED, to_model_name
from dovetail_torch.layers import BlockWeight
from dovetail_torch.progress_bar import progress_bar
from dovetail_torch.weights import Assignment, Target, build_weight_table
from dovetail_torch.weights.block_plan import BLOCK_PLAN
from dovetail_torch.weights.fingerprint import FINGERPRINT, fingerprint_files

logger = logging.getLogger(__name__)


class GGUFLoader(WeightLoader):
    """Reads one file or all parts of a split model. The files are memory-mapped."""

    provides: ClassVar[frozenset[str]] = frozenset({BLOCK_PLAN, FINGERPRINT})

    def __init__(self, context: WeightLoaderContext) -> None:
        """Store `context`. No file is read."""
        self.context = context

    def fingerprint(self) -> str:
        """Return the files' fingerprint. See `dovetail_torch.weights.fingerprint`."""
        file = self._open()
        starts = dict.fromkeys(file.paths, 0)
        for info in file.tensors.values():
            starts[info.path] = min(starts[info.path] or info.offset, info.offset)
        return fingerprint_files(file.paths, starts)

    def plan(self, model: nn.Module) -> None:
        """Set the block types of the linear layers. See `dovetail_torch.weights.block_plan`."""
        file = self._open()
        for name, target in _choose(file, model).items():
            info = file.tensors[name]
            if isinstance(target, Assignment) and _lends(info, target):
                target.expect_blocks(info.type.name)

    @torch.no_grad()
    def load(self, model: nn.Module) -> int:
        """Fill all parameters and return the bytes read.

        Raises WeightError, before anything is written, for tensors that are missing, unexpected or
        of another shape.
        """
        file = self._open()
        chosen = _choose(file, model)
        permuted = _permuted_heads(file)
        dequantized: Counter[str] = Counter()
        num_bytes = 0
        with progress_bar("Loading weights", len(chosen), shown=self.context.progress) as advance:
            for name, target in chosen.items():
                info = file.tensors[name]
                num_heads = permuted.get(_leaf(to_model_name(name)), 0)
                if info.type.is_plain:
                    _fill_plain(file, info, target, num_heads)
                elif _fill_blocks(file, info, target, num_heads):
                    dequantized[info.type.name] += 1
                num_bytes += info.num_bytes
                advance()
        if dequantized:
            counts = ", ".join(f"{count} of type {name}" for name, count in dequantized.items())
            logger.info("%s: dequantized tensors: %s.", file.path.name, counts)
        return num_bytes

    def _open(self) -> GGUFFile:
        try:
            return open_file(find_file(self.context.model_dir))
        except ModelError as error:
            raise WeightError(str(error)) from None


def _leaf(name: str) -> str:
    """Return the two components before the parameter name, such as "self_attn.q_proj"."""
    return ".".join(name.split(".")[-3:-1])


def _permuted_heads(file: GGUFFile) -> dict[str, int]:
    """Return the number of heads by name, for projections with permuted rows."""
    _, architecture = get_architecture(file)
    if not architecture.permutes_rotary:
        return {}
    config = read_config(file)
    return {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }


def restore_rows(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the converter's permutation of the rows of a query or key projection.

    In the file, the rows of each head alternate between its first and its second half.
    rows: [O, ...], weights, biases or blocks. Returns a copy.
    """
    size = rows.shape[0] // num_heads
    halves = rows.reshape(num_heads, size // 2, 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def permute_rows(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Permute rows as the converter does: the inverse of `restore_rows`. Returns a copy."""
    size = rows.shape[0] // num_heads
    halves = rows.reshape(num_heads, 2, size // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _choose(file: GGUFFile, model: nn.Module) -> dict[str, Target]:
    """Return a map of tensor name in the file to targets, for the tensors that must be read."""
    names = {to_model_name(name): name for name in file.tensors if name not in IGNORED}
    chosen = build_weight_table(model).select(names.keys(), str(file.path))
    targets = {names[name]: target for name, target in chosen.items()}
    for name, target in targets.items():
        target.check(file.tensors[name].shape, str(file.tensors[name].path))
    return targets


def _lends(info: TensorInfo, target: Assignment) -> bool:
    """Return whether the linear layers use the tensor's blocks without a conversion."""
    return not info.type.is_plain and target.takes_blocks(info.type.name, info.type.num_values)


def _fill_plain(file: GGUFFile, info: TensorInfo, target: Target, num_heads: int) -> None:
    """Write values that are stored one by one.

    num_heads: number of heads if the rows are permuted, otherwise 0.
    """
    values = plain_tensor(file.data(info.name), info.type, info.shape)
    permuted = _restore(values, info, num_heads)
    target.fill(permuted, is_mapped=not num_heads)


def _fill_blocks(file: GGUFFile, info: TensorInfo, target: Target, num_heads: int) -> bool:
    """Pass blocks to linear layers, or dequantize them. Return whether any are dequantized."""
    memory = file.data(info.name)
    blocks_OB = torch.frombuffer(memory, dtype=torch.uint8).view(-1, info.row_bytes)
    blocks_OB = _restore(blocks_OB, info, num_heads)
    if isinstance(target, Assignment) and _lends(info, target):
        is_mapped = not num_heads
        target.lend_blocks(
            BlockWeight(type_name=info.type.name, rows_OB=blocks_OB, is_mapped=is_mapped)
        )
        if not target.is_table:
            return False
    target.fill(dequantize(blocks_OB, info.type, target.target.dtype).view(info.shape))
    return True


def _restore(rows: torch.Tensor, info: TensorInfo, num_heads: int) -> torch.Tensor:
    """Return the rows in the model's order. Raise WeightError if num_heads does not divide them."""
    if not num_heads:
        return rows
    if info.shape[0] % (2 * num_heads):
        raise WeightError(
            f"{info.path}: the tensor {info.name} has {info.shape[0]} rows, which cannot be "
            f"divided among {num_heads} attention heads."
        )
    return restore_rows(rows, num_heads)
