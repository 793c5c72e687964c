"""Serve a quantized checkpoint of one small layer, or open one of its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from dovetail import LLM, SamplingParams
from dovetail_quantized_checkpoints.checkpoint import FORMATS as FORMAT_CLASSES
from dovetail_quantized_checkpoints.formats.base import ModuleTensors
from dovetail_torch.weights.checkpoint_files import WeightEntry
from end_to_end.checkpoints import OPTIONS, make_checkpoint

PROMPTS = [[0, 5, 9, 33, 71], [0, 100, 17]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
EXACT = OPTIONS | {"dtype": "float32", "load_format": "auto"}
DTYPES = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
}


def make_plain(folder):
    """Write the checkpoint that is quantized."""
    return make_checkpoint(folder, hidden_size=64, intermediate_size=96, num_hidden_layers=1)


def outputs(model, **options):
    with LLM(model, **(EXACT | options)) as llm:
        done = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        loader = llm.llm_engine.config.load.load_format
    rows = [
        {token: entry.logprob for token, entry in position.items()}
        for output in done
        for position in output.outputs[0].logprobs
    ]
    return [output.outputs[0].token_ids for output in done], rows, loader


def opened(written, tensors):
    """Return the stored weight of one module."""
    entries = {
        leaf: WeightEntry(
            name=leaf, path=Path("file"), shape=tuple(tensor.shape), dtype=DTYPES[tensor.dtype]
        )
        for leaf, tensor in tensors.items()
    }
    form = FORMAT_CLASSES[written.config["quant_method"]](written.config)
    module = ModuleTensors(prefix="", entries=entries)
    form.shape(module, tensors.__getitem__)
    return form.open(module, tensors.__getitem__)
