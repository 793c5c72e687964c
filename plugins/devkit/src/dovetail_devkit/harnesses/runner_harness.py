"""A tiny model for tests of model runners. Its attention sums the cached values.

Dimensions: V vocabulary, D head size, T tokens, S slots.
"""

from array import array
from dataclasses import replace
from typing import ClassVar

import torch

from dovetail.interfaces import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionLayer,
    AttentionMetadataBuilder,
)
from dovetail.plan import NewRequest, StepBuilder
from dovetail.sampling_params import SamplingParams
from dovetail_torch.layers import Attention
from dovetail_torch.layers.linear import HeadShape

V, D, SIZE, NUM_BLOCKS, MAX_LEN = 23, 4, 4, 12, 24


class Builder(AttentionMetadataBuilder):
    seen: ClassVar[list] = []

    def build(self, batch):
        Builder.seen.append(batch)
        return batch


class Layer(AttentionLayer):
    """Attention whose result for a token is the sum of the request's values up to this token."""

    def __init__(self, context):
        pass

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD):
        values_SD = kv_cache.view(-1, 2, D)[:, 1]
        values_SD[metadata.slot_mapping_T] = v_TKD[:, 0]
        first = 0
        for run, (count, length) in enumerate(
            zip(metadata.query_lens, metadata.seq_lens, strict=True)
        ):
            table = metadata.block_table_RM[run].tolist()
            slots = [table[index // SIZE] * SIZE + index % SIZE for index in range(length)]
            sums = values_SD[slots].cumsum(0)
            out_THD[first : first + count, 0] = sums[length - count :]
            first += count


class Backend(AttentionBackend):
    name = "sum"
    capabilities = AttentionCapabilities(dtypes=frozenset({"float64"}))

    @staticmethod
    def kv_cache_shape(num_blocks, spec):
        return (num_blocks, spec.block_size, 2, D)

    @staticmethod
    def create_builder(context):
        Builder.seen = []
        return Builder()

    @staticmethod
    def create_layer(context):
        return Layer(context)


class AdvancingBuilder(Builder):
    """A metadata builder with the method `advance`, which updates its last metadata."""

    def build(self, batch):
        super().build(batch)
        slots_T, self.seq_lens = batch.slot_mapping_T.clone(), list(batch.seq_lens)
        self.slots_T = slots_T.numpy()
        return replace(batch, slot_mapping_T=slots_T, seq_lens=self.seq_lens)

    def advance(self):
        self.slots_T += 1
        self.seq_lens[:] = [length + 1 for length in self.seq_lens]


class CountingBackend(Backend):
    capabilities = replace(Backend.capabilities, features=frozenset({"supports_advance"}))

    @staticmethod
    def create_builder(context):
        Builder.seen = []
        return AdvancingBuilder()


class Model:
    """A model whose hidden states are sums of the embeddings of all tokens so far.

    narrows: whether the model drops tokens that are not needed after the attention. num_left: the
    number of tokens after the attention, for each forward pass.
    """

    narrows = True

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.embedding_VD = torch.randn(V, D, generator=generator)
        self.head_DV = torch.randn(D, V, generator=generator)
        self.attention = Attention(HeadShape(num_heads=1, num_kv_heads=1, head_size=D), 0)
        self.forwards, self.num_left = [], []

    def forward(self, input_ids_T, positions_T, attention):
        self.forwards.append((input_ids_T.tolist(), positions_T.tolist()))
        x_T1D = self.embedding_VD[input_ids_T].unsqueeze(1)
        x_TD = self.attention(x_T1D, x_T1D, x_T1D, attention)
        x_TD = attention.narrow(x_TD) if self.narrows else x_TD
        self.num_left.append(len(x_TD))
        return x_TD

    def compute_logits(self, hidden_SD):
        return hidden_SD @ self.head_DV

    def logits(self, tokens):
        return self.embedding_VD[tokens].sum(0) @ self.head_DV

    def answer(self, prompt, num_tokens):
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]


class Steps:
    """Builds plans, tracks the generations of rows, and executes the plans with a runner."""

    def __init__(self, runner):
        self.runner, self.builder, self.generations = runner, StepBuilder(), {}

    def join(self, row, tokens, blocks, *, num_prompt=None, **params):
        self.generations[row] = self.generations.get(row, 0) + 1
        settings = {"temperature": 0, "max_tokens": 20} | params
        self.builder.join(
            NewRequest(
                request_id=f"r{row}",
                row=row,
                generation=self.generations[row],
                token_ids=array("i", tokens),
                num_prompt_tokens=num_prompt or len(tokens),
                sampling_params=SamplingParams(**settings),
                stop_token_ids=frozenset(),
                bad_words_token_ids=(),
                seed=settings.get("seed", 0),
            )
        )
        self.builder.grow(row, blocks)
        return self

    def run(self, *runs, grammar=None):
        """Execute a plan and return the tokens by row. runs: (row, start, count, samples)."""
        for row, start, count, samples in runs:
            self.builder.run(row, start, count, samples=samples)
        plan = self.builder.build()
        self.runner.execute_model(plan)
        self.output = self.runner.sample_tokens(grammar)
        assert self.output.step_id == plan.step_id
        assert list(self.output.num_sampled) == list(plan.samples)
        sampling = [row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
        return dict(zip(sampling, self.output.token_ids, strict=True))
