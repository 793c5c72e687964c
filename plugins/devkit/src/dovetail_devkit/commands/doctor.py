"""`dovetail plugins doctor`: report problems of this installation, and how to fix them.

The exit code is 1 if something is broken, and 0 if there are only notes and warnings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_json, print_line, print_table
from dovetail.cli.terminal import count_text, printable, progress_note
from dovetail.errors import ConfigError
from dovetail_devkit.doctor import BROKEN, NOTE, OK, WARNING, Finding, examine
from dovetail_devkit.doctor.examination import DEADLINE_S

_DEADLINE_HELP = "Time that one plugin may take to load, in seconds."
_ALL_HELP = "Also list the plugins without problems."
_NO_PLUGINS_HELP = "Load first-party plugins only."
_JSON_HELP = "Write a JSON array of findings instead of tables."


def doctor(
    *,
    deadline: Annotated[float, Parameter(help=_DEADLINE_HELP)] = DEADLINE_S,
    show_all: Annotated[bool, Parameter(name="--all", negative="", help=_ALL_HELP)] = False,
    no_plugins: Annotated[bool, Parameter(negative="", help=_NO_PLUGINS_HELP)] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help=_JSON_HELP)] = False,
) -> int:
    """Check this machine, this environment and the installed plugins.

    Every installed plugin is loaded. Each distribution gets a separate process.
    """
    if not deadline > 0:
        raise ConfigError(f"--deadline {deadline:g} must be a positive number of seconds.")
    with progress_note() as note:
        findings = examine(deadline_s=deadline, progress=note, no_plugins=no_plugins)
    if as_json:
        print_json(findings)
    else:
        _show(findings, show_all=show_all)
    return 1 if any(finding.verdict == BROKEN for finding in findings) else 0


def _show(findings: Sequence[Finding], *, show_all: bool) -> None:
    for area in dict.fromkeys(finding.area for finding in findings):
        own = [finding for finding in findings if finding.area == area]
        well = [finding for finding in own if _is_plain(finding)]
        shown = [finding for finding in own if show_all or finding not in well]
        rows = [(item.verdict, item.subject, _text(item)) for item in shown]
        if well and not show_all:
            rows.append(
                (
                    OK,
                    count_text(len(well), "plugin"),
                    "these plugins can be loaded and satisfy their contracts",
                )
            )
        print_line(area, style="bold")
        print_table(("", "", ""), rows)
        print_line("")
    counts = Counter(finding.verdict for finding in findings)
    counted = [f"{counts[BROKEN]} broken", count_text(counts[WARNING], WARNING)]
    counted += [count_text(counts[NOTE], NOTE), f"{counts[OK]} ok"]
    print_line(", ".join(counted) + ".", style="bold red" if counts[BROKEN] else "bold green")


def _is_plain(finding: Finding) -> bool:
    return finding.area == "plugins" and finding.verdict == OK and ":" in finding.subject


def _text(finding: Finding) -> str:
    remedy = f"\n→ {finding.remedy}" if finding.remedy else ""
    return printable(f"{finding.text}{remedy}")
