"""Converts weights to the files that formats read, once per run, in the folder of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from quality.formats import DIRECTORY, SOURCE_FILE, Format
from quality.job import JobError, run_tool

DEADLINE_S = 900.0
OPENVINO_INT4 = ("--group-size", "64", "--ratio", "1.0", "--sym")


def model_paths(
    source: Path, directory: Path, formats: Sequence[Format], pythons: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the path of the model for each format, and the reason for each missing format.

    source: the GGUF file.
    directory: the same weights as a Hugging Face directory; converted files are written next to it.
    pythons: interpreters by engine.
    """
    paths, absent = {}, {}
    for engine in dict.fromkeys(one.engine for one in formats):
        wanted = [one for one in formats if one.engine == engine]
        made = {one.model for one in wanted} - {DIRECTORY, SOURCE_FILE}
        reason = _convert(engine, pythons.get(engine), directory, sorted(made))
        for one in wanted:
            if reason:
                absent[one.name] = reason
            else:
                paths[one.name] = str(_path(one, source, directory))
    return paths, absent


def _path(one: Format, source: Path, directory: Path) -> Path:
    if one.model in (DIRECTORY, SOURCE_FILE):
        return directory if one.model == DIRECTORY else source
    out = directory.with_name(f"{directory.name}-{one.engine}")
    return out / (f"{one.model}.gguf" if one.engine == "llamacpp" else one.model)


def _convert(engine: str, python: str | None, directory: Path, kinds: Sequence[str]) -> str:
    """Convert for one engine; return the error, or "" on success."""
    if python is None:
        return f"no interpreter for {engine} was given"
    out = directory.with_name(f"{directory.name}-{engine}")
    try:
        if engine == "llamacpp" and kinds:
            out.mkdir()
            command = [python, "-m", "quality.convert_llamacpp", str(directory), str(out)]
            run_tool([*command, *kinds], DEADLINE_S)
        for kind in kinds if engine == "openvino" else ():
            run_tool(_openvino_export(python, directory, out, kind), DEADLINE_S)
    except JobError as error:
        return f"conversion failed: {error}"
    return ""


def _openvino_export(python: str, directory: Path, out: Path, kind: str) -> list[str]:
    tool = str(Path(python).with_name("optimum-cli"))
    task = ("--task", "text-generation-with-past", "--weight-format", kind)
    rest = OPENVINO_INT4 if kind == "int4" else ()
    return [tool, "export", "openvino", "--model", str(directory), *task, *rest, str(out / kind)]
