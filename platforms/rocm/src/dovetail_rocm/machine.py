"""The properties that determine whether a machine can use ROCm, and the reasons if it cannot.

`look` collects the properties; all other functions only evaluate them. This module imports no
torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail.errors import ConfigError, PluginError
from dovetail_rocm.driver import Card, Driver, read_driver
from dovetail_torch.accelerator.torch_build import TorchBuild, read_torch_build

OUTER = "ROCR_VISIBLE_DEVICES"
"""Hides devices from all programs. Its entries are numbers or uuids of the driver's devices."""
INNER = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Hide devices from programs that use HIP, as torch does.

Only the first variable that is set takes effect. Its entries are indices into the devices that
`OUTER` leaves visible.
"""

_GIB = 1 << 30
_ASSUMED_BYTES = 192 * _GIB
_NAME = re.compile(r"gfx[0-9]{1,2}[0-9a-f]{2}")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Properties of a machine.

    toolkit: the HIP version for which torch was built; "" for none. driver: None if it is missing;
    `driver_problem` says why. outer, inner: values of the variables that hide devices; None if they
    are not set.
    """

    torch_version: str
    toolkit: str
    driver: Driver | None
    driver_problem: str = ""
    outer: str | None = None
    inner: str | None = None

    @property
    def cards(self) -> tuple[Card, ...]:
        """The devices that this process may use, in its numbering."""
        if self.driver is None:
            return ()
        cards = self.driver.cards
        for value in (self.outer, self.inner):
            cards = cards if value is None else _visible(cards, value)
        return cards


def look(
    read: Callable[[], Driver] = read_driver,
    build: Callable[[str], TorchBuild] = read_torch_build,
) -> Machine:
    """Return this machine's properties. read, build: functions that query driver and torch."""
    torch_build = build("hip")
    driver, problem = None, ""
    try:
        driver = read()
    except PluginError as error:
        problem = str(error)
    inner = (os.environ.get(name) for name in INNER)
    return Machine(
        torch_version=torch_build.version,
        toolkit=torch_build.toolkit,
        driver=driver,
        driver_problem=problem,
        outer=os.environ.get(OUTER),
        inner=next((value for value in inner if value is not None), None),
    )


def assumed_machine(architecture: str) -> Machine:
    """Return the properties of a machine with one device. Raise ConfigError for an unknown name.

    architecture: such as "gfx942".
    """
    if not _NAME.fullmatch(architecture):
        raise ConfigError(
            f"the architecture {architecture!r} is not known: specify the name of an AMD target, "
            "such as gfx942."
        )
    card = Card(uuid="", architecture=architecture, total_bytes=_ASSUMED_BYTES)
    return Machine(
        torch_version="assumed", toolkit="7.0", driver=Driver(version="assumed", cards=(card,))
    )


def reasons_against(machine: Machine) -> tuple[str, ...]:
    """Return the reasons why ROCm cannot be used, each with advice, or () if it can be used."""
    reasons = []
    if not machine.torch_version:
        reasons.append("torch is not installed: install a torch build for ROCm")
    elif not machine.toolkit:
        reasons.append(
            f"torch {machine.torch_version} is built without ROCm: install a "
            "torch build for ROCm (https://pytorch.org/get-started)"
        )
    if machine.driver is None:
        reasons.append(machine.driver_problem)
    elif not machine.driver.cards:
        reasons.append("the AMD driver finds no device: check the output of `rocminfo`")
    elif not machine.cards:
        number = len(machine.driver.cards)
        reasons.append(
            f"{OUTER}={machine.outer!r} and {INNER[0]}={machine.inner!r} select none of the "
            f"{number} devices: unset them, or list numbers from 0 to {number - 1}"
        )
    return tuple(reasons)


def describe(machine: Machine) -> tuple[str, ...]:
    """Return a description of each usable device."""
    version = machine.driver.version if machine.driver else ""
    driver = f"driver {version}" if version else "the kernel's driver"
    return tuple(
        f"{card.architecture}, {card.total_bytes / _GIB:.1f} GiB, {driver}"
        for card in machine.cards
    )


def _visible(cards: Sequence[Card], entries: str) -> tuple[Card, ...]:
    """Return the devices of a list of numbers or uuids, up to the first invalid entry."""
    chosen: list[Card] = []
    for entry in entries.split(","):
        card = _named(cards, entry.strip())
        if card is None:
            break
        chosen.append(card)
    return tuple(chosen)


def _named(cards: Sequence[Card], entry: str) -> Card | None:
    if entry.isdecimal():
        return cards[int(entry)] if int(entry) < len(cards) else None
    # The driver and the variable may write hexadecimal digits in different cases.
    same = [card for card in cards if entry and card.uuid.lower() == entry.lower()]
    return same[0] if len(same) == 1 else None
