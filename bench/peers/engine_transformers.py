"""Runs transformers' `generate` with one left-padded batch, SDPA attention and the default cache.

All requests run as long as the longest one; tokens beyond a request's own number are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from peers.serving import serve_engine


class TransformersEngine:
    """One model in bfloat16, the only format measured here."""

    def load(self, model: str, weights: str, threads: int, options: Mapping[str, Any]) -> None:
        """Load the model. `options` are passed to `from_pretrained`."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        if weights != "bf16":
            raise ValueError(f"transformers is measured in bf16, not in {weights!r}")
        torch.set_num_threads(threads)
        self._torch = torch
        # Models without attention reject the name of an implementation.
        has_attention = hasattr(AutoConfig.from_pretrained(model), "num_attention_heads")
        attention = {"attn_implementation": "sdpa"} if has_attention else {}
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, **attention, **options
        ).eval()

    def prepare(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        """Do nothing: the cache grows during generation."""

    def generate(
        self, prompts: Sequence[list[int]], output_lens: Sequence[int]
    ) -> list[Sequence[int]]:
        """Run one batch until its longest request is finished."""
        torch, width, length = self._torch, max(map(len, prompts)), max(output_lens)
        ids_RL = torch.zeros(len(prompts), width, dtype=torch.long)
        mask_RL = torch.zeros_like(ids_RL)
        for row, prompt in enumerate(prompts):
            ids_RL[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_RL[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out_RL = self._model.generate(
                input_ids=ids_RL,
                attention_mask=mask_RL,
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
            )
        rows = out_RL[:, width:].tolist()
        return [row[:length] for row, length in zip(rows, output_lens, strict=True)]

    def versions(self) -> dict[str, str]:
        """Return the versions of transformers and torch."""
        return {"transformers": version("transformers"), "torch": version("torch")}


if __name__ == "__main__":
    serve_engine(TransformersEngine())
