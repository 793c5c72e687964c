"""The conformance suite rejects bidirectional attention backends that have one fault each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail_devkit.attention.bidirectional import LENGTHS, check_bidirectional
from dovetail_devkit.fakes.attention import (
    FakeAttentionBackend,
    FakeAttentionLayer,
    FakeBidirectionalBuilder,
)
from dovetail_devkit.suites.attention import AttentionCase, attention_cases

CPU = torch.device("cpu")
CASE = AttentionCase(runs=(), head_size=32)


class Causal(FakeAttentionLayer):
    """Masks the tokens after each token, as in causal attention."""

    def attend(self, q_QHD, k_LKD, v_LKD):
        self.context = replace(self.context, bidirectional=False)
        out_QHD = super().attend(q_QHD, k_LKD, v_LKD)
        self.context = replace(self.context, bidirectional=True)
        return out_QHD


class WideWindow(FakeAttentionLayer):
    """Attends to one more token on each side than the window."""

    def __init__(self, context):
        window = context.sliding_window
        super().__init__(replace(context, sliding_window=window + 1 if window else 0))


class NoWindow(FakeAttentionLayer):
    """Ignores the window."""

    def __init__(self, context):
        super().__init__(replace(context, sliding_window=0))


class OwnScale(FakeAttentionLayer):
    """Uses the default score multiplier instead of the layer's."""

    def __init__(self, context):
        super().__init__(replace(context, scale=context.head_size**-0.5))


class InterleavedHeads(FakeAttentionLayer):
    """Reads key-value head h % K instead of h // G."""

    def attend(self, q_QHD, k_LKD, v_LKD):
        groups = (-1, self.context.num_kv_heads)
        q_QHD = q_QHD.unflatten(1, groups).transpose(1, 2).flatten(1, 2)
        out_QHD = super().attend(q_QHD, k_LKD, v_LKD)
        return out_QHD.unflatten(1, groups[::-1]).transpose(1, 2).flatten(1, 2)


class ScalesQueriesInPlace(FakeAttentionLayer):
    """Changes its input, and returns the correct result."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args):
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args)
        q_THD *= 2


class RoundsInBatches(FakeAttentionLayer):
    """Returns bitwise different results in a step with several prompts."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args):
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args)
        if len(metadata.runs) > 1:
            out_THD += 1e-6


class SeesOtherPrompts(FakeBidirectionalBuilder):
    """Lets the tokens of a prompt attend to all tokens of the step."""

    def build(self, batch):
        metadata = super().build(batch)
        everything = [slot for _, slots in metadata.runs for slot in slots]
        return replace(metadata, runs=[(n, everything) for n, _ in metadata.runs])


class LeavesLastPromptOut(FakeBidirectionalBuilder):
    """Does not compute the last prompt."""

    def build(self, batch):
        metadata = super().build(batch)
        return replace(metadata, runs=metadata.runs[:-1])


def backend_of(part):
    kind = "create_builder" if issubclass(part, FakeBidirectionalBuilder) else "create_layer"
    return type(part.__name__, (FakeAttentionBackend,), {kind: staticmethod(part)})


def test_the_suite_has_a_bidirectional_attention_case_for_each_dtype():
    names = [case.name for case in attention_cases(FakeAttentionBackend, CPU)]
    assert sum(name.startswith("bidirectional, ") for name in names) == 3


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bidirectional_attention_case_accepts_a_correct_backend(dtype):
    check_bidirectional(FakeAttentionBackend, replace(CASE, dtype=dtype), CPU)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Causal, "is wrong: token"),
        (WideWindow, "is wrong: token .* window 1"),
        (NoWindow, "is wrong: token .* window 1"),
        (OwnScale, "is wrong: token"),
        (InterleavedHeads, "is wrong: token .* H=8, K=2"),
        (ScalesQueriesInPlace, "changed q, k or v"),
        (SeesOtherPrompts, "is wrong: token"),
        (LeavesLastPromptOut, f"prompt of {LENGTHS[-1]} tokens has an error of inf"),
    ],
)
def test_the_bidirectional_attention_case_rejects_the_mutant(part, message):
    with pytest.raises(AssertionError, match=message):
        check_bidirectional(backend_of(part), CASE, CPU)


def test_the_bidirectional_attention_case_rejects_results_that_depend_on_the_batch():
    backend = backend_of(RoundsInBatches)
    check_bidirectional(backend, CASE, CPU)
    features = backend.capabilities.features | {"batch_invariant"}
    backend.capabilities = replace(backend.capabilities, features=features)
    with pytest.raises(AssertionError, match="has results that differ bitwise"):
        check_bidirectional(backend, CASE, CPU)
