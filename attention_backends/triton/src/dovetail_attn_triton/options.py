"""The options of the `triton` attention backend. The model rejects unknown options.

Imported when an engine is configured: pydantic only, no torch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class TritonAttentionOptions(BaseModel):
    """Options of the `triton` attention backend.

    max_splits: maximum number of splits of a context in a step with few requests.
    workspace_mib: memory for the results of splits, allocated once per worker. If it is too
        small for a step, the step has fewer splits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_splits: Annotated[int, Field(ge=1, le=128)] = 64
    workspace_mib: Annotated[int, Field(ge=1, le=4096)] = 32
