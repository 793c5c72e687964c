"""Tests and measures the plugins on this machine's GPU, in ten minutes, without a network.

    python bench/gpu/check.py                        on a GPU; `make gpu-check`
    python bench/gpu/check.py --device cpu --small   the same sections on a CPU, in seconds
    python bench/gpu/check.py --device fake --small  the same on a fake device

Each section runs in a separate process with a deadline, and its result is on disk before the next
section begins. If a section fails, hangs or lacks a package, only its own metrics are missing. If
`.gpu-bundle` exists (`make gpu-bundle`), its wheels are installed into a private directory first.
Exit code 0: all sections pass and every target is reached; 1: a failure; 2: there is no GPU. This
program needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from gpu.bundle_contents import BUNDLE, read_bundle  # noqa: E402
from gpu.catalog import SECTIONS, TOTAL_S, SectionSpec  # noqa: E402
from gpu.device_parts import STAND_INS  # noqa: E402
from gpu.processes import python_path, run_until  # noqa: E402
from gpu.report import DIED, LACKS, LATE, NO_DEVICE, OK, read_report  # noqa: E402
from gpu.tables import aims_missed, render_table  # noqa: E402

_MIN_S = 2.0
"""Minimum remaining time in seconds with which a section is started."""
_SLACK = 1.5
_INSTALL_S = 60.0
_NONE = "torch finds no device"
_SEED = 20261121


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of the command line.

    device: "auto" for the first accelerator that torch finds. slack: maximum time of a section,
    relative to its `deadline_s`, if earlier sections were fast.
    """

    device: str
    small: bool
    sections: tuple[SectionSpec, ...]
    total_s: float
    result: Path
    slack: float = 1.0
    site: Path | None = None


class Check:
    """One run of the check. Its results are written to disk after every section."""

    def __init__(self, options: CheckOptions, scratch: Path, start: float | None = None) -> None:
        """begun: start of the time limit as a value of `time.monotonic`, or None for now."""
        self._options = options
        self._scratch = scratch
        self._begun = time.monotonic() if start is None else start
        self._device = options.device
        self.run: dict[str, Any] = {
            "format": 1,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": read_commit(),
            "command": " ".join(["python", "bench/gpu/check.py", *sys.argv[1:]]),
            "small": options.small,
            "device": {"type": ""},
            "versions": {},
            "seconds": 0.0,
            "sections": {},
        }

    def go(self) -> None:
        """Run all requested sections, `machine` first."""
        for number, spec in enumerate(self._options.sections):
            self._later_s = sum(item.deadline_s for item in self._options.sections[number:])
            print(f"{spec.name}: {spec.question}", file=sys.stderr, flush=True)
            result = self._section(spec)
            self.run["sections"][spec.name] = result
            if spec.name == "machine":
                self._learn_machine(result)
            self._write()
            line = f"  {result['state']} after {result['seconds']:.1f} s"
            print(line, file=sys.stderr, flush=True)

    def exit_code(self) -> int:
        """Return 2 without a device, 1 if a section failed or missed a target, else 0."""
        if self.machine_problem():
            return 1
        if not self._device:
            return 2
        fine = {OK, NO_DEVICE} if self._device in STAND_INS else {OK}
        bad = [
            spec.name
            for spec in self._options.sections
            if self.run["sections"][spec.name]["state"] not in fine | spec.accepted
        ]
        return 1 if bad or aims_missed(self.run) else 0

    def machine_problem(self) -> str:
        """Return why the machine is unknown, or "" if the `machine` section has described it."""
        result = self.run["sections"]["machine"]
        if result["state"] == OK:
            return ""
        advice = "; select another Python with GPU_PYTHON" if result["state"] == LACKS else ""
        return f"{result['state']}: {result['why']}{advice}"

    def _section(self, spec: SectionSpec) -> dict[str, Any]:
        if spec.name != "machine" and not self._device:
            problem = self.machine_problem()
            reason = f"the section machine failed ({problem})" if problem else _NONE
            return _unrun(NO_DEVICE, reason)
        if self._device == "cpu" and not spec.on_cpu:
            return _unrun(NO_DEVICE, "not meaningful on a CPU")
        left_s = self._options.total_s - (time.monotonic() - self._begun)
        if left_s < _MIN_S:
            return _unrun(LATE, f"the {self._options.total_s:g} s total limit has passed")
        # What earlier sections left or took, such as the installation, is shared by all others.
        share = min(left_s / self._later_s, self._options.slack)
        return self._run_process(spec, min(spec.deadline_s * share, left_s))

    def _run_process(self, spec: SectionSpec, deadline_s: float) -> dict[str, Any]:
        folder = self._scratch / spec.name
        work = folder / "work"
        work.mkdir(parents=True)
        report, ending = folder / "report.json", folder / "ending.json"
        task = {
            "module": spec.module or f"gpu.sections.{spec.name}",
            "device": self._device,
            "small": self._options.small,
            "seed": _SEED,
            "folder": str(work),
            "deadline_s": deadline_s,
            "report": str(report),
            "ending": str(ending),
        }
        site = [self._options.site] if self._options.site else []
        ended = run_until(
            [sys.executable, "-m", "gpu.section_run", json.dumps(task)],
            environment=python_path(*site, HERE.parent, ROOT / "tests"),
            folder=folder,
            deadline_s=deadline_s,
        )
        result = read_report(report) | {"seconds": round(ended.seconds, 2)}
        if ended.code is None:
            return result | {"state": LATE, "why": f"after {deadline_s:.0f} s; {ended.output}"}
        if not ending.is_file():
            return result | {"state": DIED, "why": f"exit code {ended.code}; {ended.output}"}
        return result | json.loads(ending.read_text(encoding="utf-8"))

    def _learn_machine(self, result: dict[str, Any]) -> None:
        info = result["facts"]
        self.run["device"] = info.get("device", {"type": ""})
        self.run["versions"] = info.get("versions", {})
        self._device = self.run["device"]["type"]

    def _write(self) -> None:
        self.run["seconds"] = round(time.monotonic() - self._begun, 1)
        part = self._options.result.with_suffix(".part")
        part.write_text(json.dumps(self.run, indent=1, ensure_ascii=False) + "\n", "utf-8")
        part.replace(self._options.result)


