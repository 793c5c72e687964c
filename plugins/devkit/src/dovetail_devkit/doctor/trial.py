"""One trial process: loads plugins one after the other and reports how each went.

Started by `trial_run`, never imported by anything else. Reports are JSON objects, one a line, on a
pipe of their own, since a plugin may write to the standard streams. Whoever reads them knows, when
this process ends or stops reporting, which plugin it was at.
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

    task: "fd", where to report; "plugins", pairs of kind and reference; "first", modules to import
    before, so that their time is counted for no plugin.
    """
    with os.fdopen(task["fd"], "w", encoding="utf-8", buffering=1) as pipe:

        def report(facts: dict[str, Any]) -> None:
            print(dumps(facts), file=pipe, flush=True)

        for module in task["first"]:
            _import_quietly(module)
        registry = PluginRegistry()
        for number, (kind, reference) in enumerate(task["plugins"]):
            report({"event": BEGIN, "number": number, "offset": _offset()})
            facts = _load(registry, kind, reference)
            report({"event": END, "number": number, "offset": _offset()} | facts)
    # What plugins have started (threads, handlers at exit) must not keep this process alive.
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
    reasons = () if probe.usable else probe.reasons or ("it does not say why",)
    # What a probe says of what can be used is good to know, too.
    notes = [*meant.notes, *(probe.reasons if probe.usable else ())]
    return {"error": "", "ns": took_ns, "notes": notes, "refusals": reasons}


def _import_quietly(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:
        # Whoever needs it will fail with this, by name.
        sys.modules.pop(module, None)


def _offset() -> int:
    """Return how much has been written to the standard streams, which are one file."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return os.fstat(1).st_size
