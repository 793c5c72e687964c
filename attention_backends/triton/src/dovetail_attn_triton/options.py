"""The options of the attention backend `triton`: a model that refuses what it does not know.

Imported when an engine is configured: pydantic only, no torch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class TritonAttentionOptions(BaseModel):
    """Options of the attention backend `triton`.

    max_splits: into how many parts a context is cut at most where a step has few rows.
    workspace_mib: memory for their results, taken once for each KV-cache group; where it is too
        small for a step, contexts are cut into fewer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_splits: Annotated[int, Field(ge=1, le=128)] = 64
    workspace_mib: Annotated[int, Field(ge=1, le=4096)] = 32
