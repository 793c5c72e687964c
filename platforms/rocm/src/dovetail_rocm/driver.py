"""Read what the Linux driver of AMD devices (amdgpu, KFD) reports in files.

This module opens no device and creates no context. The files are those of the kernel's topology of
compute nodes: a node is a processor or a device. This module does not depend on torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.errors import PluginError

ROOT = Path("/")
DEVICE = "dev/kfd"
NODES = "sys/class/kfd/kfd/topology/nodes"
VERSION = "sys/module/amdgpu/version"

_MAX_NODES = 4096
_MAX_BANKS = 64
_MAX_FILE_BYTES = 1 << 16
_DEVICE_HEAPS = (1, 2)
"""Heap types of a device's own memory: visible to the host, and private."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One device. uuid: "GPU-" and 16 hexadecimal digits, or "". architecture: such as "gfx942"."""

    uuid: str
    architecture: str
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The driver's report. version: "" if the kernel's own driver is used.

    cards: the devices that this process may use, in the driver's order.
    """

    version: str
    cards: tuple[Card, ...]


def read_driver(root: Path = ROOT) -> Driver:
    """Return the driver's report. Raise PluginError with advice if there is no usable driver.

    root: the directory that contains `dev` and `sys`.
    """
    device = root / DEVICE
    if not device.exists():
        raise PluginError(
            f"no AMD driver was found (/{DEVICE} does not exist): install the amdgpu driver; in a "
            f"container, start it with `--device /{DEVICE} --device /dev/dri`"
        )
    if not os.access(device, os.R_OK | os.W_OK):
        raise PluginError(
            f"this process has no permission to use /{DEVICE}: add the user to the groups "
            "`render` and `video`"
        )
    return Driver(version=_text(root / VERSION).strip(), cards=tuple(_cards(root / NODES)))


def architecture_of(version: int) -> str:
    """Return the name of a target version of the driver, such as "gfx942" for 90402."""
    major, rest = divmod(version, 10_000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def _cards(nodes: Path) -> list[Card]:
    """Return the devices of the topology, in the order of their nodes."""
    try:
        names = [path.name for path in nodes.iterdir() if path.name.isdecimal()]
    except OSError:
        return []
    numbers = sorted(map(int, names[:_MAX_NODES]))
    cards = (_card(nodes / str(number)) for number in numbers)
    return [card for card in cards if card is not None]


def _card(node: Path) -> Card | None:
    """Return the device of a node; None for a processor, and for a device of other users."""
    # The kernel rejects reads of a device that the container's rules hide.
    properties = _properties(node / "properties")
    version = properties.get("gfx_target_version", 0)
    if not properties.get("simd_count", 0) or not version:
        return None
    banks = [node / "mem_banks" / str(number) / "properties" for number in range(_num_banks(node))]
    heaps = [_properties(path) for path in banks]
    own = (heap for heap in heaps if heap.get("heap_type") in _DEVICE_HEAPS)
    number = properties.get("unique_id", 0)
    return Card(
        uuid=f"GPU-{number:016x}" if number else "",
        architecture=architecture_of(version),
        total_bytes=sum(heap.get("size_in_bytes", 0) for heap in own),
    )


def _num_banks(node: Path) -> int:
    return min(_properties(node / "properties").get("mem_banks_count", 0), _MAX_BANKS)


def _properties(path: Path) -> dict[str, int]:
    """Return the lines "name number" of a file, or {} if it cannot be read."""
    lines: Sequence[list[str]] = [line.split() for line in _text(path).splitlines()]
    pairs = (words for words in lines if len(words) == 2)
    return {name: int(number) for name, number in pairs if number.isdecimal() and number.isascii()}


def _text(path: Path) -> str:
    """Return the start of a file, or "" if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_FILE_BYTES)
    except OSError:
        return ""
