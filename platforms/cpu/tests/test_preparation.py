"""While torch is imported, the CPU platform loads its libraries and reads the packed weights."""

import ctypes
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.config import EngineArgs
from dovetail_cpu.native_library import probe_fast
from dovetail_cpu.packed_cache.folder import CACHE_VARIABLE
from dovetail_cpu.packed_cache.packed_file import PackedFile
from dovetail_cpu.platform import CPUPlatform
from dovetail_cpu.preparation import preparation, torch_libraries
from dovetail_devkit.tiny_model import write_tiny_llama

if probe_fast().usable:
    from dovetail_cpu.linear_kernel import Arena
    from dovetail_cpu.native_memory import NativeMemory
    from dovetail_cpu.preparation import early_memory
    from dovetail_cpu.preparation.early_memory import EarlyMemory

pytest.importorskip("dovetail_models")
native = pytest.mark.skipif(not probe_fast().usable, reason="native kernels are not usable here")
cpu_build = pytest.mark.skipif(
    sys.platform != "linux" or "+cpu" not in torch.__version__, reason="torch is not a CPU build"
)

PRELOAD = """
import sys, time
from dovetail_cpu.preparation.torch_libraries import preload_torch
begin = time.thread_time()
thread = preload_torch()
while thread is not None and thread.is_alive():
    pass
print(thread is not None, time.thread_time() - begin)
assert "torch" not in sys.modules
assert ("libtorch_cpu.so" in open("/proc/self/maps").read()) == (thread is not None)
"""
IMPORT = "import torch; assert torch.ones(3).sum() == 3 and preload_torch() is None"
MIN_OVERLAP_S = 0.025
"""CPU time of Python code during the load. With the interpreter lock held, it is below 0.01 s."""


def run(program, **variables):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=variables
    )
    return done.stdout.split()


@cpu_build
@pytest.mark.costly
def test_torch_libraries_load_while_python_code_runs():
    is_loaded, overlap_s = run(PRELOAD + IMPORT)
    assert is_loaded == "True"
    assert float(overlap_s) > MIN_OVERLAP_S


@cpu_build
def test_torch_libraries_are_not_loaded_by_another_thread_if_openmp_binds_threads():
    is_loaded, _ = run(PRELOAD, OMP_PROC_BIND="true")
    assert is_loaded == "False"


@pytest.mark.parametrize("skips", [False, True])
def test_the_tokenizer_library_and_native_kernels_load_before_torch_libraries(
    skips, checkpoint, monkeypatch
):
    loaded = []
    importer = SimpleNamespace(import_module=loaded.append)
    monkeypatch.setattr(preparation, "importlib", importer)
    monkeypatch.setattr(preparation, "find_library", lambda: loaded.append("kernels"))
    monkeypatch.setattr(preparation, "preload_torch", lambda: loaded.append("torch"))
    config = EngineArgs(model=checkpoint, skip_tokenizer_init=skips, load_format="dummy")
    CPUPlatform().prepare(config.create_engine_config())
    assert loaded == [*([] if skips else ["tokenizers"]), "kernels", "torch"]


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    return write_tiny_llama(path, tie_word_embeddings=True, vocab_size=160, dtype="bfloat16")


def options(folder):
    return {"plugin_options": {"worker:cpu": {"packed_cache": folder, "packed_cache_min_mib": 0}}}


def start(checkpoint, **changes):
    return LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=64,
        num_gpu_blocks_override=8,
        **changes,
    )


def prepare(checkpoint, **changes):
    """Return (whether packed weights are verified, whether memory is allocated early)."""
    platform = CPUPlatform()
    config = EngineArgs(model=checkpoint, skip_tokenizer_init=True, **changes)
    platform.prepare(config.create_engine_config())
    prepared = platform.take_preparation()
    assert platform.take_preparation() is None
    if prepared is None:
        return False, False
    memory = prepared.take_memory()
    prepared.cancel()
    return prepared.prefetch is not None, memory is not None


def test_a_result_that_is_ready_after_the_worker_has_started_is_cancelled(checkpoint, monkeypatch):
    """Otherwise its memory would be allocated as long as the engine exists."""
    platform, cancelled = CPUPlatform(), []

    def prepare_late(config):
        assert platform.take_preparation() is None
        return SimpleNamespace(cancel=lambda: cancelled.append(config))

    monkeypatch.setattr(preparation, "Preparation", prepare_late)
    config = EngineArgs(model=checkpoint, skip_tokenizer_init=True).create_engine_config()
    platform.prepare(config)
    assert cancelled == [config] and platform.take_preparation() is None


