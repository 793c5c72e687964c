"""The steps of `dovetail convert`: read the description, plan the files, write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dovetail.cli.frame.output_directory import check_output, new_directory
from dovetail.config.model_directory import ModelDirectory
from dovetail.errors import ConfigError
from dovetail.plugins import PluginRegistry
from dovetail_convert.checkpoint_source import computed_dtype, open_source
from dovetail_convert.convert_options import KEEP, ConvertOptions
from dovetail_convert.model_files import ModelFiles
from dovetail_convert.shard_writer import ShardWriter
from dovetail_torch.progress_bar import progress_bar

_OPTION = "--out"
_SPARE_BYTES = 16 << 20
"""Bytes of disk space that are reserved for the tokenizer and the headers."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was written.

    num_files, num_bytes: the number and total size of the weight files. dtypes: names, sorted.
    """

    num_tensors: int
    num_files: int
    num_bytes: int
    dtypes: tuple[str, ...]


@torch.inference_mode()
def run(model: str, options: ConvertOptions, note: Callable[[str], None]) -> Result:
    """Convert the model. note: receives a sentence about each file that is omitted.

    After a DovetailError or an interrupt, no output directory remains.
    """
    out, overwrite = options.out, options.overwrite
    check_output(_OPTION, out, 0, overwrite=overwrite)
    plugins = PluginRegistry()
    directory = ModelDirectory.open(model, revision=options.revision, plugins=plugins)
    directory.check_weights(plugins)
    _check_other(out, directory.path)
    with open_source(directory, options.dtype, plugins) as source:
        plan = source.plan()
        num_bytes = sum(tensor.num_bytes for tensor in plan)
        check_output(_OPTION, out, num_bytes + _SPARE_BYTES, overwrite=overwrite)
        with new_directory(_OPTION, out, overwrite=overwrite) as folder:
            writer = ShardWriter(folder, plan, options.max_shard_bytes)
            with progress_bar("Writing weights", len(plan), shown=True) as advance:
                source.write(writer, advance)
            dtype = None
            if options.dtype != KEEP or directory.quantization or directory.defaults:
                dtype = computed_dtype(directory, options.dtype)
            files = ModelFiles(directory, dtype, note)
            files.write(folder, plugins, skip_tokenizer=options.skip_tokenizer_init)
            writer.finish()
    return Result(
        num_tensors=len(plan),
        num_files=writer.num_files,
        num_bytes=num_bytes,
        dtypes=tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in plan})),
    )


def _check_other(out: Path, model: Path) -> None:
    """Raise ConfigError if the output would replace the model, or a directory that contains it."""
    if out.resolve() in (model.resolve(), *model.resolve().parents):
        raise ConfigError(
            f"{_OPTION}={out} contains the model to convert; choose another directory."
        )
