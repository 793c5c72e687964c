"""The cases that all benchmarks share, so that their results are comparable.

A case is a list of requests that are sent at the same time: prompts of random token ids and exact
numbers of output tokens (greedy, EOS ignored). The shapes are common in benchmarks of other
engines. Standard library only: a script may import this module in an environment without Dovetail.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

LOWEST_ID, HIGHEST_ID = 300, 7899
"""Bounds of the token ids in prompts: ordinary tokens in the vocabulary of every measured model."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case. prompt_lens, output_lens: tokens of each request. seed: seed of the prompts."""

    name: str
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    seed: int = 1000

    @cached_property
    def prompts(self) -> tuple[list[int], ...]:
        """The prompts as token ids, which are the same in every process."""
        return self.prompts_of(0)

    def prompts_of(self, repeat: int) -> tuple[list[int], ...]:
        """Return prompts of the same lengths for another repeat, without common prefixes."""
        source = random.Random(self.seed + repeat)
        return tuple(
            [source.randint(LOWEST_ID, HIGHEST_ID) for _ in range(length)]
            for length in self.prompt_lens
        )


def _varied(num_requests: int, seed: int) -> Case:
    source = random.Random(seed)
    prompt_lens = tuple(source.randint(16, 256) for _ in range(num_requests))
    output_lens = tuple(source.randint(16, 128) for _ in range(num_requests))
    return Case(name=f"varied{num_requests}", prompt_lens=prompt_lens, output_lens=output_lens)


def _by_name(cases: Sequence[Case]) -> Mapping[str, Case]:
    return MappingProxyType({case.name: case for case in cases})


CASES = _by_name(
    (
        Case(name="decode1", prompt_lens=(32,), output_lens=(128,)),
        Case(name="conc16", prompt_lens=(128,) * 16, output_lens=(64,) * 16),
        _varied(64, seed=7),
        Case(name="prefill1024", prompt_lens=(1024,), output_lens=(1,)),
    )
)
"""Every case by name: one request, 16 requests, 64 requests of mixed lengths, one long prompt."""
