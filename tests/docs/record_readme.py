"""Writes the output of `dovetail demo` into the README: `python tests/docs/record_readme.py`.

The command runs as in a terminal of 100 columns, but without colors.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- recorded: dovetail demo -->", "<!-- end -->"


def record() -> str:
    """Return the output of the demo as plain text."""
    command = [str(Path(sys.executable).with_name("dovetail")), "demo"]
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout)


def main() -> None:
    """Write the recorded output between its marks in the README."""
    text = README.read_text("utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    lines = "\n".join(line.rstrip() for line in record().strip().splitlines())
    README.write_text(f"{head}{BEGIN}\n```\n$ dovetail demo\n{lines}\n```\n{END}{tail}", "utf-8")


if __name__ == "__main__":
    main()
