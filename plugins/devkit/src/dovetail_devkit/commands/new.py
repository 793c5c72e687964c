"""`dovetail plugins new`: write a working plugin package as a starting point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_json, print_line
from dovetail.config.user_paths import user_path
from dovetail_devkit.scaffold import BLUEPRINTS, write_package

_KIND_HELP = f"One of {', '.join(BLUEPRINTS)}."
_NAME_HELP = "Name of the plugin, package and directory, such as shortest_first."
_OUT_HELP = "Directory in which the new directory is created."
_JSON_HELP = "Write a JSON object that lists the written files."


def new(
    kind: Annotated[str, Parameter(help=_KIND_HELP)],
    name: Annotated[str, Parameter(help=_NAME_HELP)],
    /,
    *,
    out: Annotated[Path, Parameter(help=_OUT_HELP)] = Path(),
    as_json: Annotated[bool, Parameter(name="--json", negative="", help=_JSON_HELP)] = False,
) -> int:
    """Write a small plugin package that installs and passes its conformance suite."""
    package = write_package(kind, name, user_path("--out", str(out)))
    if as_json:
        print_json(package)
        return 0
    print_line(f"Wrote {package.folder}:")
    for path in package.files:
        print_line(f"  {path}")
    print_line("The package works without changes. Run:")
    # pip interprets a name without a slash as the name of a distribution on an index.
    shown = package.folder if package.folder.is_absolute() else f"./{package.folder}"
    print_line(f"  pip install -e {shown}")
    checks = " ".join(f"--dovetail-plugin {plugin}" for plugin in package.plugins)
    print_line(f"  pytest {checks or shown}")
    return 0
