"""Runs a coroutine in the event loop of the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run_in_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a uvloop event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(make())
