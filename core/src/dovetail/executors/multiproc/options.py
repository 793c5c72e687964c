"""The options of the executor `multiproc`, a model that refuses what it does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MAX_S = 86_400


class MultiprocOptions(BaseModel):
    """Options of the executor `multiproc`, all in seconds.

    step_timeout_s: from a plan's order to its result; who takes longer is ended, and the engine
    with it. stall_s: without a sign of life, until a worker counts as stalled. stop_timeout_s: for
    the workers to end by themselves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_timeout_s: float = Field(default=600.0, gt=0, le=MAX_S)
    stall_s: float = Field(default=3.0, gt=0, le=MAX_S)
    stop_timeout_s: float = Field(default=10.0, gt=0, le=MAX_S)
