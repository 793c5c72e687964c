"""Arguments of each kind's suite in addition to the class: models, devices, directories.

This module depends on the suites' signatures but on no plugin. A plugin for a missing device is
skipped with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from gguf_files.models import write_model
from gguf_files.vocabularies import write_vocabulary

from dovetail.interfaces import ModelContext, Platform, WeightLoaderContext
from dovetail.plugins import PluginRegistry
from dovetail.scheduling import Scheduler
from dovetail_devkit import load_suite
from dovetail_devkit.contexts import make_worker_context, write_fake_config
from dovetail_devkit.fakes.linear_method import FakeLinearMethod
from dovetail_devkit.fakes.model import FakeModel
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_devkit.fakes.weight_loader import FakeWeightLoader
from dovetail_devkit.fakes.worker import FakeWorker
from dovetail_devkit.scheduler.program import AfterStep
from dovetail_devkit.tiny_model import TINY_LLAMA, write_tiny_llama
from dovetail_gguf.tensor_names import to_file_name
from dovetail_torch.layers import TorchLinearMethod, TorchOps
from dovetail_torch.weights import pack_linears

MAX_MODEL_LEN = 64


def check(kind: str, subject: type[Any], folder: Path) -> None:
    """Run the suite of `kind` on `subject`. Raise AssertionError with the violated rule.

    folder: an empty directory for models and similar files.
    """
    arguments, options = SUBJECTS[kind](subject, folder)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors are slower with two threads
    try:
        load_suite(kind)(subject, *arguments, **options)
    finally:
        torch.set_num_threads(before)


Wants = tuple[tuple[Any, ...], dict[str, Any]]


def _nothing(subject: type[Any], folder: Path) -> Wants:
    return (), {}


def _scheduler(subject: type[Any], folder: Path) -> Wants:
    deeper: AfterStep = lambda created: created.check_integrity()  # noqa: E731
    return (), {"after_step": deeper} if issubclass(subject, Scheduler) else {}


def _worker(subject: type[Any], folder: Path) -> Wants:
    if issubclass(subject, FakeWorker):
        return (make_worker_context(write_fake_config(folder)),), {}
    return (make_worker_context(write_tiny_llama(folder), _platform_of(subject)),), {}


def _platform_of(worker_cls: type[Any]) -> Platform:
    """Return a usable platform that prefers `worker_cls`."""
    registry = PluginRegistry()
    installed = {candidates.name for candidates in registry.candidates("worker")}
    for candidates in registry.candidates("platform"):
        platform_cls = registry.load("platform", f"{candidates.name}@{candidates.distribution}")
        if not platform_cls.probe().usable:
            continue
        platform: Platform = platform_cls()
        names = [name for name in platform.prefer("worker") if name in installed]
        if any(registry.load("worker", name) is worker_cls for name in names):
            return platform
    pytest.skip(f"no platform that can be used here prefers {worker_cls.__name__}")


def _host(subject: type[Any], folder: Path) -> Wants:
    return (torch.device("cpu"),), {}


def _device(subject: type[Any], folder: Path) -> Wants:
    capabilities = getattr(subject, "capabilities", None)
    types = subject.device_types if capabilities is None else capabilities.device_types
    for name in sorted(types or {"cpu"}):
        if name == "cpu" or (getattr(torch, name, None) and getattr(torch, name).is_available()):
            return (torch.device(name),), {}
    pytest.skip(f"{subject.__name__} runs on {', '.join(sorted(types))}, and none of them is here")


def _tokenizer(subject: type[Any], folder: Path) -> Wants:
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    core.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    write_vocabulary(folder, folder / "tiny.gguf", pre="gpt-2")
    return (folder,), {"lossless": True}


def model_context(subject: type[Any]) -> ModelContext:
    fake = issubclass(subject, FakeModel)
    config = {"vocab_size": 97, "hidden_size": 16} if fake else TINY_LLAMA
    own = getattr(subject, "example_config", {})
    return ModelContext(
        hf_config={**config, "architectures": list(subject.architectures), **own},
        dtype=torch.float32,
        device=torch.device("cpu"),
        linear_method=FakeLinearMethod() if fake else TorchLinearMethod(),
        ops=FakeOps() if fake else TorchOps(),
        max_model_len=MAX_MODEL_LEN,
    )


def fill_model(model: Any) -> None:
    loader = FakeWeightLoader(WeightLoaderContext(model_dir=Path("nowhere"), progress=False))
    loader.load(model)
    pack_linears(model)


def _model(subject: type[Any], folder: Path) -> Wants:
    return (model_context(subject),), {"fill": fill_model}


SPECIAL_CHECKPOINTS = {
    "quantized_safetensors": "tests/end_to_end/test_quantized_loading.py",
    "transformers": "tests/parity/test_fallback_parity.py",
}
"""Weight loaders of checkpoints or models that this suite cannot create, and their own tests."""


def _weight_loader(subject: type[Any], folder: Path) -> Wants:
    registry = PluginRegistry()
    llama = registry.load("model", "LlamaForCausalLM")
    write_model(write_tiny_llama(folder), folder / "tiny.gguf")
    names = {"name_in_file": to_file_name} if subject.__name__ == "GGUFLoader" else {}
    return (folder, lambda: llama(model_context(llama))), names


def _model_format(subject: type[Any], folder: Path) -> Wants:
    if not subject.__name__.startswith("GGUF"):
        return (), {}  # the class of the format has example files
    path = write_model(write_tiny_llama(folder), folder / "tiny.gguf")
    return (), {"files": {path.name: path.read_bytes()}}


SUBJECTS: dict[str, Callable[[type[Any], Path], Wants]] = {
    "admission": _nothing,
    "attention": _device,
    "compile_backend": _host,
    "executor": _nothing,
    "grammar": _nothing,
    "graph_pass": _host,
    "hooks": _nothing,
    "http_routes": _nothing,
    "io_processor": _nothing,
    "linear_method": _device,
    "kv_connector": _host,
    "logits_processor": _host,
    "step_extension": _host,
    "model": _model,
    "model_format": _model_format,
    "model_source": _nothing,
    "ops": _device,
    "platform": _nothing,
    "policy": _nothing,
    "reasoning_parser": _nothing,
    "scheduler": _scheduler,
    "stat_logger": _nothing,
    "tokenizer": _tokenizer,
    "tool_parser": _nothing,
    "weight_loader": _weight_loader,
    "worker": _worker,
    "worker_extension": _nothing,
}
"""Maps a kind to a function that returns the suite's arguments besides the class."""
