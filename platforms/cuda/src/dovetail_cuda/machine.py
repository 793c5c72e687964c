"""The facts that determine whether a machine can use CUDA, and the reasons if it cannot.

`look` collects the facts; all other functions only evaluate facts. This module imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.errors import ConfigError, PluginError
from dovetail_cuda.driver import Card, Driver, read_driver
from dovetail_torch.accelerator.torch_build import TorchBuild, read_torch_build

VISIBLE = "CUDA_VISIBLE_DEVICES"

_GIB = 1 << 30
_PARTITION = "MIG-"
_MIN_CAPABILITY = {12: (5, 0), 13: (7, 5)}
"""The lowest compute capability that a major version of CUDA supports (its release notes)."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts of a machine.

    toolkit: the CUDA version for which torch was built; "" for none. driver: None if the query
    failed; `driver_problem` says why. visible: value of CUDA_VISIBLE_DEVICES; None for all devices.
    """

    torch_version: str
    toolkit: str
    driver: Driver | None
    driver_problem: str = ""
    visible: str | None = None

    @property
    def cards(self) -> tuple[Card, ...]:
        """The devices that this process may use, in its numbering."""
        if self.driver is None:
            return ()
        return _chosen(self.driver, self.visible)


def look(
    read: Callable[..., Driver] = read_driver,
    build: Callable[[str], TorchBuild] = read_torch_build,
) -> Machine:
    """Return this machine's facts. read, build: functions that return driver and torch facts."""
    result = build("cuda")
    driver, problem = None, ""
    visible = os.environ.get(VISIBLE)
    entries = (entry.strip() for entry in (visible or "").split(","))
    try:
        driver = read(partitions=[entry for entry in entries if entry.startswith(_PARTITION)])
    except PluginError as error:
        problem = str(error)
    return Machine(
        torch_version=result.version,
        toolkit=result.toolkit,
        driver=driver,
        driver_problem=problem,
        visible=visible,
    )


def assumed_machine(architecture: str) -> Machine:
    """Return the facts of a machine with one device. Raise ConfigError for an unknown name.

    architecture: "sm_" and compute capability · 10, such as "sm_90".
    """
    number = architecture.removeprefix("sm_")
    if number == architecture or not number.isdecimal() or not 50 <= int(number) <= 999:
        raise ConfigError(
            f"the architecture {architecture!r} is not known: specify sm_ and the compute "
            "capability, such as sm_90 or sm_100."
        )
    card = Card(
        uuid="GPU-assumed",
        name=f"assumed device {architecture}",
        total_bytes=80 * _GIB,
        capability=divmod(int(number), 10),
    )
    driver = Driver(version="assumed", cuda=(13, 0), cards=(card,))
    return Machine(torch_version="assumed", toolkit="13.0", driver=driver)


def reasons_against(machine: Machine) -> tuple[str, ...]:
    """Return the reasons why CUDA cannot be used, each with advice, or () if it can be used."""
    reasons = []
    if not machine.torch_version:
        reasons.append("torch is not installed: install a torch build for CUDA")
    elif not machine.toolkit:
        reasons.append(
            f"torch {machine.torch_version} is built without CUDA: install a "
            "torch build for CUDA (https://pytorch.org/get-started)"
        )
    if machine.driver is None:
        reasons.append(machine.driver_problem)
    else:
        reasons += _against_driver(machine, machine.driver)
    return tuple(reasons)


def describe(machine: Machine) -> tuple[str, ...]:
    """Return a description of each usable device."""
    version = machine.driver.version if machine.driver else ""
    return tuple(
        f"{card.name}, {card.total_bytes / _GIB:.1f} GiB, compute capability "
        f"{_dotted(card.capability)}, driver {version}"
        for card in machine.cards
    )


def _against_driver(machine: Machine, driver: Driver) -> list[str]:
    major = _major(machine.toolkit)
    if major > driver.cuda[0]:
        return [
            f"torch {machine.torch_version} is built for CUDA {machine.toolkit}, but the driver "
            f"{driver.version} supports only CUDA {_dotted(driver.cuda)} or older: install a "
            f"driver for CUDA {major}, or a torch built for CUDA {driver.cuda[0]}"
        ]
    if not driver.cards:
        return [f"the driver {driver.version} finds no device: check the output of `nvidia-smi -L`"]
    if not machine.cards:
        return [
            f"{VISIBLE}={machine.visible!r} selects none of the {len(driver.cards)} devices: unset "
            f"it, or list numbers from 0 to {len(driver.cards) - 1}"
        ]
    unknown = [card for card in machine.cards if card.problem]
    if unknown:
        return [
            f"{card.name} cannot be used: {card.problem}; or hide it with {VISIBLE}"
            for card in unknown
        ]
    minimum = _MIN_CAPABILITY.get(major, (0, 0))
    old = [card for card in machine.cards if card.capability < minimum]
    return [
        f"{card.name} has compute capability {_dotted(card.capability)}, but CUDA "
        f"{machine.toolkit} needs {_dotted(minimum)} or higher: hide the device with {VISIBLE}, or "
        "install a torch build for an older CUDA version"
        for card in old
    ]


def _chosen(driver: Driver, visible: str | None) -> tuple[Card, ...]:
    """Return the devices that CUDA shows: those listed before the first invalid entry.

    Devices are numbered as by the driver. If devices differ, CUDA numbers the fastest first, unless
    CUDA_DEVICE_ORDER=PCI_BUS_ID is set.
    """
    if visible is None:
        return driver.cards
    chosen: list[Card] = []
    for entry in visible.split(","):
        card = _named(driver, entry.strip())
        if card is None:
            break
        chosen.append(card)
    return tuple(chosen)


def _named(driver: Driver, entry: str) -> Card | None:
    cards = driver.cards
    if entry.isdecimal():
        return cards[int(entry)] if int(entry) < len(cards) else None
    if entry.startswith(_PARTITION):
        cards = driver.partitions
    matches = [card for card in cards if entry and card.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
