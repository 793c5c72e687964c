"""Sections of a soak run: commands with time limits. A run can be interrupted and resumed.

A section that passed is not run again on the same source tree. A section that fails does not stop
the others. The output of each section is in a separate log file; the terminal shows one line per
section with its time and CPU time, one line per minute while it runs, and the tests it skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPORT_EVERY_S = 60.0
POLL_S = 0.2
NUM_LINES_SHOWN = 30
SKIPPED = "skipped: "
"""The start of a line of pytest's report that names a skipped test and the reason."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a soak run.

    passing: exit codes that count as passed; pytest exits with 5 if it selects no test.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    passing: tuple[int, ...] = (0,)


class SoakRun:
    """Runs sections one after another and records the sections that passed.

    folder: holds `state.json` and one log per section.
    tree: a digest of the tested source tree. A record of another tree is discarded. If `tree` is
    "", the tree is unknown and no section is skipped.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tree: str,
        directory: Path,
        say: Callable[[str], None] = print,
        report_every_s: float = REPORT_EVERY_S,
    ) -> None:
        self._folder, self._tree, self._directory = folder, tree, directory
        self._say, self._report_every_s = say, report_every_s
        self._file = folder / "state.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._passed: dict[str, float] = self._read()

    def run(self, sections: Sequence[Section]) -> int:
        """Run all sections that have not passed. Return 0 if all have passed now, otherwise 1."""
        begin_s = time.perf_counter()
        failed = []
        for number, section in enumerate(sections, 1):
            title = f"[{number}/{len(sections)}] {section.name}"
            if section.name in self._passed:
                self._say(f"{title}: passed before in {self._passed[section.name]:.0f} s")
                continue
            started_s, started_cpu_s = time.perf_counter(), _children_cpu_s()
            self._say(f"{title}: started")
            problem = self._run_section(section, title)
            took_s = time.perf_counter() - started_s
            cpu_s = _children_cpu_s() - started_cpu_s
            total_s = time.perf_counter() - begin_s
            verdict = "passed" if not problem else f"FAILED ({problem})"
            times = f"{took_s:.0f} s, {cpu_s:.0f} s of CPU time; {total_s:.0f} s in all"
            self._say(f"{title}: {verdict} after {times}")
            if problem:
                failed.append(section.name)
                self._say(self._last_lines(section, NUM_LINES_SHOWN))
            else:
                self._passed[section.name] = took_s
                self._write()
                self._show_skipped(section)
        passed = [self._passed[item.name] for item in sections if item.name in self._passed]
        self._say(f"soak: {len(passed)} of {len(sections)} sections passed, {sum(passed):.0f} s")
        if failed:
            self._say(f"soak: failed: {', '.join(failed)}. Run the same command to try them again.")
        return 1 if failed else 0

    def _run_section(self, section: Section, title: str) -> str:
        """Return the reason of a failure, or "" if the section passed."""
        with self._log(section).open("wb") as log:
            process = subprocess.Popen(
                section.command,
                cwd=self._directory,
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                return self._wait(process, section, title)
            finally:
                _kill_session(process)

    def _wait(self, process: subprocess.Popen[bytes], section: Section, title: str) -> str:
        started_s = reported_s = time.perf_counter()
        while process.poll() is None:
            time.sleep(POLL_S)
            now_s = time.perf_counter()
            if now_s - started_s > section.limit_s:
                return f"longer than its limit of {section.limit_s:.0f} s"
            if now_s - reported_s >= self._report_every_s:
                reported_s = now_s
                last = self._last_lines(section, 1).strip()[:100]
                self._say(f"{title}: {now_s - started_s:.0f} s: {last}")
        code = process.returncode
        return "" if code in section.passing else f"exit status {code}, log: {self._log(section)}"

    def _environment(self) -> dict[str, str]:
        """Return the environment of the sections: their processes load cached bytecode.

        A section starts up to a thousand processes. Compiling the modules takes most of their CPU
        time if the environment prevents that bytecode is written.
        """
        environment = os.environ | {"PYTHONPYCACHEPREFIX": str(self._folder / "bytecode")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return environment

    def _log(self, section: Section) -> Path:
        return self._folder / f"{section.name.replace(' ', '-').replace('/', '-')}.log"

    def _show_skipped(self, section: Section) -> None:
        lines = self._log(section).read_text("utf-8", "replace").splitlines()
        for line in [line for line in lines if line.startswith(SKIPPED)][:NUM_LINES_SHOWN]:
            self._say(f"  {line}")

    def _last_lines(self, section: Section, count: int) -> str:
        return "\n".join(self._log(section).read_text("utf-8", "replace").splitlines()[-count:])

    def _read(self) -> dict[str, float]:
        if not self._tree or not self._file.is_file():
            return {}
        record = json.loads(self._file.read_text("utf-8"))
        return dict(record["passed"]) if record["tree"] == self._tree else {}

    def _write(self) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps({"tree": self._tree, "passed": self._passed}), "utf-8")
        temporary.replace(self._file)


def _children_cpu_s() -> float:
    """Return the CPU time of the processes that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the section's process and its child processes, even if the run was interrupted."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
