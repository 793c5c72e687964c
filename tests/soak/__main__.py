"""Run every long test: `make soak`, or `PYTHONPATH=tests python -m soak [--fresh] [--only NAME …]`.

The sections are the tests that `make test` deselects (long tests, and cases of large test matrices
that the commit did not select), tests that measure time, the kernels under sanitizers, and
200,000 steps of random scheduler programs. An interrupted run continues where it stopped if it is
started again on the same source tree.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from features.suite import tree_state
from soak.sections import Section, SoakRun

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".pytest_cache" / "soak"
NO_TESTS = 5
LONG = "(slow or soak or costly) and not gpu and not partial"

PATHS = {
    "core and platforms": ("core/tests", "platforms"),
    "attention and models": ("attention_backends", "model_registry", "tests/parity"),
    "plugins": ("schedulers", "plugins", "tests/conformance"),
    "whole engines": ("tests/security", "tests/end_to_end"),
}
"""Few sections: collection takes 15 s in each, and one core is idle while the last test runs.

The other directories have few long tests, some of which use one core: they run together.
"""
FIRST = ("tests/mutation", "tests/clients", "tests/deployment")
"""Directories with single tests of several minutes, which start before the others."""


def other_directories() -> list[str]:
    """Return the directories of `tests` that no section of PATHS has, in execution order."""
    named = {*FIRST, *(path for paths in PATHS.values() for path in paths)}
    files = (ROOT / "tests").rglob("test_*.py")
    folders = {f"tests/{path.relative_to(ROOT / 'tests').parts[0]}" for path in files}
    return [*FIRST, *sorted(folders - named)]


def make_sections() -> list[Section]:
    """Return the sections in execution order. Sections that fail early come first."""
    python = sys.executable
    pytest = (python, "-m", "pytest", "-q", "--maxfail=20", "--durations=30", "-pno:cacheprovider")
    sections = [
        Section(
            name=f"long tests: {name}",
            command=(
                *pytest, "-m", LONG, "--clock=without", "-n", "4", "--dist", "worksteal", *paths
            ),
            limit_s=2400,
            passing=(0, NO_TESTS),
        )
        for name, paths in PATHS.items()
    ]  # fmt: skip
    sections.append(
        Section(
            name="long tests: other directories",
            command=(*pytest, "-m", LONG, "--clock=without", "-n", "4", *other_directories()),
            limit_s=2400,
            passing=(0, NO_TESTS),
        )
    )
    sections.append(
        Section(
            name="tests that measure time",
            command=(*pytest, "-m", "not gpu", "--clock=only"),
            limit_s=1200,
        )
    )
    sections.append(
        Section(
            name="sanitizers",
            command=(python, "platforms/cpu_kernels/sanitize.py", "--turns", "40"),
            limit_s=900,
        )
    )
    sections.append(
        Section(
            name="wiring faults",
            command=(python, "tests/features/prove.py", "--faults"),
            limit_s=900,
        )
    )
    sections.append(
        Section(
            name="features with fakes",
            command=(python, "tests/features/prove.py", "--fakes"),
            limit_s=900,
        )
    )
    sections.append(
        Section(
            name="random programs",
            command=(python, "-m", "soak.random_programs"),
            limit_s=3000,
        )
    )
    return sections


def main() -> int:
    """Run the sections that the command line selects. Return the exit code."""
    sections = make_sections()
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument(
        "--fresh", action="store_true", help="also run sections that have already passed"
    )
    parser.add_argument("--only", nargs="+", choices=[s.name for s in sections], metavar="NAME")
    options = parser.parse_args()
    if options.fresh:
        (FOLDER / "state.json").unlink(missing_ok=True)
    if options.only:
        sections = [section for section in sections if section.name in options.only]
    return SoakRun(FOLDER, tree=tree_state(), directory=ROOT).run(sections)


if __name__ == "__main__":
    raise SystemExit(main())
