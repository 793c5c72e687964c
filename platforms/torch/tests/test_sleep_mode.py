"""Sleep mode on the fake device: memory, tokens, reloaded weights, and errors."""

import gc
import os

import pytest
from torch import nn

from dovetail import LLM, SamplingParams
from dovetail.errors import CapacityError, ConfigError, WeightError
from dovetail.interfaces import LinearMethod
from dovetail_devkit.contexts import make_worker_context
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_devkit.worker.start import bring_up
from dovetail_torch.fake_device import DEVICE, FlightError, install
from dovetail_torch.fake_device.attention import GraphAttentionBackend
from dovetail_torch.fake_device.platform import FakeDevicePlatform
from dovetail_torch.fake_device.runtime import FakeDeviceRuntime
from dovetail_torch.fake_device.worker import FakeDeviceWorker
from dovetail_torch.layers.torch_linear import TorchLinearMethod

pytest.importorskip("dovetail_models")
PROMPTS = [[5, 9, 2, 7, 7, 1], [3], list(range(20)), [8] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
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
    "enable_sleep_mode": True,
}


@pytest.fixture(autouse=True)
def device():
    install()
    DEVICE.reset(lag=20, seed=1)
    yield
    gc.collect()
    assert DEVICE.memory.mapped_bytes == 0
    DEVICE.reset()


@pytest.fixture
def checkpoint(tmp_path):
    return write_tiny_llama(tmp_path)


def engine(checkpoint, **options):
    return LLM(str(checkpoint), **(OPTIONS | options))


def tokens(llm):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


class Packing(LinearMethod):
    """A linear method that keeps a transposed weight under another name."""

    def create(self, layer: nn.Module, shape):
        TorchLinearMethod().create(layer, shape)

    def pack(self, layer: nn.Module):
        layer.packed_IO = nn.Parameter(layer.weight.t().contiguous().t(), requires_grad=False)
        del layer.weight

    def apply(self, layer: nn.Module, x_TI):
        return nn.functional.linear(x_TI, layer.packed_IO)


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize("linear_method", ["torch", Packing], ids=["torch", "packing"])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_tokens_are_equal_after_sleep(tmp_path, linear_method, level, tied):
    checkpoint = write_tiny_llama(tmp_path, tie_word_embeddings=tied)
    with engine(checkpoint, linear_method=linear_method) as llm:
        expected = tokens(llm)
        in_use = DEVICE.memory.mapped_bytes
        for _ in range(2):
            llm.sleep(level)
            assert DEVICE.memory.mapped_bytes == 0 < in_use
            llm.wake_up()
            assert DEVICE.memory.mapped_bytes == in_use
            assert tokens(llm) == expected
    DEVICE.check()


@pytest.mark.costly
def test_waking_up_from_level_2_loads_the_current_weight_files(checkpoint):
    with engine(checkpoint) as llm:
        expected = tokens(llm)
        write_tiny_llama(checkpoint, seed=5)
        llm.sleep(1)
        llm.wake_up()
        assert tokens(llm) == expected
        llm.sleep(2)
        llm.wake_up()
        changed = tokens(llm)
    with engine(checkpoint) as llm:
        assert tokens(llm) == changed != expected


@pytest.mark.costly
def test_an_engine_with_async_scheduling_sleeps_between_calls(checkpoint):
    with engine(checkpoint, async_scheduling=True) as llm:
        expected = tokens(llm)
        llm.sleep()
        llm.wake_up(["kv_cache"])
        llm.wake_up(["weights"])
        assert tokens(llm) == expected
    DEVICE.check()


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("linear_method", ["torch", Packing], ids=["torch", "packing"])
def test_weights_that_cannot_be_reloaded_leave_the_engine_asleep(checkpoint, linear_method):
    file = checkpoint / "model.safetensors"
    with engine(checkpoint, linear_method=linear_method) as llm:
        expected = tokens(llm)
        llm.sleep(2)
        os.rename(file, checkpoint / "elsewhere")
        with pytest.raises(WeightError):
            llm.wake_up()
        assert DEVICE.memory.mapped_bytes == 0
        os.rename(checkpoint / "elsewhere", file)
        llm.wake_up()
        assert tokens(llm) == expected


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "error", [MemoryError("cannot pin"), RuntimeError("CUDA error: out of memory")]
)
def test_level_1_sleep_releases_nothing_if_host_memory_is_too_small(checkpoint, monkeypatch, error):
    def reject(self, num_bytes):
        raise type(error)(*error.args)  # a new object, whose traceback is not kept

    with engine(checkpoint) as llm:
        expected = tokens(llm)
        in_use = DEVICE.memory.mapped_bytes
        monkeypatch.setattr(FakeDeviceRuntime, "pinned_empty", reject)
        with pytest.raises(CapacityError, match=r"host memory \(.*use sleep level 2"):
            llm.sleep(1)
        assert DEVICE.memory.mapped_bytes == in_use
        monkeypatch.undo()
        llm.wake_up()
        assert tokens(llm) == expected


