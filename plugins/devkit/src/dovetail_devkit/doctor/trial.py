"""The main module of a trial process, which loads plugins and reports the result of each.

`trial_run` starts the process; no other module imports this module. The reports are JSON objects,
one per line, on a separate pipe, since a plugin may write to the standard streams. If this process
exits or hangs, the last report names the plugin that was being loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from json import dumps
from typing import Any

from dovetail.clock import MonotonicClock
from dovetail.errors import DovetailError
from dovetail.plugins.admission import check_probe
from dovetail.plugins.registry import PluginRegistry

BEGIN = "begin"
END = "end"


def run(task: Mapping[str, Any]) -> None:
    """Load the plugins of `task`.

    task: "fd" is the file descriptor for reports. "plugins" is a list of (kind, reference). "first"
    is a list of modules to import first, so that their import time is not counted for a plugin.
    """
    with os.fdopen(task["fd"], "w", encoding="utf-8", buffering=1) as pipe:

        def report(info: dict[str, Any]) -> None:
            print(dumps(info), file=pipe, flush=True)

        for module in task["first"]:
            _import_quietly(module)
        registry = PluginRegistry()
        for number, (kind, reference) in enumerate(task["plugins"]):
            report({"event": BEGIN, "number": number, "offset": _offset()})
            info = _load(registry, kind, reference)
            report({"event": END, "number": number, "offset": _offset()} | info)
    # Threads and exit handlers of plugins must not keep this process alive.
    os._exit(0)


def _load(registry: PluginRegistry, kind: str, reference: str) -> dict[str, Any]:
    clock = MonotonicClock()
    begun_ns = clock.now_ns()
    try:
        probe = registry.probe(kind, reference)
        cls = registry.load(kind, reference)
        took_ns = clock.now_ns() - begun_ns
        if kind == "platform" and probe.usable:
            probe = check_probe(f"platform {reference!r}", cls.probe())
    except DovetailError as error:
        return {"error": str(error)}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"}
    meant = registry.resolutions[-1]
    reasons = () if probe.usable else probe.reasons or ("the probe returned no reason",)
    # A probe can have notes, even if the platform is usable.
    notes = [*meant.notes, *(probe.reasons if probe.usable else ())]
    return {"error": "", "ns": took_ns, "notes": notes, "refusals": reasons}


def _import_quietly(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:
        # A plugin that needs the module fails with the same error later.
        sys.modules.pop(module, None)


def _offset() -> int:
    """Return the number of bytes written to the standard streams, which share one file."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return os.fstat(1).st_size
