"""Every linear, norm, rotation, activation and attention of a model goes to native kernels.

Counted where the library is called, for first-party models and for one that somebody else wrote
against the layers of `dovetail_torch` alone; torch's own versions raise meanwhile.
"""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

from dovetail import LLM, SamplingParams
from dovetail.testing.tiny_model import TINY_LLAMA, llama_shapes
from dovetail_cpu.native_library import find_library, probe_fast
from dovetail_torch.layers.torch_linear import TorchLinearMethod
from dovetail_torch.layers.torch_ops import TorchOps

pytest.importorskip("dovetail_attn_cpu")
pytest.importorskip("dovetail_models")
pytestmark = pytest.mark.skipif(not probe_fast().usable, reason="native kernels do not serve here")

NUM_LAYERS, NUM_STEPS = 2, 4
SHAPE = TINY_LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_hidden_layers": NUM_LAYERS,
    "torch_dtype": "bfloat16",
}

ALIEN = '''
"""A decoder of its own kind: attention and MLP side by side, one norm a layer."""

import torch
from torch import nn

from dovetail_torch.layers import (
    Attention,
    ColumnParallelLinear,
    HeadShape,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    SiluAndMul,
    VocabParallelEmbedding,
)


class Alien(nn.Module):
    CONTRACT, CONTRACT_VERSION = "model", "0.1"
    architectures = ("Alien",)

    def __init__(self, context):
        super().__init__()
        config, size = context.hf_config, context.hf_config["hidden_size"]
        heads = HeadShape(num_heads=4, num_kv_heads=2, head_size=config["head_dim"])
        self.table = VocabParallelEmbedding(context, config["vocab_size"], size)
        self.qkv = QKVParallelLinear(context, "qkv", size, heads)
        self.out = RowParallelLinear(context, "out", 4 * config["head_dim"], size)
        self.up = MergedColumnParallelLinear(context, "up", size, {"a": 96, "b": 96})
        self.act = SiluAndMul(context)
        self.down = RowParallelLinear(context, "down", 96, size)
        self.mix = ColumnParallelLinear(context, "mix", size, size, bias=True)
        self.norm = RMSNorm(context, size, 1e-6)
        self.rotary = RotaryEmbedding(context, config["head_dim"])
        self.attn = Attention(heads, 0)
        self.head = ParallelLMHead(context, "head", config["vocab_size"], size)

    def forward(self, input_ids_T, positions_T, attention):
        x_TD = self.table(input_ids_T)
        y_TD = self.norm(x_TD)
        q, k, v = self.qkv.split(self.qkv(y_TD))
        q, k = self.rotary(q, k, positions_T)
        z_TD = self.out(self.attn(q, k, v, attention)) + self.down(self.act(self.up(y_TD)))
        return self.mix(self.norm.add(z_TD, x_TD)[0])

    def compute_logits(self, hidden_SD):
        return self.head(hidden_SD)
'''
ALIEN_SHAPES = {
    "table.weight": (97, 64),
    "q_proj.weight": (128, 64),
    "k_proj.weight": (64, 64),
    "v_proj.weight": (64, 64),
    "out.weight": (64, 128),
    "a.weight": (96, 64),
    "b.weight": (96, 64),
    "down.weight": (64, 96),
    "mix.weight": (64, 64),
    "mix.bias": (64,),
    "norm.weight": (64,),
    "head.weight": (97, 64),
}

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
    "Alien": {
        "linear_bf16": 6,
        "rms_norm": 1,
        "add_rms_norm": 1,
        "rotary": 1,
        "silu_mul": 1,
        "attention": 1,
        "embedding": 1,
        "argmax": 1,
    },
}
PER_STEP["Qwen3ForCausalLM"] = PER_STEP["LlamaForCausalLM"] | {"rms_norm": 1 + 2 * NUM_LAYERS}


class Counted:
    """A native function that counts its calls; ctypes' settings go through to it."""

    def __init__(self, function, count):
        self.__dict__.update(function=function, count=count)

    def __setattr__(self, name, value):
        setattr(self.function, name, value)

    def __call__(self, *args):
        self.count()
        return self.function(*args)


@pytest.fixture
def calls(monkeypatch):
    """Calls of native operations by name, since the last `clear`."""
    found, library = Counter(), find_library()
    for name in {name for counts in PER_STEP.values() for name in counts} | {"linear_int8"}:
        function = getattr(library, f"dk_{name}")
        counted = Counted(function, lambda name=name: found.update([name]))
        monkeypatch.setattr(library, f"dk_{name}", counted)
    return found


def forbid(*_, **__):
    raise AssertionError("torch's own operation was called")


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def write(path, architecture):
    config = SHAPE | {"architectures": [architecture], "vocab_size": 97}
    shapes = llama_shapes(config)
    if architecture.startswith("Qwen3"):
        for number in range(NUM_LAYERS):
            for norm in ("q_norm", "k_norm"):
                shapes[f"model.layers.{number}.self_attn.{norm}.weight"] = (config["head_dim"],)
    if architecture == "Alien":
        (path / "alien.py").write_text(ALIEN)
        config["architectures"] = [f"{path}/alien.py:Alien"]
        shapes = ALIEN_SHAPES
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: (torch.randn(shape, generator=generator) * 0.1 + (len(shape) == 1)).bfloat16()
        for name, shape in shapes.items()
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path


def start(path, **options):
    return LLM(
        str(path),
        skip_tokenizer_init=True,
        trust_local_code=True,
        max_model_len=64,
        num_threads=1,
        num_gpu_blocks_override=8,
        block_size=16,
        enforce_eager=True,  # a replay calls the library once a step
        **options,
    )


def generate(llm):
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
    return llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("architecture", PER_STEP)
def test_all_of_a_model_is_native(architecture, tmp_path, calls, monkeypatch):
    llm = start(write(tmp_path, architecture))
    for name in ("rms_norm", "add_rms_norm", "rotary_embedding", "silu_and_mul", "best_tokens"):
        monkeypatch.setattr(TorchOps, name, forbid)
    monkeypatch.setattr(TorchLinearMethod, "apply", forbid)
    monkeypatch.setattr(torch.nn.functional, "linear", forbid)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", forbid)
    calls.clear()
    assert len(generate(llm)) == NUM_STEPS
    expected = {name: NUM_STEPS * count for name, count in PER_STEP[architecture].items()}
    assert calls == expected


def test_a_quantised_model_uses_its_own_products(tmp_path, calls):
    llm = start(write(tmp_path, "LlamaForCausalLM"), quantization="int8")
    calls.clear()
    generate(llm)
    assert calls["linear_int8"] == NUM_STEPS * (4 * NUM_LAYERS + 1)
    assert not calls["linear_bf16"]


def test_the_count_can_fail(tmp_path, calls):
    llm = start(write(tmp_path, "LlamaForCausalLM"), ops="torch", linear_method="onednn")
    calls.clear()
    generate(llm)
    assert set(calls) == {"attention"}


@pytest.mark.parametrize("architecture", PER_STEP)
def test_tokens_are_those_of_torch_but_for_rounding(architecture, tmp_path):
    path = write(tmp_path, architecture)
    native = generate(start(path))
    plain = generate(start(path, ops="torch", linear_method="torch", attention_backend="torch"))
    assert native[0] == plain[0]
