"""Runs Dovetail through the public `LLM` API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from peers.serving import serve_engine

OPTIONS_OF: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "gguf": {"dtype": "bfloat16"},
}
"""Maps a weight format to engine options."""

SHARED_OPTIONS: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 2 << 30,
    "use_tqdm_on_load": False,
}
"""The same cache size as the peers; all other options are the defaults."""


class DovetailEngine:
    """One `LLM` with prefix caching, which is the default. Prompts never repeat."""

    def load(self, model: str, weights: str, threads: int, options: Mapping[str, Any]) -> None:
        """Create the engine. `options` are additional engine options."""
        from dovetail import LLM, SamplingParams

        self._params = SamplingParams
        chosen = {**SHARED_OPTIONS, **OPTIONS_OF[weights], **options}
        self._llm = LLM(model, num_threads=threads, **chosen)
        phases = self._llm.llm_engine.client.facts.phases
        self.weights_s = sum(seconds for name, seconds, _ in phases if name == "load_model")

    def prepare(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        """Do nothing: the cache is allocated at startup."""

    def generate(
        self, prompts: Sequence[list[int]], output_lens: Sequence[int]
    ) -> list[Sequence[int]]:
        """Generate outputs for all prompts in one call."""
        params = [
            self._params(temperature=0.0, max_tokens=length, ignore_eos=True)
            for length in output_lens
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def versions(self) -> dict[str, str]:
        """Return the versions of the core and torch."""
        return {"dovetail": version("dovetail-core"), "torch": version("torch")}


if __name__ == "__main__":
    serve_engine(DovetailEngine())
