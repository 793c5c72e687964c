"""The `quantized_safetensors` weight loader.

A layer that computes with quantized blocks receives blocks with the same values, if a block type
can represent them; every other quantized weight is dequantized, some rows at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import ClassVar

import torch
from torch import nn

from dovetail.config.quantized_checkpoints import capability_of
from dovetail.errors import WeightError
from dovetail.interfaces.weight_loader import WeightLoader, WeightLoaderContext
from dovetail_quantized_checkpoints.checkpoint import (
    FORMATS,
    Checkpoint,
    open_checkpoint,
    read_format,
)
from dovetail_quantized_checkpoints.stored_weight import StoredExperts, StoredWeight
from dovetail_torch.layers import BlockWeight
from dovetail_torch.progress_bar import progress_bar
from dovetail_torch.weights import Assignment, MappedAssignment, Target
from dovetail_torch.weights.block_plan import BLOCK_PLAN
from dovetail_torch.weights.checkpoint_files import find_weight_files
from dovetail_torch.weights.checkpoint_tensors import (
    CHECKPOINT_TENSORS,
    CheckpointTensor,
    MappedFiles,
)
from dovetail_torch.weights.fingerprint import FINGERPRINT, fingerprint_files

logger = logging.getLogger(__name__)


class QuantizedSafetensorsLoader(WeightLoader):
    """Reads quantized weights of safetensors files. The files are memory-mapped."""

    example_files: ClassVar[str] = f"checkpoints quantized with {', '.join(FORMATS)}"
    provides: ClassVar[frozenset[str]] = frozenset(
        {BLOCK_PLAN, CHECKPOINT_TENSORS, FINGERPRINT, *map(capability_of, FORMATS)}
    )

    def __init__(self, context: WeightLoaderContext) -> None:
        """Store `context`, without reading files."""
        self.context = context

    def fingerprint(self) -> str:
        """Return a hash of the files' fingerprint and of the quantization's configuration.

        The configuration decides which weights the files represent. See
        `dovetail_torch.weights.fingerprint`.
        """
        quantization = read_format(self.context)
        parts = [
            fingerprint_files(find_weight_files(self.context.model_dir)),
            quantization.method,
            quantization.table,
        ]
        # repr: values that hf_overrides can hold, but a JSON file cannot
        text = json.dumps(parts, default=repr)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def plan(self, model: nn.Module) -> None:
        """Set the block types of the linear layers. See `dovetail_torch.weights.block_plan`.

        Reads the scales and zero points, a few per cent of the weights.
        """
        with open_checkpoint(self.context) as checkpoint:
            for name, target in checkpoint.choose(model).items():
                if name in checkpoint.modules:
                    _announce(checkpoint.open(name), target)

    @torch.no_grad()
    def load(self, model: nn.Module) -> int:
        """Fill all parameters and return the bytes read.

        Raises WeightError, before anything is written, for tensors that are missing, unexpected or
        of a different shape or dtype.
        """
        dequantized: Counter[str] = Counter()
        with open_checkpoint(self.context) as checkpoint:
            chosen = checkpoint.choose(model)
            for name in chosen.keys() & checkpoint.modules:
                checkpoint.open(name)  # raises if scales or groups are wrong
            with progress_bar("Loading weights", len(chosen), shown=self.context.progress) as tick:
                num_bytes = _fill_all(checkpoint, chosen, dequantized, tick)
        for dtype, count in dequantized.items():
            logger.info(
                "%s: %d quantized weights were dequantized to %s, which needs more memory: no "
                "kernel computes with their layout.",
                self.context.model_dir.name,
                count,
                dtype,
            )
        return num_bytes

    @contextmanager
    def checkpoint_tensors(
        self, make_model: Callable[[], nn.Module | None]
    ) -> Iterator[list[CheckpointTensor]]:
        """Yield all tensors, dequantized. See `dovetail_torch.weights.checkpoint_tensors`.

        Raises WeightError, before a value is dequantized, for a weight that cannot be dequantized.
        """
        with open_checkpoint(self.context) as checkpoint, closing(MappedFiles()) as files:
            yield list(checkpoint.tensors(files, make_model()))


def _block_type(stored: StoredWeight, target: Assignment) -> str | None:
    """Return the block type in which `target`'s linear layers can use the weight, or None."""
    name = stored.block_type
    return name if name is not None and target.takes_blocks(name, 32) else None


def _announce(stored: StoredWeight | StoredExperts, target: Target) -> None:
    """Announce blocks to the linear layers if they can use the weight as blocks."""
    if isinstance(stored, StoredExperts):
        return
    if isinstance(target, Assignment) and (name := _block_type(stored, target)) is not None:
        target.expect_blocks(name)


def _fill_all(
    checkpoint: Checkpoint,
    chosen: Mapping[str, Target],
    dequantized: Counter[str],
    tick: Callable[[], None],
) -> int:
    """Fill the targets. Count dequantized weights by their dtype. Return the bytes read."""
    num_bytes = 0
    for name, target in chosen.items():
        if name not in checkpoint.modules:
            num_bytes += target.fill(checkpoint.read(name), is_mapped=True)
        else:
            num_bytes += checkpoint.num_bytes(name)
            if not _fill(checkpoint.open(name), target):
                dequantized[str(target.target.dtype).removeprefix("torch.")] += 1
        tick()
    return num_bytes


def _fill(stored: StoredWeight | StoredExperts, target: Target) -> bool:
    """Write a weight to its target, as blocks if possible, otherwise dequantized.

    Return whether blocks were used.
    """
    if isinstance(stored, StoredExperts):
        if not isinstance(target, MappedAssignment) or not target.layout.stacked:
            raise WeightError(
                f"weight {target.name} contains experts, but the model has no experts there: "
                "config.json and the weights do not match"
            )
        for expert, own in enumerate(target.experts()):
            own.fill(stored.values_of(expert)[None])
        return False
    if isinstance(target, Assignment) and (name := _block_type(stored, target)) is not None:
        target.share_blocks(BlockWeight(type_name=name, rows_OB=stored.blocks(), is_mapped=False))
        if not target.is_table:
            return True
    target.fill(stored.dequantize(target.target.dtype))
    return False
