"""Writes the recorded parts of docs/gpu.md and of the manifests of device plugins.

The source of both is `docs/gpu.json`: the last run of the check on each type of device. Manifests
are edited as text, to keep their comments and order.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docs.gpu_proofs import parts_block, rejected_block
from docs.policy_facts import ROOT, record, recorded
from gpu.catalog import DEVICE_PLUGINS
from gpu.device_parts import STAND_INS
from gpu.tables import headline, page_block, plugins_block, verified_text

PAGE = ROOT / "docs" / "gpu.md"
RESULTS = ROOT / "docs" / "gpu.json"
MAX_COLUMNS = 120
NOTHING = "The check has never been run on a GPU."

_TABLE = re.compile(r"^\[\[plugin\]\]\n(?:(?!\[\[plugin\]\]).*\n?)*", re.MULTILINE)
_KEY = re.compile(r'^(\w+) = "(.*)"\n?', re.MULTILINE)


def read_runs() -> dict[str, Any]:
    """Return the last run on each type of device."""
    runs: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))["runs"]
    return runs


def keep_run(run: dict[str, Any]) -> None:
    """Store a run as the last run of its device. Raise ValueError for a small run or a CPU run."""
    device = run["device"]["type"]
    if device in ("", *STAND_INS) or run["small"]:
        raise ValueError(
            f"a small run, or a run on {device or 'no device'}, cannot be recorded. "
            "Run `make gpu-check` on a GPU."
        )
    runs = read_runs() | {device: run}
    text = json.dumps({"format": 1, "runs": runs}, indent=1, ensure_ascii=False)
    RESULTS.write_text(f"{text}\n", "utf-8")


def merge_runs(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one run that contains the sections of several runs on the same device.

    The last run with a section determines its result. A section that ran on another commit than the
    last run states its commit and date. Raise ValueError for different devices or versions.
    """
    *earlier, last = parts
    sections: dict[str, Any] = {}
    for run in parts:
        for key in ("device", "versions", "small"):
            if run[key] != last[key]:
                raise ValueError(f"the runs to merge have different values of {key}.")
        is_same = run["commit"] == last["commit"]
        other = {} if is_same else {"commit": run["commit"], "date": run["date"]}
        sections |= {name: other | section for name, section in run["sections"].items()}
    if not earlier:
        return last
    seconds = sum(section["seconds"] for section in sections.values())
    command = f"{last['command'].split(maxsplit=2)[0]} bench/gpu/check.py, in several commands"
    return last | {"sections": sections, "seconds": round(seconds, 1), "command": command}


def blocks(runs: dict[str, Any]) -> dict[str, str]:
    """Return the text of each recorded part of the page."""
    lines = [
        textwrap.fill(
            f"- {headline(run)}: {run['seconds']:.0f} s", MAX_COLUMNS, subsequent_indent="  "
        )
        for run in runs.values()
    ]
    results = [f"### {run['device']['name']}\n\n{page_block(run)}" for run in runs.values()]
    return {
        "runs": "\n".join(lines) or NOTHING,
        "plugins": plugins_block(runs),
        "proofs": parts_block(runs),
        "rejected": rejected_block(),
        "results": "\n\n".join(results) or page_block(None),
    }


def record_page(runs: dict[str, Any]) -> None:
    """Write all recorded parts of the page."""
    text = PAGE.read_text("utf-8")
    for name, block in blocks(runs).items():
        text = record(text, name, block)
    PAGE.write_text(text, "utf-8")


def outdated(runs: dict[str, Any]) -> list[str]:
    """Return the names of the parts of the page that differ from the recorded runs."""
    text = PAGE.read_text("utf-8")
    return [name for name, block in blocks(runs).items() if recorded(text, name) != block]


def manifests() -> Iterator[Path]:
    """Yield the manifests of all members."""
    yield from sorted(ROOT.glob("*/src/*/dovetail.toml"))
    yield from sorted(ROOT.glob("*/*/src/*/dovetail.toml"))


def with_verified(text: str, runs: dict[str, Any]) -> str:
    """Return the text of a manifest with an updated `verified` for every device plugin."""

    def renew(table: re.Match[str]) -> str:
        keys = dict(_KEY.findall(table[0]))
        plugin = f"{keys.get('kind')}:{keys.get('name')}"
        if plugin not in DEVICE_PLUGINS:
            return table[0]
        body = re.sub(r"^verified = .*\n", "", table[0].rstrip("\n") + "\n", flags=re.MULTILINE)
        line = f"verified = {json.dumps(verified_text(runs, plugin), ensure_ascii=False)}\n"
        return body + line + ("\n" if table[0].endswith("\n\n") else "")

    return _TABLE.sub(renew, text)


def record_manifests(runs: dict[str, Any]) -> None:
    """Update `verified` of the device plugins in every manifest."""
    for path in manifests():
        text = path.read_text("utf-8")
        renewed = with_verified(text, runs)
        if renewed != text:
            path.write_text(renewed, "utf-8")
