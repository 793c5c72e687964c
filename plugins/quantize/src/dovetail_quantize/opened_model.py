"""A model in the engine whose layers can be observed and changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from dovetail import LLM, SamplingParams

_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
CHUNK_TOKENS = 512
"""Maximum number of tokens in one forward pass."""


class ModelAccess:
    """A worker extension that makes the worker's model accessible in this process."""

    shared: ClassVar[list[nn.Module]] = []

    def share_model(self) -> None:
        """Append the model to the list `shared`."""
        self.shared.append(self._model)


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model in an engine in this process."""

    llm: LLM
    module: nn.Module

    @property
    def longest_chunk(self) -> int:
        """Maximum number of tokens in a chunk."""
        return self.llm.llm_engine.max_model_len - 1

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens. Return the ids."""
        return list(self.llm.get_tokenizer().encode(text, add_special_tokens=False))

    def run(self, chunk: Sequence[int]) -> None:
        """Compute the logits of all positions of a chunk of tokens."""
        self.llm.generate([list(chunk)], _PARAMS, use_tqdm=False)


@contextmanager
def open_model(model: str, **options: Any) -> Iterator[OpenedModel]:
    """Load a model in bfloat16 on the CPU, where the quantization computes.

    The engine runs eagerly, so that hooks of modules are called.

    options: options of the engine.
    """
    settings = {
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "max_num_batched_tokens": CHUNK_TOKENS + 1,
        "max_num_seqs": 1,
        "platform": "cpu",
        "use_tqdm_on_load": False,
        "worker_extension_cls": ModelAccess,
        **options,
    }
    with LLM(model, **settings) as llm:
        llm.llm_engine.collective_rpc("share_model")
        yield OpenedModel(llm=llm, module=ModelAccess.shared.pop())