@pytest.mark.costly
def test_a_step_of_a_sleeping_worker_is_detected(checkpoint):
    engine_args = {name: OPTIONS[name] for name in ("attention_backend", "enable_sleep_mode")}
    worker = FakeDeviceWorker(make_worker_context(checkpoint, FakeDevicePlatform(), **engine_args))
    bring_up(worker)
    worker.sleep(1)
    with pytest.raises(FlightError, match="not mapped"):
        worker._loaded.dummy_run(1, 1)
    worker.wake_up(("kv_cache",))
    with pytest.raises(FlightError, match="not mapped"):
        worker._loaded.dummy_run(1, 1)
    worker.wake_up()
    worker._loaded.dummy_run(1, 1)
    worker.shutdown()


@pytest.mark.costly
def test_the_memory_of_the_weights_is_not_available_for_the_cache(checkpoint):
    left = []
    for enabled in (False, True):
        engine_args = {"attention_backend": GraphAttentionBackend, "enable_sleep_mode": enabled}
        worker = FakeDeviceWorker(
            make_worker_context(checkpoint, FakeDevicePlatform(), **engine_args)
        )
        worker.init_device()
        worker.load_model()
        left.append(worker.determine_available_memory())
        worker.shutdown()
        del worker
        gc.collect()
    # Regions are larger than the tensors, by less than one region of small tensors.
    assert 0 <= left[0] - left[1] < 2 * 16 * 16384


@pytest.mark.costly
def test_a_worker_without_sleep_mode_rejects_sleep(checkpoint):
    context = make_worker_context(
        checkpoint, FakeDevicePlatform(), attention_backend=GraphAttentionBackend
    )
    worker = FakeDeviceWorker(context)
    bring_up(worker)
    for call in (lambda: worker.sleep(1), worker.wake_up):
        with pytest.raises(ConfigError, match="set enable_sleep_mode=True"):
            call()
    worker.shutdown()


@pytest.mark.costly
def test_a_device_without_virtual_memory_is_rejected(checkpoint, monkeypatch):
    monkeypatch.setattr(FakeDeviceRuntime, "virtual_memory", lambda self: None)
    with pytest.raises(ConfigError, match="enable_sleep_mode=True is not supported on private"):
        engine(checkpoint)


@pytest.mark.costly
def test_the_cpu_platform_rejects_sleep_mode(checkpoint):
    pytest.importorskip("dovetail_cpu")
    with pytest.raises(ConfigError, match=r"enable_sleep_mode=True .* platform 'cpu'.*'sleep'"):
        LLM(str(checkpoint), platform="cpu", skip_tokenizer_init=True, enable_sleep_mode=True)


@pytest.mark.costly
def test_parameters_keep_their_strides_and_their_sharing(tmp_path):
    write_tiny_llama(tmp_path, tie_word_embeddings=True)
    engine_args = {"attention_backend": GraphAttentionBackend, "enable_sleep_mode": True}
    for linear_method in (Packing, "torch"):
        engine_args["linear_method"] = linear_method
        worker = FakeDeviceWorker(
            make_worker_context(tmp_path, FakeDevicePlatform(), **engine_args)
        )
        bring_up(worker)
        model = worker.get_model()
        if linear_method is Packing:
            packed_IO = model.model.layers[0].mlp.down_proj.packed_IO
            assert packed_IO.stride() == (1, packed_IO.shape[0])
        else:
            assert model.lm_head.weight is model.model.embed_tokens.weight
        worker.shutdown()
        del worker, model
        gc.collect()
