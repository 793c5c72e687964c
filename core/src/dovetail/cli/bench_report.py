"""Prints measurements as a table of medians and spreads, or writes them as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.engine.llm_engine import LLMEngine


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Statistics of one measured quantity over all runs. iqr: interquartile range."""

    unit: str
    median: float
    min: float
    max: float
    iqr: float
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a bench command. case: the options. measures: summaries by name, in order."""

    command: str
    case: Mapping[str, Any]
    measures: Mapping[str, Summary]


def summarize(unit: str, values: Sequence[float]) -> Summary:
    """Return the median and the spread of one or more values."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else ()
    return Summary(
        unit=unit,
        median=statistics.median(values),
        min=min(values),
        max=max(values),
        iqr=quartiles[2] - quartiles[0] if quartiles else 0.0,
        values=tuple(values),
    )


def print_report(report: Report, engine: LLMEngine) -> None:
    """Print the report as a table, with the model, the plugins and the options."""
    from rich.console import Console
    from rich.table import Table

    parts = {plugin.kind: plugin.name for plugin in engine.plugins.chosen}
    model = engine.config.model
    chosen = ", ".join(f"{kind} {parts[kind]}" for kind in _SHOWN_KINDS if kind in parts)
    case = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report.case.items())
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("")
    for heading in ("median", "min", "max", "IQR"):
        table.add_column(heading, justify="right")
    table.add_column("unit")
    for name, measure in report.measures.items():
        spread = (measure.median, measure.min, measure.max, measure.iqr)
        table.add_row(name, *(_rounded(value) for value in spread), measure.unit)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{model.served_model_name} in {model.dtype}: {chosen}", markup=False)
    console.print(f"{case}\n", markup=False)
    console.print(table)


def write_json(file: Path, report: Report, engine: LLMEngine) -> None:
    """Write the report, the engine's plugins and options, and properties of the machine to a file.

    Raises ConfigError if the file cannot be written.
    """
    config = engine.config
    document = {
        "command": report.command,
        "model": config.model.served_model_name,
        "case": dict(report.case),
        "engine": {
            **config.model_dump(mode="json", include={"cache", "scheduler", "parallel", "compute"}),
            "dtype": config.model.dtype,
            "load_format": config.load.model_dump(mode="json")["load_format"],
            "plugins": [asdict(plugin) for plugin in engine.plugins.chosen],
        },
        "machine": {
            "architecture": platform.machine(),
            "num_cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "measures": {
            name.replace(" ", "_"): asdict(measure) for name, measure in report.measures.items()
        },
    }
    try:
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {file} cannot be written: {error.strerror}.") from None


_SHOWN_KINDS = ("platform", "attention", "linear_method", "ops", "scheduler", "policy", "worker")


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
