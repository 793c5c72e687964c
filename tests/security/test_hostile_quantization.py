"""Quantized weights with hostile fields or tensors are dequantized or raise a typed error."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from dovetail.errors import WeightError
from end_to_end.quantized_checkpoints import DTYPES, opened
from end_to_end.quantized_writers import FORMATS

MAX_SECONDS = 2.0
VALUES = (
    *(0, -1, -128, 1, 3, 7, 10**30, True, False, 0.5, float("nan"), None, "", "x" * 10_000),
    *([], [0, 0], [-1, -1], [1], [2**40, 2**40], ["a", "b"], [[]], {}, {"": {}}, {"a": None}),
)
"""Values of fields of `quantization_config`."""
SHAPES = ((), (0,), (1,), (0, 0), (1, 1), (2, 3), (64, 0), (1, 64, 96), (3, 5, 7, 1))


def paths(table, start=()):
    """Yield the paths of all fields, also of those in tables."""
    for name, value in table.items():
        yield (*start, name)
        if isinstance(value, dict):
            yield from paths(value, (*start, name))


def replaced(table, path, value):
    name, *rest = path
    return {**table, name: replaced(table[name], rest, value) if rest else value}


def check(written, tensors):
    """Open a weight and compute its values. A WeightError is allowed, no other exception."""
    start = time.monotonic()
    try:
        stored = opened(written, tensors)
        values = stored.dequantize(torch.float32)
        assert tuple(values.shape) == stored.shape and values.numel() < 1 << 20
    except WeightError as error:
        assert len(str(error)) < 1000
    assert time.monotonic() - start < MAX_SECONDS


def weight(name):
    return FORMATS[name].quantize((64, 96), torch.Generator().manual_seed(3))[0]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", FORMATS)
def test_hostile_values_of_fields_give_typed_errors(name):
    written, tensors = FORMATS[name], weight(name)
    for path in paths(written.config):
        if path == ("quant_method",):
            continue
        for value in VALUES:
            check(replace(written, config=replaced(written.config, path, value)), tensors)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", FORMATS)
def test_hostile_tensors_give_typed_errors(name):
    written, tensors = FORMATS[name], weight(name)
    for leaf, tensor in tensors.items():
        others = [tensor.new_zeros(shape) for shape in SHAPES]
        others += [torch.zeros(tensor.shape, dtype=dtype) for dtype in DTYPES]
        others += [tensor[:-1], tensor[..., :-1], tensor[..., None]] if tensor.ndim else []
        others += [tensor.repeat(2, *[1] * (tensor.ndim - 1))] if tensor.ndim else []
        others += [tensor.mT] if tensor.ndim == 2 else []
        if not tensor.is_floating_point():
            limits = torch.iinfo(tensor.dtype)
            others += [torch.full_like(tensor, value) for value in (limits.min, limits.max)]
        else:
            others += [torch.full_like(tensor.float(), torch.nan).to(tensor.dtype)]
        for other in others:
            check(written, {**tensors, leaf: other})
        check(written, {key: value for key, value in tensors.items() if key != leaf})
