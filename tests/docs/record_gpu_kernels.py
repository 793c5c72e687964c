"""Compile every GPU kernel for its targets, count its work, and write docs/gpu_kernels.md.

The script needs Triton, but no GPU.

python tests/docs/record_gpu_kernels.py
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs.gpu_kernels import PACKAGES, PAGE, cases_of, count_traffic, render

from dovetail_devkit.triton.compiled_kernels import check_kernel


def main() -> None:
    """Compile the kernels and write the page. Raise if a kernel exceeds its limits."""
    created = {
        package: [
            check_kernel(case, target) for case in cases_of(package) for target in case.targets
        ]
        for package in PACKAGES
    }
    PAGE.write_text(render(created, count_traffic(), version("triton")), "utf-8")
    print(f"{sum(map(len, created.values()))} kernels written to {PAGE}")


if __name__ == "__main__":
    main()
