"""Child processes that embed token ids: Dovetail, OpenVINO, and transformers with mean pooling.

sentence-transformers runs the same modules as transformers here, without its tokenization.
Each process serves `load` and `embed` (`serving.py`), in the environment of its engine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from peers.serving import serve

_NAMES = {"bf16": "bfloat16", "f32": "float32"}


class Embedder(Protocol):
    """Embeds texts of equal lengths."""

    def embed(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Return the normalized mean of the hidden states of each text."""


class DovetailEmbedder:
    """`LLM.embed` with its default options."""

    def __init__(self, model: str, precision: str, threads: int) -> None:
        from dovetail import LLM

        self._llm = LLM(
            model,
            dtype=_NAMES[precision],
            pooling_type="mean",
            num_threads=threads,
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
        )

    def embed(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Embed all texts in one call."""
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.embed(requests, use_tqdm=False)
        return [output.outputs.embedding for output in outputs]


class TransformersEmbedder:
    """One forward pass with the transformers library, SDPA attention and mean pooling."""

    def __init__(self, model: str, precision: str, threads: int) -> None:
        import torch
        from transformers import AutoModel

        torch.set_num_threads(threads)
        self._torch = torch
        self._run = AutoModel.from_pretrained(
            model, dtype=getattr(torch, _NAMES[precision]), attn_implementation="sdpa"
        ).eval()

    def embed(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Embed all texts in one batch."""
        torch = self._torch
        ids_RT = torch.tensor(prompts)
        with torch.inference_mode():
            x_RTD = self._run(
                input_ids=ids_RT, attention_mask=torch.ones_like(ids_RT)
            ).last_hidden_state
            mean_RD = x_RTD.float().mean(1)
            normalized: list[list[float]] = torch.nn.functional.normalize(mean_RD).tolist()
        return normalized


class OpenVINOEmbedder(TransformersEmbedder):
    """The model as OpenVINO's graph. In bf16, OpenVINO converts the float32 weights itself."""

    def __init__(self, model: str, precision: str, threads: int) -> None:
        import torch
        from optimum.intel import OVModelForFeatureExtraction

        self._torch = torch
        self._run = OVModelForFeatureExtraction.from_pretrained(
            model,
            export=True,
            ov_config={
                "INFERENCE_PRECISION_HINT": precision,
                "INFERENCE_NUM_THREADS": str(threads),
                "PERFORMANCE_HINT": "THROUGHPUT",
                "NUM_STREAMS": "1",
            },
        )


ENGINES = {
    "dovetail": DovetailEmbedder,
    "openvino": OpenVINOEmbedder,
    "transformers": TransformersEmbedder,
}


def main() -> None:
    """Serve until stdin is closed."""
    embedder: list[Any] = []

    def load(engine: str, model: str, precision: str, threads: int) -> dict[str, Any]:
        embedder[:] = [ENGINES[engine](model, precision, threads)]
        return {}

    def embed(prompts: list[list[int]]) -> dict[str, Any]:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        vectors = embedder[0].embed(prompts)
        return {
            "seconds": time.perf_counter() - begin,
            "cpu_seconds": time.process_time() - begin_cpu,
            "first": vectors[0],
        }

    serve({"load": load, "embed": embed})
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
