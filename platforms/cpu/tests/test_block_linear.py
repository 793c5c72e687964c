"""The `gguf` linear method: fused layers of several types, shards, damaged blocks, cached bytes."""

import numpy as np
import pytest
import torch

from dovetail.errors import WeightError
from dovetail.interfaces import ModelContext
from dovetail_cpu.native_library import probe_any
from dovetail_devkit.suites.linear_method import check_linear_method
from dovetail_torch.distributed.shard import Shard
from dovetail_torch.layers import (
    BlockWeight,
    ParallelLinear,
    ParallelLMHead,
    TorchOps,
    VocabParallelEmbedding,
)
from dovetail_torch.weights import build_weight_table

pytestmark = pytest.mark.skipif(not probe_any().usable, reason="native kernels are not available")

CPU = torch.device("cpu")
WIDTH = 96


def make_method():
    from dovetail_cpu.quantized_linear import GGUFLinearMethod

    return GGUFLinearMethod()


def make_context(method, dtype=torch.bfloat16):
    return ModelContext(
        hf_config={},
        dtype=dtype,
        device=CPU,
        linear_method=method,
        ops=TorchOps(),
        max_model_len=8,
    )


def random_q8_0(num_rows, seed, in_features=WIDTH):
    """Return blocks, each a float16 and 32 int8 numbers, and their values in float64."""
    chance = np.random.default_rng(seed)
    codes = chance.integers(-128, 128, (num_rows, in_features // 32, 32), np.int8)
    scales = chance.uniform(0.001, 0.02, (num_rows, in_features // 32, 1)).astype(np.float16)
    blocks = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=2)
    values = (scales.astype(np.float64) * codes).reshape(num_rows, in_features)
    return blocks_of("Q8_0", blocks), torch.from_numpy(values)


def random_q4_0(num_rows, seed):
    """Return blocks, each a float16 and 16 bytes, and their values in float64."""
    chance = np.random.default_rng(seed)
    q = chance.integers(0, 256, (num_rows, WIDTH // 32, 16), np.uint8)
    scales = chance.uniform(-0.2, 0.2, (num_rows, WIDTH // 32, 1)).astype(np.float16)
    codes = np.concatenate([q & 15, q >> 4], axis=2).astype(np.float64) - 8
    blocks = np.concatenate([scales.view(np.uint8), q], axis=2)
    return blocks_of("Q4_0", blocks), torch.from_numpy((scales * codes).reshape(num_rows, WIDTH))


def blocks_of(type_name, blocks):
    rows_OB = torch.from_numpy(blocks.reshape(len(blocks), -1))
    return BlockWeight(type_name=type_name, rows_OB=rows_OB, is_mapped=False)


def exact_inputs(num_tokens, in_features=WIDTH):
    """Return inputs that are represented exactly in int8 with one scale per 32 inputs."""
    generator = torch.Generator().manual_seed(3)
    x_TI = torch.randint(-127, 128, (num_tokens, in_features), generator=generator)
    x_TI[:, ::32] = 127
    return x_TI.bfloat16()


def make_layer(method, parts, *, bias=False):
    return ParallelLinear(make_context(method), "model.layers.3.fused", WIDTH, parts, bias=bias)


def test_the_gguf_linear_method_meets_its_contract():
    check_linear_method(type(make_method()), CPU)


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [(33, 7, 20, 40), (32, 64, 32, 5)])
def test_parts_of_different_block_types_are_packed_without_rounding(sizes):
    """Two parts of one type are packed together. The last part has no blocks, only bfloat16."""
    method = make_method()
    layer = make_layer(method, dict(zip("abcd", sizes, strict=True)), bias=True)
    makers = (random_q4_0, random_q8_0, random_q8_0)
    values = []
    for part, (maker, num_rows) in enumerate(zip(makers, sizes, strict=False)):
        blocks, exact = maker(num_rows, part)
        layer.share_blocks(part, blocks)
        values.append(exact)
    generator = torch.Generator().manual_seed(1)
    layer.bias.copy_(torch.randn(sum(sizes), generator=generator))
    plain_OI = layer.weight[-sizes[-1] :]
    plain_OI.copy_(torch.randn(plain_OI.shape, generator=generator))
    weight_OI = torch.cat([*values, plain_OI.double()])
    method.pack(layer)
    assert not layer.blocks and not hasattr(layer, "weight")
    for num_tokens in (1, 5, 30):
        x_TI = exact_inputs(num_tokens)
        want_TO = x_TI.double() @ weight_OI.T + layer.bias.double()
        got_TO = layer(x_TI)
        assert got_TO.is_contiguous()
        # The only remaining error is the rounding to bfloat16.
        torch.testing.assert_close(got_TO.double(), want_TO, rtol=2**-8, atol=1e-3)


@torch.inference_mode()
def test_restored_packed_blocks_give_the_same_matrix_products():
    def make():
        method = make_method()
        layer = make_layer(method, {"a": 40, "b": 24})
        layer.expect_blocks(0, "Q4_0")
        layer.expect_blocks(1, "Q8_0")
        return method, layer

    method, layer = make()
    layer.share_blocks(0, random_q4_0(40, 1)[0])
    layer.share_blocks(1, random_q8_0(24, 2)[0])
    num_bytes = method.packed_bytes(layer)
    method.pack(layer)
    form = method.packed_form(layer)
    assert form.readonly and len(form) == num_bytes
    other, again = make()
    assert other.packed_format() == method.packed_format()
    assert other.packed_bytes(again) == num_bytes
    other.restore(again, form)
    other.pack(again)
    x_TI = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(again(x_TI), layer(x_TI))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_error_names_the_tensor_with_damaged_blocks(bad):
    method = make_method()
    layer = make_layer(method, {"a": 40, "b": 24})
    for part, num_rows in enumerate((40, 24)):
        blocks, _ = random_q8_0(num_rows, part)
        if part == 1:
            half = torch.from_numpy(np.array([bad], np.float16).view(np.uint8))
            blocks.rows_OB[5, 34:36] = half
        layer.share_blocks(part, blocks)
    with pytest.raises(WeightError, match=r"1 scales of model\.layers\.3\.b\.weight are NaN"):
        method.pack(layer)


def test_a_float32_layer_rejects_quantized_blocks():
    layer = ParallelLinear(make_context(make_method(), torch.float32), "x", WIDTH, {"x": 8})
    table = build_weight_table(torch.nn.ModuleDict({"x": layer}))
    assert not table.assignments["x.weight"].takes_blocks("Q8_0", 32)


def test_a_rank_packs_its_blocks_unless_the_division_would_split_a_block():
    """A rank has 32 of 128 inputs: a whole block of Q8_0, but only a part of a block of Q4_K."""
    method = make_method()
    layer = ParallelLinear(
        make_context(method),
        "x",
        Shard(start=32, size=32, whole=128),
        {"x": Shard(start=8, size=8, whole=16)},
    )
    target = build_weight_table(torch.nn.ModuleDict({"x": layer})).assignments["x.weight"]
    assert target.takes_blocks("Q8_0", 32)
    assert not target.takes_blocks("Q4_K", 256) and not target.takes_blocks("IQ4_NL", 32)
    blocks, values = random_q8_0(16, 0, in_features=128)
    target.share_blocks(blocks)
    method.pack(layer)
    x_TI = exact_inputs(3, 32)
    want_TO = x_TI.double() @ values[8:, 32:64].T
    torch.testing.assert_close(layer(x_TI).double(), want_TO, rtol=2**-8, atol=1e-3)


class Tied(torch.nn.Module):
    """An embedding and an LM head that share a weight."""

    def __init__(self, context):
        super().__init__()
        self.embed = VocabParallelEmbedding(context, 70, WIDTH)
        self.head = ParallelLMHead(context, "head", 70, WIDTH, tied_to=self.embed)


def test_a_tied_lm_head_uses_blocks_and_the_embedding_table_uses_dequantized_values():
    method = make_method()
    model = Tied(make_context(method))
    target = build_weight_table(model).assignments["embed.weight"]
    assert target.takes_blocks("Q8_0", 32) and target.is_table
    blocks, values = random_q8_0(70, 0)
    target.share_blocks(blocks)
    method.pack(model.head)
    x_TI = exact_inputs(2)
    torch.testing.assert_close(
        model.head(x_TI).double(), x_TI.double() @ values.T, rtol=2**-8, atol=1e-3
    )
