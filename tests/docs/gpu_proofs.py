"""Renders the tables of docs/gpu.md that state how each part of the GPU path was tested.

The source is gpu_proofs.toml beside this module; results on devices come from docs/gpu.json.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.report import NEVER
from gpu.tables import Run, verified_text

FILE = Path(__file__).with_name("gpu_proofs.toml")


def read_proofs() -> dict[str, list[dict[str, Any]]]:
    """Return the tables "part" and "rejected"."""
    return tomllib.loads(FILE.read_text("utf-8"))


def parts_block(runs: Mapping[str, Run]) -> str:
    """Return a Markdown table: part, proof without a device, sections, result on devices."""
    lines = [
        "| part | tested without a GPU by | `make gpu-check` | on a device |",
        "|---|---|---|---|",
    ]
    for part in read_proofs()["part"]:
        sections = ", ".join(part["sections"]) or "no section"
        how = f"{part['how']} ({_count(part['tests'])})"
        lines.append(f"| {part['name']} | {how} | {sections} | {_on_device(part, runs)} |")
    return "\n".join(lines)


def rejected_block() -> str:
    """Return a Markdown table of invalid inputs and the messages that users see."""
    lines = ["| input | the error names |", "|---|---|"]
    for row in read_proofs()["rejected"]:
        lines.append(f"| {row['input']} | {row['response']} ({_count(row['tests'])}) |")
    return "\n".join(lines)


def _count(tests: list[str]) -> str:
    return "1 test" if len(tests) == 1 else f"{len(tests)} tests"


def _on_device(part: Mapping[str, Any], runs: Mapping[str, Run]) -> str:
    if "plugin" in part:
        text = verified_text(runs, part["plugin"])
        return NEVER if text.startswith(NEVER) else text
    states = [
        f"{name}: {run['sections'][name]['state']} on {run['device']['name']}"
        for run in runs.values()
        for name in part["sections"]
        if name in run["sections"] and not run["small"]
    ]
    return "; ".join(states) or NEVER
