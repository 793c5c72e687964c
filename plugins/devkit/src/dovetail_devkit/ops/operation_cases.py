"""The cases of operations that are checked once per dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING

from dovetail.interfaces.ops import Ops, overridden_operations
from dovetail_devkit.case import Case

if TYPE_CHECKING:
    import torch

Check = Callable[[Ops, "torch.device", str], None]
"""Checks an operation on a device in a dtype. Raises AssertionError."""


def operation_cases(
    checks: Mapping[str, Check],
    ops_cls: type[Ops],
    device: torch.device,
    *,
    dtypes: Iterable[str],
) -> Iterator[Case]:
    """Yield a case for each dtype and each operation that the class overrides.

    checks: maps the name of an operation to its check. Each case creates a provider.
    """

    def case(name: str, dtype: str) -> Case:
        return Case(name=f"{name} in {dtype}", run=lambda: checks[name](ops_cls(), device, dtype))

    overridden = overridden_operations(ops_cls)
    for name, dtype in product(checks, tuple(dtypes)):
        if name in overridden:
            yield case(name, dtype)
