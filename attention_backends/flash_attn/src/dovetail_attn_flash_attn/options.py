"""The options of the `flash_attn` attention backend. The model rejects unknown options.

Imported when an engine is configured: pydantic only, no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

AUTO: Literal["auto"] = "auto"


class FlashAttentionOptions(BaseModel):
    """Options of the `flash_attn` attention backend.

    provider: the library that contains the kernels. "auto" selects the first that meets all
        requirements, in the order "vllm", "fa3", "flash_attn", "torch".
    graph_splits: maximum number of splits of a context in captured decodes with FA3. Intermediate
        results take graph_splits · requests · query heads · head size · 4 bytes. Other steps have
        no such limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: Literal["auto", "vllm", "fa3", "flash_attn", "torch"] = AUTO
    graph_splits: Annotated[int, Field(ge=1, le=256)] = 32
