"""Formats the results of `make gpu-check` for a terminal, for `docs/gpu.md` and for manifests.

A metric that a run does not contain is shown as "never run". The script uses the standard library
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpu.catalog import DEVICE_PLUGINS, SECTIONS, SectionSpec
from gpu.report import NEVER, OK

Run = Mapping[str, Any]

UNVERIFIED = "never run on its device"
_PASSED = "passed"


def aims_missed(run: Run) -> list[str]:
    """Return "section: metric" for every metric that misses its target. None for small runs."""
    if run["small"]:
        return []
    missed = []
    for spec in SECTIONS:
        values = _values(run["sections"].get(spec.name, {}))
        missed += [
            f"{spec.name}: {metric.name}"
            for metric in spec.metrics
            if metric.name in values and not metric.reached(values[metric.name])
        ]
    return missed


def render_table(run: Run) -> str:
    """Return a run as lines for a terminal."""
    lines = [headline(run), ""]
    for spec in SECTIONS:
        section = run["sections"].get(spec.name)
        if section is None:
            continue
        lines.append(f"{spec.name:<18} {section['state']:<12} {section['seconds']:>6.1f} s")
        lines += [f"    {line}" for line in _metric_lines(spec, section, small=run["small"])]
        lines += [f"    {_counts_text(*item)}" for item in section["plugins"].items()]
        if section["state"] != OK and section.get("why"):
            lines += [f"    ! {line}" for line in section["why"].splitlines()]
        lines += [f"    · {note}" for note in section["notes"]]
    lines += ["", f"{run['seconds']:.0f} s in total."]
    return "\n".join(lines)


def headline(run: Run) -> str:
    """Return device, date, commit and versions in one line."""
    device = run["device"]
    name = device.get("name") or device["type"] or "no GPU"
    versions = ", ".join(f"{what} {which}" for what, which in run["versions"].items())
    size = "small sizes; " if run["small"] else ""
    return f"{name}; {size}{run['date']}, commit {run['commit']}; {versions or 'nothing known'}"


def page_block(run: Run | None) -> str:
    """Return a Markdown table of all sections and metrics. run: None if nothing was ever run."""
    lines = ["| section | measurement | target | result |", "|---|---|---|---|"]
    for spec in SECTIONS:
        section = {} if run is None else run["sections"].get(spec.name, {})
        state = section.get("state", NEVER)
        result = state if state == NEVER else _run_description(section)
        lines.append(f"| **{spec.name}** | {spec.question} | | {result} |")
        lines += [f"| | {line} |" for line in _metric_cells(spec, section)]
        lines += [
            f"| | `{plugin}` | | {_counts(counts)} |"
            for plugin, counts in section.get("plugins", {}).items()
        ]
    return "\n".join(lines)


def _run_description(section: Run) -> str:
    """Return state and time of a section, and its commit if the rest of the run has another."""
    commit = f", commit {section['commit']}" if "commit" in section else ""
    return f"{section['state']}, {section['seconds']:.0f} s{commit}"


def plugins_block(runs: Mapping[str, Run]) -> str:
    """Return a Markdown table of device plugins and the devices that verified them."""
    lines = ["| plugin | verified on |", "|---|---|"]
    lines += [f"| `{plugin}` | {verified_text(runs, plugin)} |" for plugin in DEVICE_PLUGINS]
    return "\n".join(lines)


def verified_text(runs: Mapping[str, Run], plugin: str) -> str:
    """Return the text for a plugin's manifest: the devices on which it passed its suite.

    runs: the last run on each type of device. The text names each device of the plugin.
    """
    texts = [_verified_on(run, plugin) for run in runs.values()]
    return "; ".join(text for text in texts if text) or UNVERIFIED


def _verified_on(run: Run, plugin: str) -> str:
    section = run["sections"].get("conformance", {})
    counts = section.get("plugins", {}).get(plugin)
    if counts is None or run["small"] or _is_mostly_skipped(counts):
        return ""
    of = run | section  # a section of another commit states its commit and date
    where = f"{run['device']['name']}, {of['date'][:10]}, commit {of['commit']}"
    return where if is_sound(counts) else f"fails on {where}"


def _is_mostly_skipped(counts: Mapping[str, int]) -> bool:
    """Return whether most cases could not run, for example because a package is missing."""
    return counts.get("skipped", 0) > sum(counts.values()) / 2


def is_sound(counts: Mapping[str, int]) -> bool:
    """Return whether a suite ran without failures."""
    return bool(counts.get(_PASSED)) and not (counts.get("failed") or counts.get("error"))


def _metric_lines(spec: SectionSpec, run: Run, *, small: bool) -> Iterator[str]:
    known = {item.name: item for item in spec.metrics}
    for metric in run["metrics"]:
        spec_of = known.get(metric["name"])
        what = spec_of.what if spec_of else metric["name"]
        unit = spec_of.unit if spec_of else metric["unit"]
        aim = spec_of.aim if spec_of and not small else ""
        missed = " MISSED" if aim and spec_of and not spec_of.reached(metric["value"]) else ""
        note = f"  ({metric['note']})" if metric["note"] else ""
        value = f"{number(metric['value'])} {unit}".strip()
        yield f"{what:<44} {value:>18}  {aim}{missed}{note}".rstrip()


def _metric_cells(spec: SectionSpec, run: Run) -> Iterator[str]:
    measured = {metric["name"]: metric for metric in run.get("metrics", ())}
    for item in spec.metrics:
        metric = measured.pop(item.name, None)
        result = NEVER if metric is None else f"{number(metric['value'])} {item.unit}".strip()
        if metric is not None and not item.reached(metric["value"]):
            result = f"**{result}**"
        yield f"{item.what} | {item.aim} | {result}"
    for metric in measured.values():
        note = f", {metric['note']}" if metric["note"] else ""
        yield f"{metric['name']}{note} | | {number(metric['value'])} {metric['unit']}"


def number(value: float) -> str:
    """Format a number with three or four significant digits."""
    if value != value or abs(value) == float("inf"):
        return str(value)
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _values(run: Run) -> dict[str, float]:
    return {metric["name"]: metric["value"] for metric in run.get("metrics", ())}


def _counts_text(plugin: str, counts: Mapping[str, int]) -> str:
    return f"{plugin:<44} {_counts(counts)}"


def _counts(counts: Mapping[str, int]) -> str:
    shown = [f"{count} {what}" for what, count in counts.items() if count]
    return ", ".join(shown) or "no case ran"
