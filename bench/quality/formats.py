"""The compared formats: those of Dovetail, and those of other engines for the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FLOAT32, BF16 = "float32", "bf16"
REFERENCES = (FLOAT32, BF16)
"""Dovetail's formats that are the references for all other formats."""

OFF_GRID, PUBLISHED = "off grid", "published"
WEIGHTS = (OFF_GRID, PUBLISHED)
"""The kinds of weights: the first to compare formats, the second only to check published files."""

DIRECTORY = "directory"
SOURCE_FILE = "source"


@dataclass(frozen=True, kw_only=True)
class Format:
    """One row of the tables.

    engine: `quality.engine_<engine>`.
    options: options of the engine.
    model: the input of the engine: "directory" (Hugging Face), "source" (the GGUF file, only for
        the published weights), or the name of a conversion. A conversion of Dovetail is
        "<method>-<format>" of `dovetail quantize`.
    """

    name: str
    engine: str
    model: str = DIRECTORY
    options: Mapping[str, Any] = field(default_factory=dict)

    def is_for(self, weights: str) -> bool:
        """Return whether the format is measured on these weights.

        The GGUF file itself is measured only with the published weights, and calibrated formats
        only with the noisy weights.
        """
        if self.model == SOURCE_FILE:
            return weights == PUBLISHED
        return weights == OFF_GRID or self.engine != "dovetail" or self.model == DIRECTORY


def _ours(name: str, **options: Any) -> Format:
    return Format(name=name, engine="dovetail", options={"dtype": "bfloat16", **options})


def _calibrated(method: str, block_format: str) -> Format:
    return Format(
        name=f"{block_format}, {method}",
        engine="dovetail",
        model=f"{method}-{block_format}",
        options={"dtype": "bfloat16"},
    )


def _option(method: str, **options: Any) -> dict[str, Any]:
    return {"quantization": method, "plugin_options": {method: options}}


OURS = (
    Format(name=FLOAT32, engine="dovetail", options={"dtype": "float32"}),
    _ours(BF16),
    _ours("int8", quantization="int8"),
    _ours("int8, head bf16", **_option("int8", head="bfloat16")),
    _ours("q4_k", quantization="q4_k"),
    _ours("q4_k, fallback int8", **_option("q4_k", fallback="int8")),
    _ours("int4", quantization="int4"),
    _ours("int4, groups of 64", **_option("int4", group_size=64)),
    _ours("int4, groups of 128", **_option("int4", group_size=128)),
    _ours("int4, head int4", **_option("int4", head="int4")),
    _ours("fp8", quantization="fp8"),
    *(_calibrated("rtn", block_format) for block_format in ("q4_k", "q4_1", "q6_k")),
    *(_calibrated("gptq", block_format) for block_format in ("int4", "q4_1", "q4_k", "q6_k")),
    *(_calibrated("awq", block_format) for block_format in ("int4", "q4_1", "q4_k")),
    _ours("KV cache int8", kv_cache_dtype="int8"),
    Format(name="GGUF file", engine="dovetail", model=SOURCE_FILE, options={"dtype": "bfloat16"}),
)

PEERS = (
    *(
        Format(name=f"llama.cpp {kind}", engine="llamacpp", model=kind)
        for kind in ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M")
    ),
    Format(name="llama.cpp GGUF file", engine="llamacpp", model=SOURCE_FILE),
    Format(name="OpenVINO int8", engine="openvino", model="int8"),
    Format(name="OpenVINO int4", engine="openvino", model="int4"),
    Format(name="torch dynamic int8", engine="torch", options={"weights": "int8"}),
)

EVERY = (*OURS, *PEERS)
