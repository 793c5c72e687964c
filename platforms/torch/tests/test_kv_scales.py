"""Scales of the KV cache: their names in checkpoints, their values, and the layers that use
them."""

import json
import struct

import pytest
import torch

from dovetail.errors import ConfigError, WeightError
from dovetail_devkit.contexts import make_worker_context
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_devkit.worker.start import bring_up
from dovetail_torch.fake_device import DEVICE, install
from dovetail_torch.fake_device.attention import NoWaitAttentionBackend, NoWaitLayer
from dovetail_torch.fake_device.platform import FakeDevicePlatform
from dovetail_torch.fake_device.worker import FakeDeviceWorker
from dovetail_torch.weights.kv_scales import ScaleAssignment, is_kv_scale

pytest.importorskip("dovetail_models")
FOR_LAYER = "model.layers.{}.self_attn.{}"
CACHE = {"kv_cache_dtype": "fp8_e4m3", "kv_cache_scales": "layer"}


class ScaledBackend(NoWaitAttentionBackend):
    """A backend that accepts fp8 with per-layer scales, and records them."""

    name = "scaled"
    capabilities = type(NoWaitAttentionBackend.capabilities)(
        dtypes=frozenset({"float32"}),
        kv_cache_dtypes=frozenset({"float32", "fp8_e4m3", "fp8_e5m2"}),
        features=frozenset({"kv_layer_scales"}),
    )
    seen = ()

    @staticmethod
    def create_layer(context):
        ScaledBackend.seen = (*ScaledBackend.seen, context.kv_scales)
        return Discarding(context)


class Discarding(NoWaitLayer):
    """A layer without attention, because the fake layer cannot write fp8."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, rotary_args=None):
        out_THD.zero_()


@pytest.fixture(autouse=True)
def device():
    install()
    DEVICE.reset()
    ScaledBackend.seen = ()
    yield
    DEVICE.reset()


def with_scales(folder, scales):
    """Write a tiny model whose file also contains these weights: float32 values by name."""
    checkpoint = write_tiny_llama(folder)
    file = checkpoint / "model.safetensors"
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    for name, values in scales.items():
        as_list = values if isinstance(values, list) else [values]
        added = struct.pack(f"<{len(as_list)}f", *as_list)
        shape = [len(as_list)] if isinstance(values, list) else []
        offsets = [len(data), len(data) + len(added)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += added
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return checkpoint


def start(checkpoint, **options):
    engine_args = {"attention_backend": ScaledBackend, "dtype": "float32"} | CACHE | options
    worker = FakeDeviceWorker(make_worker_context(checkpoint, FakeDevicePlatform(), **engine_args))
    bring_up(worker)
    return worker


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("attn.k_scale", "")]
)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_the_layers_get_the_scales_of_the_checkpoint(tmp_path, names, dtype):
    scales = {
        FOR_LAYER.format(layer, name): 0.5 + layer + 10 * kind
        for layer in range(2)
        for kind, name in enumerate(names)
        if name
    }
    worker = start(with_scales(tmp_path, scales), kv_cache_dtype=dtype)
    values = [10.5, 11.5] if names[1] else [1.0, 1.0]
    assert [scales.tolist() for scales in ScaledBackend.seen] == [
        [0.5, values[0]],
        [1.5, values[1]],
    ]
    spec = next(iter(worker.get_kv_cache_spec().values()))
    assert (spec.dtype, spec.scale_bytes) == (dtype, 0)
    worker.shutdown()


@pytest.mark.costly
def test_layers_without_scales_in_the_checkpoint_use_a_scale_of_1(tmp_path):
    worker = start(write_tiny_llama(tmp_path))
    assert [scales.tolist() for scales in ScaledBackend.seen] == [[1.0, 1.0]] * 2
    worker.shutdown()


@pytest.mark.costly
def test_scales_are_ignored_without_an_fp8_cache(tmp_path):
    checkpoint = with_scales(tmp_path, {FOR_LAYER.format(0, "k_proj.k_scale"): 0.5})
    worker = start(checkpoint, kv_cache_dtype="auto", kv_cache_scales=None)
    assert ScaledBackend.seen == (None, None)
    worker.shutdown()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_positive_and_finite_is_rejected(tmp_path, value):
    checkpoint = with_scales(tmp_path, {FOR_LAYER.format(1, "v_scale"): value})
    with pytest.raises(WeightError, match=r"layers\.1\.self_attn\.v_scale is .* positive"):
        start(checkpoint)


@pytest.mark.parametrize(("value", "rounded"), [(1e300, "inf"), (1e-300, "0")])
def test_a_scale_in_float64_that_float32_cannot_represent_is_rejected(value, rounded):
    assignment = ScaleAssignment(name="layers.0.k_scale", target=torch.ones(1))
    with pytest.raises(WeightError, match=rf"layers\.0\.k_scale is {rounded}.* in float32"):
        assignment.fill(torch.tensor([value], dtype=torch.float64))
    assignment.fill(torch.tensor([0.5], dtype=torch.float64))
    assert assignment.target.tolist() == [0.5]


def test_per_head_scales_are_rejected(tmp_path):
    checkpoint = with_scales(tmp_path, {FOR_LAYER.format(0, "k_scale"): [0.5, 0.25]})
    with pytest.raises(WeightError, match=r"k_scale has the shape \[2\].*kv_cache_scales='token'"):
        start(checkpoint)


def test_an_unknown_layer_or_kind_of_scale_is_rejected(tmp_path):
    for name in ("model.layers.0.self_attn.v_proj.k_scale", "model.layers.0.mlp.scale"):
        with pytest.raises(WeightError, match="does not have 1 weight"):
            start(with_scales(tmp_path, {name: 0.5}))


def test_weight_scales_are_not_scales_of_the_cache():
    assert is_kv_scale("a.k_scale") and is_kv_scale("a.v_proj.v_scale")
    for name in (
        "a.k_proj.weight_scale",
        "a.q_scale",
        "a.k_proj.v_scale",
        "k_scale",
        "a.k_scale.b",
    ):
        assert not is_kv_scale(name)


def test_a_backend_without_per_layer_scales_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="kv_layer_scales is required but not declared"):
        start(write_tiny_llama(tmp_path), attention_backend=NoWaitAttentionBackend)


@pytest.mark.costly
def test_scales_are_reloaded_after_sleep_level_2(tmp_path):
    name = FOR_LAYER.format(0, "k_scale")
    worker = start(with_scales(tmp_path, {name: 0.5}), enable_sleep_mode=True)
    worker.sleep(2)
    with_scales(tmp_path, {name: 0.75})
    worker.wake_up()
    assert ScaledBackend.seen[0].tolist() == [0.75, 1.0]
    assert torch.equal(
        worker.get_model().model.layers[0].self_attn.attn.kv_scales.to("cpu"),
        torch.tensor([0.75, 1.0]),
    )
    worker.shutdown()
