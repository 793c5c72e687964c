"""Checks of the configuration and of plugins, which a worker makes before it creates a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces import LinearMethod, Ops


def read_vocab_size(hf_config: Mapping[str, Any]) -> int:
    """Return the width of the logits. Raise ConfigError if config.json does not have it."""
    vocab_size = hf_config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(
            f"config.json has vocab_size={vocab_size!r}; vocab_size must be an integer."
        )
    return vocab_size


def check_device(kind: str, cls: type[LinearMethod] | type[Ops], device: torch.device) -> None:
    """Raise ConfigError if a provider, a plugin of this kind, does not support the device."""
    if device.type in (cls.device_types or {device.type}) | {"meta"}:
        return
    raise ConfigError(
        f"the {kind} {cls.__name__} supports {', '.join(sorted(cls.device_types))}, but the "
        f"device is {device.type}: choose another one."
    )
