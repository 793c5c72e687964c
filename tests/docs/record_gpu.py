"""Write docs/gpu.md, and `verified` of device plugins in manifests, from `make gpu-check` results.

python tests/docs/record_gpu.py .bench/gpu.json     add this run to docs/gpu.json, then write
python tests/docs/record_gpu.py a.json b.json       the same for a run in several commands
python tests/docs/record_gpu.py                     write from docs/gpu.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from docs.gpu_page import (  # noqa: E402
    keep_run,
    merge_runs,
    read_runs,
    record_manifests,
    record_page,
)


def main() -> int:
    """Write the page and the manifests. Return 1 if a result cannot be recorded."""
    names = sys.argv[1:]
    try:
        if names:
            keep_run(merge_runs([json.loads(Path(name).read_text("utf-8")) for name in names]))
    except ValueError as error:
        print(f"{', '.join(names)}: {error}", file=sys.stderr)
        return 1
    record_page(read_runs())
    record_manifests(read_runs())
    return 0


if __name__ == "__main__":
    sys.exit(main())
