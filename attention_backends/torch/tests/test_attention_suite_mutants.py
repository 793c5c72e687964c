"""The conformance suite rejects faulty backends: each mutant has one fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail.interfaces.attention import AttentionCapabilities
from dovetail_devkit.fakes.attention import (
    FakeAttentionBackend,
    FakeAttentionBuilder,
    FakeAttentionLayer,
)
from dovetail_devkit.suites.attention import (
    AttentionCase,
    check_attention,
    check_case,
    reference_attention,
    standard_cases,
)

CPU = torch.device("cpu")


class WideWindow(FakeAttentionLayer):
    """Attends to one token more than the window."""

    def __init__(self, context):
        window = context.sliding_window
        super().__init__(replace(context, sliding_window=window + 1 if window else 0))


class NarrowWindow(FakeAttentionLayer):
    """Attends to one token less than the window."""

    def __init__(self, context):
        super().__init__(replace(context, sliding_window=max(context.sliding_window - 1, 0)))


class NoSoftCap(FakeAttentionLayer):
    """Ignores the soft cap."""

    def __init__(self, context):
        super().__init__(replace(context, soft_cap=0.0))


class NoSinks(FakeAttentionLayer):
    """Ignores the sinks."""

    def __init__(self, context):
        super().__init__(replace(context, sinks=None))


class SinksOfOtherHeads(FakeAttentionLayer):
    """Uses the sink of another query head."""

    def __init__(self, context):
        sinks = context.sinks
        super().__init__(context if sinks is None else replace(context, sinks=sinks.roll(1)))


class NoAlibi(FakeAttentionLayer):
    """Ignores the ALiBi slopes."""

    def __init__(self, context):
        super().__init__(replace(context, alibi_slopes=None))


class AlibiOfOtherHeads(FakeAttentionLayer):
    """Uses the slope of another query head."""

    def __init__(self, context):
        slopes = context.alibi_slopes
        other = None if slopes is None else slopes.roll(1)
        super().__init__(replace(context, alibi_slopes=other))


class CappedSinks(FakeAttentionLayer):
    """Applies the soft cap to the sinks, too, as if they were scores."""

    def __init__(self, context):
        sinks, cap = context.sinks, context.soft_cap
        both = sinks is not None and cap
        super().__init__(replace(context, sinks=cap * (sinks / cap).tanh()) if both else context)


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


class SeesFuture(FakeAttentionLayer):
    """Lets every token of a request attend to all tokens of the request in the step."""

    def attend(self, q_QHD, k_LKD, v_LKD):
        last = [super(SeesFuture, self).attend(q[None], k_LKD, v_LKD) for q in q_QHD]
        return torch.cat(last)


class TopLeftMask(FakeAttentionLayer):
    """Aligns the causal mask with the first position, as if there were no context."""

    def attend(self, q_QHD, k_LKD, v_LKD):
        if len(q_QHD) == 1:
            return super().attend(q_QHD, k_LKD, v_LKD)
        return super().attend(q_QHD, k_LKD[: len(q_QHD)], v_LKD[: len(q_QHD)])


class CapAfterScaleTwice(FakeAttentionLayer):
    """Applies the soft cap before the scale instead of after it."""

    def attend(self, q_QHD, k_LKD, v_LKD):
        context = self.context
        if not context.soft_cap:
            return super().attend(q_QHD, k_LKD, v_LKD)
        return reference_attention(
            q_QHD,
            k_LKD,
            v_LKD,
            scale=context.scale,
            sliding_window=context.sliding_window,
            soft_cap=context.soft_cap * context.scale,
        )


class WritesKeysNextDoor(FakeAttentionLayer):
    """Writes keys one slot too far."""

    def write(self, slots_2SKD, slots_T, k_TKD, v_TKD):
        super().write(slots_2SKD, slots_T, k_TKD, v_TKD)
        slots_2SKD[0, (slots_T + 1) % slots_2SKD.shape[1]] = k_TKD


class SwapsKeysAndValues(FakeAttentionLayer):
    """Stores keys in place of values."""

    def write(self, slots_2SKD, slots_T, k_TKD, v_TKD):
        super().write(slots_2SKD, slots_T, v_TKD, k_TKD)


class ForgetsToWriteDecodes(FakeAttentionLayer):
    """Writes nothing for a step of few tokens, but attends correctly in it."""

    def write(self, slots_2SKD, slots_T, k_TKD, v_TKD):
        self.kept = slots_2SKD[:, slots_T].clone(), slots_2SKD, slots_T
        super().write(slots_2SKD, slots_T, k_TKD, v_TKD)

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args):
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args)
        before, slots_2SKD, slots_T = self.kept
        if len(slots_T) < 4:
            slots_2SKD[:, slots_T] = before


class TouchesEarlierTokens(FakeAttentionLayer):
    """Rounds earlier contents of the cache."""

    def write(self, slots_2SKD, slots_T, k_TKD, v_TKD):
        slots_2SKD.copy_(slots_2SKD.to(torch.float8_e4m3fn).to(slots_2SKD.dtype))
        super().write(slots_2SKD, slots_T, k_TKD, v_TKD)


class ClearsEarlierTokens(FakeAttentionLayer):
    """Clears the values of each request's first token in its later steps."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args):
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args)
        for query_len, slots in metadata.runs:
            if query_len < len(slots):
                kv_cache.view(2, -1, *kv_cache.shape[3:])[1, slots[0]] = 0


