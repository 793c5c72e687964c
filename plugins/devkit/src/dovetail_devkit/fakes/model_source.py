"""A fake model source that writes small model directories."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from dovetail.errors import ModelError
from dovetail.interfaces.model_source import LocalModel, ModelSource, ModelSourceContext

_NAME = re.compile(r"[a-z0-9]{1,20}")


class FakeModelSource(ModelSource):
    """Provides a model directory for each argument of lower-case letters and digits."""

    examples: ClassVar[tuple[str, ...]] = ("small", "large")

    def __init__(self, context: ModelSourceContext) -> None:
        self._folder = context.cache_dir / "fake"
        self._report = context.report

    def find(self, argument: str) -> Path | None:
        """Return the model directory if it exists, else None."""
        if not _NAME.fullmatch(argument):
            raise ModelError(
                f"{argument!r} is not a valid name; use up to 20 lower-case letters and digits."
            )
        path = self._folder / argument
        return path if path.is_dir() else None

    def fetch(self, argument: str) -> Path:
        """Return the model directory. Write it if it is missing."""
        if self.find(argument) is None:
            self._report(f"writing {argument}")
            path = self._folder / argument
            path.mkdir(parents=True)
            config = {"architectures": ["FakeModel"], "vocab_size": 256}
            (path / "config.json").write_text(json.dumps(config))
        return self._folder / argument

    def local_models(self) -> Sequence[LocalModel]:
        """Return the model directories that exist."""
        paths = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        return [LocalModel(name=f"fake:{path.name}", path=path, license="MIT") for path in paths]