@native
def test_packed_weights_are_verified_by_the_thread_that_prefetches_them(
    checkpoint, tmp_path, monkeypatch
):
    threads, verify = [], PackedFile.verify

    def recording(*arguments, **keywords):
        threads.append(threading.current_thread().name)
        verify(*arguments, **keywords)

    monkeypatch.setattr(PackedFile, "verify", recording)
    for _ in range(2):
        start(checkpoint, **options(str(tmp_path / "packed"))).shutdown()
    assert threads == ["dovetail-packed-prefetch"]


@native
def test_only_the_process_of_the_worker_prepares_weights(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_MIN_EARLY_BYTES", 0)
    chosen = options(str(tmp_path / "packed"))
    assert prepare(checkpoint, **chosen) == (False, True)
    assert prepare(checkpoint, **options("off")) == (False, True)
    start(checkpoint, **chosen).shutdown()
    assert prepare(checkpoint, **chosen) == (True, False)
    assert prepare(checkpoint, **options("off")) == (False, True)
    assert prepare(checkpoint, load_format="dummy", **chosen) == (False, False)
    assert prepare(checkpoint, executor_backend="multiproc", **chosen) == (False, False)
    wrong = {"plugin_options": {"worker:cpu": {"packed_cache": 3}}}
    assert prepare(checkpoint, **wrong) == (False, False)


@native
def test_memory_is_allocated_early_only_for_bfloat16_weights_that_fit(checkpoint, monkeypatch):
    off = options("off")
    assert prepare(checkpoint, **off) == (False, False)  # a small model
    monkeypatch.setattr(preparation, "_MIN_EARLY_BYTES", 0)
    assert prepare(checkpoint, **off) == (False, True)
    for other in ({"dtype": "float32"}, {"quantization": "int8"}, {"linear_method": "torch"}):
        assert prepare(checkpoint, **other, **off) == (False, False)
    little = {"available": 1 << 40, "limit": 1 << 10}
    monkeypatch.setattr(preparation, "read_memory", lambda: little)
    assert prepare(checkpoint, **off) == (False, False)


@native
def test_weights_are_packed_into_memory_that_was_allocated_early(checkpoint, monkeypatch):
    expected = start(checkpoint, **options("off"))
    prompt, params = [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = expected.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    expected.shutdown()
    monkeypatch.setattr(preparation, "_MIN_EARLY_BYTES", 0)
    taken, forgotten = [], []
    take, forget = EarlyMemory.take, NativeMemory.forget
    monkeypatch.setattr(EarlyMemory, "take", lambda m: taken.append(take(m)) or taken[-1])
    monkeypatch.setattr(
        NativeMemory, "forget", lambda m, start: (forgotten.append(m), forget(m, start))
    )
    llm = start(checkpoint, **options("off"))
    assert len(taken) == 1 and forgotten == taken
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == tokens
    llm.shutdown()


@native
def test_early_memory_is_zeroed_and_its_pages_are_allocated_until_it_is_taken():
    size = (8 << 20) + 5000
    early = EarlyMemory(size)
    while early.touched_bytes < size:
        time.sleep(0.001)
    memory = early.take()
    content = (ctypes.c_char * size).from_address(memory.address)
    assert bytes(content) == bytes(size)
    content[1 << 20], content[size - 1] = b"a", b"b"
    memory.forget((1 << 20) + 1)
    assert content[1 << 20] == b"a" and content[(1 << 20) + 4096] == b"\0"


@native
def test_early_memory_that_no_worker_takes_is_released(monkeypatch):
    """A notebook keeps the exception of a start that failed, and with it the engine's parts."""
    monkeypatch.setattr(early_memory, "KEPT_S", 0.01)
    freed, free = [], NativeMemory.__del__
    monkeypatch.setattr(NativeMemory, "__del__", lambda memory: (freed.append(1), free(memory)))
    early = EarlyMemory(8 << 20)
    while not freed:
        time.sleep(0.001)
    assert early.take() is None


@native
def test_packed_weights_use_other_memory_if_the_early_memory_is_too_small():
    early = EarlyMemory(1 << 20)
    arena = Arena()
    arena.use(early.take())
    arena.reserve(3 << 20)
    view = arena.take(2 << 20)
    assert bytes(view[-4:]) == bytes(4)
    assert arena.take(1 << 20).nbytes == 1 << 20


def test_without_a_thread_the_import_of_torch_loads_its_libraries(monkeypatch, tmp_path):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(torch_libraries, "_library_folder", lambda: tmp_path)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert torch_libraries.preload_torch() is None


def test_a_cache_directory_that_cannot_exist_does_not_fail_the_preparation(
    checkpoint, monkeypatch, tmp_path
):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300)))
    is_verified, _ = prepare(checkpoint)
    assert not is_verified