class ClearsUnusedSlots(FakeAttentionLayer):
    """A correct variant: clears the values after each request's last token."""

    def write(self, slots_2SKD, slots_T, k_TKD, v_TKD):
        for _, slots in self.runs:
            end = slots[-1] + 1
            slots_2SKD[1, end : -(-end // self.size) * self.size] = 0
        super().write(slots_2SKD, slots_T, k_TKD, v_TKD)

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args):
        self.runs, self.size = metadata.runs, kv_cache.shape[2]
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args)


class ScalesQueriesInPlace(FakeAttentionLayer):
    """Changes its input, and returns the correct result."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args):
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args)
        q_THD *= 2


class LeavesLastRowOut(FakeAttentionLayer):
    """Does not write the result of the last request."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args):
        metadata = replace(metadata, runs=metadata.runs[:-1])
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args)


class MasksGarbageByWeight(FakeAttentionLayer):
    """Multiplies values of unused slots by zero instead of not reading them."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args):
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, *rotary_args)
        out_THD += 0 * kv_cache[0, 0, 0, 0, 0]


class TurnsKeysAlone(FakeAttentionLayer):
    """Rotates the keys but not the queries."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, rotary_args=None):
        if rotary_args is not None:
            _, k_TKD = rotary_args.apply(q_THD, k_TKD)
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD)


class TurnsByPlace(FakeAttentionLayer):
    """Rotates by the index of the token in the step instead of its position."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, rotary_args=None):
        if rotary_args is not None:
            positions = [len(slots) - n + i for n, slots in metadata.runs for i in range(n)]
            limit = len(rotary_args.cos_sin_PR)
            rotary_args = replace(rotary_args, positions_T=torch.tensor(positions) % limit)
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, rotary_args)


class TurnsInPlace(FakeAttentionLayer):
    """Rotates its inputs in place."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, rotary_args=None):
        if rotary_args is not None:
            turned = rotary_args.apply(q_THD, k_TKD)
            q_THD.copy_(turned[0])
            k_TKD.copy_(turned[1])
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD)


class FirstRowsTable(FakeAttentionBuilder):
    """Uses the blocks of the first request for every request."""

    def build(self, batch):
        table_RM = batch.block_table_RM
        return super().build(replace(batch, block_table_RM=table_RM[:1].expand_as(table_RM)))


class DropsLastBlock(FakeAttentionBuilder):
    """Omits the first token of a new block, so that queries attend to one token less."""

    def build(self, batch):
        meta = super().build(batch)
        runs = [(n, s[:-1] if self.drops(n, len(s)) else s) for n, s in meta.runs]
        return replace(meta, runs=runs)

    def drops(self, query_len, seq_len):
        return query_len == 1 < seq_len and seq_len % self._block_size == 1


def backend_of(part):
    kind = "create_builder" if issubclass(part, FakeAttentionBuilder) else "create_layer"
    return type(part.__name__, (FakeAttentionBackend,), {kind: staticmethod(part)})


class CutsTheLongestDecodes(DropsLastBlock):
    """Declares a threshold, and omits a token of requests with exactly this many tokens."""

    reorder_threshold = 11

    def drops(self, query_len, seq_len):
        return query_len == 11