def read_commit() -> str:
    """Return the commit of this checkout, with "+" if a file was changed, or of the bundle."""
    try:
        commit = _git("rev-parse", "--short=10", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return read_bundle(ROOT / BUNDLE).get("commit", "unknown")


def _git(*words: str) -> str:
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def suits(bundle: Path) -> bool:
    """Return whether a bundle for this Python exists. Warn about a bundle for another version."""
    contents = read_bundle(bundle)
    if not contents:
        return False
    here = ".".join(map(str, sys.version_info[:2]))
    if contents["python"] != here:
        text = f"{bundle} is for Python {contents['python']} and is ignored; this is Python {here}"
        print(f"{text}; the installed packages are used.", file=sys.stderr)
        return False
    commit = read_commit()
    if commit != contents["commit"]:
        text = f"the bundle is of commit {contents['commit']}, this checkout of {commit}"
        print(f"Warning: {text}. Create the bundle again.", file=sys.stderr)
    return True


def install(bundle: Path, site: Path, scratch: Path) -> str:
    """Install a bundle's wheels into `site` without an index. Return the error, "" on success."""
    wheels = sorted(map(str, bundle.glob("*.whl")))
    options = ("--no-index", "--no-deps", "--no-compile", "--target", str(site))
    ended = run_until(
        [sys.executable, "-m", "pip", "install", "--quiet", *options, *wheels],
        environment=python_path(),
        folder=scratch,
        deadline_s=_INSTALL_S,
    )
    return "" if ended.code == 0 else f"pip exited with code {ended.code}: {ended.output}"


def _unrun(state: str, why: str) -> dict[str, Any]:
    return read_report(Path("nowhere")) | {"state": state, "why": why, "seconds": 0.0}


def _parse() -> argparse.Namespace:
    names = [spec.name for spec in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--device", default="auto", help="auto, cuda, rocm, xpu; or cpu, fake to try it out"
    )
    parser.add_argument(
        "--small", action="store_true", help="small sizes, which a CPU runs in seconds"
    )
    parser.add_argument("--sections", nargs="+", choices=names, default=names)
    parser.add_argument("--total-s", type=float, default=TOTAL_S)
    parser.add_argument(
        "--slack",
        type=float,
        default=_SLACK,
        help="maximum time of a section, relative to its deadline, if earlier ones were fast",
    )
    parser.add_argument("--json", type=Path, default=ROOT / ".bench" / "gpu.json")
    parser.add_argument("--bundle", type=Path, default=ROOT / BUNDLE)
    return parser.parse_args()


def main() -> int:
    """Run the check, print its table and return the exit code."""
    start, args = time.monotonic(), _parse()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    selected = {"machine", *args.sections}
    with tempfile.TemporaryDirectory(prefix="dovetail-gpu-") as name:
        scratch, site = Path(name), None
        if suits(args.bundle):
            site = scratch / "site"
            if problem := install(args.bundle, site, scratch):
                print(f"The bundle {args.bundle} cannot be installed: {problem}", file=sys.stderr)
                return 1
        options = CheckOptions(
            device=args.device,
            small=args.small,
            sections=tuple(spec for spec in SECTIONS if spec.name in selected),
            total_s=args.total_s,
            slack=args.slack,
            result=args.json.resolve(),
            site=site,
        )
        check = Check(options, scratch, start)
        check.go()
    print(render_table(check.run))
    print(f"\nWritten: {options.result}")
    if problem := check.machine_problem():
        print(f"The section machine failed, so no other section ran: {problem}")
    elif not check.run["device"]["type"]:
        print("This check needs a GPU. To try the command without one: --device cpu --small")
    return check.exit_code()


if __name__ == "__main__":
    sys.exit(main())
