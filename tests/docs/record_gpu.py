"""Writes docs/gpu.md, and what manifests say of devices, from a result of `make gpu-check`.

python tests/docs/record_gpu.py .bench/gpu.json     keep this run in docs/gpu.json, then write
python tests/docs/record_gpu.py                     write from docs/gpu.json as it is
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from docs.gpu_page import keep_run, read_runs, record_manifests, record_page  # noqa: E402


def main() -> int:
    """Write both; return 1 for a result that proves nothing."""
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
