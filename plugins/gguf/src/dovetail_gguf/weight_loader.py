"""The weight loader `gguf`: fills a model from the tensors of a GGUF file.

A layer that computes with quantized blocks (`BlockWeight`) receives the unchanged blocks of the
mapped file; all other weights are dequantized, some rows at a time. `tensor_mappings` describes the
names and the order of rows in the file.
Dimensions: O output features, I input features, B bytes of a row.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from dovetail.errors import ModelError, WeightError
from dovetail.interfaces import WeightMapping
from dovetail.interfaces.weight_loader import WeightLoader, WeightLoaderContext
from dovetail_gguf.dequantize import dequantize, plain_tensor
from dovetail_gguf.encoders.architecture_names import ENCODER_NAMES
from dovetail_gguf.encoders.configuration import has_head
from dovetail_gguf.encoders.weight_names import encoder_mappings
from dovetail_gguf.metadata_fields import Fields
from dovetail_gguf.model_config import get_architecture, read_architecture, read_config
from dovetail_gguf.open_files import open_file
from dovetail_gguf.reader import GGUFFile, TensorInfo, find_file
from dovetail_gguf.state_layers import decay_logarithms, has_offset, is_decay, is_reshaped
from dovetail_gguf.tensor_names import tensor_mappings
from dovetail_torch.layers import BlockWeight
from dovetail_torch.progress_bar import progress_bar
from dovetail_torch.weights import Assignment, MappedAssignment, Target, build_weight_table
from dovetail_torch.weights.block_plan import BLOCK_PLAN
from dovetail_torch.weights.fingerprint import FINGERPRINT, fingerprint_files
from dovetail_torch.weights.weight_names import PLAIN

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
            for part in _parts(target):
                if _can_share_blocks(info, part):
                    part.expect_blocks(info.type.name)

    @torch.no_grad()
    def load(self, model: nn.Module) -> int:
        """Fill all parameters and return the bytes read.

        Raises WeightError, before anything is written, for tensors that are missing, unexpected or
        of another shape.
        """
        file = self._open()
        chosen = _choose(file, model)
        offset = _norm_offset(file)
        dequantized: Counter[str] = Counter()
        num_bytes = 0
        with progress_bar("Loading weights", len(chosen), shown=self.context.progress) as advance:
            for name, target in chosen.items():
                info = file.tensors[name]
                if info.type.is_plain:
                    _fill_plain(file, info, target, offset if has_offset(name) else 0.0)
                elif _fill_blocks(file, info, target):
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
    """Return the targets of the tensors that must be read, by the tensor's name in the file."""
    table = build_weight_table(model, _mappings(file, model))
    targets = table.select(file.tensors.keys(), str(file.path))
    for name, target in targets.items():
        info = file.tensors[name]
        target.check(_shape(info, target), str(info.path))
        if is_decay(name) and not info.type.is_plain:
            raise WeightError(
                f"{info.path}: tensor {name} has the type {info.type.name}; it must be F32"
            )
    return targets


def _mappings(file: GGUFFile, model: nn.Module) -> list[WeightMapping]:
    """Return the mappings of the tensors of the file to the modules of `model`.

    A decoder that pools does not use the head of its file.
    """
    name = read_architecture(file)
    if name in ENCODER_NAMES:
        return encoder_mappings(name, has_head=has_head(Fields(file, name)))
    mappings = tensor_mappings(get_architecture(file)[1], read_config(file), file.tensors.keys())
    return mappings if hasattr(model, "lm_head") else [WeightMapping(source="output"), *mappings]


def _norm_offset(file: GGUFFile) -> float:
    """Return the number that the converter adds to the weights of norms."""
    is_encoder = read_architecture(file) in ENCODER_NAMES
    return 0.0 if is_encoder else get_architecture(file)[1].norm_offset


def _shape(info: TensorInfo, target: Target) -> tuple[int, ...]:
    """Return the shape of a tensor. Files may omit outer dimensions of size 1."""
    if is_reshaped(info.name) and math.prod(info.shape) == math.prod(target.shape):
        return target.shape
    return (1,) * (len(target.shape) - len(info.shape)) + info.shape


def _parts(target: Target) -> tuple[Assignment, ...]:
    """Return the parts of a target that linear layers may use as blocks."""
    if isinstance(target, Assignment):
        return (target,)
    return target.parts if isinstance(target, MappedAssignment) else ()


def _can_share_blocks(info: TensorInfo, target: Assignment) -> bool:
    """Return whether the linear layers can use the tensor's blocks without conversion."""
    return not info.type.is_plain and target.takes_blocks(info.type.name, info.type.num_values)


def _fill_plain(file: GGUFFile, info: TensorInfo, target: Target, offset: float) -> None:
    """Write unquantized values. offset: was added by the converter and is subtracted again."""
    values = plain_tensor(file.data(info.name), info.type, _shape(info, target))
    if is_decay(info.name):
        values = decay_logarithms(values, f"{info.path}: tensor {info.name}")
        target.fill(values)
    else:
        target.fill(values - offset if offset else values, is_mapped=not offset)


def _fill_blocks(file: GGUFFile, info: TensorInfo, target: Target) -> bool:
    """Pass blocks to linear layers, or dequantize them. Return whether any are dequantized."""
    memory = file.data(info.name)
    blocks_OB = torch.frombuffer(memory, dtype=torch.uint8).view(-1, info.row_bytes)
    if not isinstance(target, MappedAssignment):
        return _fill_part(info, target, blocks_OB, is_mapped=True)
    if target.layout.transposed:
        values = dequantize(blocks_OB, info.type, target.target.dtype)
        target.fill(values.view(target.shape))
        return True
    # In other layouts, the rows are a copy in another order.
    is_mapped = replace(target.layout, stacked=0) == PLAIN
    results = [
        _fill_part(info, part, piece_OB, is_mapped=is_mapped)
        for part, piece_OB in zip(target.parts, target.pieces(blocks_OB), strict=True)
    ]
    return any(results)


def _is_whole(target: Assignment, device: torch.device) -> bool:
    """Return whether the whole weight is contiguous in the memory of `device`."""
    weight = target.target
    return weight.shape == target.shape and weight.is_contiguous() and weight.device == device


def _fill_part(
    info: TensorInfo, target: Target, blocks_OB: torch.Tensor, *, is_mapped: bool
) -> bool:
    """Pass or dequantize the blocks of one weight of the model. See `_fill_blocks`."""
    if isinstance(target, Assignment) and _can_share_blocks(info, target):
        target.share_blocks(
            BlockWeight(type_name=info.type.name, rows_OB=blocks_OB, is_mapped=is_mapped)
        )
        if not target.is_table:
            return False
    if isinstance(target, Assignment) and _is_whole(target, blocks_OB.device):
        dequantize(blocks_OB, info.type, out_OI=target.target.view(len(blocks_OB), -1))
        target.finish()
        return True
    values = dequantize(blocks_OB, info.type, target.target.dtype)
    target.fill(values.view(target.shape))
    return True
