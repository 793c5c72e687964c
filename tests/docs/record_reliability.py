"""Write the fault matrix into docs/reliability.md, from pytest reports.

pytest -m "" core/tests/engine_process/test_injected_faults.py --junitxml=report.xml
python tests/docs/record_reliability.py report.xml …    record the results of these reports
python tests/docs/record_reliability.py --check         check that the page matches the code
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs.fault_matrix import PAGE, merged, read_page, read_reports, record_page, render, summary
from docs.policy_facts import recorded


def main() -> int:
    """Write the page, or check it. Return the exit code."""
    if sys.argv[1:] != ["--check"]:
        record_page(merged(read_page(), read_reports(map(Path, sys.argv[1:]))))
    matrix = read_page()
    print(summary(matrix))
    text = PAGE.read_text("utf-8")
    current = recorded(text, "faults") == render(matrix)
    current = current and recorded(text, "summary") == summary(matrix)
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
