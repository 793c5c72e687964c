"""Describes this machine and this version of Dovetail, for calibration files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

import dovetail
from dovetail.config.model_directory import ModelDirectory
from dovetail.config.model_sources import find_model
from dovetail.errors import DovetailError
from dovetail.machine import find_devices, read_cores, read_system_file, tool_output
from dovetail.model_files import MAX_BYTES, read_json_object
from dovetail.plugins import PluginRegistry

CONFIG = "config.json"


class MachineInfo(BaseModel):
    """A machine: its processor, number of usable cores, devices, and the version of torch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu: str
    num_cores: int
    devices: tuple[str, ...] = ()
    torch: str = ""

    @property
    def hardware(self) -> tuple[str, int, tuple[str, ...]]:
        """The properties that determine the speed."""
        return self.cpu, self.num_cores, self.devices

    def describe(self) -> str:
        """Return a one-line description."""
        return ", ".join((f"{self.cpu} with {self.num_cores} cores", *self.devices))


@lru_cache
def this_machine() -> MachineInfo:
    """Return the description of this machine. Imports no tensor library."""
    devices = tuple(line.partition(",")[0] for _, line in find_devices())
    return MachineInfo(
        cpu=_cpu_name(), num_cores=read_cores().logical, devices=devices, torch=_torch_version()
    )


def code_commit() -> str:
    """Return the commit of the checkout of the core, or the version of its distribution."""
    folder = Path(dovetail.__file__).parent
    lines = tool_output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    return lines[0] if lines else version("dovetail-core")


def config_digest(config: Mapping[str, Any] | None) -> str:
    """Return the SHA-256 of a model's configuration; "" without one."""
    if not config:
        return ""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def model_name(model: str) -> str:
    """Return a model's name for file names: the last part of the path of a directory."""
    return Path(model).name if os.path.exists(model) else model


@lru_cache
def local_config(model: str) -> dict[str, Any] | None:
    """Return the configuration of a local model; None if there is none. Downloads nothing.

    A directory needs no weights.
    """
    try:
        path: Path | None = Path(os.path.expanduser(model))
        if not os.path.exists(path):
            path = find_model(model, PluginRegistry(), fetch=False)
        if path is not None and (path / CONFIG).is_file():
            return dict(read_json_object(path / CONFIG, max_bytes=MAX_BYTES[CONFIG]))
        return to_plain_containers(ModelDirectory.open(path).config) if path else None
    except (DovetailError, OSError):
        return None


def to_plain_containers(value: Any) -> Any:
    """Return a frozen configuration as plain dictionaries and lists."""
    if hasattr(value, "items"):
        return {str(name): to_plain_containers(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_containers(part) for part in value]
    return value


def _cpu_name() -> str:
    """Return the name of the processor, and its family, which identifies the generation."""
    fields: dict[str, str] = {}
    for line in read_system_file("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name", "unknown processor")
    family = "-".join(fields[key] for key in ("cpu family", "model") if key in fields)
    return f"{name} ({family})" if family else name


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
