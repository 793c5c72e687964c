"""Weights are streamed while loading: peak memory is near the size of the served weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

native = pytest.importorskip("dovetail_cpu_kernels")

NUM_LAYERS, HIDDEN, INNER, GROUP = 16, 1024, 4096, 128
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (256, HIDDEN),
    "self_attn.v_proj": (256, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
NUM_WEIGHTS = NUM_LAYERS * sum(rows * columns for rows, columns in MATRICES.values())
ALLOWANCE = 120 << 20
"""Bytes for everything but weights: plugins, the model's other parts, the cache, workspaces."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": INNER,
    "vocab_size": 320,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCRIPT = """
import json, sys
from pathlib import Path
import dovetail_cpu.worker
from dovetail import LLM

def kib(field):
    text = Path("/proc/self/status").read_text()
    return int(text.partition(field + ":")[2].split()[0])

before = kib("VmRSS")
options = json.loads(sys.argv[2])
llm = LLM(
    sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, num_threads=1, block_size=16,
    kv_cache_memory_bytes=4 << 20, use_tqdm_on_load=False, max_num_seqs=4, **options
)
print((kib("VmHWM") - before) << 10)
llm.shutdown()
"""


def bf16(generator, prefix, shape):
    weight = torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05, generator=generator)
    return {f"{prefix}.weight": weight}


def gptq(generator, prefix, shape):
    rows, columns = shape
    words = torch.randint(
        -(1 << 31), 1 << 31, (columns // 8, rows), dtype=torch.int32, generator=generator
    )
    groups = columns // GROUP
    return {
        f"{prefix}.qweight": words,
        f"{prefix}.qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
        f"{prefix}.scales": torch.full((groups, rows), 0.004, dtype=torch.float16),
    }


def write(folder, make, **changes):
    """Write a checkpoint with one shard per layer."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    generator, files = torch.Generator().manual_seed(1), {}
    shared = bf16(generator, "model.embed_tokens", (320, HIDDEN))
    shared["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for number in range(NUM_LAYERS + 1):
        tensors, prefix = {}, f"model.layers.{number}"
        if number == NUM_LAYERS:
            tensors = shared
        else:
            for name, shape in MATRICES.items():
                tensors |= make(generator, f"{prefix}.{name}", shape)
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        save_file(tensors, folder / f"{number}.safetensors", metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, f"{number}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))


def grown_bytes(folder, **options):
    """Return by how many bytes loading raises the peak resident memory of a new process."""
    environment = {**os.environ, "DOVETAIL_PACKED_CACHE": "off"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return int(run.stdout.split()[-1])


@pytest.fixture(autouse=True)
def native_only():
    if not native.status().available:
        pytest.skip(native.status().reason)


def test_quantizing_during_loading_needs_no_full_copy_of_the_weights(tmp_path):
    write(tmp_path, bf16)
    served = NUM_WEIGHTS * 4.5 / 8
    grown = grown_bytes(tmp_path, quantization="int4")
    assert grown < 1.1 * served + ALLOWANCE, (grown >> 20, served / 2**20)
    assert 1.1 * served + ALLOWANCE < 2 * NUM_WEIGHTS  # a copy in bfloat16 would exceed it


def test_a_gptq_checkpoint_is_loaded_without_dequantized_weights(tmp_path):
    table = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
    write(tmp_path, gptq, quantization_config={**table, "sym": True})
    served = NUM_WEIGHTS * 4.5 / 8
    grown = grown_bytes(tmp_path)
    # The mapped files are counted, too.
    assert grown < 2.1 * served + ALLOWANCE, (grown >> 20, served / 2**20)
    assert 2.1 * served + ALLOWANCE < 2 * NUM_WEIGHTS
