"""The weight loader `gguf`: fills a model from the tensors of a GGUF file.

A layer that computes with quantized blocks (`BlockWeight`) receives them as they are in the mapped
file; all other weights are dequantized, some rows at a time. The converter of llama.cpp permutes
the rows of query and key projections of some architectures; they are restored here.
Legend: O output features, I input features, B bytes of a row.
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
from dovetail_gguf.reader import GGUFFile, TensorInfo, find_file
from dovetail_gguf.tensor_names import IGNORED, to_model_name
from dovetail_torch.weights import Assignment, MappedAssignment, build_weight_table
from dovetail_torch.weights.fingerprint import FINGERPRINT, fingerprint_files
from dovetail_torch.weights.loading_progress import loading_progress

logger = logging.getLogger(__name__)

Target = Assignment | MappedAssignment


class GGUFLoader(WeightLoader):
    """Reads one file or all parts of a split model; the files are memory-mapped."""

    provides: ClassVar[frozenset[str]] = frozenset({FINGERPRINT})

    def __init__(self, context: WeightLoaderContext) -> None:
        """Keep `context`; read nothing yet."""
        self.context = context

    def fingerprint(self) -> str:
        """Return the files' fingerprint; see `dovetail_torch.weights.fingerprint`."""
        return fingerprint_files(self._open().paths)

    @torch.no_grad()
    def load(self, model: nn.Module) -> int:
        """Fill all parameters and return the bytes read.

        Raises WeightError, before anything is written, for tensors that are missing, unexpected or
        of another shape.
        """
        file = self._open()
        names = {to_model_name(name): name for name in file.tensors if name not in IGNORED}
        table = build_weight_table(model)
        chosen = table.select(names.keys(), str(file.path))
        for name, target in chosen.items():
            target.check(file.tensors[names[name]].shape, str(file.tensors[names[name]].path))
        permuted = _permuted_heads(file)
        dequantized: Counter[str] = Counter()
        num_bytes = 0
        with loading_progress(len(chosen), shown=self.context.progress) as advance:
            for name, target in chosen.items():
                info = file.tensors[names[name]]
                if not info.type.is_plain:
                    dequantized[info.type.name] += 1
                _fill(file, info, target, permuted.get(_leaf(name), 0))
                num_bytes += info.num_bytes
                advance()
        if dequantized:
            counts = ", ".join(f"{count} of type {name}" for name, count in dequantized.items())
            logger.info("%s: dequantized tensors: %s.", file.path.name, counts)
        return num_bytes

    def _open(self) -> GGUFFile:
        try:
            return GGUFFile(find_file(self.context.model_dir))
        except ModelError as error:
            raise WeightError(str(error)) from None


def _leaf(name: str) -> str:
    """Return the last two components but the parameter's: "self_attn.q_proj"."""
    return ".".join(name.split(".")[-3:-1])


def _permuted_heads(file: GGUFFile) -> dict[str, int]:
    """Return the number of heads of the projections whose rows are permuted."""
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


def _fill(file: GGUFFile, info: TensorInfo, target: Target, num_heads: int) -> None:
    """Write one tensor to its target. num_heads: of permuted rows, otherwise 0."""
    if num_heads and info.shape[0] % (2 * num_heads):
        raise WeightError(
            f"{info.path}: the tensor {info.name} has {info.shape[0]} rows, which {num_heads} "
            "attention heads cannot share."
        )
    memory = file.data(info.name)
    if info.type.is_plain:
        values = plain_tensor(memory, info.type, info.shape)
        permuted = restore_rows(values, num_heads) if num_heads else values
        target.fill(permuted, is_mapped=not num_heads)
        return
    blocks_OB = torch.frombuffer(memory, dtype=torch.uint8).view(-1, info.row_bytes)
    if num_heads:
        blocks_OB = restore_rows(blocks_OB, num_heads)
    target.fill(dequantize(blocks_OB, info.type, target.target.dtype).view(info.shape))
