"""The signatures that the plugin depends on, as lines of text.

`python attention_backends/flashinfer/tests/patched/signatures.py` writes them to signatures.json,
for the installed version of FlashInfer.
"""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import reference_kernels
import reference_ops

FIXTURE = Path(__file__).with_name("signatures.json")

FUNCTIONS = (
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.__init__",
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.plan",
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.run",
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.__init__",
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper._plan_impl",  # `plan` accepts any keyword
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.run",
    "flashinfer.attention:BatchAttentionWithAttentionSinkWrapper.__init__",
    "flashinfer.decode:trtllm_batch_decode_with_kv_cache",
    "flashinfer.prefill:trtllm_batch_context_with_kv_cache",
    "flashinfer.norm:rmsnorm",
    "flashinfer.norm:gemma_rmsnorm",
    "flashinfer.norm:fused_add_rmsnorm",
    "flashinfer.norm:gemma_fused_add_rmsnorm",
    "flashinfer.rope:apply_rope_with_cos_sin_cache",
    "flashinfer.activation:silu_and_mul",
    "flashinfer.utils:get_trtllm_gen_multi_ctas_kv_counter_bytes",
)


def lines_of(path: str) -> list[str]:
    """Return one line for each parameter of a function."""
    module, _, name = path.partition(":")
    result = import_module(module)
    for part in name.split("."):
        result = getattr(result, part)
    return [str(item) for item in inspect.signature(result).parameters.values()]


def current() -> dict[str, list[str]]:
    """Return the signatures of the installed package."""
    native = {
        **{f"plan of {kernels}": names for kernels, names in reference_kernels.PLAN_NAMES.items()},
        **{f"trtllm-gen {kind}": names for kind, names in reference_kernels.TABLE_NAMES.items()},
        **{f"operation {name}": names for name, names in reference_ops.OP_NAMES.items()},
        "paged_run": reference_kernels.RUN_NAMES,
        "paged_run of a variant": reference_kernels.JIT_RUN_NAMES,
    }
    return {path: lines_of(path) for path in FUNCTIONS} | native


def main() -> None:
    """Write the signatures of the installed version to signatures.json."""
    result = {"version": [version("flashinfer-python")]} | current()
    FIXTURE.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
