"""Sampling: computes tokens and their log-probabilities from the logits of a step.

This module depends on rows and logits only, not on models, blocks, plans or processes.
"""

from dovetail_torch.sampling.grammar import GrammarMask
from dovetail_torch.sampling.logprobs import gather_logprobs
from dovetail_torch.sampling.sampler import SampledTokens, Sampler

__all__ = ["GrammarMask", "SampledTokens", "Sampler", "gather_logprobs"]
