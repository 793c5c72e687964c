"""Resolves the level of compilation, and checks the options that depend on it."""

from __future__ import annotations

from dovetail.config.draft import Draft
from dovetail.errors import ConfigError
from dovetail.interfaces.config_fields import AUTO, reference_name
from dovetail.value_checks import shorten

NO_COMPILATION = "none"
AS_IS = "as_is"
_LEVEL = "compute.compile_level"
_UNSET = {
    "compile_backend": AUTO,
    "compile_passes": (),
    "compile_sizes": (),
    "compile_cache": AUTO,
}
"""The options that need a compile level, with their default values."""


def resolve_compile_level(draft: Draft) -> None:
    """Resolve compile_level. Raise ConfigError if another option conflicts with it."""
    draft.fill(
        _LEVEL, NO_COMPILATION, "the default: compilation slows startup and may not speed up steps"
    )
    level = draft.get(_LEVEL)
    if level == NO_COMPILATION:
        _reject_unused(draft)
        return
    for path, is_valid, reason in (
        (
            "model.enforce_eager",
            not draft.get("model.enforce_eager"),
            "this option forbids compilation",
        ),
        (
            "parallel.tensor_parallel_size",
            draft.get("parallel.tensor_parallel_size") == 1,
            "all-reduces between workers cannot be compiled yet",
        ),
        (
            "cache.cpu_offload_gb",
            not draft.get("cache.cpu_offload_gb"),
            "weights in host memory cannot be inputs of compiled code",
        ),
        (
            "compute.batch_invariant",
            not draft.get("compute.batch_invariant"),
            "compiled code does not guarantee bitwise equal results in every batch",
        ),
        (
            "compute.compile_sizes",
            level != AS_IS or not draft.get("compute.compile_sizes"),
            "at this level torch selects the shapes",
        ),
    ):
        if not is_valid:
            option = path.partition(".")[2]
            raise ConfigError(
                f"compile_level={level!r} and {option}={shorten(draft.get(path))} cannot be used "
                f"together: {reason}. Omit one of them."
            )


def _reject_unused(draft: Draft) -> None:
    for option, default in _UNSET.items():
        value = draft.get(f"compute.{option}")
        if value not in (default, None):
            raise ConfigError(
                f"{option}={shorten(reference_name(value))} has no effect with "
                f"compile_level={NO_COMPILATION!r}. Omit it, or set compile_level to as_is, "
                "once or piecewise."
            )
