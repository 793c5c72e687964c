"""The conformance suite of the model format contract.

The suite reads the files in the attribute `examples` of the format, if this attribute exists.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random

from dovetail.errors import ModelError
from dovetail.interfaces.model_format import ModelDescription, ModelFormat
from dovetail_devkit.expectation import checking, expect

NUM_DAMAGED = 50
MAX_SECONDS = 10.0


@checking("model_format")
def check_model_format(
    format_cls: type[ModelFormat],
    *,
    files: Mapping[str, bytes] | None = None,
    options: Mapping[str, object] | None = None,
) -> None:
    """Check a format against its contract. Raise AssertionError with the violated rule.

    files: valid model files, as a map of name to content; None for the format's `examples`.
    """
    if files is None:
        files = getattr(format_cls, "examples", {})
    instance = format_cls(**({"options": options} if options else {}))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in files.items():
            _check_valid(instance, folder / file, content)
            _check_damaged(instance, folder / file, content)
        _check_rejected(instance, folder / "missing.model")
        for number, content in enumerate((b"", b"\x00" * 4096, Random(1).randbytes(4096))):
            path = folder / f"invalid{number}.model"
            path.write_bytes(content)
            _check_rejected(instance, path)
        pipe = folder / "pipe.model"
        os.mkfifo(pipe)
        _check_rejected(instance, pipe)
        (folder / "directory.model").mkdir()
        _check_rejected(instance, folder / "directory.model")


def _check_valid(created: ModelFormat, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    description = created.describe(path)
    expect(
        isinstance(description, ModelDescription),
        f"describe() returns a {type(description).__name__}; expected a ModelDescription",
    )
    names = description.config.get("architectures")
    expect(
        isinstance(names, (list, tuple)) and bool(names) and all(isinstance(n, str) for n in names),
        f"describe returns architectures={names!r} in config; expected a list of str",
    )
    expect(bool(description.load_format), "describe must return a load_format")
    expect(bool(description.tokenizer_mode), "describe must return a tokenizer_mode")
    expect(
        description.pooling in (None, "", "last", "mean", "cls"),
        f"describe returns pooling={description.pooling!r}; expected None, '', 'last', 'mean' or "
        "'cls'",
    )
    expect(created.choose([path]) == path, "choose() must return the only file of a directory")


def _check_damaged(created: ModelFormat, path: Path, content: bytes) -> None:
    """Check that truncated and damaged files are read or rejected in bounded time."""
    random = Random(2)
    damaged = path.with_name(f"damaged-{path.name}")
    for _ in range(NUM_DAMAGED):
        invalid = bytearray(content[: random.randrange(len(content))])
        if random.random() < 0.5:
            invalid = bytearray(content)
            for _ in range(random.randrange(1, 9)):
                invalid[random.randrange(len(invalid))] = random.randrange(256)
        damaged.write_bytes(invalid)
        begin_s = time.perf_counter()
        try:
            created.describe(damaged)
        except ModelError as error:
            expect(
                damaged.name in str(error),
                f"the ModelError must name the file; its message is: {error}",
            )
        took_s = time.perf_counter() - begin_s
        expect(took_s < MAX_SECONDS, f"describe() took {took_s:.0f} s for a damaged file")


def _check_rejected(created: ModelFormat, path: Path) -> None:
    try:
        created.describe(path)
    except ModelError as error:
        expect(
            path.name in str(error), f"the ModelError must name the file; its message is: {error}"
        )
        return
    expect(False, f"describe({path.name}) must raise ModelError")
