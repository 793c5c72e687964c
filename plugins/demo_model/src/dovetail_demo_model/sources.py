"""The model sources `demo`, `demo-draft` and `demo-embedding`: the weights are package data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dovetail.errors import ModelError
from dovetail.interfaces import LocalModel, ModelSource, ModelSourceContext
from dovetail_demo_model import draft_dir, embedding_dir, model_dir

LICENSE = "Apache-2.0"


class DemoSource(ModelSource):
    """The demo model."""

    name = "demo"

    def __init__(self, context: ModelSourceContext) -> None:
        """context: not used, because nothing is downloaded."""

    def find(self, argument: str) -> Path:
        """Return the model directory. Raises ModelError if `argument` is not empty."""
        if argument:
            raise ModelError(f"model={self.name!r} takes no argument, got {argument!r}.")
        return self.directory()

    def local_models(self) -> Sequence[LocalModel]:
        """Return this model as the only entry of the list."""
        return (LocalModel(name=self.name, path=self.directory(), license=LICENSE),)

    def directory(self) -> Path:
        """Return the model directory."""
        return model_dir()


class DraftSource(DemoSource):
    """The draft model: same tokenizer, fewer parameters."""

    name = "demo-draft"

    def directory(self) -> Path:
        """Return the model directory."""
        return draft_dir()


class EmbeddingSource(DemoSource):
    """The embedding model: an encoder with its own tokenizer."""

    name = "demo-embedding"

    def directory(self) -> Path:
        """Return the model directory."""
        return embedding_dir()
