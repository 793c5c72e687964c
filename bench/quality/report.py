"""Markdown tables and the plot of the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quality.formats import BF16, FLOAT32, OFF_GRID

Rows = Sequence[Mapping[str, Any]]
"""The rows of the report, each with weights, format, bytes_per_weight and texts."""


def tables(result: Mapping[str, Any]) -> str:
    """Return the document: the origin of the metrics, then a table for each kind of weights."""
    origin, settings = result["origin"], result["origin"]["settings"]
    commits = dict.fromkeys([origin["commit"], *(row["commit"] for row in result["rows"])])
    parts = [
        f"`{origin['command']}`, commit {' and '.join(commits)}, {origin['date']}. "
        f"Model {settings['model']}; {settings['chunks']} chunks of {settings['chunk_tokens']} "
        f"tokens per text.",
        "\n".join(f"- {domain}: {sources}" for domain, sources in settings["texts"].items()),
    ]
    for weights in dict.fromkeys(row["weights"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["weights"] == weights]
        parts += [f"## {weights.capitalize()} weights", _divergence(rows), _perplexity(rows)]
    if result["layers"]:
        parts += ["## Layers of all-MiniLM-L6-v2", _layers(result["layers"])]
    if result["absent"]:
        parts.append("\n".join(f"- {name}: {why}" for name, why in result["absent"].items()))
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _divergence(rows: Rows) -> str:
    texts = list(rows[0]["texts"])
    head = [
        "format",
        "bytes per weight",
        *(f"KL to float32, {text}" for text in texts),
        f"mean KL to {FLOAT32}",
        f"mean KL to {BF16}",
        f"same most likely token as {FLOAT32}",
    ]
    lines = [
        [
            row["format"],
            f"{row['bytes_per_weight']:.3f}",
            *(_cell(row["texts"][text]["kl"][FLOAT32], ".4f") for text in texts),
            _cell(mean(row, "kl", FLOAT32), ".4f"),
            _cell(mean(row, "kl", BF16), ".4f"),
            _cell(mean(row, "same_best", FLOAT32), ".2%"),
        ]
        for row in rows
    ]
    return table(head, lines)


def _perplexity(rows: Rows) -> str:
    texts = list(rows[0]["texts"])
    base = next((row for row in rows if row["format"] == BF16), None)
    lines = []
    for row in rows:
        cells = []
        for text in texts:
            value = row["texts"][text]["perplexity"]
            change = value / base["texts"][text]["perplexity"] - 1 if base else None
            cells.append(f"{value:.3f} ({_cell(change, '+.2%')})")
        lines.append([row["format"], *cells])
    return table(["perplexity (against bf16)", *texts], lines)


def _layers(layers: Mapping[str, Mapping[str, float]]) -> str:
    formats = list(next(iter(layers.values())))
    lines = [
        [layer, *(f"{errors[name]:.4f}" for name in formats)] for layer, errors in layers.items()
    ]
    return table(["relative error of the output", *formats], lines)


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def mean(row: Mapping[str, Any], figure: str, reference: str) -> float | None:
    """Return the mean of a metric over the texts, each with equal weight, or None if unknown."""
    values = [text[figure].get(reference) for text in row["texts"].values()]
    if None in values:
        return None
    return float(sum(values) / len(values))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Plot KL divergence over bytes per weight, without weights that the file has quantized."""
    indexes = {row["format"]: row["bytes_per_weight"] for row in _compared(result)}
    title = f"{_model(result)}: accuracy and size"
    _draw(result, indexes, ("bytes per weight of linear layers and head", title), path)


def plot_speed(result: Mapping[str, Any], speeds: Mapping[str, float], path: Path) -> None:
    """Draw KL divergence over tokens per second of one request.

    speeds: the tokens per second of each format.
    """
    title = f"{_model(result)}: accuracy and speed"
    _draw(result, speeds, ("tokens per second of one request", title), path)


def _compared(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        item for item in result["rows"] if item["weights"] == OFF_GRID and item["format"] != FLOAT32
    ]


def _model(result: Mapping[str, Any]) -> str:
    return f"{result['origin']['settings']['model']} off its grid"


def _draw(
    result: Mapping[str, Any], indexes: Mapping[str, float], labels: tuple[str, str], path: Path
) -> None:
    """Draw the mean KL divergence of each format with a position on the horizontal axis.

    Names are in a column at the right, because points of different engines are close together.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6))
    shown = [row for row in _compared(result) if row["format"] in indexes]
    shown.sort(key=lambda row: -(mean(row, "kl", FLOAT32) or 0.0))
    for number, row in enumerate(shown):
        ours = row["engine"] == "dovetail"
        color = "tab:blue" if ours else "tab:orange"
        at = (indexes[row["format"]], mean(row, "kl", FLOAT32))
        axes.plot(*at, "o" if ours else "s", color=color)
        axes.annotate(
            row["format"],
            at,
            xytext=(1.03, 1 - (number + 0.5) / len(shown)),
            textcoords="axes fraction",
            va="center",
            color=color,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.5, "alpha": 0.5},
        )
    axes.set_yscale("log")
    axes.set_xlabel(labels[0])
    axes.set_ylabel("KL divergence from float32, nats (mean of the texts)")
    axes.set_title(f"{labels[1]} (circles: Dovetail, squares: other engines)")
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
