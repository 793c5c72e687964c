"""Writes config.json, the tokenizer and the other files of a checkpoint that are not weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dovetail.config.model_directory import CONFIG_FILE, ModelDirectory
from dovetail.config.pooling_modules import MODULES_FILE, read_modules
from dovetail.errors import ModelError
from dovetail.model_files import (
    MAX_TEMPLATE_BYTES,
    file_exists,
    list_model_files,
    open_model_file,
    parse_json,
    read_json_object,
    read_model_file,
)
from dovetail.plugins import PluginRegistry
from dovetail.tokenizers.huggingface import MAX_ADDITIONAL_TEMPLATES, HuggingFaceTokenizer
from dovetail.tokenizers.saved_files import special_token_ids, tokenizer_files
from dovetail_torch.weights.checkpoint_files import SINGLE_FILE

_GENERATION_FILE = "generation_config.json"
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_OTHER_FILES = (
    _GENERATION_FILE,
    "config_sentence_transformers.json",
    MODULES_FILE,
    "preprocessor_config.json",
    "processor_config.json",
    "sentence_bert_config.json",
)
_TEMPLATES = "additional_chat_templates"
_QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
_TOKEN_FIELDS = ("bos_token", "eos_token", "pad_token")
_PART = "text_config"
_POOLING_FOLDER = "1_Pooling"
_POOLING_FIELDS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last": "pooling_mode_lasttoken",
}
_MODULES_PACKAGE = "sentence_transformers.models"


class ModelFiles:
    """The files of one model other than weights. dtype: for config.json; None to keep its dtype.

    note: receives a sentence about contents that are omitted.
    """

    def __init__(
        self, directory: ModelDirectory, dtype: torch.dtype | None, note: Callable[[str], None]
    ) -> None:
        self._directory, self._dtype, self._note = directory, dtype, note
        self._is_file = directory.path.is_file()

    def write(self, folder: Path, plugins: PluginRegistry, *, skip_tokenizer: bool) -> None:
        """Write the files. Raise ModelError for a file or a tokenizer that cannot be copied."""
        if not self._is_file:
            _write_json(folder / CONFIG_FILE, self._config(self._read_config()))
            self._copy(folder, skip_tokenizer=skip_tokenizer)
            return
        token_ids: dict[str, int] = {}
        if not skip_tokenizer:
            tokenizer = self._load_tokenizer(plugins)
            for name, content in tokenizer_files(tokenizer).items():
                (folder / name).write_text(content, "utf-8")
            token_ids = _token_ids(tokenizer)
        generation_config = self._directory.generation_config
        unstated = {f"{name}_id": None for name in _TOKEN_FIELDS}
        stated = {key: generation_config[key] for key in unstated if key in generation_config}
        config = self._config({**unstated, **stated, **token_ids, **self._directory.config})
        _write_json(folder / CONFIG_FILE, config)
        if generation_config:
            _write_json(folder / _GENERATION_FILE, generation_config)
        if self._directory.pooling is not None:
            _write_modules(folder, self._directory.pooling)

    def _read_config(self) -> dict[str, Any]:
        config = read_json_object(self._directory.path / CONFIG_FILE)
        if config.pop("auto_map", None):
            self._note("auto_map of config.json is not written: code of a model is never copied.")
        return config

    def _config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of config.json, with the new dtype and without the quantization."""
        result = dict(config)
        if self._directory.quantization:
            for field in _QUANTIZATION_FIELDS:
                result.pop(field, None)
        if self._dtype is not None:
            field = "torch_dtype" if "torch_dtype" in result and "dtype" not in result else "dtype"
            result[field] = str(self._dtype).removeprefix("torch.")
        if isinstance(result.get(_PART), Mapping):
            result[_PART] = self._config(result[_PART])
        return result

    def _copy(self, folder: Path, *, skip_tokenizer: bool) -> None:
        """Copy the files of a model directory. Every file has a size limit."""
        source = self._directory.path
        names = [*_OTHER_FILES, *(() if skip_tokenizer else _TOKENIZER_FILES)]
        for name in names:
            if file_exists(source / name):
                (folder / name).write_bytes(read_model_file(source / name))
        if not skip_tokenizer:
            for path in list_model_files(
                source / _TEMPLATES, ".jinja", at_most=MAX_ADDITIONAL_TEMPLATES
            ):
                (folder / _TEMPLATES).mkdir(exist_ok=True)
                content = read_model_file(path, max_bytes=MAX_TEMPLATE_BYTES)
                (folder / _TEMPLATES / path.name).write_bytes(content)
        for part in _module_folders(source):
            (folder / part).mkdir(exist_ok=True)
            (folder / part / CONFIG_FILE).write_bytes(read_model_file(source / part / CONFIG_FILE))
            if file_exists(source / part / SINGLE_FILE):
                with (
                    open_model_file(source / part / SINGLE_FILE) as descriptor,
                    open(descriptor, "rb", closefd=False) as weights,
                    (folder / part / SINGLE_FILE).open("xb") as copy,
                ):
                    shutil.copyfileobj(weights, copy)

    def _load_tokenizer(self, plugins: PluginRegistry) -> HuggingFaceTokenizer:
        directory = self._directory
        cls = plugins.load("tokenizer", directory.defaults["model.tokenizer_mode"])
        options = plugins.options_of("tokenizer", cls)
        tokenizer = cls.from_directory(directory.path, **({"options": options} if options else {}))
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ModelError(
                f"{directory.path}: the tokenizer {cls.__name__} cannot be written as "
                "tokenizer.json. Set --skip-tokenizer-init to write the weights only."
            )
        return tokenizer


def _token_ids(tokenizer: HuggingFaceTokenizer) -> dict[str, int]:
    """Return the config.json fields with the ids of special tokens."""
    token_ids = special_token_ids(tokenizer)
    return {f"{name}_id": token_ids[name] for name in _TOKEN_FIELDS if name in token_ids}


def _module_folders(source: Path) -> Iterator[str]:
    """Yield the directories of the sentence-transformers modules in `source` that have a config."""
    if not read_modules(source):  # raises for directories outside of `source`
        return
    file = source / MODULES_FILE
    for module in parse_json(file, read_model_file(file)):
        part = module.get("path", "")
        if part and file_exists(source / part / CONFIG_FILE):
            yield part


def _write_modules(folder: Path, pooling: str) -> None:
    """Write the modules of sentence-transformers that pool as a model file states.

    pooling: see `ModelDescription`.
    """
    modules = [("Transformer", "")]
    if pooling:
        modules.append(("Pooling", _POOLING_FOLDER))
        (folder / _POOLING_FOLDER).mkdir()
        modes = {field: name == pooling for name, field in _POOLING_FIELDS.items()}
        _write_json(folder / _POOLING_FOLDER / CONFIG_FILE, modes)
    modules.append(("Normalize", "2_Normalize"))  # as the engine does for a model file
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"{_MODULES_PACKAGE}.{kind}"}
        for index, (kind, path) in enumerate(modules)
    ]
    _write_json(folder / MODULES_FILE, entries)


def _write_json(path: Path, content: Mapping[str, Any] | list[dict[str, Any]]) -> None:
    path.write_text(f"{json.dumps(content, indent=2, ensure_ascii=False)}\n", "utf-8")
