"""The model format `gguf`: describes the model in a GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dovetail.errors import ModelError
from dovetail.interfaces import ModelDescription, ModelFormat
from dovetail.model_files import file_exists, read_json_object
from dovetail_gguf.model_config import read_config, read_generation_config, read_pooling
from dovetail_gguf.open_files import open_file
from dovetail_gguf.reader import first_part

METHOD = "gguf"
"""The common name of the quantization, the weight loader and the tokenizer plugin."""
GENERATION_FILE = "generation_config.json"
"""A file next to the GGUF file; `dovetail quantize` writes it."""


class GGUFFormat(ModelFormat):
    """Reads the metadata and the list of tensors, but no weights.

    A generation_config.json next to the file is read, too. Token ids in the file take precedence.
    """

    def describe(self, path: Path) -> ModelDescription:
        """Return the description. For an invalid file, raise a ModelError that names it."""
        file = open_file(path)
        types = Counter(info.type.name for info in file.tensors.values() if not info.type.is_plain)
        quantization = {}
        if types:
            quantization = {
                "method": METHOD,
                "source": f"the tensor types of {path.name}",
                "config": {"types": dict(types)},
            }
        try:
            config = read_config(file)
        except ModelError:
            raise
        except (ArithmeticError, ValueError) as error:
            raise ModelError(f"{path} is damaged: {error}.") from None
        generation, notes = read_generation_config(file), []
        beside = path.with_name(GENERATION_FILE)
        if file_exists(beside):
            generation = {**read_json_object(beside), **generation}
            notes = [f"{beside} has the sampling defaults of {path.name}."]
        return ModelDescription(
            config=config,
            generation_config=generation,
            load_format=METHOD,
            tokenizer_mode=METHOD,
            quantization=quantization,
            notes=tuple(notes),
            pooling=read_pooling(file),
        )

    def choose(self, paths: Sequence[Path]) -> Path | None:
        """Return the only file, or the first part of the only split model."""
        return super().choose(paths) or first_part(list(paths))
