"""The options of the `multiproc` executor. Unknown options are an error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MAX_S = 86_400


class MultiprocOptions(BaseModel):
    """Options of the `multiproc` executor, all in seconds.

    step_timeout_s: maximum duration of a step; after a longer step workers and engine fail.
    stall_s: a worker without heartbeats for this long counts as stalled. stop_timeout_s: how long
    the workers may take to exit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_timeout_s: float = Field(default=600.0, gt=0, le=MAX_S)
    stall_s: float = Field(default=3.0, gt=0, le=MAX_S)
    stop_timeout_s: float = Field(default=10.0, gt=0, le=MAX_S)
