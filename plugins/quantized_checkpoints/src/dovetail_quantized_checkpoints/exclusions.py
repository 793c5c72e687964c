"""Compares the modules of a checkpoint with those that its quantization configuration excludes.

Two contradictions are errors: a quantized module that the configuration excludes, and a module that
is neither quantized nor excluded although other layers of the same name are quantized.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dovetail.errors import WeightError
from dovetail.value_checks import shorten
from dovetail_torch.weights.checkpoint_files import WeightEntry

MAX_ENTRIES = 100_000
_FIELDS = {
    "awq": ("modules_to_not_convert",),
    "bitsandbytes": ("llm_int8_skip_modules",),
    "compressed-tensors": ("ignore",),
    "fp8": ("modules_to_not_convert", "ignored_layers", "ignore"),
    "gptq": ("dynamic",),
    "mxfp4": ("modules_to_not_convert",),
}
"""Keys of `quantization_config` that exclude modules, by method; the most common key is first."""
_REGEX, _EXCLUDES = "re:", "-:"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_SIMPLE = re.compile(r"(?:(?:\\[.dw]|\[[\w^-]+\]|[\w.-])[*+?]?|\(\?:|[()|^$])*")
_MAX_PATTERN, _MAX_UNBOUNDED, _MAX_MATCHES = 300, 2, 20_000
"""Limits for patterns, which come from the checkpoint. A pattern that exceeds a limit is not
evaluated: it matches every module."""


class Exclusions:
    """The modules that `quantization_config` excludes from quantization."""

    def __init__(self, method: str, table: Mapping[str, Any]) -> None:
        """Read the keys. Raise WeightError for values of a wrong type."""
        self.field = next((name for name in _FIELDS[method] if table.get(name)), _FIELDS[method][0])
        entries = _strings(self.field, table.get(self.field))
        if method == "gptq":  # "-:" excludes modules; "+:" and no prefix change their settings
            entries = [
                f"{_REGEX}{entry.removeprefix(_EXCLUDES)}"
                for entry in entries
                if entry.startswith(_EXCLUDES)
            ]
        self._whole_names = method == "compressed-tensors"
        self._parts = {entry for entry in entries if not entry.startswith(_REGEX)}
        self._regexes = [
            (entry, _compiled(entry.removeprefix(_REGEX)))
            for entry in entries
            if entry.startswith(_REGEX)
        ]
        self._num_matches = 0

    def entry_for(self, module: str) -> str | None:
        """Return an entry that excludes a module, or None. Skip patterns that are not evaluated."""
        for name in _spellings(module):
            if self._whole_names and name in self._parts:
                return name
        if not self._whole_names:
            for part in _part_sequences(module):
                if part in self._parts:
                    return part
        return next((entry for entry, regex in self._regexes if self._matches(regex, module)), None)

    def may_exclude(self, module: str) -> bool:
        """Return whether an entry excludes a module. Unevaluated patterns match all modules."""
        if any(part in self._parts for part in _part_sequences(module)):
            return True
        return any(
            regex is None or self._matches(regex, module) or self._num_matches >= _MAX_MATCHES
            for _, regex in self._regexes
        )

    def _matches(self, regex: re.Pattern[str] | None, module: str) -> bool:
        if regex is None or self._num_matches >= _MAX_MATCHES:
            return False
        self._num_matches += 1
        return any(regex.match(name) is not None for name in _spellings(module[-_MAX_PATTERN:]))


def check_modules(
    exclusions: Exclusions,
    quantized: Mapping[str, WeightEntry],
    plain: Iterable[WeightEntry],
    *,
    are_all: bool,
) -> None:
    """Raise WeightError if the checkpoint contradicts its configuration.

    quantized: one tensor of each quantized module, by the module's name. plain: all other tensors.
    are_all: whether the configuration states that every linear layer that it does not exclude is
    quantized.
    """
    for module, entry in quantized.items():
        if (excluded := exclusions.entry_for(module)) is not None:
            raise WeightError(
                f"{entry.path}: weight {entry.name} is quantized, but quantization_config."
                f"{exclusions.field} excludes the module with {shorten(excluded)}. Correct the "
                "configuration, or use another checkpoint"
            )
    if not are_all:
        return
    known = {_NUMBER.sub("*", module): entry for module, entry in quantized.items()}
    for entry in plain:
        module, _, leaf = entry.name.rpartition(".")
        other = known.get(_NUMBER.sub("*", module))
        if leaf != "weight" or other is None or exclusions.may_exclude(module):
            continue
        raise WeightError(
            f"{entry.path}: weight {entry.name} is not quantized, but {other.name} is, and "
            f"quantization_config.{exclusions.field} does not exclude it: only a part of the "
            "checkpoint is quantized"
        )


def _strings(field: str, value: Any) -> Collection[str]:
    if value is None:
        return ()
    items = list(value) if isinstance(value, (list, tuple, Mapping)) else None
    if items is None or len(items) > MAX_ENTRIES or not all(isinstance(x, str) for x in items):
        raise WeightError(
            f"quantization_config: {field} is {shorten(value)}; it must be a list or object of "
            f"at most {MAX_ENTRIES:,} module names"
        )
    return items


def _compiled(pattern: str) -> re.Pattern[str] | None:
    """Return the compiled pattern, or None if matching it may take long."""
    num_unbounded = pattern.count("*") + pattern.count("+")
    if len(pattern) > _MAX_PATTERN or num_unbounded > _MAX_UNBOUNDED:
        return None
    if not _SIMPLE.fullmatch(pattern):
        return None
    try:
        return re.compile(pattern)
    except re.error:
        return None


def _spellings(module: str) -> Iterable[str]:
    """Yield the name of a module, then the name without the prefixes that some wrappers add."""
    parts = module.split(".")
    yield module
    first = next((index for index, part in enumerate(parts) if part.isdecimal()), 0)
    if first > 1:
        tail = ".".join(parts[first - 1 :])
        yield from (tail, f"model.{tail}")


def _part_sequences(module: str) -> Iterable[str]:
    """Yield all sequences of consecutive parts of a name, such as "mlp.gate" of "x.mlp.gate"."""
    parts = module.split(".")[:64]
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:end])
