"""The contract of a weight loader: it fills a model's parameters from a load format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class WeightLoaderContext:
    """All that a loader is made from.

    progress: show a progress bar where the output is a terminal. seed: for loaders that draw.
    options: the loader plugin's own, validated.
    """

    model_dir: Path
    seed: int = 0
    progress: bool = True
    options: Mapping[str, object] = field(default_factory=dict)


class WeightLoader(ABC):
    """Fills the parameters of a model.

    Contract. Weights are streamed: no second copy of the model in memory. After `load` every
    parameter and persistent buffer has been written exactly once.
    """

    CONTRACT: ClassVar[str] = "weight_loader"
    CONTRACT_VERSION: ClassVar[str] = "0.1"

    @abstractmethod
    def __init__(self, context: WeightLoaderContext) -> None:
        """Keep `context`; read nothing yet."""

    @abstractmethod
    def load(self, model: nn.Module) -> int:
        """Fill all parameters in place and return the bytes read.

        Raises WeightError naming file and weight: missing shard, truncated file, wrong shape,
        missing or unexpected weight.
        """
