"""The cache of packed weights uses valid files. It reports invalid files once and rewrites them."""

import json
import logging
import os
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dovetail.interfaces import ModelContext, WeightLoaderContext
from dovetail_cpu.packed_cache import cache as packed_cache
from dovetail_cpu.packed_cache.cache import PackedCache
from dovetail_cpu.packed_cache.folder import default_folder, packed_folder
from dovetail_cpu.packed_cache.packed_file import PackedEntry, PackedFile, write_packed
from dovetail_cpu.packed_cache.packed_form import PACKED_FORM
from dovetail_cpu.packed_cache.prefetch import PackedPrefetch, find_packed, weight_files
from dovetail_torch.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    RowParallelLinear,
    TorchLinearMethod,
    TorchOps,
    VocabParallelEmbedding,
    pack_linears,
)
from dovetail_torch.weights import SafetensorsLoader
from dovetail_torch.weights.assignment import Assignment

V, D = 50, 16


class Doubled(TorchLinearMethod):
    """A linear method that packs 2 · weight. `num_packed`: number of layers that it packed."""

    provides = frozenset({PACKED_FORM})

    def __init__(self, version=1):
        self.version, self.num_packed = version, 0

    def create(self, layer, shape):
        super().create(layer, shape)
        layer.packed_OI, layer.sizes = None, (shape.out_features, shape.in_features)

    def pack(self, layer):
        if layer.packed_OI is None:
            layer.packed_OI, self.num_packed = 2 * layer.weight, self.num_packed + 1
        del layer.weight

    def apply(self, layer, x_TI):
        return x_TI @ layer.packed_OI.T / 2

    def packed_format(self):
        return f"doubled/{self.version}"

    def packed_bytes(self, layer):
        return layer.sizes[0] * layer.sizes[1] * 4

    def packed_form(self, layer):
        return memoryview(layer.packed_OI.numpy()).cast("B")

    def restore(self, layer, form):
        copied = torch.frombuffer(bytearray(form), dtype=torch.float32)
        layer.packed_OI, layer.settled = copied.view(layer.sizes), frozenset({"weight"})


class Model(nn.Module):
    """A model with fused and single linear layers between an embedding and an LM head."""

    def __init__(self, method, *, tied):
        super().__init__()
        context = ModelContext(
            hf_config={},
            dtype=torch.float32,
            device=torch.device("cpu"),
            linear_method=method,
            ops=TorchOps(),
            max_model_len=8,
        )
        self.embed = VocabParallelEmbedding(context, V, D)
        parts = {"gate_proj": 2 * D, "up_proj": 2 * D}
        self.gate_up = MergedColumnParallelLinear(context, "gate_up", D, parts)
        self.down = RowParallelLinear(context, "down", 4 * D, D)
        self.lm_head = ParallelLMHead(
            context, "lm_head", V, D, tied_to=self.embed if tied else None
        )

    def forward(self, ids_T):
        return self.lm_head(self.down(self.gate_up(self.embed(ids_T))))


@pytest.fixture(params=[False, True], ids=["own head", "tied head"])
def tied(request):
    return request.param


@pytest.fixture
def checkpoint(tmp_path, tied):
    path = tmp_path / "checkpoint"
    path.mkdir()
    write_checkpoint(path, tied)
    return path


def write_checkpoint(path, tied, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (V, D), "gate_proj": (2 * D, D), "up_proj": (2 * D, D), "down": (D, 4 * D)}
    if not tied:
        shapes["lm_head"] = (V, D)
    weights = {f"{n}.weight": torch.randn(s, generator=generator) for n, s in shapes.items()}
    save_file(weights, path / "model.safetensors")


