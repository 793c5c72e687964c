"""Small random checkpoints, one for each feature of an architecture, with reference logits.

Weights are larger than in a trained model: logits have a standard deviation near `LOGIT_STD`, so
that the two largest logits rarely agree up to rounding errors, and attention is far from uniform,
so that a wrong mask, angle or cache slot changes the result. This module depends on transformers,
not on the engine.

Dimensions: T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from parity.router_gaps import RouterGaps

VOCAB_SIZE = 257
LOGIT_STD = 2.0
MAX_LEN = 664
"""Length of the longest sequence: a prompt of 600 tokens and 64 generated tokens."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
_UPPER_WINDOW = {
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 45,
    "max_window_layers": 1,
}
CHECKPOINTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama: llama3 rope, 4/2 heads": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama: all biases, tied, 4/1 heads of 20": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 20,
            "num_key_value_heads": 1,
        },
    ),
    "mistral: window 37, 8/2 heads of 8": (
        "Mistral",
        {"sliding_window": 37, "num_attention_heads": 8, "head_dim": 8, "num_hidden_layers": 3},
    ),
    "mistral: no window, tied, 3/3 heads of 36": (
        "Mistral",
        {
            "sliding_window": None,
            "tie_word_embeddings": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 36,
        },
    ),
    "qwen2: biases, tied, 6/2 heads": (
        "Qwen2",
        {"hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": True},
    ),
    "qwen2: biases, window 45 above layer 0": ("Qwen2", _UPPER_WINDOW),
    "qwen3: tied, 4/2 heads of 36": ("Qwen3", {"head_dim": 36, "tie_word_embeddings": True}),
    "qwen3: biases, window above, 4/4 heads of 10": (
        "Qwen3",
        {**_UPPER_WINDOW, "attention_bias": True, "head_dim": 10, "num_key_value_heads": 4},
    ),
}
"""Maps a name to its architecture prefix in transformers and its differences from the common shape.
"""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A saved checkpoint and its transformers model, float32, eager attention.

    folder: the model directory for the engine.
    """

    name: str
    folder: Path
    oracle: transformers.PreTrainedModel
    _known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def has_states(self) -> bool:
        """Whether some layers are recurrent."""
        return "linear_attention" in (getattr(self.oracle.config, "layer_types", None) or ())

    @property
    def windows(self) -> list[int]:
        """The sliding window of each layer, 0 for none, as transformers reads the config.

        A recurrent layer needs only the state after the previous token: a window of 2. A layer with
        chunked attention needs as many blocks as one with a window of the size of a chunk.
        """
        config = self.oracle.config
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None) or 0
        if kinds is None:
            return [window] * config.num_hidden_layers
        chunk = getattr(config, "attention_chunk_size", None) or 0
        spans = {"sliding_attention": window, "chunked_attention": chunk, "linear_attention": 2}
        return [spans.get(kind, 0) for kind in kinds]

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits after each token of the sequence, [T, V], computed without a batch.

        The logits are cached, because all correct runs have the same sequences.
        """
        return self._compute(token_ids)[0]

    def router_gaps(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the smallest gap of the routers at each token, [T] (`RouterGaps`)."""
        return self._compute(token_ids)[1]

    @torch.inference_mode()
    def _compute(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        key = tuple(token_ids)
        if key not in self._known:
            with RouterGaps(len(key)) as gaps:
                logits_TV = self.oracle(torch.tensor([key]), use_cache=False).logits[0]
            self._known[key] = logits_TV, gaps.smallest_T
        return self._known[key]


def make_checkpoint(
    name: str,
    folder: Path,
    seed: int,
    kinds: Mapping[str, tuple[str, Mapping[str, Any]]] = CHECKPOINTS,
) -> Checkpoint:
    """Create and save the checkpoint `name` of `kinds`. The weights depend on name and seed."""
    prefix, changes = kinds[name]
    config_cls = getattr(transformers, f"{prefix}Config")
    config = config_cls(**{**_SHAPE, **changes}, attn_implementation="eager")
    oracle = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    _fill(oracle, torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode())))
    oracle.save_pretrained(folder)
    return Checkpoint(name=name, folder=folder, oracle=oracle)


@torch.no_grad()
def _fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Fill all weights so that every part of the model affects the logits.

    Linear layers keep the variance, norms are about 1 and biases are large. The signs of the last
    norm are random: with positive signs a tied model repeats its input.
    """
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            sign = noise.sign() if name == "model.norm.weight" else 1.0
            noise = sign * (1 + 0.2 * noise)
        elif name.endswith("bias"):
            noise *= 0.3
        else:
            is_head = "embed_tokens" in name or "lm_head" in name
            noise *= (LOGIT_STD if is_head else 1.0) * parameter.shape[1] ** -0.5
        parameter.copy_(noise)
