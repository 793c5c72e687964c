"""Capability "profile": the torch profiler records a worker on demand.

The profile is a Chrome trace, which Perfetto and chrome://tracing show. Recording slows the steps
down. Operations of native replay appear as one event per step.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import torch

from dovetail.config.user_paths import user_path
from dovetail.errors import ConfigError

PROFILE_VARIABLE = "DOVETAIL_PROFILE_DIR"
"""Environment variable with the directory for profiles; default: `dovetail_profiles`."""
DEFAULT_FOLDER = "dovetail_profiles"

_numbers = count(1)


class Profiler:
    """Records one profile at a time."""

    def __init__(self) -> None:
        """Create a profiler that is not recording."""
        self._running: torch.profiler.profile | None = None

    def start(self) -> None:
        """Start recording. Raise ConfigError if a profile is already being recorded."""
        if self._running is not None:
            raise ConfigError("A profile is already being recorded. Stop it first.")
        folder().mkdir(parents=True, exist_ok=True)
        kinds = torch.profiler.supported_activities()
        self._running = torch.profiler.profile(activities=kinds, record_shapes=True)
        self._running.start()

    def stop(self) -> Path:
        """Stop recording, write the profile and return its file.

        Raises ConfigError if no profile is being recorded.
        """
        profile, self._running = self._running, None
        if profile is None:
            raise ConfigError("No profile is being recorded. Start one first.")
        profile.stop()
        path = folder() / f"worker-{os.getpid()}-{next(_numbers)}.json.gz"
        profile.export_chrome_trace(str(path))
        return path


def folder() -> Path:
    """Return the directory for profiles. Raise ConfigError for a home that is not known."""
    stated = os.environ.get(PROFILE_VARIABLE, "") or DEFAULT_FOLDER
    return user_path(PROFILE_VARIABLE, stated).absolute()
