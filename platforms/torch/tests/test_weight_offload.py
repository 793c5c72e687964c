"""Weight offload on the fake device: tokens, memory, the order of copies, and errors."""

import gc

import pytest
import torch
from torch import nn

from dovetail import LLM, SamplingParams
from dovetail.errors import CapacityError, ConfigError, WeightError
from dovetail.interfaces import LinearMethod
from dovetail_devkit.contexts import make_worker_context
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_torch.accelerator.offload import OffloadedLayers, plan_offload
from dovetail_torch.fake_device import DEVICE, NAME, FlightError, install
from dovetail_torch.fake_device.attention import GraphAttentionBackend
from dovetail_torch.fake_device.platform import FakeDevicePlatform
from dovetail_torch.fake_device.runtime import FakeDeviceRuntime
from dovetail_torch.fake_device.timeline import Stream
from dovetail_torch.fake_device.worker import FakeDeviceWorker
from dovetail_torch.layers.torch_linear import TorchLinearMethod

pytest.importorskip("dovetail_models")
GIB = 1 << 30
NUM_LAYERS = 6
PROMPTS = [[5, 9, 2, 7, 7, 1], [3], list(range(20)), [8] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
OPTIONS = {
    "platform": FakeDevicePlatform,
    "worker_cls": FakeDeviceWorker,
    "attention_backend": GraphAttentionBackend,
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 60,
    "max_model_len": 64,
    "block_size": 4,
    "max_num_seqs": 3,
    "dtype": "float32",
    "num_threads": 1,
}


@pytest.fixture(autouse=True)
def device():
    install()
    DEVICE.reset(lag=20, seed=1)
    yield
    DEVICE.reset()


@pytest.fixture
def checkpoint(tmp_path):
    return write_tiny_llama(tmp_path, num_hidden_layers=NUM_LAYERS)


def tokens(checkpoint, **options):
    with LLM(str(checkpoint), **(OPTIONS | options)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def layer_bytes(checkpoint):
    """Return the size of a layer in the memory of a slot."""
    worker = FakeDeviceWorker(make_worker_context(checkpoint, FakeDevicePlatform()))
    worker.init_device()
    worker._make_model()
    layer = worker._model.model.layers[0]
    return sum(-(-weight.nbytes // 512) * 512 for weight in layer.parameters())


def gigabytes(checkpoint, num_layers):
    return layer_bytes(checkpoint) * num_layers / GIB


class Packing(LinearMethod):
    """A linear method that packs on the device only, to a transposed weight."""

    def create(self, layer: nn.Module, shape):
        TorchLinearMethod().create(layer, shape)

    def pack(self, layer: nn.Module):
        assert layer.weight.device.type == NAME
        layer.packed_IO = nn.Parameter(layer.weight.t().contiguous().t(), requires_grad=False)
        del layer.weight

    def apply(self, layer: nn.Module, x_TI):
        return nn.functional.linear(x_TI, layer.packed_IO)


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize("num_layers", [3, 4, 5, NUM_LAYERS])
@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_are_equal_and_the_host_never_waits(checkpoint, num_layers, ahead):
    """The worker of the fake device raises an error for each wait and each unordered access."""
    expected = tokens(checkpoint, enforce_eager=True)
    offload = gigabytes(checkpoint, num_layers)
    assert tokens(checkpoint, cpu_offload_gb=offload, async_scheduling=ahead) == expected
    DEVICE.check()


@pytest.mark.costly
def test_packed_weights_are_offloaded(checkpoint):
    expected = tokens(checkpoint, linear_method=Packing)
    offload = gigabytes(checkpoint, 4)
    assert tokens(checkpoint, linear_method=Packing, cpu_offload_gb=offload) == expected


def started(checkpoint, **options):
    gc.collect()
    engine_args = {"attention_backend": GraphAttentionBackend} | options
    worker = FakeDeviceWorker(make_worker_context(checkpoint, FakeDevicePlatform(), **engine_args))
    worker.init_device()
    worker.load_model()
    return worker


@pytest.mark.costly
def test_the_memory_of_offloaded_layers_is_available_for_the_cache(checkpoint):
    size = layer_bytes(checkpoint)
    left = {}
    for num_layers in (3, 0, 4, NUM_LAYERS):  # the first run allocates tensors that are kept
        options = {"cpu_offload_gb": size * num_layers / GIB} if num_layers else {}
        worker = started(checkpoint, **options)
        left[num_layers] = worker.determine_available_memory()
        worker.shutdown()
        del worker
        gc.collect()
    assert left[4] - left[0] == 2 * size  # four layers, less the two slots
    assert left[NUM_LAYERS] - left[0] == 4 * size


@pytest.mark.costly
def test_the_device_never_has_all_weights(checkpoint):
    """A model that does not fit is created and loaded layer by layer."""
    size = layer_bytes(checkpoint)
    started(checkpoint, cpu_offload_gb=NUM_LAYERS * size / GIB).shutdown()
    gc.collect()
    before = DEVICE.memory.peak_bytes = DEVICE.memory.allocated_bytes
    worker = started(checkpoint, cpu_offload_gb=NUM_LAYERS * size / GIB)
    others = sum(x.nbytes for x in worker._model.parameters()) - NUM_LAYERS * size
    # The other weights, two slots, the layer that is created or packed, and the rotary table.
    assert DEVICE.memory.peak_bytes - before < max(others, 0) + 4 * size
    worker.shutdown()


@pytest.mark.costly
def test_the_next_layer_is_copied_on_another_stream_before_a_layer_computes(
    checkpoint, monkeypatch
):
    log = []
    fetch, before = OffloadedLayers._fetch, OffloadedLayers._before

    def logged_fetch(self, number):
        if self._held[number % 2] != number:
            log.append(f"copy {number}")
        fetch(self, number)
        assert self._targets[number].piece.written.stream != DEVICE.timeline.default.number

    def logged_before(self, number, layer, args):
        before(self, number, layer, args)
        log.append(f"run {number}")

    monkeypatch.setattr(OffloadedLayers, "_fetch", logged_fetch)
    monkeypatch.setattr(OffloadedLayers, "_before", logged_before)
    worker = started(checkpoint, cpu_offload_gb=gigabytes(checkpoint, 4))
    assert log == ["copy 0", "copy 1"]
    log.clear()
    for _ in range(2):
        worker._loaded.dummy_run(1, 1)
    # While a layer runs, the weights of the next layer are in the other slot or on their way.
    step = ["run 0", "copy 2", "run 1", "copy 3", "run 2", "copy 0", "run 3", "copy 1"]
    assert log == 2 * step
    worker.shutdown()
    DEVICE.check()


def drop_reading_order(monkeypatch):
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)


def drop_writing_order(monkeypatch):
    monkeypatch.setattr(Stream, "wait_stream", lambda self, stream: None)


@pytest.mark.costly
@pytest.mark.parametrize("drop", [drop_reading_order, drop_writing_order])
def test_missing_synchronization_of_copies_and_layers_is_detected(checkpoint, monkeypatch, drop):
    worker = started(checkpoint, cpu_offload_gb=gigabytes(checkpoint, 4))
    DEVICE.timeline.lag = None
    worker._loaded.dummy_run(1, 1)
    drop(monkeypatch)
    with pytest.raises(FlightError):
        worker._loaded.dummy_run(1, 1)
    monkeypatch.undo()
    worker.shutdown()


@torch.inference_mode()
def test_layers_may_run_in_any_order():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
    x = torch.randn(3, 8)
    order = [4, 0, 0, 3, 1, 2, 4, 2]
    expected = x
    for index in order:
        expected = model.layers[index](expected)
    plan = plan_offload(model, 5 * 512)
    runtime = FakeDeviceRuntime()
    device = runtime.activate(0, num_threads=None)
    module = torch.get_device_module(NAME)
    OffloadedLayers(model, plan, module, runtime.pinned_empty, device)
    actual = x.to(device)
    with DEVICE.strict():
        for index in order:
            actual = model.layers[index](actual)
    assert torch.equal(actual.to("cpu"), expected)
    DEVICE.check()


@pytest.mark.parametrize(
    ("num_layers", "message"),
    [
        (NUM_LAYERS + 1, "is more than the weights of all 6 layers of a worker"),
        (2, "saves no device memory, because 2 layers are always on the device"),
        (0.5, "saves no device memory"),
    ],
)
def test_a_size_that_is_too_large_or_too_small_is_rejected(checkpoint, num_layers, message):
    with pytest.raises(ConfigError, match=f"cpu_offload_gb=.* {message}"):
        tokens(checkpoint, cpu_offload_gb=gigabytes(checkpoint, num_layers))


def test_offload_and_sleep_mode_cannot_be_combined(checkpoint):
    with pytest.raises(ConfigError, match=r"enable_sleep_mode=True and cpu_offload_gb=1\.0"):
        tokens(checkpoint, cpu_offload_gb=1, enable_sleep_mode=True)


def test_the_cpu_platform_rejects_weight_offload(checkpoint):
    pytest.importorskip("dovetail_cpu")
    with pytest.raises(ConfigError, match=r"cpu_offload_gb=1\.0 .* 'cpu'.*'weight_offload'"):
        LLM(str(checkpoint), platform="cpu", skip_tokenizer_init=True, cpu_offload_gb=1)


@pytest.mark.costly
def test_too_little_host_memory_is_reported(checkpoint, monkeypatch):
    def reject(self, num_bytes):
        raise MemoryError(f"cannot pin {num_bytes} bytes")

    offload = gigabytes(checkpoint, 4)
    started(checkpoint, cpu_offload_gb=offload).shutdown()
    monkeypatch.setattr(FakeDeviceRuntime, "pinned_empty", reject)
    with pytest.raises(CapacityError, match=r"the offloaded weights \(cannot pin.*cpu_offload_gb"):
        started(checkpoint, cpu_offload_gb=offload)


@pytest.mark.costly
def test_damaged_weights_of_an_offloaded_layer_are_rejected(checkpoint):
    file = checkpoint / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-400:] = b"\xff" * 400
    file.write_bytes(data)
    with pytest.raises(WeightError, match="NaN or infinite values"):
        started(checkpoint, cpu_offload_gb=gigabytes(checkpoint, NUM_LAYERS))
