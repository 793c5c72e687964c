"""Give the wheel of dovetail-cpu-kernels in a directory its manylinux tag: `manylinux.py FOLDER`.

auditwheel reads which versions of the C and C++ libraries the kernels need, and renames the wheel
after the oldest platform that provides them. Then pip also installs the wheel on machines without
a compiler, and rejects it where it would not load.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def repair(folder: Path) -> list[Path]:
    """Replace each wheel that is tagged for Linux in general. Return the new wheels.

    Raises SystemExit with the output of auditwheel if a wheel fits no manylinux platform.
    """
    before = set(folder.glob("*.whl"))
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    for wheel in folder.glob("dovetail_cpu_kernels-*-linux_*.whl"):
        command = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, wheel)
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PATH": tools},
        )
        if done.returncode:
            raise SystemExit(f"auditwheel: {wheel.name}: {(done.stderr or done.stdout).strip()}")
        wheel.unlink()
    return sorted(set(folder.glob("*.whl")) - before)


if __name__ == "__main__":
    for new in repair(Path(sys.argv[1])):
        print(new.name)
