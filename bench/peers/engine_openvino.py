"""Runs OpenVINO GenAI's continuous batching pipeline on the CPU with a converted model.

OpenVINO computes with 16-bit weights in bfloat16. The KV cache has the default of 8 bits per value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from peers.serving import serve_engine


class OpenVinoEngine:
    """One pipeline with 2 GiB of cache for at most 64 requests."""

    def load(self, model: str, weights: str, threads: int, options: Mapping[str, Any]) -> None:
        """Compile the model. The converter has already quantized its weights."""
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {**properties, **options}
        )

    def prepare(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        """Do nothing: the cache has a fixed size."""

    def generate(
        self, prompts: Sequence[list[int]], output_lens: Sequence[int]
    ) -> list[Sequence[int]]:
        """Add all requests and run steps until all have finished."""
        handles = []
        for number, (prompt, length) in enumerate(zip(prompts, output_lens, strict=True)):
            config = self._genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = length
            config.ignore_eos, config.do_sample = True, False
            ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
            handles.append(self._pipeline.add_request(number, ids, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [handle.read_all()[0].generated_ids for handle in handles]

    def versions(self) -> dict[str, str]:
        """Return the versions of OpenVINO's packages."""
        return {name: version(name) for name in ("openvino", "openvino-genai")}


if __name__ == "__main__":
    serve_engine(OpenVinoEngine())
