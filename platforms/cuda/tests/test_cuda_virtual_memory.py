"""Virtual memory and sleep mode of CUDA with a fake driver library, which uses host memory."""

import ctypes
import gc
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.errors import CapacityError, PluginError, UserError
from dovetail_cuda.driver import Card, Driver
from dovetail_cuda.machine import Machine
from dovetail_cuda.platform import CUDAPlatform
from dovetail_cuda.virtual_memory import AllocationProperties, CUDAVirtualMemory
from dovetail_cuda.worker import CUDAWorker
from dovetail_devkit.harnesses.fake_device_life import on_fake_device
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_torch.accelerator.virtual_memory import SleepableMemory
from dovetail_torch.fake_device import DEVICE, install
from dovetail_torch.fake_device.attention import GraphAttentionBackend
from dovetail_torch.fake_device.runtime import FakeDeviceRuntime
from dovetail_torch.fake_device.tensor import FakeDeviceTensor
from dovetail_torch.fake_device.worker import StrictSteps

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
SOURCE = Path(__file__).with_name("stand_in_libcuda.c")
PAGE = 65536
MIB = 1 << 20


@pytest.fixture(scope="session")
def library_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("stand_in") / "libcuda.so"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", path, SOURCE]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def library(library_path):
    """Return a fake driver library with 64 MiB.

    The test fails if the tested code calls it incorrectly.
    """
    loaded = ctypes.CDLL(str(library_path))
    loaded.stand_in_used.restype = ctypes.c_size_t
    loaded.stand_in_misuse.restype = ctypes.c_char_p
    loaded.stand_in_reset.argtypes = (ctypes.c_size_t, ctypes.c_int)
    loaded.stand_in_set_free.argtypes = (ctypes.c_size_t,)
    loaded.stand_in_reset(64 * MIB, 1)
    yield loaded
    gc.collect()
    assert loaded.stand_in_misuse() == b""
    assert loaded.stand_in_used() == loaded.stand_in_num_reservations() == 0


def as_host_tensor(region):
    """Return the bytes of a region as a tensor of the host, which keeps the region."""
    memory = (ctypes.c_ubyte * region.num_bytes).from_address(region.address)
    memory.region = region
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.fixture
def memory(library):
    return CUDAVirtualMemory(0, library=library, wrap=as_host_tensor)


def test_the_ctypes_structures_have_the_sizes_of_the_driver_structures():
    assert ctypes.sizeof(AllocationProperties) == 32
    assert AllocationProperties.win32_metadata.offset == 16
    assert AllocationProperties.flags.offset == 24


def test_a_region_keeps_its_address_and_returns_its_memory(memory, library):
    region = memory.reserve(3 * PAGE)
    address = region.address
    for _ in range(3):
        region.map()
        assert library.stand_in_used() == 3 * PAGE
        assert region.tensor().fill_(7).sum() == 7 * 3 * PAGE
        region.unmap()
        assert library.stand_in_used() == 0
    assert region.address == address


@pytest.mark.costly
def test_the_memory_of_a_region_is_freed_with_its_last_tensor(memory, library):
    region = memory.reserve(PAGE)
    region.map()
    tensor = region.tensor()[5:]
    del region
    gc.collect()
    assert library.stand_in_used() == PAGE
    tensor.fill_(1)
    del tensor
    gc.collect()
    assert library.stand_in_used() == library.stand_in_num_reservations() == 0


@pytest.mark.costly
@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_failed_call_leaves_the_region_unmapped(memory, library, function):
    region = memory.reserve(PAGE)
    for status, error in ((2, CapacityError), (999, PluginError)):
        library.stand_in_fail_next(function.encode(), status)
        with pytest.raises(error, match="too little free" if status == 2 else "error 999"):
            region.map()
        assert library.stand_in_used() == 0
    region.map()
    region.tensor().fill_(1)


def test_a_device_without_virtual_memory_is_rejected(library):
    library.stand_in_reset(MIB, 0)
    with pytest.raises(PluginError, match=r"device 0 does not support virtual memory.*False"):
        CUDAVirtualMemory(0, library=library)


def test_a_missing_driver_is_rejected(monkeypatch):
    monkeypatch.setattr("dovetail_cuda.virtual_memory.LIBRARY", "libabsent.so.7")
    with pytest.raises(PluginError, match=r"libabsent\.so\.7 cannot be loaded"):
        CUDAVirtualMemory(0)


MISUSES = {
    "a size that is not a multiple": lambda memory: memory.reserve(PAGE + 1),
    "unmapped before it is mapped": lambda memory: memory.reserve(PAGE).unmap(),
    "unmapped twice": lambda memory: [unmapped(memory).unmap()],
    "mapped twice": lambda memory: [mapped(memory).map()],
}


def mapped(memory):
    region = memory.reserve(PAGE)
    region.map()
    return region


def unmapped(memory):
    region = mapped(memory)
    region.unmap()
    return region


@pytest.mark.costly
@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_the_fake_driver_rejects_invalid_calls(memory, library, misuse):
    with pytest.raises(PluginError, match="failed with error 1;"):
        misuse(memory)
    assert library.stand_in_misuse()
    library.stand_in_reset(MIB, 1)


