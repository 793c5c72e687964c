"""Converts weights to the files that formats read, in the directory of the run.

Weights are converted when a format first needs them. Formats of Dovetail that require calibration
data are written by `dovetail quantize`, with parts of all calibration data.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quality.formats import DIRECTORY, SOURCE_FILE, Format
from quality.job import JobError, run_tool
from quality.texts import CALIBRATION, TextError

DEADLINE_S = 1800.0
OPENVINO_INT4 = ("--group-size", "64", "--ratio", "1.0", "--sym")
CALIBRATION_CHARACTERS = 11_000
"""Characters of calibration data per source; together about the 8,192 tokens that the command
reads."""


def model_path(first: Format, source: Path, directory: Path, python: str) -> Path:
    """Return the path of a format's model, which is converted first if that is necessary.

    source: the GGUF file.
    directory: the same weights as a Hugging Face directory; converted files are written next to it.
    python: the interpreter of the format's engine.

    Raises JobError if the conversion fails.
    """
    if first.model in (DIRECTORY, SOURCE_FILE):
        return directory if first.model == DIRECTORY else source
    out = directory.with_name(f"{directory.name}-{first.engine}")
    out.mkdir(exist_ok=True)
    path = out / (f"{first.model}.gguf" if first.engine == "llamacpp" else first.model)
    if not path.exists():
        run_tool(_COMMANDS[first.engine](python, directory, path), DEADLINE_S)
    return path


def _llamacpp(python: str, directory: Path, path: Path) -> list[str]:
    module = "quality.convert_llamacpp"
    return [python, "-m", module, str(directory), str(path.parent), path.stem]


def _openvino(python: str, directory: Path, path: Path) -> list[str]:
    tool = str(Path(python).with_name("optimum-cli"))
    task = ("--task", "text-generation-with-past", "--weight-format", path.name)
    rest = OPENVINO_INT4 if path.name == "int4" else ()
    return [tool, "export", "openvino", "--model", str(directory), *task, *rest, str(path)]


def _quantize(python: str, directory: Path, path: Path) -> list[str]:
    method, block_format = path.name.split("-")
    command = [str(Path(python).with_name("dovetail")), "quantize", str(directory)]
    command += ["--method", method, "--format", block_format, "--out", str(path)]
    if method == "rtn":
        return command
    text = path.with_name("calibration.txt")
    text.write_text(calibration_text(), encoding="utf-8")
    return [*command, "--calibrate", str(text)]


def calibration_text() -> str:
    """Return the beginnings of the calibration data. Raises JobError if one is missing."""
    try:
        return "\n".join(text.excerpt()[:CALIBRATION_CHARACTERS] for text in CALIBRATION)
    except TextError as error:
        raise JobError(str(error)) from None


_COMMANDS: dict[str, Callable[[str, Path, Path], list[str]]] = {
    "dovetail": _quantize,
    "llamacpp": _llamacpp,
    "openvino": _openvino,
}
"""The command of each engine from its interpreter, the directory and the path to write."""
