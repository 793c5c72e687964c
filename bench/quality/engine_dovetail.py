"""Runs Dovetail through the public `LLM` API. A worker extension copies prompt logits.

Because prompt log-probabilities are requested, the engine computes the logits of every position.
Everything else is as in serving, including the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from dovetail import LLM, SamplingParams
from dovetail_torch.runner import model_runner
from quality.positions import AnyRecorder


class WeightSizes:
    """A worker extension that reports the size of the weights of linear layers and the LM head."""

    def linear_sizes(self) -> tuple[int, int]:
        """Return bytes and number of the weights of all layers that a decode step reads."""
        num_bytes = num_weights = 0
        for layer in self._model.modules():
            shape = getattr(layer, "shape", None) or getattr(layer, "packed_shape", None)
            if shape is None or not hasattr(shape, "part_sizes"):
                continue
            count = shape.out_features * shape.in_features
            method = getattr(layer, "linear_method", None)
            packed = method.packed_bytes(layer) if hasattr(method, "packed_bytes") else 0
            item = torch.empty((), dtype=shape.dtype).element_size()
            num_bytes += packed or count * item
            num_weights += count
        return num_bytes, num_weights


def run(job: Mapping[str, Any], recorder: AnyRecorder) -> dict[str, Any]:
    """Compute the logits of all chunks."""
    longest = max(len(ids) for chunks in job["chunks"].values() for ids in chunks)
    settings = {
        "skip_tokenizer_init": True,
        "max_model_len": longest + 1,
        "enable_prefix_caching": False,
        "num_threads": job["threads"],
        "use_tqdm_on_load": False,
        "worker_extension_cls": WeightSizes,
        **job["options"],
    }
    measure = model_runner.measure

    def record(logits_PV: torch.Tensor, *rest: Any) -> Any:
        recorder.add(logits_PV.float().numpy())
        return measure(logits_PV, *rest)

    model_runner.measure = record
    try:
        with LLM(job["model"], **settings) as llm:
            ((num_bytes, num_weights),) = llm.llm_engine.collective_rpc("linear_sizes")
            _generate(llm, job["chunks"], recorder)
    finally:
        model_runner.measure = measure
    return {
        "bytes_per_weight": num_bytes / num_weights,
        "versions": {"dovetail": version("dovetail-core"), "torch": version("torch")},
    }


def _generate(
    llm: LLM, chunks_by_text: Mapping[str, Sequence[Sequence[int]]], recorder: AnyRecorder
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for text, chunks in chunks_by_text.items():
        for number, ids in enumerate(chunks):
            recorder.begin(text, number, ids)
            llm.generate([ids], params, use_tqdm=False)
            recorder.end()
