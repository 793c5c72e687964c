"""The options of this package's plugins. Each model rejects unknown options.

Imported when an engine is configured: pydantic only, no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

LayerName = Annotated[str, Field(min_length=1, max_length=300)]


class FP8Options(BaseModel):
    """Options of the `fp8` linear method.

    scales: one scale per output feature ("channel"), or per block of `block_size` x `block_size`
        weights ("block"). head: the format of the LM head. ignored_layers: names of layers that
        are not quantized, or parts of names, such as "mlp.down_proj" or "model.layers.0".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scales: Literal["channel", "block"] = "channel"
    block_size: Literal[32, 64, 128] = 128
    head: Literal["unquantized", "fp8"] = "unquantized"
    ignored_layers: Annotated[tuple[LayerName, ...], Field(max_length=10_000)] = ()
