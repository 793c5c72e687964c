"""Lists the model architectures that the installed plugins support."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dovetail.cli.plugins_table import print_json, print_line, print_table
from dovetail.plugins import PluginRegistry

FALLBACK = "TransformersForCausalLM"
"""The model plugin that runs models of the transformers library."""
TRANSFORMERS = "transformers"
RECORDS = Path(__file__).with_name("tested_architectures.json")
"""The tested formats, and a test, of each architecture. Generated from the project's tests."""
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, kw_only=True)
class ArchitectureInfo:
    """An architecture, as config.json names it, and the plugin that implements it.

    implementation: "native" or "transformers". tasks: what the model can be used for. formats:
    the supported weight formats; safetensors may be quantized if the implementation is native.
    tested: the test that compares the architecture with transformers; "" if none is recorded.
    distribution: the name and version of the package that contains the plugin.
    """

    architecture: str
    implementation: str
    tasks: tuple[str, ...]
    formats: tuple[str, ...]
    tested: str
    distribution: str


def supported_architectures(registry: PluginRegistry) -> Iterator[ArchitectureInfo]:
    """Yield the architectures of all model plugins, without importing the plugins.

    If `FALLBACK` is installed, also yield the architectures that are tested with it and have no
    native implementation.
    """
    records, names = json.loads(RECORDS.read_text("utf-8")), set()
    fallback = None
    for candidate in registry.candidates("model"):
        if candidate.name == FALLBACK:
            fallback = candidate
            continue
        names.add(candidate.name)
        record = records["native"].get(candidate.name, {})
        yield ArchitectureInfo(
            architecture=candidate.name,
            implementation="native",
            tasks=_tasks(
                candidate.name, is_pooling="pooling" in registry.entry_of(candidate).provides
            ),
            formats=("safetensors", *record.get("formats", ())),
            tested=record.get("tested", ""),
            distribution=f"{candidate.distribution} {candidate.version}",
        )
    for name, test in records[TRANSFORMERS].items() if fallback is not None else ():
        if name not in names:
            yield ArchitectureInfo(
                architecture=name,
                implementation=TRANSFORMERS,
                tasks=("generate",),
                formats=("safetensors",),
                tested=test,
                distribution=f"{fallback.distribution} {fallback.version}",
            )


def has_fallback(registry: PluginRegistry) -> bool:
    """Return whether `FALLBACK` is installed, which runs architectures without a native model."""
    return any(candidate.name == FALLBACK for candidate in registry.candidates("model"))


def print_architectures(*, as_json: bool) -> None:
    """Print a table, or JSON."""
    registry = PluginRegistry()
    rows = list(supported_architectures(registry))
    if as_json:
        print_json(rows)
        return
    print_table(
        ("architecture", "implementation", "tasks", "formats", "tested by", "distribution"),
        [
            (
                row.architecture,
                row.implementation,
                ", ".join(row.tasks),
                ", ".join(row.formats),
                row.tested or "no record",
                row.distribution,
            )
            for row in rows
        ],
    )
    if has_fallback(registry):
        print_line(
            "Other decoder models run through the transformers library if it supports them. A "
            "check after loading rejects models whose outputs would be wrong."
        )


def _tasks(name: str, *, is_pooling: bool) -> tuple[str, ...]:
    if not is_pooling:
        return "generate", "embed"
    return ("classify", "score") if name.endswith(_CLASSIFIER) else ("embed", "score")
