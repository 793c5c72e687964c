"""The CPU worker through an engine: packed cache, threads, invalid weights, cache memory."""

import json
import logging
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, PluginError, WeightError
from dovetail_cpu.native_library import probe_fast
from dovetail_cpu.options import CPUWorkerOptions
from dovetail_cpu.packed_cache import cache
from dovetail_cpu.packed_cache.folder import CACHE_VARIABLE
from dovetail_cpu.runtime import SMALL_PAGES_BYTES, lazy_zeros
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_torch.runner.loaded_model import LoadedModel

pytest.importorskip("dovetail_models")
native = pytest.mark.skipif(not probe_fast().usable, reason="native kernels are not usable here")
MIB = 1 << 20


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    return write_tiny_llama(path, tie_word_embeddings=True, vocab_size=160)


def start(path, *, threads=1, **options):
    return LLM(
        str(path),
        skip_tokenizer_init=True,
        max_model_len=64,
        num_threads=threads,
        **({"dtype": "bfloat16", "block_size": 16, "num_gpu_blocks_override": 8} | options),
    )


def generate(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate([[5, 6, 7], [9]], params, use_tqdm=False)


def tokens(llm):
    return [output.outputs[0].token_ids for output in generate(llm)]


def kept(index, **more):
    options = {"packed_cache": str(index), "packed_cache_min_mib": 0} | more
    return {"plugin_options": {"worker:cpu": options}}


@pytest.mark.costly
@native
@pytest.mark.parametrize("quantization", [None, "int8", "q4_k", "int4"])
def test_the_second_start_of_a_worker_maps_the_cached_packed_weights(
    quantization, checkpoint, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    options = kept(tmp_path / "cache") | {"quantization": quantization}
    first = start(checkpoint, **options)
    expected = tokens(first)
    first.shutdown()
    assert len(list((tmp_path / "cache").iterdir())) == 1
    second = start(checkpoint, **options)
    assert "Mapped" in caplog.text
    assert tokens(second) == expected
    second.shutdown()


@native
@pytest.mark.parametrize("options", [{}, {"packed_cache_huge_pages": False}])
def test_cached_packed_weights_are_moved_to_huge_pages_unless_this_is_disabled(
    options, checkpoint, tmp_path, monkeypatch
):
    sizes, movers = [], []
    monkeypatch.setattr(cache, "can_move", lambda size: sizes.append(size) or True)
    monkeypatch.setattr(cache, "HugePageMover", lambda mapped: movers.append(Mock()) or movers[-1])
    start(checkpoint, **kept(tmp_path / "cache", **options)).shutdown()
    assert not sizes
    second = start(checkpoint, **kept(tmp_path / "cache", **options))
    (file,) = (tmp_path / "cache").iterdir()
    assert sizes == ([] if options else [file.stat().st_size])
    assert not any(mover.stop.called for mover in movers)
    second.shutdown()
    assert [mover.stop.call_count for mover in movers] == [1] * len(sizes)


@native
def test_each_packed_format_is_cached_separately(checkpoint, tmp_path):
    for quantization in (None, "int8", "q4_k", "int4"):
        start(checkpoint, **kept(tmp_path / "cache"), quantization=quantization).shutdown()
    assert len(list((tmp_path / "cache").iterdir())) == 4


@native
def test_an_environment_variable_moves_or_disables_the_packed_cache(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "there"))
    start(checkpoint, **kept("auto")).shutdown()
    assert len(list((tmp_path / "there").iterdir())) == 1
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    start(checkpoint, **kept("auto")).shutdown()
    assert not (tmp_path / "xdg").exists()


def test_small_models_and_random_weights_are_not_cached(checkpoint, tmp_path):
    directory = tmp_path / "cache"
    start(checkpoint, **kept(directory, packed_cache_min_mib=64)).shutdown()
    start(checkpoint, **kept(directory), load_format="dummy").shutdown()
    start(checkpoint, **kept(directory), linear_method="torch").shutdown()
    assert not directory.exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, [8]), ({"num_gpu_blocks_override": None, "gpu_memory_utilization": 0.2}, [64])],
)
def test_a_start_runs_the_model_once(changes, expected, checkpoint, monkeypatch):
    """A run reads all weights. The run that measures the memory of a step replaces the warm-up."""
    runs, run = [], LoadedModel.dummy_run

    def recording(loaded, num_tokens, num_sampled):
        runs.append(num_tokens)
        run(loaded, num_tokens, num_sampled)

    monkeypatch.setattr(LoadedModel, "dummy_run", recording)
    start(checkpoint, **{"linear_method": "torch"} | changes).shutdown()
    assert runs == expected


