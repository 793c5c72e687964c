"""Finds the engines to compare: Dovetail, and others with an interpreter and a converted model.

Another engine is described by a table of a TOML file or by environment variables, which
take precedence. An engine that this Python can import and that reads the checkpoints directly needs
no description. README.md shows a file.

    [openvino]
    python = "/where/it/is/bin/python"
    models = { bf16 = "/where/models/are/{name}-bf16", int8 = "…", int4 = "…" }

`{name}` stands for the name of the checkpoint's directory, `{checkpoint}` for its path. Further
keys: env (variables added to the environment), options (options of the adapter), skip (cases that
do not run), adapter (a module that serves the protocol; needed for an unknown name). A name that
begins with "dovetail" is another configuration of Dovetail, not a peer.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.child import first_line_of

OURS = "dovetail"
OWN_ADAPTERS = "peers.engine_"
FORMATS = ("bf16", "int8", "int4")
GGUF_FILE = "gguf"
"""The format of a checkpoint that is a GGUF file, in which its tensors have their types."""

FILE_VARIABLE = "DOVETAIL_PEERS"
"""Names the default TOML file; DOVETAIL_PEER_<NAME>_PYTHON and _<FORMAT> override it."""

PACKAGES = {
    OURS: "dovetail",
    "llamacpp": "llama_cpp",
    "ikllamacpp": "numpy",  # its library is not a package
    "openvino": "openvino_genai",
    "transformers": "transformers",
    "vllm": "vllm",
}
"""Maps a name to the package that its interpreter needs; the adapter is `engine_<name>.py`."""

AS_THEY_ARE = {
    OURS: dict.fromkeys((*FORMATS, GGUF_FILE), "{checkpoint}"),
    "llamacpp": {GGUF_FILE: "{checkpoint}"},
    "transformers": {"bf16": "{checkpoint}"},
    "vllm": {"bf16": "{checkpoint}"},
}
"""Formats for which an engine loads the checkpoint directly."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One engine. models: maps a format to a path with `{name}` or `{checkpoint}` in it."""

    name: str
    adapter: str
    python: str
    models: Mapping[str, str]
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()

    def model_for(self, checkpoint: Path, weights: str) -> str | None:
        """Return the path of the engine's model in a format, or None if it has none."""
        template = self.models.get(weights)
        if template is None:
            return None
        path = template.format(name=checkpoint.name, checkpoint=checkpoint)
        return path if Path(path).exists() else None


def find_contenders(
    expected: str, file: str | None, environ: Mapping[str, str]
) -> tuple[list[Contender], dict[str, str]]:
    """Return the engines, Dovetail first, and for each missing engine the reason.

    expected: "auto" for all that can be found, or names separated by commas. file: the TOML file.
    Raises ValueError for a name that neither the file nor this module knows.
    """
    path = file or environ.get(FILE_VARIABLE)
    described = tomllib.loads(Path(path).read_text("utf-8")) if path else {}
    names = list(dict.fromkeys([*PACKAGES, *described]))
    if expected != "auto":
        requested = [OURS, *(name.strip() for name in expected.split(",") if name.strip())]
        unknown = sorted(set(requested) - set(names))
        if unknown:
            raise ValueError(f"unknown engines {unknown}; choose from {names}")
        names = list(dict.fromkeys(requested))
    collected, absent = [], {}
    for name in names:
        contender = _describe(name, described.get(name, {}), environ)
        reason = _missing(contender)
        if reason:
            absent[name] = reason
        else:
            collected.append(contender)
    return collected, absent


def _describe(name: str, table: Mapping[str, Any], environ: Mapping[str, str]) -> Contender:
    prefix = f"DOVETAIL_PEER_{name.upper()}_"
    adapter = table.get("adapter", f"{OWN_ADAPTERS}{name}")
    models = {**AS_THEY_ARE.get(adapter.removeprefix(OWN_ADAPTERS), {}), **table.get("models", {})}
    for weights in FORMATS:
        models |= {weights: environ[key]} if (key := prefix + weights.upper()) in environ else {}
    return Contender(
        name=name,
        adapter=adapter,
        python=environ.get(f"{prefix}PYTHON", table.get("python", sys.executable)),
        models=models,
        env=table.get("env", {}),
        options=table.get("options", {}),
        skip=frozenset(table.get("skip", ())),
    )


def _missing(contender: Contender) -> str:
    """Return why an engine cannot be compared, or "" if it can."""
    if not contender.adapter.startswith(OWN_ADAPTERS):
        return ""  # an external adapter reports missing packages itself
    package = PACKAGES.get(contender.adapter.removeprefix(OWN_ADAPTERS))
    if package is None:
        return "the name is unknown, and its table has no key `adapter`"
    if contender.python == sys.executable:
        has_it = importlib.util.find_spec(package) is not None
    else:
        script = f"import importlib.util as u; print(u.find_spec({package!r}) is not None)"
        has_it = first_line_of(contender.python, ["-c", script]) == "True"
    if not has_it:
        return f"{package} is not installed for {os.path.basename(contender.python)}"
    return "" if contender.models else "its table names no converted model"
