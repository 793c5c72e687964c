"""Write docs/gpu.md, and `verified` of device plugins in manifests, from `make gpu-check` results.

python tests/docs/record_gpu.py .bench/gpu.json     add this run to docs/gpu.json, then write
python tests/docs/record_gpu.py                     write from docs/gpu.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from docs.gpu_page import keep_run, read_runs, record_manifests, record_page  # noqa: E402


def main() -> int:
    """Write the page and the manifests. Return 1 if a result cannot be recorded."""
    for name in sys.argv[1:]:
        try:
            keep_run(json.loads(Path(name).read_text("utf-8")))
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    record_page(read_runs())
    record_manifests(read_runs())
    return 0


if __name__ == "__main__":
    sys.exit(main())
