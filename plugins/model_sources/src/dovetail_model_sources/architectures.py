"""Lists the model architectures that the installed plugins support."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dovetail.cli.plugins_table import print_json, print_line, print_table
from dovetail.plugins import PluginRegistry

FALLBACK = "TransformersForCausalLM"
"""The model plugin that serves architectures through the library transformers."""
TRANSFORMERS = "transformers"
RECORDS = Path(__file__).with_name("tested_architectures.json")
"""Formats and tests by implementation and architecture, made from the tests of the project."""
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, kw_only=True)
class ArchitectureInfo:
    """An architecture, as config.json names it, and the plugin that implements it.

    implementation: "native" or "transformers". tasks: the tasks of such a model. formats: the
    supported formats of its weights; safetensors may be quantized if the implementation is native.
    tested: the test that compares it with transformers; "" if none is recorded. distribution: the
    installed package, with its version.
    """

    architecture: str
    implementation: str
    tasks: tuple[str, ...]
    formats: tuple[str, ...]
    tested: str
    distribution: str


def supported_architectures(registry: PluginRegistry) -> Iterator[ArchitectureInfo]:
    """Yield the architectures of all model plugins, without importing the plugins.

    Those with the plugin for transformers' classes are the tested ones without a native model.
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
            "Other decoder models that the library transformers supports run through it. A check "
            "when the model is loaded rejects those that would be computed incorrectly."
        )


def _tasks(name: str, *, is_pooling: bool) -> tuple[str, ...]:
    if not is_pooling:
        return "generate", "embed"
    return ("classify", "score") if name.endswith(_CLASSIFIER) else ("embed", "score")
