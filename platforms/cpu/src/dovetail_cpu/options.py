"""The options of this package's plugins. Each model rejects unknown options.

Imported when an engine is configured: pydantic only, no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class CPUWorkerOptions(BaseModel):
    """Options of the `cpu` worker.

    packed_cache: location of the packed weights that are cached between starts: "auto" (the value
        of DOVETAIL_PACKED_CACHE, else $XDG_CACHE_HOME/dovetail/packed), "off", or a directory.
        packed_cache_gib: maximum size of the cache. The least recently used files are deleted
        first. packed_cache_min_mib: smaller models are not cached. packed_cache_huge_pages: copy
        cached weights to huge pages, which the processor reads faster, while the engine runs;
        otherwise they stay in the pages of the file, which engines share.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    packed_cache: Annotated[str, Field(min_length=1)] = "auto"
    packed_cache_gib: Annotated[float, Field(gt=0, le=1 << 20)] = 20.0
    packed_cache_min_mib: Annotated[int, Field(ge=0)] = 64
    packed_cache_huge_pages: bool = True


class Int8Options(BaseModel):
    """Options of the `int8` linear method.

    head: the format of the LM head's weights. refined_groups: the groups of activations that have
        15 bits instead of 8: those with a "large" scale, "most" groups, or "none". More refined
        groups are slower and more accurate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: Literal["int8", "bfloat16"] = "int8"
    refined_groups: Literal["none", "large", "most"] = "large"


class GGUFOptions(BaseModel):
    """Options of the `gguf` linear method. refined_groups: as in `Int8Options`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    refined_groups: Literal["none", "large", "most"] = "most"


class Int4Options(BaseModel):
    """Options of the `int4` linear method.

    group_size: input features per scale. head: the format of the LM head, which is the
        most sensitive layer; "int4" is faster and less accurate. "q6_k" (6.56 bits per
        weight) is replaced by "int8" if its input features are not a multiple of 256.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_size: Literal[32, 64, 128] = 32
    head: Literal["int4", "q6_k", "int8", "bfloat16"] = "q6_k"


class Q4KOptions(BaseModel):
    """Options of the `q4_k` linear method.

    head: the format of the LM head; "q6_k" is replaced by "int8" if its input features
        are not a multiple of 256. fallback: the format of another such layer; "int8" is
        more accurate, and needs more memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: Literal["int8", "q6_k", "q4_k", "bfloat16"] = "q6_k"
    fallback: Literal["q4_1", "int8"] = "q4_1"
