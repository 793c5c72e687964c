"""The steps of `dovetail quantize`: load, measure, quantize, write, load the result, measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dovetail.cli.frame.output_directory import check_output, new_directory
from dovetail.config.model_directory import ModelDirectory
from dovetail.errors import ModelError
from dovetail_quantize.checkpoint import FILE, Tensor, write_checkpoint
from dovetail_quantize.evaluation import Accuracy, limit_chunks, measure
from dovetail_quantize.layer_plan import PLAIN, bits_of, pick_type
from dovetail_quantize.metadata import check_representable
from dovetail_quantize.opened_model import CHUNK_TOKENS, OpenedModel, open_model
from dovetail_quantize.quantize_options import FORMATS, HEADS, QuantizeOptions
from dovetail_quantize.quantizing import Quantized, Settings, quantize_layers
from dovetail_quantize.round_trip import check_round_trip
from dovetail_quantize.rounding import quantize_rows
from dovetail_quantize.texts import built_in_text, read_text, split_chunks
from dovetail_torch.layers import ParallelLMHead, linear_layers
from dovetail_torch.layers.linear import ParallelLinear

_OPTION = "--out"
_EVALUATION_TOKENS = 4096
_SPARE_BYTES = 16 << 20
_UNROUNDED = (".mlp.gate.weight", ".mlp.shared_expert_gate.weight")
"""Suffixes of router weights, which are not quantized."""
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run. head: the block type of the LM head and the embedding."""

    quantized: Quantized
    before: Accuracy
    after: Accuracy
    num_positions: int
    head: str
    output: Path
    num_bytes: int


def run(model: str, options: QuantizeOptions, note: Callable[[str], None]) -> Result:
    """Quantize and write the model. note: receives progress, one sentence at a time.

    After a DovetailError, no output directory remains.
    """
    directory = ModelDirectory.open(model)
    check_representable(directory, options.method)
    check_round_trip(directory.config)
    output = options.out or Path(f"{_stem(directory.path)}-{options.format}")
    settings = Settings(
        method=options.method,
        types=FORMATS[options.format],
        max_layer_error=options.max_layer_error,
        damping=options.damping,
    )
    calibration = None
    if options.calibrate is not None:
        calibration = read_text("--calibrate", options.calibrate)
    option, evaluation = "--evaluate", built_in_text()
    if options.evaluate is not None:
        evaluation = read_text(option, options.evaluate)
    check_output(_OPTION, output, 0)
    stated = directory.config["max_position_embeddings"]
    length = {"max_model_len": min(CHUNK_TOKENS + 1, stated)}
    with open_model(model, linear_method="torch", **length) as opened:
        check_output(_OPTION, output, _estimate(opened, options))
        chunks = []
        if calibration is not None:
            chunks = split_chunks(opened, calibration, "--calibrate", options.max_tokens)
        held_out = split_chunks(opened, evaluation, option, _EVALUATION_TOKENS)
        held_out = limit_chunks(held_out, directory.config["vocab_size"])
        note("Measuring the original model.")
        before, reference = measure(opened, held_out)
        quantized = quantize_layers(opened, settings, chunks, note)
        head_type, tensors = _tensors(opened, quantized, options)
    with new_directory(_OPTION, output) as folder:
        note("Writing.")
        write_checkpoint(folder, directory, tensors)
        del tensors
        note("Measuring the saved model.")
        with open_model(str(folder / FILE), **length) as opened:
            after, _ = measure(opened, held_out, reference)
        num_bytes = (folder / FILE).stat().st_size
    return Result(
        quantized=quantized,
        before=before,
        after=after,
        num_positions=sum(len(chunk) - 1 for chunk in held_out),
        head=head_type,
        output=output,
        num_bytes=num_bytes,
    )


def _stem(path: Path) -> str:
    return path.stem if path.is_file() else path.name


def _estimate(opened: OpenedModel, options: QuantizeOptions) -> int:
    """Return the approximate size of the output in bytes."""
    total = 0.0
    for name, parameter in opened.module.named_parameters():
        is_head = name in (_TABLE, _HEAD)
        names = HEADS[options.head] if is_head else FORMATS[options.format]
        is_matrix = parameter.dim() == 2 and not name.endswith(_UNROUNDED)
        kind = pick_type(names, parameter.shape[-1]) if is_matrix else "F32"
        total += parameter.numel() * (32 if kind == "F32" else bits_of(kind)) / 8
    return int(total) + _SPARE_BYTES


def _tensors(
    opened: OpenedModel, quantized: Quantized, options: QuantizeOptions
) -> tuple[str, dict[str, Tensor]]:
    """Return the block type of the LM head, and all tensors by their names in the model."""
    tensors: dict[str, Tensor] = {}
    own = dict(opened.module.named_parameters())
    for _, layer in linear_layers(opened.module):
        if isinstance(layer, ParallelLMHead):
            continue
        parent = layer.shape.name.rpartition(".")[0]
        own.pop(f"{layer.shape.name}.weight")
        if layer.shape.num_experts > 1:
            tensors |= _stacked(layer, parent, quantized)
            continue
        bias = own.pop(f"{layer.shape.name}.bias", None)
        sizes = layer.shape.part_sizes
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        rows = layer.weight.split(sizes)
        for leaf, values, bias_O in zip(layer.shape.part_names, rows, biases, strict=True):
            part = quantized.parts[f"{parent}.{leaf}.weight"]
            stored = values.detach() if part.blocks_OB is None else part.blocks_OB
            tensors[part.name] = (part.type_name, stored)
            if bias_O is not None:
                tensors[f"{parent}.{leaf}.bias"] = ("F32", bias_O.detach().float())
    head_type = PLAIN
    for name, parameter in own.items():
        values = parameter.detach()
        if not bool(values.isfinite().all()):
            raise ModelError(f"{name} has values that are NaN or infinite: the model is damaged.")
        if values.dim() != 2 or name.endswith(_UNROUNDED):
            tensors[name] = ("F32", values.float().squeeze(0))
            continue
        head_type = pick_type(HEADS[options.head], values.shape[1])
        stored = values if head_type == PLAIN else quantize_rows(values, head_type)
        tensors[name] = (head_type, stored.to(torch.uint8) if head_type != PLAIN else stored)
    return head_type, tensors


def _stacked(layer: ParallelLinear, parent: str, quantized: Quantized) -> dict[str, Tensor]:
    """Return the tensors of a layer with experts, with the experts as the first dimension."""
    shape = layer.shape
    num_parts = len(shape.part_names) // shape.num_experts
    rows = layer.weight.detach().split(shape.part_sizes)
    tensors: dict[str, Tensor] = {}
    for number, leaf in enumerate(shape.part_names[:num_parts]):
        part = quantized.parts[f"{parent}.{leaf.rpartition('.')[2]}.weight"]
        stored = part.blocks_OB
        if stored is None:
            stored = torch.cat(rows[number::num_parts])
        tensors[part.name] = (part.type_name, stored.unflatten(0, (shape.num_experts, -1)))
    return tensors
