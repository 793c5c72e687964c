"""Code that the formats share: the tensors of a module, and checks of shapes and config fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dovetail.errors import WeightError
from dovetail.value_checks import shorten
from dovetail_quantized_checkpoints.stored_weight import StoredExperts, StoredWeight
from dovetail_torch.weights.checkpoint_files import WeightEntry

Read = Callable[[str], torch.Tensor]
"""Returns a memory-mapped tensor of the checkpoint by its name."""


@dataclass(frozen=True, kw_only=True)
class ModuleTensors:
    """The tensors of one linear layer in the checkpoint.

    prefix: the common prefix of their names, usually the module's name and a dot. entries: the
    header entries by the part of the name after the prefix.
    """

    prefix: str
    entries: Mapping[str, WeightEntry]

    def entry(
        self, leaf: str, dtypes: Collection[str], *, num_dims: int | None = None
    ) -> WeightEntry:
        """Return a tensor's entry. Raise WeightError if it is missing, or of a different dtype."""
        result = self.entries.get(leaf)
        name = f"{self.prefix}{leaf}"
        if result is None:
            present = next(iter(self.entries.values()))
            raise WeightError(
                f"{present.path}: {present.name} is quantized, but {name} is missing: the "
                "checkpoint is incomplete"
            )
        if result.dtype not in dtypes or (num_dims is not None and len(result.shape) != num_dims):
            raise self.error(
                f"has the dtype {result.dtype} and the shape {list(result.shape)}; expected "
                f"{' or '.join(sorted(dtypes))} with {num_dims or 'any number of'} dimensions",
                leaf,
            )
        return result

    def expect_shape(self, leaf: str, shape: tuple[int, ...]) -> None:
        """Raise WeightError if a tensor has a different shape."""
        actual = self.entries[leaf].shape
        if actual != shape:
            raise self.error(
                f"has the shape {list(actual)}, but the other tensors of the layer require "
                f"{list(shape)}",
                leaf,
            )

    def error(self, problem: str, leaf: str) -> WeightError:
        """Return an error about one tensor of the module."""
        path = next(iter(self.entries.values())).path
        return WeightError(f"{path}: weight {self.prefix}{leaf} {problem}")


class Format(ABC):
    """Reads the weights of one quantization method. Created from `quantization_config`.

    marks: suffixes of tensor names that occur only in quantized modules. quantizes_all: whether
    every linear layer that the configuration does not exclude by name is quantized.
    """

    marks: ClassVar[tuple[str, ...]]
    quantizes_all: bool = True
    leaves: ClassVar[frozenset[str]]
    """The last name parts of all tensors that belong to a quantized weight, such as "qweight"."""

    def split(self, name: str) -> tuple[str, str] | None:
        """Split the name of a tensor into (prefix, leaf). Return None for other leaves."""
        prefix, dot, leaf = name.rpartition(".")
        return (f"{prefix}{dot}", leaf) if leaf in self.leaves else None

    def weight_name(self, prefix: str) -> str:
        """Return the name that the weight of a module has in the model."""
        return f"{prefix}weight"

    @abstractmethod
    def shape(self, module: ModuleTensors, read: Read) -> tuple[int, ...]:
        """Return the shape of the dequantized weight: (O, I) for a linear layer.

        Raises WeightError if tensors are missing, have different shapes or dtypes, or contradict
        the configuration.
        """

    @abstractmethod
    def open(self, module: ModuleTensors, read: Read) -> StoredWeight | StoredExperts:
        """Return the quantized weight of a module. Called after `shape`."""


def choice(table: Mapping[str, Any], field: str, allowed: Collection[Any], default: Any) -> Any:
    """Return the value of a field. Raise WeightError unless it is one of the allowed values."""
    value = table.get(field)
    value = default if value is None else value
    if isinstance(value, str):
        value = value.lower()
    if not any(value == item and type(value) is type(item) for item in allowed):
        names = ", ".join(map(repr, allowed))
        raise WeightError(
            f"quantization_config: {field} is {shorten(value)}; supported: {names}. Use another "
            "checkpoint of the model"
        )
    return value


def group_count(
    module: ModuleTensors,
    leaf: str,
    count: int,
    num_inputs: int,
    group_sizes: Collection[int] = (),
    *,
    is_indexed: bool = False,
) -> int:
    """Check the number of groups in a tensor, `count`, and return it.

    group_sizes: the sizes that the configuration states for the modules, -1 if a row is one group;
    empty if it states none. is_indexed: whether another tensor states the group of each feature;
    then the last group may have fewer features than the others.
    Raises WeightError if `count` contradicts the sizes, or if groups of consecutive features would
    have different sizes.
    """
    if not 0 < count <= num_inputs:
        raise module.error(f"has {count} groups for {num_inputs} features", leaf)
    if group_sizes:
        sizes = {num_inputs if size == -1 else size for size in group_sizes}
        fitting = {size for size in sizes if count == -(-num_inputs // size)}
        stated = f"the group_size {' or '.join(map(str, sorted(group_sizes)[:9]))}"
        if not fitting:
            raise module.error(
                f"has {count} groups for {num_inputs} features, but quantization_config states "
                f"{stated}",
                leaf,
            )
        if count > 1 and not is_indexed and num_inputs // count not in fitting:
            raise module.error(
                f"has {count} groups for {num_inputs} features, which are not a multiple of "
                f"{stated} in quantization_config, and no tensor states the group of each feature",
                leaf,
            )
    elif num_inputs % count and not is_indexed:
        raise module.error(f"has {count} groups, which do not divide {num_inputs} features", leaf)
    return count


def read_group_size(table: Mapping[str, Any], field: str = "group_size") -> int | None:
    """Return the stated group size, or None. Raise WeightError if it is invalid."""
    size = table.get(field)
    if size is None or (type(size) is int and (size == -1 or 0 < size < 1 << 31)):
        return size
    raise WeightError(
        f"quantization_config: {field} is {shorten(size)}; it must be a positive integer or -1"
    )
