"""Calibration files: measured step times of one model on one machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dovetail.errors import UserError
from dovetail_lab.step_times.fitting import TERMS
from dovetail_lab.step_times.machine_info import MachineInfo

FORMAT = "dovetail-step-times"
VERSION = 4
_MAX_FILE_BYTES = 2**20
_MAX_PS = 10**15

Picoseconds = Annotated[int, Field(ge=0, le=_MAX_PS)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Knot = tuple[Annotated[int, Field(ge=0, le=10_000_000)], Annotated[float, Field(ge=0.1, le=10.0)]]
Knots = Annotated[tuple[Knot, ...], Field(max_length=1000)]
RowKnots = tuple[Annotated[int, Field(ge=1, le=1_000_000)], Annotated[Knots, Field(min_length=1)]]
DecodeKnots = Annotated[tuple[RowKnots, ...], Field(max_length=1000)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MeasuredModel(_Model):
    """The measured model: its name and the SHA-256 of its configuration."""

    name: str
    config_digest: str


class MeasuredEngine(_Model):
    """The limits of the engine that was measured; `num_threads` is 0 for the platform's choice."""

    max_num_seqs: Annotated[int, Field(ge=1)]
    max_num_batched_tokens: Annotated[int, Field(ge=1)]
    max_model_len: Annotated[int, Field(ge=2)]
    block_size: Annotated[int, Field(ge=1)]
    num_threads: Annotated[int, Field(ge=0)] = 0


class FitQuality(_Model):
    """How well the fit describes the measured steps.

    bias: the sum of the modeled times divided by the sum of the measured times, minus 1. mape: mean
    absolute percentage error, as a fraction. repeat_mape: the mape of one measurement against
    another measurement of the same step.
    """

    num_steps: Annotated[int, Field(ge=0)]
    bias: Finite
    mape: Finite
    repeat_mape: Finite


class Calibration(_Model):
    """The contents of a calibration file. Times are in picoseconds; see `Fit` for the terms."""

    format: Literal["dovetail-step-times"] = FORMAT
    version: Literal[4] = VERSION
    model: MeasuredModel
    machine: MachineInfo
    engine: MeasuredEngine
    created: str
    commit: str
    step_ps: dict[str, Picoseconds]
    batch_change_ps: tuple[Picoseconds, Picoseconds]
    gap_ps: tuple[Picoseconds, Picoseconds]
    prefill_gap_ps: tuple[Picoseconds, Picoseconds, Picoseconds]
    decode_factors: DecodeKnots
    prefill_factors: Knots
    quality: FitQuality

    @model_validator(mode="after")
    def _check_terms(self) -> Self:
        if set(self.step_ps) != set(TERMS):
            raise ValueError(f"step_ps must have the terms {', '.join(TERMS)}")
        tables = [self.prefill_factors, *(knots for _, knots in self.decode_factors)]
        for positions in ([rows for rows, _ in self.decode_factors], *map(_positions, tables)):
            if sorted(set(positions)) != positions:
                raise ValueError(
                    "the numbers of tokens and requests in a table of factors must increase"
                )
        return self

    def write(self, path: Path) -> None:
        """Write the file. Raises UserError if it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.model_dump(mode="json"), indent=1)
            path.write_text(text + "\n", "utf-8")
        except OSError as error:
            raise UserError(f"{str(path)!r} cannot be written: {error.strerror}.") from error


def _positions(knots: Sequence[tuple[int, float]]) -> list[int]:
    return [position for position, _ in knots]


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file. Raises UserError if it is invalid or has a different version."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UserError(f"{str(path)!r} is larger than {_MAX_FILE_BYTES:,} bytes.")
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} is not a calibration file: {error}.") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise UserError(
            f"{str(path)!r} is not a calibration file. Create one with `dovetail lab profile`."
        )
    if fields.get("version") != VERSION:
        raise UserError(
            f"{str(path)!r} has version {str(fields.get('version'))[:20]}; this lab reads version "
            f"{VERSION}. Recreate it with `dovetail lab profile`."
        )
    try:
        return Calibration.model_validate(fields)
    except ValidationError as error:
        shown = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"
            for item in error.errors()[:3]
        )
        raise UserError(f"{str(path)!r} is invalid: {shown}.") from error


def mismatches(
    calibration: Calibration,
    *,
    machine: MachineInfo,
    model_digest: str,
    engine: MeasuredEngine,
    commit: str = "",
) -> Sequence[str]:
    """Return one sentence for each difference between a calibration and an experiment.

    machine: this machine. model_digest: the digest of the experiment's model; "" if it is not
    known.
    engine: the limits of the experiment; its `num_threads` is not compared. commit: the commit of
    this version; "" to accept any version.
    """
    sentences = []
    if calibration.machine.hardware != machine.hardware:
        sentences.append(
            f"The calibration was measured on another machine: {calibration.machine.describe()}; "
            f"this one is {machine.describe()}."
        )
    if model_digest and model_digest != calibration.model.config_digest:
        sentences.append(
            f"The calibration was measured with another model: {calibration.model.name!r}."
        )
    software = (calibration.commit, calibration.machine.torch), (commit, machine.torch)
    if commit and software[0] != software[1]:
        sentences.append(
            "The calibration was measured with commit {} and torch {}; this is commit {} with "
            "torch {}.".format(*software[0], *software[1])
        )
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        measured, used = getattr(calibration.engine, name), getattr(engine, name)
        if used > measured:
            sentences.append(
                f"The calibration was measured up to {name}={measured}; {name}={used} is "
                "extrapolated."
            )
    return sentences
