"""Write the policies' properties into their pages: `python tests/docs/record_schedulers.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs.policy_facts import TABLE, read_facts, record, render_table


def main() -> None:
    """Write the table of policies and the properties of each page between their marks."""
    info = read_facts()
    TABLE.write_text(record(TABLE.read_text("utf-8"), "policies", render_table(info)), "utf-8")
    for properties in info:
        properties.page.write_text(
            record(properties.page.read_text("utf-8"), "facts", properties.render()), "utf-8"
        )


if __name__ == "__main__":
    main()
