"""Runs torch through transformers: float32, or dynamic int8 quantization of linear layers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from quality.positions import AnyRecorder


@torch.inference_mode()
def run(job: Mapping[str, Any], recorder: AnyRecorder) -> dict[str, Any]:
    """Compute the logits of all chunks."""
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    is_int8 = job["options"].get("weights") == "int8"
    if is_int8:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated in favor of torchao
            model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    for text, chunks in job["chunks"].items():
        for number, ids in enumerate(chunks):
            recorder.begin(text, number, ids)
            recorder.add(model(torch.tensor([ids])).logits[0, :-1].float().numpy())
            recorder.end()
    return {
        "bytes_per_weight": 1.0 if is_int8 else 4.0,
        "versions": {"torch": version("torch"), "transformers": version("transformers")},
    }
