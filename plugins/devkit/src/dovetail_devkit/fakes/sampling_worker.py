"""A sampler in plain Python, and a fake worker that supports every sampling field.

`FakeSampler` applies the fields in the same order as `dovetail_torch`. Tests override one of its
methods to create a faulty sampler. Logits are computed from the attention result of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from dovetail.interfaces.sampling_support import FULL_SAMPLING
from dovetail.plan import NewRequest
from dovetail_devkit.fakes.worker import FakeWorker
from dovetail_devkit.rows.model import RowModel
from dovetail_devkit.rows.state import MASK, mix

SPREAD = 8.0
"""Logits are between -SPREAD / 2 and SPREAD / 2."""
NEVER = -math.inf


class FakeSampler:
    """Chooses one token from the logits of one row."""

    def choose(
        self,
        logits: list[float],
        request: NewRequest,
        tokens: Sequence[int],
        allowed: frozenset[int] | None,
    ) -> int:
        """Return the sampled token.

        tokens: prompt and output of the row. allowed: the tokens that the row's grammar allows, or
        None without a grammar.
        """
        params, num_prompt = request.sampling_params, request.num_prompt_tokens
        if allowed is not None:
            logits = keep(logits, allowed)
        if params.allowed_token_ids:
            logits = keep(logits, frozenset(params.allowed_token_ids))
        self.forbid(logits, request, tokens)
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        self.penalize(logits, request, tokens[:num_prompt], tokens[num_prompt:])
        if params.greedy:
            return best_of(logits)
        logits = [logit / self.temperature(request) for logit in logits]
        logits = self.truncate(logits, request)
        noise = self.noise(request, len(tokens), len(logits))
        # Source: Maddison et al. 2014, "A* Sampling", arXiv:1411.0030 (the Gumbel trick).
        return best_of([logit + item for logit, item in zip(logits, noise, strict=True)])

    def forbid(self, logits: list[float], request: NewRequest, tokens: Sequence[int]) -> None:
        """Ban the last tokens of bad words, and stop tokens before min_tokens."""
        output = list(tokens[request.num_prompt_tokens :])
        for *before, last in request.bad_words_token_ids:
            if output[len(output) - len(before) :] == before:
                logits[last] = NEVER
        if len(output) < request.sampling_params.min_tokens:
            for token in request.stop_token_ids:
                logits[token] = NEVER

    def penalize(
        self, logits: list[float], request: NewRequest, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """Apply the penalties to tokens of the prompt and output."""
        params = request.sampling_params
        if params.repetition_penalty != 1.0:
            for token in {*prompt, *output}:
                factor = params.repetition_penalty
                logits[token] *= 1 / factor if logits[token] > 0 else factor
        if params.frequency_penalty or params.presence_penalty:
            for token in set(output):
                logits[token] -= params.frequency_penalty * list(output).count(token)
                logits[token] -= params.presence_penalty

    def temperature(self, request: NewRequest) -> float:
        """Return the divisor of the logits."""
        return request.sampling_params.temperature

    def truncate(self, logits: list[float], request: NewRequest) -> list[float]:
        """Return the logits after min_p, top_k and top_p have banned tokens."""
        params = request.sampling_params
        order = sorted(range(len(logits)), key=logits.__getitem__, reverse=True)
        weights = [math.exp(logit - logits[order[0]]) for logit in logits]
        kept = [token for token in order if weights[token] >= params.min_p]
        kept = kept[: params.top_k or len(kept)]
        share, whole = 0.0, sum(weights[token] for token in kept)
        for index, token in enumerate(kept):
            if share >= params.top_p * whole:
                kept = kept[:index]
                break
            share += weights[token]
        return keep(logits, frozenset(kept))

    def noise(self, request: NewRequest, position: int, count: int) -> list[float]:
        """Return Gumbel noise that depends only on the seed and the position."""
        start = mix(request.seed, position)
        return [-math.log(-math.log((mix(start, i) + 1) / (MASK + 2))) for i in range(count)]


class SamplingRowModel(RowModel):
    """A `RowModel` that samples tokens with a `FakeSampler`."""

    sampler_cls: ClassVar[type[FakeSampler]] = FakeSampler

    def choose(self, row: int, attended: int, allowed: frozenset[int] | None) -> int:
        """Return the sampled token."""
        state = self.rows[row]
        logits = [SPREAD * (mix(attended, token) / MASK - 0.5) for token in range(self.vocab_size)]
        return self.sampler_cls().choose(logits, state.request, state.tokens, allowed)


class SamplingWorker(FakeWorker):
    """A fake worker that supports every field of `SamplingParams`."""

    provides = FULL_SAMPLING
    row_model_cls = SamplingRowModel


def keep(logits: Sequence[float], tokens: frozenset[int]) -> list[float]:
    """Return the logits, with -inf for all tokens except `tokens`."""
    return [logit if token in tokens else NEVER for token, logit in enumerate(logits)]


def best_of(logits: Sequence[float]) -> int:
    """Return the first token with the largest logit."""
    return max(range(len(logits)), key=logits.__getitem__)
