"""Provides the arguments of suites: models, devices, tokenizer files and platforms.

Each argument has a default, which the user can override. If the model plugin `LlamaForCausalLM` is
installed, its class is used as a default. torch is imported within functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dovetail.config.model_directory import ModelDirectory
from dovetail.errors import PluginNotFoundError
from dovetail.interfaces.model import ModelContext
from dovetail.interfaces.platform import Platform
from dovetail.interfaces.worker import WorkerContext
from dovetail.plugins import PluginRegistry
from dovetail.plugins.construction import construct
from dovetail.plugins.metadata.first_party import top_package
from dovetail.plugins.selection import AUTO, choose_platform
from dovetail_devkit.contexts import (
    fake_model_overrides,
    make_worker_context,
    write_fake_config,
)
from dovetail_devkit.expectation import SkipCase
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.tiny_model import TINY_LLAMA, write_safetensors, write_tiny_llama

if TYPE_CHECKING:
    import torch

MAX_MODEL_LEN = 64
BORROWED_MODEL = "LlamaForCausalLM"
_MODEL_WITHOUT_ATTENTION = "PositionalModel"
_STRICT_ATTENTION = "dovetail_devkit.fakes.attention:FakeAttentionBackend"
_SIZES = {"vocab_size": 97, "hidden_size": 16}


@dataclass(frozen=True, kw_only=True)
class Subjects:
    """The arguments of suites. The creator of this object must close `stack`.

    model: a model directory of the user; None for the default. platform: reference of the platform
    for workers. device: a device type; "" for the first available type that the plugin claims.
    unusable: the reason of the plugin's probe if it cannot be used on this machine, else "".
    """

    registry: PluginRegistry
    stack: ExitStack
    model: ModelDirectory | None = None
    platform: str = AUTO
    device: str = ""
    unusable: str = ""

    @cached_property
    def folder(self) -> Path:
        """A new, empty directory that this object owns."""
        return Path(self.stack.enter_context(TemporaryDirectory(prefix="dovetail-kit-")))

    def new_folder(self, name: str) -> Path:
        """Return a new directory in `folder`."""
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    def find_device(self, claimed: frozenset[str]) -> torch.device:
        """Return a device of a claimed type (empty: any). Raise SkipCase if none is available."""
        import torch

        devices = [self.device] if self.device else sorted(claimed) or ["cpu"]
        for name in devices:
            module = getattr(torch, name, None)
            if name == "cpu" or (module is not None and module.is_available()):
                return torch.device(name)
        raise SkipCase(f"the plugin needs a device of the type {', '.join(devices)}")

    def model_config(self, cls: type[Any]) -> Mapping[str, Any]:
        """Return a config.json for a model class, from the user's model or a tiny Llama.

        `example_config` of the class replaces fields of the tiny Llama.
        """
        if self.model is not None:
            return self.model.config
        own = getattr(cls, "example_config", {})
        return TINY_LLAMA | {"architectures": list(cls.architectures)} | dict(own)

    def model_context(self, hf_config: Mapping[str, Any], device: torch.device) -> ModelContext:
        """Return the context of a model, with the layers and ops of this kit."""
        import torch

        from dovetail_devkit.fakes.linear_method import FakeLinearMethod
        from dovetail_devkit.fakes.ops import FakeOps

        return ModelContext(
            hf_config=hf_config,
            dtype=torch.float32,
            device=device,
            linear_method=FakeLinearMethod(),
            ops=FakeOps(),
            max_model_len=MAX_MODEL_LEN,
        )

    def has_model(self) -> bool:
        """Return whether the architecture of the default model is installed."""
        return BORROWED_MODEL in {candidate.name for candidate in self.registry.candidates("model")}

    def checkpoint(self) -> tuple[ModelDirectory, Any]:
        """Return a model directory with weights, and the model's class."""
        directory = self.model or self._open_checkpoint()
        return directory, self.registry.load("model", directory.architecture)

    def _open_checkpoint(self) -> ModelDirectory:
        path = self._write_checkpoint()
        return ModelDirectory.open(path, hf_overrides=fake_model_overrides(path))

    def _write_checkpoint(self) -> Path:
        if self.has_model():
            return write_tiny_llama(self.new_folder("llama"))
        path = write_fake_config(self.new_folder("fake"))
        hidden, vocab = _SIZES["hidden_size"], _SIZES["vocab_size"]
        shapes = {
            "embed": (vocab, hidden),
            "qkv": (3 * hidden, hidden),
            "out": (hidden, hidden),
            "norm": (hidden,),
            "head": (vocab, hidden),
        }
        write_safetensors(path / "model.safetensors", shapes)
        return path

    def worker_context(self, worker_cls: type[Any]) -> WorkerContext:
        """Return the context of a worker. Raise SkipCase if its platform is not available.

        Attention is the kit's fake, which is slow, correct and checks the worker's metadata.
        """
        platform = self._platform_of(worker_cls)
        if self.model is not None:
            return make_worker_context(self.model.path, platform)
        if self.has_model():
            folder = write_tiny_llama(self.new_folder("llama"))
            return make_worker_context(folder, platform, attention_backend=_STRICT_ATTENTION)
        folder = self.new_folder("positional")
        return make_worker_context(
            write_fake_config(folder, architectures=[_MODEL_WITHOUT_ATTENTION]),
            platform,
            load_format="dovetail_devkit.fakes.weight_loader:FakeWeightLoader",
        )

    def tokenizer_dir(self) -> tuple[Path, bool]:
        """Return a directory with tokenizer files, and whether they are lossless."""
        if self.model is not None:
            return self.model.path, False
        return write_byte_tokenizer(self.new_folder("tokenizer")), True

    def check_format(self, cls: type[Any]) -> None:
        """Raise SkipCase if the plugin reads files that the kit cannot write.

        Such plugins are model formats, and weight loaders with the attribute `example_files`.
        """
        if self.model is None and (files := getattr(cls, "example_files", "")):
            raise SkipCase(
                f"the plugin reads only {files}; pass such a directory with --dovetail-model-dir"
            )
        package = cls.__module__.partition(".")[0]
        candidates = self.registry.candidates("model_format") if self.model is None else ()
        formats = [f"*.{item.name}" for item in candidates if top_package(item.target) == package]
        if formats:
            raise SkipCase(
                f"the plugin reads {formats[0]} files; pass the path of such a file with "
                f"--dovetail-model-dir"
            )

    def _platform_of(self, worker_cls: type[Any]) -> Platform:
        """Return the platform that the user names, or else a platform that prefers the worker."""
        if self.platform != AUTO:
            return choose_platform(self.registry, self.platform)
        own = self._distribution_of(worker_cls)
        reasons: list[str] = []
        for candidate in self.registry.candidates("platform"):
            if not candidate.first_party and candidate.distribution != own:
                continue  # do not import third-party packages that were not requested
            platform_cls = self.registry.load("platform", candidate.reference)
            probe = platform_cls.probe()
            if not probe.usable:
                reasons += probe.reasons if candidate.distribution == own else ()
                continue
            platform: Platform = construct("platform", platform_cls)
            if candidate.distribution == own or self._prefers(platform, worker_cls):
                return platform
        if reasons:
            raise SkipCase("; ".join(reasons))
        try:
            return choose_platform(self.registry, AUTO)
        except PluginNotFoundError:
            return FakePlatform()

    def _distribution_of(self, worker_cls: type[Any]) -> str:
        target = f"{worker_cls.__module__}:{worker_cls.__qualname__}"
        package = target.partition(".")[0].partition(":")[0]
        for candidate in self.registry.candidates("worker"):
            if candidate.target.partition(".")[0].partition(":")[0] == package:
                return candidate.distribution
        return ""

    def _prefers(self, platform: Platform, worker_cls: type[Any]) -> bool:
        preferred = platform.prefer("worker")
        candidates = [
            candidate
            for candidate in self.registry.candidates("worker")
            if candidate.name in preferred
        ]
        first_party = [item.reference for item in candidates if item.first_party]
        return any(self.registry.load("worker", our) is worker_cls for our in first_party)


def write_byte_tokenizer(directory: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json of a lossless tokenizer."""
    import tokenizers

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
    core.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
