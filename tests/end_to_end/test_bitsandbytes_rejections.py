"""bitsandbytes checkpoints that are damaged or contradict their configuration are rejected."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch

from dovetail.errors import ModelError, WeightError
from end_to_end.quantized_checkpoints import make_plain, opened, outputs
from end_to_end.quantized_writers import bitsandbytes_blocks, bitsandbytes_rows, gptq, write

STATE = "weight.quant_state.bitsandbytes__nf4"
MAX_SECONDS = 2.0


def quantized(*, nested=False):
    tensors, _ = bitsandbytes_blocks(nested=nested).quantize(
        (64, 96), torch.Generator().manual_seed(1)
    )
    return tensors


def change_fields(**fields):
    """Return a change of fields in the JSON of a weight. A field of None is removed."""

    def change(tensors):
        state = json.loads(bytes(tensors[STATE].tolist())) | fields
        text = json.dumps({name: value for name, value in state.items() if value is not None})
        tensors[STATE] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    return change


def raw(data):
    return lambda tensors: tensors.update({STATE: torch.tensor(list(data), dtype=torch.uint8)})


def with_tensor(leaf, tensor):
    return lambda tensors: tensors.update({leaf: tensor})


DAMAGED = {
    "no JSON": (raw(b"{"), "is not valid JSON"),
    "no text": (raw(bytes(range(128, 200))), "is not valid JSON"),
    "deep JSON": (raw(b"[" * 9000), "is not valid JSON"),
    "long JSON": (raw(b" " * 20000), "20000 bytes of JSON"),
    "a list": (raw(b"[1]"), "is not a JSON object"),
    "no shape": (change_fields(shape=None), "states shape None"),
    "negative shape": (change_fields(shape=[-64, 96]), "states shape"),
    "shape of floats": (change_fields(shape=[64.0, 96]), "states shape"),
    "large shape": (change_fields(shape=[2**31, 2**31]), "states shape"),
    "shape that lies": (change_fields(shape=[64, 2**20]), "has 3072 bytes for the shape"),
    "block size 0": (change_fields(blocksize=0), "states blocksize 0"),
    "negative block size": (change_fields(blocksize=-64), "states blocksize -64"),
    "block size of a bool": (change_fields(blocksize=True), "states blocksize True"),
    "other block size": (change_fields(blocksize=128), r"absmax has the shape \[96\]"),
    "other type": (change_fields(quant_type="fp4"), "states quant_type"),
    "unknown dtype": (change_fields(dtype="float64"), "states dtype"),
    "dtype of a list": (change_fields(dtype=["float32"]), "states dtype"),
    "codes": (with_tensor("weight", torch.zeros(7, 1, dtype=torch.uint8)), "has 7 bytes"),
    "dtype of codes": (with_tensor("weight", torch.zeros(64, 96, dtype=torch.int32)), "dtype I32"),
    "maxima": (with_tensor("weight.absmax", torch.zeros(96, dtype=torch.uint8)), "dtype U8"),
    "table": (with_tensor("weight.quant_map", torch.zeros(15)), r"quant_map has the shape \[15\]"),
    "no table": (lambda tensors: tensors.pop("weight.quant_map"), "quant_map is missing"),
    "no maxima": (lambda tensors: tensors.pop("weight.absmax"), "absmax is missing"),
}
NESTED = {
    "block size": (change_fields(nested_blocksize=0), "states nested_blocksize 0"),
    "no block size": (change_fields(nested_blocksize=None), "states nested_blocksize None"),
    "offset": (change_fields(nested_offset="1"), "states nested_offset"),
    "infinite offset": (change_fields(nested_offset=float("inf")), "states nested_offset"),
    "maxima": (with_tensor("weight.nested_absmax", torch.zeros(2)), "nested_absmax has the shape"),
    "table": (
        lambda tensors: tensors.pop("weight.nested_quant_map"),
        "nested_quant_map is missing",
    ),
    "no maxima": (
        lambda tensors: tensors.pop("weight.nested_absmax"),
        "weight.absmax has the dtype",
    ),
}


@pytest.mark.parametrize("name", [*DAMAGED, *(f"nested, {name}" for name in NESTED)])
def test_a_damaged_weight_is_rejected(name):
    is_nested = name.startswith("nested, ")
    change, match = NESTED[name.removeprefix("nested, ")] if is_nested else DAMAGED[name]
    tensors = quantized(nested=is_nested)
    change(tensors)
    start = time.monotonic()
    with pytest.raises(WeightError, match=match):
        opened(bitsandbytes_blocks(), tensors)
    assert time.monotonic() - start < MAX_SECONDS


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (with_tensor("SCB", torch.zeros(63)), r"SCB has the shape \[63\]"),
        (with_tensor("weight", torch.zeros(64, 96, dtype=torch.uint8)), "dtype U8"),
        (with_tensor("weight_format", torch.tensor(1, dtype=torch.uint8)), "weight_format"),
    ],
)
def test_checkpoints_with_damaged_int8_rows_are_rejected(change, match):
    tensors, _ = bitsandbytes_rows().quantize((64, 96), torch.Generator().manual_seed(1))
    change(tensors)
    with pytest.raises(WeightError, match=match):
        opened(bitsandbytes_rows(), tensors)


CONFIGS = {
    "both": ({"load_in_4bit": True, "load_in_8bit": True}, "True and True"),
    "other bits": ({"load_in_4bit": False, "load_in_8bit": True}, "codes of 4 bits.*load_in_8bit"),
    "type": ({"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type is 'af4'"),
    "a number": ({"load_in_4bit": 1}, "load_in_4bit is 1"),
    "skipped": ({"llm_int8_skip_modules": ["q_proj"]}, "llm_int8_skip_modules excludes"),
    "names": ({"llm_int8_skip_modules": 7}, "llm_int8_skip_modules is 7"),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_contradicts_the_tensors_is_rejected(name, tmp_path):
    fields, match = CONFIGS[name]
    written = bitsandbytes_blocks()
    written = replace(written, config=written.config | fields)
    folder, _ = write(make_plain(tmp_path / "plain"), tmp_path, written)
    with pytest.raises(WeightError, match=match):
        outputs(folder)


def test_a_torchao_checkpoint_is_rejected_with_advice(tmp_path):
    written = replace(gptq(), config={"quant_method": "torchao", "quant_type": {"default": {}}})
    folder, _ = write(make_plain(tmp_path / "plain"), tmp_path, written)
    with pytest.raises(ModelError, match=r"'torchao'.*unquantized checkpoint.*quantization="):
        outputs(folder)
