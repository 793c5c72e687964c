"""The options of `dovetail convert`. Imported with the command: no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dovetail.errors import ConfigError, nearest

KEEP = "auto"
DTYPES = (KEEP, "bfloat16", "float16", "float32")
MAX_SHARD_BYTES = 1 << 40
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?) ?(?P<unit>[A-Za-z]{0,3})")


def _option(text: str) -> Parameter:
    return Parameter(help=text)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The options of `dovetail convert`. `check_options` checks the values."""

    out: Annotated[Path, Parameter(name=("--out", "--output"), help="The new directory.")]
    dtype: Annotated[str, _option("auto (as in the checkpoint), bfloat16, float16 or float32.")] = (
        KEEP
    )
    max_shard_size: Annotated[
        str, _option("Maximum size of a file with weights, such as 500MB or 2GiB.")
    ] = "5GB"
    overwrite: Annotated[
        bool, Parameter(negative="", help="Replace the directory if it contains a model.")
    ] = False
    skip_tokenizer_init: Annotated[bool, Parameter(negative="", help="Write no tokenizer.")] = False
    revision: Annotated[str | None, _option("Branch, tag or commit of a model on the hub.")] = None

    @property
    def max_shard_bytes(self) -> int:
        """The maximum size of a file in bytes. Raises ConfigError for an invalid size."""
        match = _SIZE.fullmatch(self.max_shard_size)
        unit = None if match is None else _UNITS.get(match["unit"].upper())
        size = 0 if match is None or unit is None else int(float(match["number"]) * unit)
        if not 0 < size <= MAX_SHARD_BYTES:
            raise ConfigError(
                f"--max-shard-size={self.max_shard_size:.80} must be a number of bytes with a "
                "unit, from 1B to 1TiB, such as 500MB or 2GiB."
            )
        return size


def check_options(options: ConvertOptions) -> None:
    """Raise ConfigError, naming the option, for an invalid value."""
    if options.dtype not in DTYPES:
        raise ConfigError(
            f"--dtype={options.dtype:.80} is not known.{nearest(options.dtype[:80], DTYPES)}\n"
            f"Choices: {', '.join(DTYPES)}."
        )
    assert options.max_shard_bytes
