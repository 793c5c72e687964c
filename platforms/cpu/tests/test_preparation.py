"""While torch is imported, the CPU platform loads its libraries and reads the packed weights."""

import importlib
import subprocess
import sys
import threading

import pytest
import torch

from dovetail import LLM
from dovetail.config import EngineArgs
from dovetail_cpu import torch_libraries
from dovetail_cpu.native_library import probe_fast
from dovetail_cpu.packed_cache.packed_file import PackedFile
from dovetail_cpu.platform import CPUPlatform
from dovetail_devkit.tiny_model import write_tiny_llama

pytest.importorskip("dovetail_models")
native = pytest.mark.skipif(not probe_fast().usable, reason="native kernels are not usable here")
cpu_build = pytest.mark.skipif(
    sys.platform != "linux" or "+cpu" not in torch.__version__, reason="torch is not a CPU build"
)

PRELOAD = """
import sys, time
from dovetail_cpu.torch_libraries import preload_torch
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
def test_the_tokenizer_library_is_imported_before_torch_libraries_load(
    skips, checkpoint, monkeypatch
):
    loaded = []
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    monkeypatch.setattr(importlib, "import_module", lambda name: loaded.append(name))
    monkeypatch.setattr(torch_libraries, "preload_torch", lambda: loaded.append("torch"))
    config = EngineArgs(model=checkpoint, skip_tokenizer_init=skips, load_format="dummy")
    CPUPlatform().prepare(config.create_engine_config())
    assert loaded == (["torch"] if skips else ["tokenizers", "torch"])


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    return write_tiny_llama(path, tie_word_embeddings=True, vocab_size=160)


def options(folder):
    return {"plugin_options": {"worker:cpu": {"packed_cache": folder, "packed_cache_min_mib": 0}}}


def prefetch_of(checkpoint, **changes):
    platform = CPUPlatform()
    config = EngineArgs(model=checkpoint, skip_tokenizer_init=True, **changes)
    platform.prepare(config.create_engine_config())
    prefetch = platform.take_prefetch()
    if prefetch is not None:
        prefetch.cancel()
    assert platform.take_prefetch() is None
    return prefetch


@native
def test_packed_weights_are_verified_by_the_thread_that_prefetches_them(
    checkpoint, tmp_path, monkeypatch
):
    threads, verify = [], PackedFile.verify

    def recording(*arguments, **keywords):
        threads.append(threading.current_thread().name)
        verify(*arguments, **keywords)

    monkeypatch.setattr(PackedFile, "verify", recording)
    settings = {"dtype": "bfloat16", "max_model_len": 64, "num_gpu_blocks_override": 8}
    for _ in range(2):
        llm = LLM(
            str(checkpoint),
            skip_tokenizer_init=True,
            **settings,
            **options(str(tmp_path / "packed")),
        )
        llm.shutdown()
    assert threads == ["dovetail-packed-prefetch"]


def test_packed_weights_are_prefetched_only_by_the_process_of_the_worker(checkpoint, tmp_path):
    tmp_path.joinpath("packed").mkdir()
    chosen = options(str(tmp_path / "packed"))
    assert prefetch_of(checkpoint, **chosen) is not None
    assert prefetch_of(checkpoint, **options("off")) is None
    assert prefetch_of(checkpoint, **options(str(tmp_path / "absent"))) is None
    assert prefetch_of(checkpoint, load_format="dummy", **chosen) is None
    assert prefetch_of(checkpoint, executor_backend="multiproc", **chosen) is None
    assert prefetch_of(checkpoint, plugin_options={"worker:cpu": {"packed_cache": 3}}) is None
