"""Renders the tables of docs/architectures.md from the plugins and from the lists of the tests."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import transformers
from docs.policy_facts import record, recorded
from gguf_files.encoders import CLASSIFIER_CONVERSIONS, ENCODER_CONVERSIONS
from gguf_files.families import CONVERSIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dovetail.plugins import PluginRegistry
from dovetail_model_sources.architectures import (
    RECORDS,
    ArchitectureInfo,
    supported_architectures,
)
from parity.checkpoints import CHECKPOINTS
from parity.fallback_checkpoints import REJECTED, SERVED
from parity.family_checkpoints import FAMILIES
from parity.test_family_parity import RUN_CONFIGS
from parity.test_pooling_parity import CLASSIFIERS, DECODER_CLASSIFIERS, ENCODERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
MAX_COLUMNS = 120
FAMILY_TEST = "`test_family_parity.py`"
DENSE_TEST = "`test_engine_parity.py`"
POOLING_TEST = "`test_pooling_parity.py`"


def blocks() -> Mapping[str, str]:
    """Return the text of each recorded part of the page."""
    return {
        "native": "\n".join(_native_rows()),
        "fallback": _listed(SERVED),
        "rejected": _listed(REJECTED),
    }


def record_page() -> None:
    """Write the recorded parts of the page, and the file of tested architectures."""
    text = PAGE.read_text("utf-8")
    for name, block in blocks().items():
        text = record(text, name, block)
    PAGE.write_text(text, "utf-8")
    RECORDS.write_text(architecture_records(), "utf-8")


def architecture_records() -> str:
    """Return the content of the file from which `dovetail models --architectures` reads tests."""
    native = {
        info.architecture: {
            "formats": ["gguf"] if info.architecture in _gguf_classes() else [],
            "tested": _proof(info.architecture).replace("`", ""),
        }
        for info in _native()
    }
    fallback = {_architecture(name): "test_fallback_parity.py" for name in SERVED}
    records = {"native": native, "transformers": dict(sorted(fallback.items()))}
    return json.dumps(records, indent=1) + "\n"


def outdated() -> list[str]:
    """Return the names of the parts of the page, and of the file, that differ from the tests."""
    text = PAGE.read_text("utf-8")
    parts = [name for name, block in blocks().items() if recorded(text, name) != block]
    is_current = RECORDS.read_text("utf-8") == architecture_records()
    return parts if is_current else [*parts, RECORDS.name]


def unproven() -> list[str]:
    """Return the native architectures without a parity test."""
    return [info.architecture for info in _native() if not _proof(info.architecture)]


def _native() -> Iterator[ArchitectureInfo]:
    for info in supported_architectures(PluginRegistry()):
        if info.distribution.startswith("dovetail-models "):
            yield info


def _native_rows() -> Iterator[str]:
    yield "| architecture | tasks | GGUF | tensor parallel | compared with transformers |"
    yield "|---|---|---|---|---|"
    for info in _native():
        name = info.architecture
        model_cls = PluginRegistry().load("model", name)
        ranks = "yes" if "tensor_parallel" in model_cls.provides else "no"
        gguf = "yes" if name in _gguf_classes() else "no"
        proof = _proof(name) or "no test"
        yield f"| `{name}` | {', '.join(info.tasks)} | {gguf} | {ranks} | {proof} |"


def _proof(name: str) -> str:
    """Return an architecture's comparison with transformers, and its number of checkpoints."""
    model_cls = PluginRegistry().load("model", name)
    names = {name, *model_cls.architectures}
    families = [family for family in FAMILIES.values() if family.model in names]
    if families:
        return f"{FAMILY_TEST}: {_checkpoints(len(families))}, {len(RUN_CONFIGS)} configurations"
    dense = [prefix for prefix, _ in CHECKPOINTS.values() if f"{prefix}ForCausalLM" in names]
    if dense:
        return f"{DENSE_TEST}: {_checkpoints(len(dense))}"
    if name in (*ENCODERS, *CLASSIFIERS, *DECODER_CLASSIFIERS):
        return POOLING_TEST
    return ""


def _checkpoints(count: int) -> str:
    return f"{count} checkpoint{'s' if count > 1 else ''}"


def _gguf_classes() -> set[str]:
    """Return the architectures whose GGUF files are compared with transformers."""
    written = {conversion.family.model for conversion in CONVERSIONS.values()}
    encoders = (*ENCODER_CONVERSIONS.values(), *CLASSIFIER_CONVERSIONS.values())
    written |= {conversion.model for conversion in encoders}
    own = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
    return written | own


def _listed(model_types: Collection[str]) -> str:
    names = ", ".join(f"`{_architecture(name)}`" for name in sorted(model_types))
    return textwrap.fill(names, MAX_COLUMNS, break_on_hyphens=False)


def _architecture(model_type: str) -> str:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if name is None:  # an encoder-decoder model
        config_cls = CONFIG_MAPPING[model_type]
        name = getattr(transformers, config_cls.__name__.replace("Config", "Model")).__name__
    return name if isinstance(name, str) else name[0]
