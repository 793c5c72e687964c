"""The bigram worker: a table gives the logits of the next token for each last token.

It supports temperature (0 is greedy), seed and grammars, but no other sampling parameters. It keeps
the tokens of each row and no cache. Dimensions: S sampled requests, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dovetail.errors import ModelError
from dovetail.interfaces import (
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelInfo,
    WorkerBase,
    WorkerContext,
)
from dovetail.plan import NewRequest, SchedulerOutput
from dovetail.result import ModelRunnerOutput

WORKSPACE_BYTES = 1 << 20


class BigramWorker(WorkerBase):
    """Executes plans on a table of logits, [V, V]: row i has the logits of the token after i."""

    def __init__(self, context: WorkerContext) -> None:
        self._model = context.config.model
        self._rows: dict[int, NewRequest] = {}
        self._tokens: dict[int, array[int]] = {}
        self._plan: SchedulerOutput | None = None

    def init_device(self) -> None:
        """Do nothing: numpy needs no device."""

    def load_model(self) -> None:
        """Read bigram.npy. Raise ModelError if it is missing or does not fit config.json."""
        file = Path(self._model.model_dir) / "bigram.npy"
        vocab_size = int(self._model.hf_config["vocab_size"])
        try:
            table_VV = np.load(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read as an array: {error}") from error
        if table_VV.shape != (vocab_size, vocab_size):
            raise ModelError(
                f"{file} has shape {table_VV.shape}; config.json's vocab_size={vocab_size} asks "
                f"for {(vocab_size, vocab_size)}."
            )
        self._table_VV = table_VV.astype(np.float32, copy=False)

    def get_model_info(self) -> ModelInfo:
        """Return the vocabulary size of the table and the maximum length in config.json."""
        longest = self._model.hf_config.get("max_position_embeddings", 0)
        return ModelInfo(vocab_size=len(self._table_VV), max_model_len=int(longest))

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return no specs: the model keeps no cache."""
        return {}

    def determine_available_memory(self) -> int:
        """Return a nominal size: there is no cache."""
        return WORKSPACE_BYTES

    def initialize_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Do nothing."""

    def compile_or_warm_up_model(self) -> None:
        """Do nothing: the worker needs no warm-up."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Apply leaves and joins of the plan. The lookup itself is part of sampling."""
        for row in plan.leaves:
            del self._rows[row], self._tokens[row]
        for request in plan.joins:
            self._rows[request.row] = request
            self._tokens[request.row] = request.token_ids[:]
        self._plan = plan

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Sample a token for each request that samples, and append it to its row."""
        if self._plan is None:
            raise RuntimeError("sample_tokens before execute_model")
        plan, allowed = self._plan, self._allowed(grammar)
        sampled = array("i")
        for run, row in enumerate(plan.rows):
            if plan.samples[run]:
                token = self._choose(row, allowed.get(run))
                self._tokens[row].append(token)
                sampled.append(token)
        return ModelRunnerOutput(
            step_id=plan.step_id, num_sampled=plan.samples[:], token_ids=sampled
        )

    def shutdown(self) -> None:
        """Remove all rows."""
        self._rows.clear()
        self._tokens.clear()

    def _allowed(self, grammar: GrammarOutput | None) -> dict[int, np.ndarray]:
        """Map each constrained request to its allowed tokens, bool [V]."""
        if grammar is None:
            return {}
        words = np.frombuffer(grammar.bitmask, np.uint8).reshape(len(grammar.runs), -1)
        bits_SV = np.unpackbits(words, axis=1, bitorder="little")[:, : len(self._table_VV)]
        return dict(zip(grammar.runs, bits_SV.astype(bool), strict=True))

    def _choose(self, row: int, allowed_V: np.ndarray | None) -> int:
        request, tokens = self._rows[row], self._tokens[row]
        logits_V = self._table_VV[tokens[-1]]
        if allowed_V is not None:
            logits_V = np.where(allowed_V, logits_V, -np.inf)
        temperature = request.sampling_params.temperature
        if request.sampling_params.greedy:
            return int(logits_V.argmax())
        # The Gumbel trick (Maddison et al. 2014, arXiv:1411.0030), with numbers that depend on the
        # request's seed and the position only: other requests and preemption change no token.
        seed = request.seed & (2**64 - 1)
        noise_V = np.random.default_rng((seed, len(tokens))).gumbel(size=len(logits_V))
        return int((logits_V / temperature + noise_V).argmax())
