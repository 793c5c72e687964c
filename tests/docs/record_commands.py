"""Records the output of the commands in docs/plugins/commands.md: run this file to update the page.

Each ```console block begins with a command; its current output replaces the lines below it.
The commands run in an empty directory, on the demo model.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plugins" / "commands.md"
COLUMNS = 120

_BLOCK = re.compile(r"^```console\n\$ ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def recorded() -> dict[str, str]:
    """Return the recorded output of each command on the page."""
    return dict(_BLOCK.findall(PAGE.read_text("utf-8")))


def printed(command: str, folder: Path) -> str:
    """Run "dovetail …" in `folder` and return its standard output followed by its errors."""
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "Traceback" in done.stderr:
        raise RuntimeError(f"{command} failed, and is not recorded:\n{done.stderr}")
    text = (done.stdout + done.stderr).replace(str(folder), ".")
    text = text.replace(sys.prefix, "VENV").replace(str(PAGE.parents[2]), "SOURCE")
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def main() -> None:
    """Run all commands and rewrite the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def renew(block: re.Match[str]) -> str:
            return f"```console\n$ {block[1]}\n{printed(block[1], folder)}```"

        PAGE.write_text(_BLOCK.sub(renew, PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
