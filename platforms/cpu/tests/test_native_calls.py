"""All linear layers, norms, rotations, activations and attention of a model use native kernels.

Calls of the library are counted, for first-party models and for a third-party model that uses only
the layers of `dovetail_torch`. During the tests, torch's implementations raise an error.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail_cpu.native_library import find_library, probe_fast
from dovetail_cpu_kernels.linear import INT8
from dovetail_devkit.tiny_encoder import write_tiny_encoder
from dovetail_torch.layers.torch_linear import TorchLinearMethod
from dovetail_torch.layers.torch_ops import TorchOps

pytest.importorskip("dovetail_attn_cpu")
pytest.importorskip("dovetail_models")
pytestmark = pytest.mark.skipif(
    not probe_fast().usable, reason="native kernels are not usable here"
)

NUM_LAYERS, NUM_STEPS = 2, 4
PER_STEP = {
    "LlamaForCausalLM": {
        "linear_bf16": 4 * NUM_LAYERS + 1,
        "rms_norm": 1,
        "add_rms_norm": 2 * NUM_LAYERS,
        "rotary": NUM_LAYERS,
        "silu_mul": NUM_LAYERS,
        "attention": NUM_LAYERS,
        "embedding": 1,
        "argmax": 1,
    },
    "CustomNormsLayer": {
        "linear_bf16": 6,
        "rms_norm": 1,
        "add_rms_norm": 2,
        "rotary": 1,
        "silu_mul": 1,
        "attention": 1,
        "embedding": 1,
        "argmax": 1,
    },
}
PER_STEP["Qwen3ForCausalLM"] = PER_STEP["LlamaForCausalLM"] | {"rms_norm": 1 + 2 * NUM_LAYERS}
PER_STEP["Qwen3MoeForCausalLM"] = PER_STEP["Qwen3ForCausalLM"] | {
    "linear_bf16": 2 * NUM_LAYERS + 1,
    "select_experts": NUM_LAYERS,
    "experts": NUM_LAYERS,
}
del PER_STEP["Qwen3MoeForCausalLM"]["silu_mul"]

ENCODER_STEP = {
    "linear_bf16": 4 * NUM_LAYERS,
    "layer_norm": 1 + 2 * NUM_LAYERS,
    "bidirectional": NUM_LAYERS,
    "embedding": 1,
}

NATIVE_OPS = (
    "rms_norm",
    "add_rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "select_experts",
    "best_tokens",
)


class Counted:
    """A wrapper of a native function that counts calls and forwards ctypes attributes."""

    def __init__(self, function, count):
        self.__dict__.update(function=function, count=count)

    def __setattr__(self, name, value):
        setattr(self.function, name, value)

    def __call__(self, *args):
        self.count()
        return self.function(*args)


@pytest.fixture
def calls(monkeypatch):
    """Counts of native calls by name, since the last `clear`."""
    counter, library = Counter(), find_library()
    counted_names = {name for counts in (*PER_STEP.values(), ENCODER_STEP) for name in counts}
    for name in counted_names | {"linear_int8"}:
        function = getattr(library, f"dk_{name}")
        counted = Counted(function, lambda name=name: counter.update([name]))
        monkeypatch.setattr(library, f"dk_{name}", counted)
    return counter


def forbid(*_, **__):
    raise AssertionError("the torch implementation was called")


def hf_overrides_for(path):
    """Return the `hf_overrides` for a class of out_of_tree_decoder.py, or None otherwise."""
    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    if name != "CustomNormsLayer":
        return None
    return {"architectures": [f"{Path(__file__).with_name('out_of_tree_decoder.py')}:{name}"]}


def start(path, **options):
    return LLM(
        str(path),
        hf_overrides=hf_overrides_for(path),
        skip_tokenizer_init=True,
        trust_local_code=True,
        max_model_len=64,
        num_threads=1,
        num_gpu_blocks_override=8,
        block_size=16,
        enforce_eager=True,  # a replay calls the library once per step
        **options,
    )


def generate(llm):
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
    return llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("architecture", PER_STEP)
def test_every_operation_of_a_model_is_native(architecture, write_bf16, calls, monkeypatch):
    llm = start(write_bf16(architecture))
    for name in NATIVE_OPS:
        monkeypatch.setattr(TorchOps, name, forbid)
    monkeypatch.setattr(TorchLinearMethod, "apply", forbid)
    monkeypatch.setattr(TorchLinearMethod, "apply_experts", forbid)
    monkeypatch.setattr(torch.nn.functional, "linear", forbid)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", forbid)
    calls.clear()
    assert len(generate(llm)) == NUM_STEPS
    expected = {name: NUM_STEPS * count for name, count in PER_STEP[architecture].items()}
    assert calls == expected


def test_every_operation_of_an_encoder_is_native(tmp_path, calls, monkeypatch):
    """GELU is a part of the linear layer before it."""
    folder = write_tiny_encoder(tmp_path)
    llm = LLM(str(folder), dtype="bfloat16", pooling_type="mean", num_threads=1)
    for name in ("linear", "gelu", "layer_norm", "scaled_dot_product_attention"):
        monkeypatch.setattr(torch.nn.functional, name, forbid)
    calls.clear()
    assert len(llm.embed(["w1 w2 w3"], use_tqdm=False)) == 1
    assert calls == ENCODER_STEP


def test_a_quantized_model_uses_quantized_matrix_products(write_bf16, calls):
    llm = start(write_bf16("LlamaForCausalLM"), quantization="int8")
    calls.clear()
    generate(llm)
    assert calls["linear_int8"] == NUM_STEPS * (4 * NUM_LAYERS + 1)
    assert not calls["linear_bf16"]


def test_quantized_experts_are_computed_in_one_call(write_bf16, calls, monkeypatch):
    from dovetail_cpu.linear_kernel import ExpertKernel

    kinds, initialize = set(), ExpertKernel.__init__

    def record(kernel, gate_up, down, specs, **activation):
        kinds.update(spec.kind for spec in specs)
        initialize(kernel, gate_up, down, specs, **activation)

    monkeypatch.setattr(ExpertKernel, "__init__", record)
    llm = start(write_bf16("Qwen3MoeForCausalLM"), quantization="int8")
    calls.clear()
    generate(llm)
    assert calls["experts"] == NUM_STEPS * NUM_LAYERS
    assert kinds == {INT8}


def test_the_call_counter_detects_operations_without_native_calls(write_bf16, calls):
    llm = start(write_bf16("LlamaForCausalLM"), ops="torch", linear_method="onednn")
    calls.clear()
    generate(llm)
    assert set(calls) == {"attention"}


@pytest.mark.costly
@pytest.mark.parametrize("architecture", PER_STEP)
def test_tokens_equal_those_of_torch_up_to_rounding(architecture, write_bf16):
    path = write_bf16(architecture)
    native = generate(start(path))
    plain = generate(start(path, ops="torch", linear_method="torch", attention_backend="torch"))
    assert native[0] == plain[0]