@pytest.mark.costly
def test_access_to_unmapped_memory_crashes_the_process(library_path):
    program = (
        "import sys; from pathlib import Path; import ctypes\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_cuda_virtual_memory import CUDAVirtualMemory, as_host_tensor, PAGE\n"
        f"library = ctypes.CDLL({str(library_path)!r})\n"
        "library.stand_in_reset(ctypes.c_size_t(1 << 20), 1)\n"
        "region = CUDAVirtualMemory(0, library=library, wrap=as_host_tensor).reserve(PAGE)\n"
        "region.map(); tensor = region.tensor().fill_(1); region.unmap()\n"
        "print('unmapped', flush=True); tensor.sum()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "unmapped\n", ended.stderr
    assert ended.returncode == -signal.SIGSEGV


def test_small_tensors_share_regions_and_large_tensors_do_not(memory, library):
    sleepable = SleepableMemory(memory, "a test", lambda: None)
    small = [sleepable.allocate(100) for _ in range(9)]
    assert library.stand_in_num_reservations() == 1
    assert {item.data_ptr() % 512 for item in small} == {0}
    large = sleepable.allocate(9 * PAGE + 1)
    assert library.stand_in_num_reservations() == 2 and large.numel() == 9 * PAGE + 1
    for number, item in enumerate([*small, large]):
        item.fill_(number)
    assert [int(item[0]) for item in small] == list(range(9))
    assert sleepable.num_bytes == library.stand_in_used() == 26 * PAGE


def test_memory_that_torch_caches_is_released_before_a_mapping_fails(memory, library):
    released = []

    def release():
        released.append(1)
        library.stand_in_set_free(PAGE * 40)

    sleepable = SleepableMemory(memory, "a test", release)
    library.stand_in_set_free(0)
    sleepable.allocate(PAGE)
    assert released == [1]
    library.stand_in_set_free(0)
    tight = SleepableMemory(memory, "a test", lambda: None)
    with pytest.raises(CapacityError, match=r"not enough memory for a test, 0\.00 GiB"):
        tight.allocate(1)


# --- an engine --------------------------------------------------------------------------------

CARD = Card(uuid="GPU-1", name="a card", total_bytes=64 * MIB, capability=(9, 0))
DRIVER = Driver(version="580", cuda=(13, 0), cards=(CARD,))
MACHINE = Machine(torch_version="2.11", toolkit="13.0", driver=DRIVER)
PROMPTS = [[5, 9, 2, 7, 7, 1], [3], list(range(20))]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


def on_device(region):
    """Return the bytes of a region as a tensor of the fake device."""
    piece = DEVICE.memory.take(0)
    return FakeDeviceTensor(as_host_tensor(region), piece)


@pytest.fixture
def engine(library, tmp_path):
    """An engine on the fake device, whose weights and cache are in the fake driver's memory."""
    install()
    DEVICE.reset(lag=20, seed=1)

    class Runtime(FakeDeviceRuntime):
        def virtual_memory(self):
            return CUDAVirtualMemory(0, library=library, wrap=on_device)

    class PlatformWithRuntime(on_fake_device(CUDAPlatform, MACHINE)):
        def runtime(self):
            return Runtime()

    llm = LLM(
        str(write_tiny_llama(tmp_path)),
        platform=PlatformWithRuntime,
        worker_cls=type("Watched", (StrictSteps, CUDAWorker), {}),
        attention_backend=GraphAttentionBackend,
        ops="torch",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=60,
        max_model_len=64,
        block_size=4,
        max_num_seqs=3,
        dtype="float32",
        enable_sleep_mode=True,
    )
    yield llm
    llm.shutdown()
    del llm
    DEVICE.check()
    gc.collect()


def tokens(llm):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def counts(llm):
    result = llm.llm_engine.client.core.executor._worker._runner.graph_counts
    return result.captured, result.replayed


@pytest.mark.costly
@pytest.mark.parametrize("level", [1, 2])
def test_a_cuda_engine_generates_the_same_tokens_after_sleep(engine, library, level):
    expected = tokens(engine)
    in_use, before = library.stand_in_used(), counts(engine)
    engine.sleep(level)
    assert library.stand_in_used() == 0 < in_use
    with pytest.raises(UserError, match="already asleep"):
        engine.sleep()
    engine.wake_up()
    assert library.stand_in_used() == in_use
    assert tokens(engine) == expected
    # Graphs store addresses; they are replayed and not captured again.
    after = counts(engine)
    assert after[0] == before[0] and after[1] > before[1] > 0


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_stays_asleep_if_the_memory_is_taken_and_can_wake_up_later(
    engine, library, level
):
    expected = tokens(engine)
    in_use = library.stand_in_used()
    engine.sleep(level)
    library.stand_in_set_free(in_use // 4)
    for tags in ((), ["kv_cache"], ["weights"]):
        with pytest.raises(CapacityError, match=r"for the (weights|KV cache), 0\.00 GiB"):
            engine.wake_up(tags)
        assert library.stand_in_used() == 0
        with pytest.raises(UserError, match="asleep; call wake_up"):
            engine.llm_engine.resume()
    library.stand_in_set_free(64 * MIB)
    engine.wake_up()
    assert library.stand_in_used() == in_use
    assert tokens(engine) == expected


@pytest.mark.costly
def test_sleep_tags_can_wake_up_the_weights_before_the_cache(engine, library):
    expected = tokens(engine)
    in_use = library.stand_in_used()
    engine.sleep(1)
    engine.wake_up(["weights"])
    assert 0 < library.stand_in_used() < in_use
    engine.wake_up(["kv_cache"])
    assert library.stand_in_used() == in_use
    assert tokens(engine) == expected
