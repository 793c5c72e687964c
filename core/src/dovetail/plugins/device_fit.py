"""Device fit: whether a plugin computes on the device that the platform has.

Only kinds whose contract declares `device_types` are asked; attention backends answer for
themselves, when they are held against an ask.
"""

from __future__ import annotations

from typing import Any

_DECLARE_DEVICES = frozenset({"compile_backend", "linear_method", "ops", "worker"})


def device_refusal(kind: str, cls: type[Any], device_type: str) -> str:
    """Return why a class cannot compute on a device of that type; "" if it can.

    device_type: as tensors are told it; "" if it is not known.
    """
    types: frozenset[str] = cls.device_types if kind in _DECLARE_DEVICES else frozenset()
    if not types or not device_type or device_type in types:
        return ""
    return f"it runs on {', '.join(sorted(types))}, and the platform's device is {device_type}"
