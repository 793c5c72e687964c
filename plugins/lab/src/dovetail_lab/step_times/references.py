"""Finds the step-time model that a reference in an option or experiment file names.

linear, linear:NAME=PICOSECONDS,…   rough constants of an 8-billion-parameter model on a large GPU
calibrated:NAME                     a shipped calibration
FILE.json, calibrated:FILE.json     a calibration of `dovetail lab profile`
roofline:DEVICE                     a rough estimate from the model's configuration and a data sheet
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail_lab.simulation.setup import StepTimeModel
from dovetail_lab.step_times.calibrated import CalibratedStepTimes
from dovetail_lab.step_times.calibration import (
    Calibration,
    MeasuredEngine,
    mismatches,
    read_calibration,
)
from dovetail_lab.step_times.linear import NAME as LINEAR
from dovetail_lab.step_times.linear import make_linear
from dovetail_lab.step_times.machine_info import (
    code_commit,
    config_digest,
    local_config,
    this_machine,
)
from dovetail_lab.step_times.roofline import ModelSizes, RooflineStepTimes, read_device

_CALIBRATIONS = Path(__file__).with_name("calibrations")
_CALIBRATED, _ROOFLINE, _ENDING = "calibrated", "roofline", ".json"


@dataclass(frozen=True, kw_only=True)
class StepTimeReference:
    """A step-time model of an experiment.

    name: see this module. model: the model directory or name; "" if the experiment names none.
    """

    name: str
    model: str = ""

    @property
    def kind(self) -> str:
        """The part before the first colon; "calibrated" for a calibration file."""
        return _CALIBRATED if self.name.endswith(_ENDING) else self.name.partition(":")[0]

    def load(self) -> StepTimeModel:
        """Return the model; raise UserError if it is unknown or invalid."""
        return _load(self, self.digest())

    def digest(self) -> str:
        """Return a hash (str) of everything that determines the step times."""
        if self.kind == _CALIBRATED:
            return hashlib.sha256(self.calibration_file().read_bytes()).hexdigest()
        if self.kind == _ROOFLINE:
            sheet = read_device(self.name.partition(":")[2]).model_dump()
            text = json.dumps([sheet, self._model_config()], sort_keys=True, default=str)
            return hashlib.sha256(text.encode()).hexdigest()
        return self.name

    def problems(self, engine: MeasuredEngine, *, strict: bool = False) -> Sequence[str]:
        """Return one sentence for each reason why the times may be wrong for an experiment.

        engine: the limits of the experiment. strict: whether a calibration of another commit or
        version of torch is a problem, and the rough constants of the default model.
        """
        if self.kind == _ROOFLINE:
            return ("Times of roofline are rough: errors of 25 to 50 % are usual.",)
        if self.kind == LINEAR and strict:
            return ("Times of linear are rough: constants of a model on a large GPU.",)
        if self.kind != _CALIBRATED:
            return ()
        return mismatches(
            self.calibration(),
            machine=this_machine(),
            model_digest=config_digest(local_config(self.model)) if self.model else "",
            engine=engine,
            commit=code_commit() if strict else "",
        )

    def calibration(self) -> Calibration:
        """Return the calibration; raise UserError if it cannot be read."""
        return read_calibration(self.calibration_file())

    def calibration_file(self) -> Path:
        """Return the path of the calibration; raise UserError if there is none."""
        prefix, _, name = self.name.partition(":")
        if prefix != _CALIBRATED or os.path.isfile(self.name):
            name = self.name
        path = Path(name) if name.endswith(_ENDING) else _CALIBRATIONS / f"{name}{_ENDING}"
        known = shipped_calibrations()
        if not os.path.isfile(path) or (not name.endswith(_ENDING) and name not in known):
            raise UserError(
                f"step_times={self.name!r}: there is no calibration {name!r}. The shipped "
                f"calibrations are {', '.join(known)}; create one with `dovetail lab profile`."
            )
        return path

    def _model_config(self) -> Mapping[str, Any]:
        if not self.model:
            raise UserError(
                f"step_times={self.name!r} needs a model. Write --model, or setup.model in the "
                "experiment file: a directory with config.json."
            )
        config = local_config(self.model)
        if config is None:
            raise UserError(
                f"step_times={self.name!r}: model={self.model!r} is not a local model with a "
                "config.json."
            )
        return config


def shipped_calibrations() -> Sequence[str]:
    """Return the names of the shipped calibrations."""
    return sorted(path.stem for path in _CALIBRATIONS.glob(f"*{_ENDING}"))


@lru_cache
def _load(reference: StepTimeReference, digest: str) -> StepTimeModel:
    """Return the model. digest: part of the cache key, so that changed files are read again."""
    if reference.kind == LINEAR:
        return make_linear(reference.name)
    if reference.kind == _CALIBRATED:
        return CalibratedStepTimes(reference.calibration())
    if reference.kind == _ROOFLINE:
        device = reference.name.partition(":")[2]
        sizes = ModelSizes.of(reference._model_config())
        return RooflineStepTimes(device, sizes, read_device(device))
    raise UserError(
        f"step_times={reference.name!r} is not known. Use linear, linear:NAME=PICOSECONDS, "
        "calibrated:NAME, a file of `dovetail lab profile`, or roofline:DEVICE."
    )
