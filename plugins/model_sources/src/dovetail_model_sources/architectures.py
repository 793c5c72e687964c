"""Lists the model architectures that the installed plugins support."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dovetail.cli.plugins_table import print_json, print_line, print_table
from dovetail.plugins import PluginRegistry

FALLBACK = "TransformersForCausalLM"
"""The model plugin that serves architectures through the library transformers."""
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, kw_only=True)
class ArchitectureInfo:
    """An architecture, as config.json names it, and the plugin that implements it.

    tasks: the tasks of such a model. distribution: the installed package, with its version.
    """

    architecture: str
    tasks: tuple[str, ...]
    distribution: str


def supported_architectures(registry: PluginRegistry) -> Iterator[ArchitectureInfo]:
    """Yield the architectures of all model plugins, without importing the plugins."""
    for candidate in registry.candidates("model"):
        if candidate.name != FALLBACK:
            yield ArchitectureInfo(
                architecture=candidate.name,
                tasks=_tasks(
                    candidate.name, is_pooling="pooling" in registry.entry_of(candidate).provides
                ),
                distribution=f"{candidate.distribution} {candidate.version}",
            )


def has_fallback(registry: PluginRegistry) -> bool:
    """Return whether architectures without a plugin are computed by the library transformers."""
    return any(candidate.name == FALLBACK for candidate in registry.candidates("model"))


def print_architectures(*, as_json: bool) -> None:
    """Print a table, or JSON."""
    registry = PluginRegistry()
    rows = list(supported_architectures(registry))
    if as_json:
        print_json(rows)
        return
    print_table(
        ("architecture", "tasks", "distribution"),
        [(row.architecture, ", ".join(row.tasks), row.distribution) for row in rows],
    )
    if has_fallback(registry):
        print_line(
            "Other decoder models that the library transformers supports run through it. A check "
            "when the model is loaded rejects those that would be computed incorrectly."
        )


def _tasks(name: str, *, is_pooling: bool) -> tuple[str, ...]:
    if not is_pooling:
        return "generate", "embed"
    return ("classify", "score") if name.endswith(_CLASSIFIER) else ("embed", "score")
