"""The fixed list of first-party distributions, each with the package of its plugins.

Distributions with similar names are third-party distributions. A plugin of a first-party
distribution counts as third-party if it is in another package. A test compares the list with the
members of the repository.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

FIRST_PARTY: Mapping[str, str] = MappingProxyType(
    {
        "dovetail-attn-cpu": "dovetail_attn_cpu",
        "dovetail-attn-flash-attn": "dovetail_attn_flash_attn",
        "dovetail-attn-flashinfer": "dovetail_attn_flashinfer",
        "dovetail-attn-torch": "dovetail_attn_torch",
        "dovetail-attn-triton": "dovetail_attn_triton",
        "dovetail-client-tools": "dovetail_client_tools",
        "dovetail-convert": "dovetail_convert",
        "dovetail-core": "dovetail",
        "dovetail-cpu": "dovetail_cpu",
        "dovetail-cpu-kernels": "dovetail_cpu_kernels",
        "dovetail-cuda": "dovetail_cuda",
        "dovetail-demo-model": "dovetail_demo_model",
        "dovetail-devkit": "dovetail_devkit",
        "dovetail-gguf": "dovetail_gguf",
        "dovetail-io-jsonl": "dovetail_io_jsonl",
        "dovetail-kv-memory": "dovetail_kv_memory",
        "dovetail-lab": "dovetail_lab",
        "dovetail-model-sources": "dovetail_model_sources",
        "dovetail-models": "dovetail_models",
        "dovetail-no-repeat-ngram": "dovetail_no_repeat_ngram",
        "dovetail-ops-triton": "dovetail_ops_triton",
        "dovetail-parsers": "dovetail_parsers",
        "dovetail-quantize": "dovetail_quantize",
        "dovetail-quantized-checkpoints": "dovetail_quantized_checkpoints",
        "dovetail-rocm": "dovetail_rocm",
        "dovetail-sched-fcfs": "dovetail_sched_fcfs",
        "dovetail-sched-priority": "dovetail_sched_priority",
        "dovetail-sched-research": "dovetail_sched_research",
        "dovetail-server": "dovetail_server",
        "dovetail-stats-jsonl": "dovetail_stats_jsonl",
        "dovetail-structured-output": "dovetail_structured_output",
        "dovetail-structured-output-xgrammar": "dovetail_structured_output_xgrammar",
        "dovetail-torch": "dovetail_torch",
        "dovetail-transformers": "dovetail_transformers",
        "dovetail-xpu": "dovetail_xpu",
    }
)
"""The import package of each first-party distribution, by its normalized name."""


def normalize_distribution(name: str) -> str:
    """Return the normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def top_package(target: str) -> str:
    """Return the top-level package of "package.module:Class"."""
    return target.partition(":")[0].partition(".")[0]


def first_party_package(distribution: str) -> str:
    """Return the package of a first-party distribution; "" for a third-party one."""
    return FIRST_PARTY.get(normalize_distribution(distribution), "")


def is_first_party(distribution: str, target: str) -> bool:
    """Return whether `target` ("module:Class") is a plugin of a first-party distribution.

    distribution: the distribution's name as written in its metadata.
    """
    return top_package(target) == first_party_package(distribution)


def first_party_owner(target: str) -> str:
    """Return the first-party distribution whose package contains `target`; "" if none does."""
    package = top_package(target)
    return next((name for name, its_own in FIRST_PARTY.items() if its_own == package), "")
