"""A fake model format: a model file contains only a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from dovetail.interfaces.model_format import ModelDescription, ModelFormat
from dovetail.model_files import MIB, read_json_object


class FakeModelFormat(ModelFormat):
    """Reads a JSON file with the fields of config.json. The file contains no weights."""

    examples: ClassVar[Mapping[str, bytes]] = {
        "model.fake": b'{"architectures": ["FakeModel"], "vocab_size": 256}'
    }

    def describe(self, path: Path) -> ModelDescription:
        """Return the description in the file."""
        return ModelDescription(
            config=read_json_object(path, max_bytes=MIB),
            load_format="dummy",
            tokenizer_mode="huggingface",
        )