class TwiceTheBytes(FakeAttentionBackend):
    """Requires a cache that is larger than the spec allows."""

    @staticmethod
    def kv_cache_shape(num_blocks, spec):
        return FakeAttentionBackend.kv_cache_shape(2 * num_blocks, spec)


class RejectsItsClaim(FakeAttentionBackend):
    """Declares support for half precision, but rejects it."""

    @classmethod
    def refusals(cls, requirements):
        return ["not today"] if requirements.dtype == "float16" else []


class RejectsNothing(FakeAttentionBackend):
    """Declares support for every capability."""

    class AcceptsAllRequirements(AttentionCapabilities):
        def refusals(self, requirements):
            return []

    capabilities = AcceptsAllRequirements(dtypes=frozenset({"float32"}))


MUTANTS = {
    WideWindow: "token",
    NarrowWindow: "token",
    NoSoftCap: "token",
    NoSinks: "token",
    SinksOfOtherHeads: "token",
    NoAlibi: "token",
    AlibiOfOtherHeads: "token",
    CappedSinks: "token",
    OwnScale: "token",
    InterleavedHeads: "head",
    SeesFuture: "token",
    TopLeftMask: "token",
    CapAfterScaleTwice: "token",
    WritesKeysNextDoor: "cache of earlier tokens|token",
    SwapsKeysAndValues: "token",
    ForgetsToWriteDecodes: "nan.*The step is 'decodes'",
    TouchesEarlierTokens: "changed the cache of earlier tokens",
    ClearsEarlierTokens: "changed the cache of earlier tokens",
    ScalesQueriesInPlace: "changed q, k or v",
    LeavesLastRowOut: "nan",
    MasksGarbageByWeight: "nan",
    TurnsKeysAlone: "token",
    TurnsByPlace: "token",
    TurnsInPlace: "changed q, k or v",
    FirstRowsTable: "token",
    DropsLastBlock: "token",
    CutsTheLongestDecodes: "'short and long runs are in one batch'",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("part", "message"), MUTANTS.items())
def test_the_suite_rejects_the_mutant(part, message):
    with pytest.raises(AssertionError, match=message):
        check_attention(backend_of(part), CPU)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_suite_accepts_a_backend_that_clears_unused_slots(dtype):
    case = AttentionCase(runs=((16, 1), (0, 7), (19, 4), (14, 1)), dtype=dtype)
    check_case(backend_of(ClearsUnusedSlots), case, CPU)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (TwiceTheBytes, "kv_cache_shape"),
        (RejectsItsClaim, "claims to support .*, but rejects it"),
        (RejectsNothing, "which it does not claim to support"),
    ],
)
def test_the_suite_rejects_false_capabilities(backend, message):
    with pytest.raises(AssertionError, match=message):
        check_attention(backend, CPU)


@pytest.mark.parametrize("part", [OwnScale, InterleavedHeads, SeesFuture])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_tolerances_of_half_precision_still_reject_mutants(part, dtype):
    case = AttentionCase(runs=((16, 1), (0, 7), (19, 4)), dtype=dtype)
    check_case(FakeAttentionBackend, case, CPU)
    with pytest.raises(AssertionError, match=dtype):
        check_case(backend_of(part), case, CPU)


def test_the_conformance_cases_require_only_declared_capabilities():
    capabilities = AttentionCapabilities(
        dtypes=frozenset({"bfloat16"}), head_sizes=frozenset({128, 256}), block_size_multiple=16
    )
    cases = standard_cases(capabilities)
    kinds = {(case.dtype, case.head_size) for case in cases}
    assert kinds == {("bfloat16", 128), ("bfloat16", 256)}
    assert {case.block_size for case in cases} == {16, 32}
    assert not any(case.sliding_window or case.soft_cap or case.sinks for case in cases)


def test_the_reference_attention_equals_an_explicit_sum():
    q = torch.tensor([[[1.0]], [[2.0]]])
    k = torch.tensor([[[0.0]], [[1.0]], [[2.0]]])
    v = torch.tensor([[[1.0]], [[10.0]], [[100.0]]])
    actual = reference_attention(q, k, v, scale=1.0, sliding_window=2).flatten()
    e = torch.tensor(1.0, dtype=torch.float64).exp()
    expected = torch.stack([(1 + 10 * e) / (1 + e), (10 * e**2 + 100 * e**4) / (e**2 + e**4)])
    torch.testing.assert_close(actual, expected)
