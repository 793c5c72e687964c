"""Run every kernel at every level under the address and undefined-behavior sanitizers.

Compiles the library's sources and `sanitize/*.cpp` into one program and runs it: random shapes in
buffers of the exact size; results are compared with sums in double precision (`sanitize/cases.h`
explains how to add a case). Levels that this CPU does not support are not compiled. Exits with the
program's status; 0 means success. On a CPU with AVX-512, the compiler needs 6 minutes of CPU time,
half of it for linear_groups_level.cpp, and 4 turns need half a minute; `--sampled` needs a third.

    python platforms/cpu_kernels/sanitize.py [--turns 4] [--sampled] [--folder DIR] [--thread]
"""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")


def usable_levels(flags_of: Mapping[str, Sequence[str]], cpu_info: str) -> list[str]:
    """Return the levels whose compiler flags are features of the CPU. cpu_info: /proc/cpuinfo."""
    words = next((line for line in cpu_info.splitlines() if line.startswith("flags")), "").split()
    features = {word.replace("_", "") for word in words}
    return [
        name
        for name, flags in flags_of.items()
        if features.issuperset(flag.removeprefix("-m").replace("-", "") for flag in flags)
    ]


def sampled_levels(names: Sequence[str]) -> list[str]:
    """Return the first level and one other, selected by the commit hash."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return list(names)
    others = names[1:]
    return [names[0], others[int(done.stdout, 16) % len(others)]] if others else list(names)


def build_driver(folder: Path, sanitizers: str, sampled: bool) -> Path:
    """Compile library and cases into `folder`. Return the program's path."""
    setup: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    flags = (*setup["FLAGS"], *FLAGS, f"-fsanitize={sanitizers}")
    folder.mkdir(parents=True, exist_ok=True)
    cases = [
        setup["Object"](source=source, path=folder / f"{source.stem}.o", flags=())
        for source in sorted((ROOT / "sanitize").glob("*.cpp"))
    ]
    flags_of = {name: level.flags for name, level in setup["LEVELS"].items()}
    levels = usable_levels(flags_of, Path("/proc/cpuinfo").read_text("utf-8"))
    levels = sampled_levels(levels) if sampled else levels
    objects = [*setup["plan"](folder, levels), *cases]
    print(f"sanitize: compiling {len(objects)} files for {', '.join(levels)}", flush=True)
    setup["compile_all"](compiler, objects, flags)
    program = folder / "driver"
    paths = [str(item.path) for item in objects]
    setup["run"]([*compiler, *flags, *paths, "-o", str(program)], "linking the driver")
    return program


def main() -> None:
    """Build the program, run it, and exit with its status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=4, help="runs of each case at each level")
    parser.add_argument(
        "--sampled", action="store_true", help="only two levels, selected by the commit hash"
    )
    parser.add_argument("--folder", type=Path, help="keep objects here; only changes are compiled")
    parser.add_argument("--thread", action="store_true", help="look for data races instead")
    args = parser.parse_args()
    sanitizers = "thread" if args.thread else "address,undefined"
    with tempfile.TemporaryDirectory() as temporary:
        began = time.monotonic()
        program = build_driver(args.folder or Path(temporary), sanitizers, args.sampled)
        built = time.monotonic()
        done = subprocess.run([str(program), str(args.turns)], check=False)
        ran = time.monotonic() - built
    print(f"sanitize: built in {built - began:.0f} s, ran {ran:.0f} s, status {done.returncode}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
