import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from dovetail.errors import ContractError
from dovetail.interfaces import AttentionContext, RotaryArgs
from dovetail_torch.attention_table import AttentionTable, NoAttention
from dovetail_torch.layers import TorchOps

T, H, K, D = 5, 4, 2, 8


class Turning:
    """A layer that applies RoPE itself. It stores the rotary arguments and returns its queries."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, rotary_args=None):
        self.rotary_args = rotary_args
        out_THD.copy_(q_THD)


class Marking:
    """A layer that writes a number to its cache and to its output, and stores its arguments."""

    def __init__(self, mark):
        self.mark, self.calls = mark, []

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD):
        self.calls.append((q_THD.clone(), k_TKD.clone(), v_TKD.clone(), metadata))
        kv_cache += self.mark
        out_THD.copy_(q_THD + self.mark)


def make_table(first_mark=1, builder_of=(0, 1, 0)):
    layers = [Marking(first_mark + index) for index in range(len(builder_of))]
    caches = [torch.zeros(2) for _ in layers]
    table = AttentionTable(layers, caches, builder_of)
    table.metadata = ["first", "second"]
    return table, layers, caches


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(T, heads, D, generator=generator) for heads in (H, K, K))


def test_an_index_selects_the_layer_and_its_cache_and_metadata(qkv):
    table, layers, caches = make_table()
    for index in (2, 0, 1):
        assert torch.equal(table.attend(index, *qkv), qkv[0] + (index + 1))
    assert [cache.tolist() for cache in caches] == [[1, 1], [2, 2], [3, 3]]
    assert [layer.calls[0][3] for layer in layers] == ["first", "second", "first"]
    for layer in layers:
        inputs = layer.calls[0][:3]
        assert all(torch.equal(item, two) for item, two in zip(inputs, qkv, strict=True))


@pytest.fixture
def rotary_args():
    angle_PF = torch.linspace(0, 3, T)[:, None] * torch.ones(D // 2)
    table_PR = torch.cat((angle_PF.cos(), angle_PF.sin()), dim=-1)
    return RotaryArgs(ops=TorchOps(), positions_T=torch.arange(T), cos_sin_PR=table_PR)


def test_a_layer_that_applies_rope_gets_the_rotary_args(qkv, rotary_args):
    layer = Turning()
    table = AttentionTable([layer], [torch.zeros(2)], (0,), rotates=True)
    table.metadata = [None]
    assert torch.equal(table.attend(0, *qkv, rotary_args), qkv[0])
    assert layer.rotary_args is rotary_args
    table.attend(0, *qkv)
    assert layer.rotary_args is None


def test_the_ops_apply_rope_for_layers_that_do_not_apply_it(qkv, rotary_args):
    table, layers, _ = make_table()
    turned = rotary_args.apply(*qkv[:2])
    assert (turned[0] - qkv[0]).abs().max() > 0.5
    assert torch.equal(table.attend(0, *qkv, rotary_args), turned[0] + 1)
    inputs = layers[0].calls[0]
    assert torch.equal(inputs[0], turned[0]) and torch.equal(inputs[1], turned[1])


def test_the_attention_layer_applies_rope_even_if_there_is_no_kv_cache(qkv, rotary_args):
    class Counting(TorchOps):
        num_turned = 0

        def rotary_embedding(self, *tensors):
            self.num_turned += 1
            return super().rotary_embedding(*tensors)

    ops = Counting()
    out_THD = NoAttention(1).attend(0, *qkv, replace(rotary_args, ops=ops))
    assert ops.num_turned == 1 and out_THD.shape == qkv[0].shape and not out_THD.any()


def test_in_a_compiled_graph_the_ops_apply_rope(qkv, rotary_args):
    layer = Turning()
    table = AttentionTable([layer], [torch.zeros(2)], (0,), rotates=True)
    table.metadata = [None]
    compiled = torch.compile(lambda *x: table.attend(0, *x, rotary_args), backend="eager")
    torch.testing.assert_close(compiled(*qkv), rotary_args.apply(*qkv[:2])[0])
    assert layer.rotary_args is None


def test_attend_returns_a_new_contiguous_tensor(qkv):
    table, _, _ = make_table()
    q_THD = qkv[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert not q_THD.is_contiguous()
    out_THD = table.attend(0, q_THD, *qkv[1:])
    assert out_THD.is_contiguous() and out_THD.shape == (T, H, D)
    assert torch.equal(q_THD, qkv[0])  # the input is not changed


def test_attention_tables_have_unique_slots_and_are_freed_with_their_owner(qkv):
    tables = [make_table()[0] for _ in range(3)]
    assert len({table.slot for table in tables}) == 3
    slot = tables[0].slot
    out_THD = torch.ops.dovetail.attend(*qkv, slot, 1)
    assert torch.equal(out_THD, qkv[0] + 2)
    del tables
    gc.collect()
    with pytest.raises(KeyError):
        torch.ops.dovetail.attend(*qkv, slot, 1)


def test_attention_without_a_cache_returns_zeros(qkv):
    out_THD = NoAttention(8).attend(7, *qkv)
    assert out_THD.shape == (T, H, D) and out_THD.is_contiguous()
    assert not out_THD.any()


class Twice(nn.Module):
    """A model with two attention layers and arithmetic operations before and after them."""

    def forward(self, q_THD, k_TKD, v_TKD, attention: AttentionContext):
        once = attention.attend(0, q_THD * 2, k_TKD, v_TKD)
        return attention.attend(2, once, k_TKD, v_TKD) + 1


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield torch.compile(Twice(), fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


@torch.inference_mode()
def test_a_compiled_model_calls_the_layers_of_the_given_table(qkv, compiled):
    tables = [make_table(mark) for mark in (1, 10)]
    for _ in range(2):
        for (table, _, caches), mark in zip(tables, (1, 10), strict=True):
            before = [cache.clone() for cache in caches]
            assert torch.allclose(compiled(*qkv, table), qkv[0] * 2 + (2 * mark + 3))
            assert [float((now - was)[0]) for now, was in zip(caches, before, strict=True)] == [
                mark,
                0,
                mark + 2,
            ]
    assert all([len(layer.calls) for layer in layers] == [2, 0, 2] for _, layers, _ in tables)


@torch.inference_mode()
def test_a_compiled_model_reads_the_metadata_of_the_step(qkv, compiled):
    table, layers, _ = make_table()
    for step in ("one", "two", "three"):
        table.metadata = [step, None]
        compiled(*qkv, table)
    assert [call[3] for call in layers[0].calls] == ["one", "two", "three"]


@pytest.mark.costly
@torch.inference_mode()
def test_a_compiled_model_supports_other_numbers_of_tokens_with_the_same_table(qkv, compiled):
    table, layers, _ = make_table()
    for num_tokens in (5, 3, 1, 4):
        out_THD = compiled(*(x[:num_tokens] for x in qkv), table)
        assert out_THD.shape == (num_tokens, H, D)
    assert [len(call[0]) for call in layers[0].calls] == [5, 3, 1, 4]


def test_an_undeclared_layer_is_rejected_before_the_cache_is_allocated(qkv):
    with pytest.raises(
        ContractError, match=r"computes attention in layer 1, but has 1 Attention modules"
    ):
        NoAttention(1).attend(1, *qkv)
