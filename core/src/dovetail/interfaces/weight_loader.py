"""The contract of a weight loader: it reads a model's parameters from a checkpoint format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class WeightLoaderContext:
    """Constructor arguments of a weight loader.

    model_dir: the model directory or the model file. progress: show a progress bar if the output
    is a terminal. seed: the seed of loaders that generate random weights. quantization: "method",
    "source" and "config" of a quantized checkpoint with the user's overrides applied, read-only;
    empty if it is not quantized; None if the loader must read the model's files to find out.
    options: validated options of the loader plugin.
    """

    model_dir: Path
    seed: int = 0
    progress: bool = True
    quantization: Mapping[str, Any] | None = None
    options: Mapping[str, object] = field(default_factory=dict)


class WeightLoader(ABC):
    """Fills the parameters of a model.

    Contract: The loader streams weights; it never holds a second copy of the model in memory.
    `load` writes every parameter and persistent buffer exactly once.
    """

    CONTRACT: ClassVar[str] = "weight_loader"
    CONTRACT_VERSION: ClassVar[str] = "0.2"

    @abstractmethod
    def __init__(self, context: WeightLoaderContext) -> None:
        """Store `context`. Do not read files yet."""

    @abstractmethod
    def load(self, model: nn.Module) -> int:
        """Fill all parameters in place and return the number of bytes read.

        Raises WeightError, naming the file and the weight, for a missing shard, a truncated file, a
        wrong shape, and a missing or unexpected weight.
        """
