"""Accuracy of engines from the results of `bench/quality.py`, and which engines are compared.

Speed is compared at equal accuracy: an engine is part of a ratio if its KL divergence from float32,
on weights that no format represents exactly, is at most 1.25 times that of Dovetail in the same
format. An engine without a result is not part of a ratio. In bf16, no weights are rounded, and
every engine is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quality.formats import FLOAT32, OFF_GRID
from quality.report import mean
from quality.results import read

from peers.roster import OURS

MAX_TIMES_OURS = 1.25
EXACT = "bf16"
NAMES = {
    (OURS, "bf16"): "bf16",
    (OURS, "int8"): "int8",
    (OURS, "int4"): "int4",
    ("llamacpp", "bf16"): "llama.cpp BF16",
    ("llamacpp", "int8"): "llama.cpp Q8_0",
    ("llamacpp", "int4"): "llama.cpp Q4_0",
    ("llamacpp-q4_k_m", "int4"): "llama.cpp Q4_K_M",
    (f"{OURS}-q4_k", "int4"): "q4_k",
    (f"{OURS}-gptq", "bf16"): "q4_k, gptq",
    ("ikllamacpp", "int8"): "llama.cpp Q8_0",  # the same file, also below
    ("ikllamacpp", "int4"): "llama.cpp Q4_0",
    ("openvino", "int8"): "OpenVINO int8",
    ("openvino", "int4"): "OpenVINO int4",
}
"""Formats of `quality/formats.py` by engine and format of the speed run.

`dovetail-gptq` serves a quantized file, for which a speed run needs no option: its format is bf16.
"""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """kl: mean KL divergence from float32 in nats, by engine and format.

    origin: source of the results.
    """

    kl: Mapping[tuple[str, str], float]
    origin: str

    def counts(self, engine: str, weights: str) -> bool:
        """Return whether an engine is part of the speed ratios of a format."""
        if weights == EXACT:
            return True
        ours, theirs = self.kl.get((OURS, weights)), self.kl.get((engine, weights))
        return ours is not None and theirs is not None and theirs <= MAX_TIMES_OURS * ours


def read_accuracy(path: Path) -> Accuracy:
    """Read the JSON file of `bench/quality.py`. Raises ResultsError if the file is invalid.

    If Dovetail's results for int8 or int4 are missing, raises a ValueError that names the format.
    """
    result = read(path)
    rows = {row["format"]: row for row in result["rows"] if row["weights"] == OFF_GRID}
    results = {key: mean(rows[name], "kl", FLOAT32) for key, name in NAMES.items() if name in rows}
    kl = {key: value for key, value in results.items() if value is not None}
    missing = [weights for weights in ("int8", "int4") if (OURS, weights) not in kl]
    if missing:
        raise ValueError(f"--quality={path} has no accuracy of Dovetail for {', '.join(missing)}")
    settings = result["origin"]["settings"]
    num_tokens = settings["chunks"] * settings["chunk_tokens"]
    commits = " and ".join(dict.fromkeys(row["commit"] for row in rows.values()))
    origin = f"{settings['model']} off its grid, {num_tokens:,} tokens per text, commit {commits}"
    return Accuracy(kl=kl, origin=origin)