def test_invalid_worker_options_are_rejected(checkpoint):
    assert CPUWorkerOptions().packed_cache_gib == 20
    for invalid in ({"packed_cache_gib": 0}, {"packed_cach": "off"}, {"packed_cache": ""}):
        with pytest.raises(ConfigError, match="packed_cach"):
            start(checkpoint, plugin_options={"worker:cpu": invalid})


@native
def test_torch_uses_one_thread_if_and_only_if_native_kernels_are_used(checkpoint):
    import dovetail_cpu_kernels

    start(checkpoint, threads=2).shutdown()
    assert (dovetail_cpu_kernels.num_threads(), torch.get_num_threads()) == (2, 1)
    start(checkpoint, threads=2, dtype="float32").shutdown()
    assert torch.get_num_threads() == 2
    start(checkpoint, threads=2, linear_method="torch").shutdown()
    assert torch.get_num_threads() == 2


@pytest.mark.costly
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
    ],
)
@pytest.mark.parametrize("method", ["auto", "onednn", "torch"])
def test_the_error_for_a_weight_with_nan_or_infinity_contains_its_name(name, method, checkpoint):
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    weights[name].view(-1)[3] = float("nan")
    save_file(weights, file)
    # A tied head shares the embedding's table; if it is packed, the error names the head.
    shown = r"model\.embed_tokens|lm_head" if "embed" in name else name.replace(".", r"\.")
    with pytest.raises(WeightError, match=shown):
        start(checkpoint, linear_method=method)


@native
def test_models_of_unaligned_sizes_generate_tokens(tmp_path):
    sizes = {"hidden_size": 33, "intermediate_size": 47, "head_dim": 6, "vocab_size": 101}
    path = write_tiny_llama(tmp_path, **sizes)
    for quantization in (None, "int8", "q4_k", "int4"):
        assert all(len(ids) == 8 for ids in tokens(start(path, quantization=quantization)))


def test_an_unknown_quantization_is_rejected_and_the_known_ones_are_listed(checkpoint):
    with pytest.raises(PluginError, match=r"quantization|linear_method") as caught:
        start(checkpoint, quantization="int5")
    assert "int5" in str(caught.value) and "int4" in str(caught.value)


@native
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_in_another_dtype_is_rejected(quantization, checkpoint):
    with pytest.raises(ConfigError, match="bfloat16"):
        start(checkpoint, quantization=quantization, dtype="float32")
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["torch_dtype"] == "float32"  # "auto" means float32 here


def test_cache_memory_is_zeroed_and_allocated_lazily():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    zeros = lazy_zeros(512 * MIB)
    assert zeros.dtype == torch.uint8 and zeros.numel() == 512 * MIB
    assert (zeros.data_ptr() + SMALL_PAGES_BYTES) % (2 * MIB) == 0
    assert not zeros[: 8 * MIB].any() and not zeros[-1]
    zeros[5] = 1
    assert resident() - before < 64 * MIB
    before = resident()
    buffers = [lazy_zeros(4 * MIB) for _ in range(30)]
    for buffer in buffers:
        buffer[:1000] = 1
    assert resident() - before < 8 * MIB  # huge pages would need 60 MiB
    assert lazy_zeros(0).numel() == 0 and lazy_zeros(3).numel() == 3
