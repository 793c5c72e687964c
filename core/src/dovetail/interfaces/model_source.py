"""The contract of a model source: it finds and downloads models by name.

`--model NAME` or `--model NAME:ARGUMENT` selects the source plugin `NAME`, unless a local file or
directory has that name. `--model ORGANIZATION/NAME` is short for `hub:ORGANIZATION/NAME`. A source
without arguments provides one model (`demo`, `smollm2`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from dovetail.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class ModelSourceContext:
    """Constructor arguments of a model source.

    cache_dir: the directory for downloaded models; it may not exist yet. report: a function that
    receives one line of progress at a time. options: validated options of the plugin.
    """

    cache_dir: Path
    report: Callable[[str], None] = lambda line: None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """A model that is on this machine.

    name: the value of the `model` option that selects it. path: a model directory or a model file.
    license: as its package states it, "" if unknown.
    """

    name: str
    path: Path
    license: str = ""


class ModelSource(ABC):
    """Finds models by name and downloads them.

    Contract: Only `fetch` uses a network. No method imports or runs code of a downloaded package.
    After a download that fails or does not match its checksum, `find` still returns None. Several
    processes may fetch the same model at the same time.
    """

    CONTRACT: ClassVar[str] = "model_source"
    CONTRACT_VERSION: ClassVar[str] = "0.1"

    @abstractmethod
    def __init__(self, context: ModelSourceContext) -> None:
        """Store `context`. Do not create files yet."""

    @abstractmethod
    def find(self, argument: str) -> Path | None:
        """Return the model directory or model file, or None if it must be fetched first.

        argument: the text after "NAME:", or "", with "@REVISION" if the `revision` option is set.
        Raises ModelError for an invalid argument.
        """

    def fetch(self, argument: str) -> Path:
        """Return the model directory or model file, after downloading it if it is missing.

        Raises ModelError for an invalid argument, a failed download, a wrong checksum and a full
        disk. The default is for sources that download nothing: it returns the result of `find`.
        """
        path = self.find(argument)
        if path is None:
            raise ModelError(f"The model source {type(self).__name__} has no model {argument!r}.")
        return path

    def local_models(self) -> Sequence[LocalModel]:
        """Return the models of this source that are on this machine."""
        return ()
