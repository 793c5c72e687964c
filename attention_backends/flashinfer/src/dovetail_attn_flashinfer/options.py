"""The options of the `flashinfer` attention backend. The model rejects unknown options.

Imported when an engine is configured: pydantic only, no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class FlashInferAttentionOptions(BaseModel):
    """Options of the `flashinfer` attention backend.

    kernels: kernels for prefill. "auto" selects "trtllm-gen" for compute capability 10.0 and 10.3,
        "fa3" for 9.0, and "fa2" for other devices. "trtllm-gen" also computes decodes; otherwise
        decodes use "fa2" with tensor cores. FlashInfer downloads the kernels of "trtllm-gen".
    workspace_mib: device memory for intermediate results, allocated once per worker.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernels: Literal["auto", "fa2", "fa3", "trtllm-gen"] = "auto"
    workspace_mib: Annotated[int, Field(ge=16, le=4096)] = 128
