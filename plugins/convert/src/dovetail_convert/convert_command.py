"""`dovetail convert`: write a model as a Hugging Face checkpoint."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_line
from dovetail.cli.terminal import count_text
from dovetail_convert.convert_options import ConvertOptions, check_options

_MODEL_HELP = "A model directory, a GGUF file, or a name for a model source."


def convert(
    model: Annotated[str, Parameter(help=_MODEL_HELP)],
    /,
    *,
    options: Annotated[ConvertOptions, Parameter(name="*")],
) -> int:
    """Write a model as a Hugging Face checkpoint: config.json, tokenizer, safetensors shards."""
    check_options(options)
    from dovetail_convert.run import run  # slow to import

    with _terminated_as_interrupted():
        result = run(model, options, lambda text: print(text, file=sys.stderr, flush=True))
    print_line(
        f"Saved to {options.out}: {count_text(result.num_tensors, 'tensor')} "
        f"({', '.join(result.dtypes)}) in {count_text(result.num_files, 'file')}, "
        f"{result.num_bytes / 1e6:.1f} MB."
    )
    return 0


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, so that no incomplete directory remains."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