class Started:
    """A model, loaded as the worker loads models. `read`: names of the weights that were read."""

    def __init__(
        self, checkpoint, folder, monkeypatch, *, tied, min_bytes=0, version=1, prefetches=False
    ):
        self.read = []
        fill = Assignment.fill
        with monkeypatch.context() as patched:
            patched.setattr(
                Assignment,
                "fill",
                lambda a, *w, **k: (self.read.append(a.name), fill(a, *w, **k))[1],
            )
            loader = SafetensorsLoader(WeightLoaderContext(model_dir=checkpoint, progress=False))
            self.method = Doubled(version)
            self.model = Model(self.method, tied=tied)
            file = find_packed(folder, checkpoint) if prefetches else None
            prefetch = None if file is None else PackedPrefetch(file, num_threads=1)
            self.cache = cache = PackedCache(
                folder,
                self.model,
                loader.fingerprint(),
                files=weight_files(checkpoint),
                min_bytes=min_bytes,
            )
            with torch.inference_mode():
                self.is_restored = cache.restore(num_threads=2, prefetch=prefetch)
                loader.load(self.model)
                pack_linears(self.model)
                self.logits_TV = self.model(torch.arange(V))
            if not self.is_restored:
                cache.save()
            cache.wait()


@pytest.fixture
def start(checkpoint, tmp_path, tied, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    folder = packed_folder(tmp_path / "cache", max_bytes=1 << 20)

    def begin(where=checkpoint, **info):
        caplog.clear()
        return Started(where, info.pop("folder", folder), monkeypatch, tied=tied, **info)

    return begin


def files(tmp_path):
    return sorted((tmp_path / "cache").iterdir())


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_the_second_start_reads_only_the_weights_that_are_never_packed(start, tmp_path, caplog):
    first = start()
    assert not first.is_restored and first.method.num_packed == 3
    assert len(files(tmp_path)) == 1
    second = start()
    assert second.is_restored and second.method.num_packed == 0
    assert second.read == ["embed.weight"]
    assert torch.equal(first.logits_TV, second.logits_TV)
    assert not warnings(caplog)


def test_prefetched_packed_weights_are_used_and_verified_once(start, monkeypatch, caplog):
    first = start(prefetches=True)
    assert not first.is_restored and not warnings(caplog)
    num_verified, verify = [], PackedFile.verify
    monkeypatch.setattr(
        PackedFile, "verify", lambda *a, **k: (num_verified.append(a), verify(*a, **k))
    )
    second = start(prefetches=True)
    assert second.is_restored and len(num_verified) == 1
    assert torch.equal(first.logits_TV, second.logits_TV)


def test_a_prefetched_file_of_another_format_is_not_used(start, tmp_path, caplog):
    first = start(version=1)
    (file,) = files(tmp_path)
    os.utime(file, (1, 1))
    start(version=2)
    mistaken = start(version=1, prefetches=True)
    assert mistaken.is_restored and torch.equal(mistaken.logits_TV, first.logits_TV)
    assert not warnings(caplog)


def test_a_moved_checkpoint_uses_the_cached_file_but_a_changed_checkpoint_does_not(
    start, checkpoint, tmp_path, tied
):
    start()
    moved = checkpoint.rename(tmp_path / "elsewhere")
    assert start(moved).is_restored
    write_checkpoint(moved, tied, seed=1)
    other = start(moved)
    assert not other.is_restored
    assert len(files(tmp_path)) == 2


def test_a_change_of_one_weight_value_is_detected(start, checkpoint):
    start()
    file = checkpoint / "model.safetensors"
    status = file.stat()
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert not start().is_restored
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    # All bytes of this small file are sampled; a change of a large file might only change the time.
    assert not start().is_restored


def test_packed_formats_are_cached_separately(start, tmp_path):
    start()
    assert not start(version=2).is_restored
    assert start(version=1).is_restored and start(version=2).is_restored
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("path", [3, 20, 60, -1])
@pytest.mark.parametrize("prefetches", [False, True])
def test_a_damaged_file_is_reported_once_and_rewritten(start, tmp_path, caplog, path, prefetches):
    first = start()
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[path] ^= 255
    file.write_bytes(content)
    damaged = start(prefetches=prefetches)
    assert not damaged.is_restored and torch.equal(damaged.logits_TV, first.logits_TV)
    (text,) = warnings(caplog)
    assert str(tmp_path / "cache") in text and "repacked" in text
    assert start().is_restored


def test_a_packed_file_that_was_renamed_to_another_file_is_rejected(start, tmp_path, caplog):
    start()
    (packed_file,) = files(tmp_path)
    start(version=2)
    (other,) = [file for file in files(tmp_path) if file != packed_file]
    other.write_bytes(packed_file.read_bytes())
    assert not start(version=2).is_restored
    assert "another checkpoint or format" in warnings(caplog)[0]


def test_all_files_may_be_deleted_at_any_time(start, tmp_path):
    start()
    second = start()
    for file in files(tmp_path):
        file.unlink()
    again = second.model(torch.arange(V))
    assert torch.equal(again, second.logits_TV)
    assert not start().is_restored


def test_an_unwritable_directory_is_reported_once_and_does_not_stop_the_start(
    start, tmp_path, caplog
):
    (tmp_path / "a file").write_text("")
    folder = packed_folder(tmp_path / "a file" / "cache", max_bytes=1 << 20)
    started = start(folder=folder)
    assert started.method.num_packed == 3
    assert len(warnings(caplog)) == 1


def test_a_full_disk_is_reported_once(start, tmp_path, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    start()
    (text,) = warnings(caplog)
    assert "No space left" in text and not files(tmp_path)


def test_a_process_without_more_threads_starts_and_maps_cached_weights(
    start, tmp_path, caplog, monkeypatch
):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        first = start()
        (text,) = warnings(caplog)
        assert "can't start new thread" in text and not (tmp_path / "cache").exists()
    start()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for prefetches in (False, True):
        again = start(prefetches=prefetches)
        assert again.is_restored and not warnings(caplog)
        assert torch.equal(again.logits_TV, first.logits_TV)


def test_models_below_the_minimum_or_above_the_maximum_size_are_not_cached(start, tmp_path, caplog):
    start(min_bytes=1 << 20)
    assert not (tmp_path / "cache").exists() and not warnings(caplog)
    start(folder=packed_folder(tmp_path / "cache", max_bytes=100))
    assert not (tmp_path / "cache").exists()
    assert "limit" in warnings(caplog)[0]


def test_a_tied_lm_head_is_loaded_from_its_own_weight_if_the_file_contains_it(
    start, checkpoint, tied, tmp_path
):
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["embed.weight"].clone()
    save_file(weights, file)
    first, second = start(), start()
    assert second.is_restored and torch.equal(first.logits_TV, second.logits_TV)
    if tied:  # the weight is stored only under the head's name
        del weights["embed.weight"]
        save_file(weights, file)
        third, fourth = start(), start()
        assert fourth.is_restored and fourth.read == ["lm_head.weight"]
        assert torch.equal(third.logits_TV, fourth.logits_TV)


def test_the_default_directory_follows_the_xdg_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "dovetail" / "packed"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_folder() == tmp_path / ".cache" / "dovetail" / "packed"


def test_the_index_of_a_packed_file_describes_its_contents(start, tmp_path):
    start()
    (file,) = files(tmp_path)
    head = file.read_bytes()[32:].split(b"}]", 1)[0]
    start_of_index = head[: head.index(b'"size"')].rstrip(b", ") + b"}"
    assert json.loads(start_of_index)["key"]["formats"] == ["doubled/1"]


@pytest.mark.parametrize("name", ["a.gguf", "a.safetensors"])
def test_packed_weights_are_found_by_size_and_time_of_the_weight_files(name, tmp_path):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    weights = model_dir / name
    weights.write_bytes(b"weights")
    folder = packed_folder(tmp_path / "cache", max_bytes=1 << 20)
    entry = PackedEntry(name="layer", form=memoryview(b"packed"))
    key = {"files": weight_files(model_dir)}
    folder.store("first", 6, lambda fd: write_packed(fd, key, [entry]))
    for path in (model_dir, weights):
        file = find_packed(folder, path)
        assert file is not None and bytes(file.forms["layer"]) == b"packed"
    assert find_packed(folder, tmp_path) is None
    weights.write_bytes(b"others")
    assert find_packed(folder, model_dir) is None
    assert weight_files(tmp_path / "absent") == []


def test_ranks_share_the_memory_for_huge_pages(start, tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(packed_cache, "can_move", lambda size: sizes.append(size))
    start()
    start().cache.move_to_huge_pages(num_sharing=3)
    (file,) = files(tmp_path)
    assert sizes == [3 * file.stat().st_size]
