"""Linear methods that use another linear method, which the worker selects for them."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.interfaces import Platform
from dovetail.plugins import PluginRegistry
from dovetail.plugins.construction import construct
from dovetail.plugins.selection import choose_inner
from dovetail_torch.checks import check_device

INNER_METHOD = "inner_method"
"""Capability id of linear methods with the property `inner`, which the worker sets to an instance
of the method that it selects automatically for this platform."""


def with_inner_method(
    provider: Any, plugins: PluginRegistry, platform: Platform, device: torch.device
) -> Any:
    """Return a linear method or op provider, with its inner method if it needs one."""
    if INNER_METHOD in getattr(type(provider), "provides", ()):
        cls = choose_inner(plugins, platform, "linear_method")
        check_device("linear_method", cls, device)
        provider.inner = construct("linear_method", cls)
    return provider
