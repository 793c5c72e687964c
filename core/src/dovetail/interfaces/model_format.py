"""The contract of a model format: it reads the description of a single-file model.

A file whose name ends in `.NAME` is read by the model format plugin `NAME`. Model directories with
config.json are read by the engine itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The contents of a model file, without weights.

    config: like config.json of a model directory, with "architectures". generation_config: like
    generation_config.json. load_format, tokenizer_mode: the plugins that read weights and tokenizer
    of the file. quantization: {"method", "source", "config"} if the weights are quantized; a linear
    method that declares "quantization.METHOD" computes with them. dequantizes: whether the weight
    loader can fill plain weights if there is no such linear method. notes: sentences for the log.
    pooling: how the hidden states of a text become one vector: "last", "mean" or "cls"; "" if they
    do not; None if the file does not state it. With a value, the engine pools by default.
    """

    config: Mapping[str, Any]
    load_format: str
    tokenizer_mode: str
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)
    dequantizes: bool = True
    notes: tuple[str, ...] = ()
    pooling: str | None = None


class ModelFormat(ABC):
    """Reads the description of model files.

    Contract: Time and memory are bounded for any file. Weights are not read.
    """

    CONTRACT: ClassVar[str] = "model_format"
    CONTRACT_VERSION: ClassVar[str] = "0.2"

    def __init__(self) -> None:  # noqa: B027  # optional to override
        """Create the format.

        If the plugin has an options model, this method must accept the keyword `options=None`: the
        validated options as a mapping.
        """

    @abstractmethod
    def describe(self, path: Path) -> ModelDescription:
        """Return the description of the model in the file `path`.

        Raises ModelError, naming the file, for a file that is missing, damaged or not supported.
        """

    def choose(self, paths: Sequence[Path]) -> Path | None:
        """Return the file to load as the model of a directory, or None if it is ambiguous.

        paths: the files in the directory with this format's suffix, sorted; at least one.
        """
        return paths[0] if len(paths) == 1 else None
