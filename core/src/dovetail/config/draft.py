"""A configuration during resolution: the requested values and the values set so far."""

from __future__ import annotations

from dovetail.interfaces.config_fields import AUTO, ConfigNode, reference_name
from dovetail.interfaces.engine_config import (
    CacheConfig,
    Change,
    ComputeConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from dovetail.interfaces.requested_config import RequestedConfig

_SECTIONS: dict[str, type[ConfigNode]] = {
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "load": LoadConfig,
    "compute": ComputeConfig,
    "model": ModelConfig,
}
"""The classes of the sections whose fields a resolution can set."""

_OF_MODEL = ("model.dtype", "model.max_model_len", "model.tokenizer_mode")
"""The fields of the `model` section that do not come from the checkpoint."""
_CACHE_SIZES = ("cache.kv_cache_memory_bytes", "cache.num_gpu_blocks_override")
_LEFT_TO_WORKERS = (
    "parallel.worker_cls",
    "compute.attention_backend",
    "compute.linear_method",
    "compute.ops",
    "compute.compile_backend",
    "compute.compile_cache",
)
"""Fields whose values are selected only where they are used, such as plugins. If the user left such
a field open, its resolved value is None."""


class Draft:
    """The requested values and the values that replaced them, with the reason of each change.

    paths: the fields that may be set, as "section.field". open: the fields that the user left open,
    even if they have been set since.
    """

    def __init__(self, requested: RequestedConfig) -> None:
        self.requested = requested
        self._values: dict[str, object] = {}
        self._changes: list[Change] = []
        paths = [f"{name}.{field}" for name in _SECTIONS for field in self._fields(name)]
        self.paths = [path for path in paths if path in _OF_MODEL or not path.startswith("model.")]
        left = {path for path in self.paths if self.get(path) in (None, AUTO)}
        if not left.issuperset(_CACHE_SIZES):
            # Both options set the size of the cache: if the user set one, the other is not open.
            left.difference_update(_CACHE_SIZES)
        self.open = frozenset(left)

    def section(self, name: str) -> ConfigNode:
        """Return a section of the requested configuration."""
        section: ConfigNode = getattr(self.requested, name)
        return section

    def get(self, path: str) -> object:
        """Return the current value of the field at `path`."""
        if path in self._values:
            return self._values[path]
        name, field = path.split(".")
        return getattr(self.section(name), field)

    def count(self, path: str) -> int | None:
        """Return the value of an integer field, or None while it is open."""
        value = self.get(path)
        return value if isinstance(value, int) else None

    def put(self, path: str, value: object, reason: str) -> None:
        """Set a value and record the reason, unless the field already has that value."""
        before = self.get(path)
        if before == value:
            return
        self._values[path] = value
        self._changes.append(
            Change(
                field=path,
                before=reference_name(before),
                after=reference_name(value),
                reason=reason,
            )
        )

    def fill(self, path: str, value: object, reason: str) -> None:
        """Set a value if the field is open."""
        if self.get(path) in (None, AUTO):
            self.put(path, value, reason)

    def finish(self) -> EngineConfig:
        """Check the resolved configuration and return it."""
        sections: dict[str, object] = {}
        for name, cls in _SECTIONS.items():
            values = {field: self._resolved(f"{name}.{field}") for field in self._fields(name)}
            sections[name] = cls(**values)
        extensions = self.requested.extensions.model_copy(
            update={
                path.partition(".")[2]: value
                for path, value in self._values.items()
                if path.startswith("extensions.")
            }
        )
        sections["extensions"] = extensions
        changes = tuple(self._changes)
        return EngineConfig(**{**dict(self.requested), **sections, "changes": changes})

    def _resolved(self, path: str) -> object:
        value = self.get(path)
        return None if path in _LEFT_TO_WORKERS and value == AUTO else value

    def _fields(self, name: str) -> list[str]:
        return list(type(self.section(name)).model_fields)
