"""The linear method `fp8`: contract, values, stored codes, ranks."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

from dovetail import LLM, SamplingParams
from dovetail.interfaces import LinearShape
from dovetail.interfaces.linear_method import ExpertLayers
from dovetail_devkit.suites.linear_method import check_linear_method
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_torch.distributed.shard import Shard
from dovetail_torch.fake_device import DEVICE, install
from dovetail_torch.fake_device.attention import GraphAttentionBackend
from dovetail_torch.fake_device.platform import FakeDevicePlatform
from dovetail_torch.fake_device.worker import FakeDeviceWorker
from dovetail_torch.layers import TorchOps
from dovetail_torch.quantization import fp8_linear, fp8_rounding
from dovetail_torch.quantization.fp8_linear import FP8LinearMethod
from dovetail_torch.quantization.fp8_rounding import decode, round_weight

CPU = torch.device("cpu")


def make_layer(method, weight_OI, parts, *, num_experts=1, in_shard=None, ranks=None):
    """Return a loaded layer that is not packed yet."""
    layer = nn.Module()
    if in_shard is not None:
        layer.in_shard, layer.part_shards, layer.ranks = in_shard, (), ranks
    shape = LinearShape(
        name="model.layers.3.mlp.fused",
        in_features=weight_OI.shape[1],
        part_names=tuple(f"{number}.proj" for number in range(len(parts))),
        part_sizes=tuple(parts),
        bias=False,
        dtype=weight_OI.dtype,
        device=CPU,
        num_experts=num_experts,
    )
    layer.shape = shape
    method.create(layer, shape)
    with torch.no_grad():
        layer.weight.copy_(weight_OI)
    return layer


def random_weight(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def stores_codes(monkeypatch):
    """Make the method treat host memory as device memory."""
    monkeypatch.setattr(fp8_linear, "is_host_memory", lambda device: False)


def test_the_method_meets_its_contract():
    check_linear_method(FP8LinearMethod, CPU)


def test_the_method_with_stored_codes_meets_its_contract(stores_codes):
    check_linear_method(FP8LinearMethod, CPU, dtypes=["bfloat16"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"scales": "block", "block_size": 32}])
@torch.inference_mode()
def test_stored_codes_and_written_values_represent_the_same_numbers(options, dtype, monkeypatch):
    weight_OI = random_weight(70, 50, dtype=dtype)
    written = make_layer(FP8LinearMethod(options), weight_OI, (37, 33))
    FP8LinearMethod(options).pack(written)
    monkeypatch.setattr(fp8_linear, "is_host_memory", lambda device: False)
    method = FP8LinearMethod(options)
    stored = make_layer(method, weight_OI, (37, 33))
    method.pack(stored)
    assert stored.weight.dtype == torch.float8_e4m3fn and stored.weight.nbytes == 70 * 50
    block = options.get("block_size", 0)
    values_OI = decode(stored.weight, stored.weight_scale, block, dtype)
    assert torch.equal(values_OI, written.weight) and not torch.equal(values_OI, weight_OI)
    # The parts of a fused layer are rounded as separate weights.
    for start, size in ((0, 37), (37, 33)):
        codes, scales = round_weight(weight_OI[start : start + size], block)
        assert torch.equal(decode(codes, scales, block, dtype), values_OI[start : start + size])


@pytest.mark.parametrize("block", [0, 32])
def test_weights_rounded_in_chunks_have_the_same_values(block, monkeypatch):
    weight_OI = random_weight(100, 70)
    whole = [tensor.float() for tensor in round_weight(weight_OI, block)]
    monkeypatch.setattr(fp8_rounding, "MAX_CHUNK_VALUES", 71)
    pieces = [tensor.float() for tensor in round_weight(weight_OI, block)]
    assert all(map(torch.equal, whole, pieces))


def test_zeros_and_values_of_any_magnitude_are_rounded_within_one_sixteenth():
    for factor in (1e-30, 1.0, 1e30):
        weight_OI = random_weight(4, 64) * factor
        weight_OI[1] = 0
        codes, scales = round_weight(weight_OI, 0)
        values_OI = decode(codes, scales, 0, torch.float32)
        assert bool((values_OI[1] == 0).all())
        smallest = scales * 2.0**-6  # below it codes have fewer bits
        allowed = torch.maximum(weight_OI.abs(), smallest) / 16 * 1.000001
        assert bool(((values_OI - weight_OI).abs() <= allowed).all())


class ThreadRanks:
    def __init__(self, rank, table, barrier):
        self.rank, self.size, self._table, self._barrier = rank, len(table), table, barrier

    def all_gather(self, x):
        self._table[self.rank] = x
        self._barrier.wait(10)
        return torch.cat(self._table, dim=-1)


def test_ranks_that_shard_the_inputs_of_a_row_use_the_same_scale():
    weight_OI = random_weight(24, 64)
    weight_OI[:, 40] *= 50  # the second rank has the largest values
    table, barrier = [None, None], Barrier(2)

    def pack(rank):
        method = FP8LinearMethod()
        shard = Shard(start=32 * rank, size=32, whole=64)
        part_OI = weight_OI[:, shard.slice]
        ranks = ThreadRanks(rank, table, barrier)
        layer = make_layer(method, part_OI, (24,), in_shard=shard, ranks=ranks)
        method.pack(layer)
        return layer.weight

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(pack, range(2)))
    codes, scales = round_weight(weight_OI, 0)
    assert torch.equal(torch.cat(parts, dim=1), decode(codes, scales, 0, torch.float32))


@torch.inference_mode()
def test_experts_with_stored_codes_give_the_same_sums_as_the_written_values(monkeypatch):
    gate_up, down = random_weight(4 * 96, 40), random_weight(4 * 40, 48, seed=1)
    x_TD = random_weight(7, 40, seed=2)
    experts_TK, weights_TK = torch.tensor([[3, 0]] * 7), torch.full((7, 2), 0.5)

    def sums():
        method = FP8LinearMethod()
        layers = [
            make_layer(method, gate_up, (48,) * 8, num_experts=4),
            make_layer(method, down, (40,) * 4, num_experts=4),
        ]
        for layer in layers:
            method.pack(layer)
        both = ExpertLayers(gate_up=layers[0], down=layers[1], ops=TorchOps())
        return method.apply_experts(both, x_TD, experts_TK, weights_TK), layers

    expected, _ = sums()
    monkeypatch.setattr(fp8_linear, "is_host_memory", lambda device: False)
    actual, layers = sums()
    assert all(layer.weight.dtype == torch.float8_e4m3fn for layer in layers)
    assert torch.equal(actual, expected)


@pytest.mark.costly
def test_a_device_that_stores_codes_generates_the_same_tokens_as_the_host(tmp_path):
    pytest.importorskip("dovetail_models")
    checkpoint = write_tiny_llama(tmp_path)

    def tokens(**engine):
        with LLM(
            str(checkpoint),
            quantization="fp8",
            plugin_options={"linear_method:fp8": {"head": "fp8"}},
            skip_tokenizer_init=True,
            num_gpu_blocks_override=60,
            max_model_len=64,
            max_num_seqs=2,
            enforce_eager=True,
            num_threads=1,
            dtype="float32",
            **engine,
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
            done = llm.generate([[5, 9, 2], [8] * 9], params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in done]

    install()
    DEVICE.reset(lag=5, seed=1)
    try:
        on_device = tokens(
            platform=FakeDevicePlatform,
            worker_cls=FakeDeviceWorker,
            attention_backend=GraphAttentionBackend,
        )
    finally:
        DEVICE.reset()
    assert on_device == tokens(platform="cpu")
