"""The worker's life cycle on a fake runtime, with a model and plugins that this file defines."""

import json
from array import array
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dovetail.config import EngineArgs
from dovetail.config.resolve import resolve
from dovetail.errors import CapacityError, ConfigError, ModelError, PluginError, PluginNotFoundError
from dovetail.interfaces import (
    KVCacheConfig,
    ModelInfo,
    Platform,
    PlatformInfo,
    Probe,
    WorkerContext,
)
from dovetail.kv_cache.grouping import group_layers
from dovetail.plan import NewRequest, StepBuilder
from dovetail.plugins import PluginRegistry
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.fakes.attention import FakeAttentionBackend, FakeAttentionLayer
from dovetail_torch.layers import Attention, TorchLinearMethod
from dovetail_torch.layers.linear import HeadShape, MergedColumnParallelLinear, RowParallelLinear
from dovetail_torch.worker import TorchWorker

V, D = 11, 8


class Runtime:
    """A runtime with simulated memory. `calls`: names of the called methods, in order."""

    def __init__(self):
        self.calls, self.total, self.used, self.peak = [], 1_000_000, 100_000, 3_200

    def activate(self, local_rank, *, num_threads):
        self.calls.append(("activate", local_rank, num_threads))
        return torch.device("cpu")

    def total_memory_bytes(self):
        return self.total

    def memory_in_use_bytes(self):
        return self.used

    def reset_peak(self):
        self.calls.append("reset_peak")

    def peak_bytes(self):
        self.calls.append("peak")
        return self.peak

    def max_profile_tokens(self):
        return 32

    def synchronize(self):
        self.calls.append("synchronize")


class Somewhere(Platform):
    info = PlatformInfo(name="somewhere", device_type="cpu")

    def __init__(self):
        self.given = Runtime()

    @classmethod
    def probe(cls):
        return Probe(usable=True)

    def capabilities(self):
        return frozenset({"dtype.float32"})

    def total_memory_bytes(self, local_rank=0):
        return 1

    def prefer(self, kind):
        return {"ops": ("torch",), "linear_method": ("torch",)}.get(kind, ())

    def runtime(self):
        return self.given


class Tiny(nn.Module):
    """A model with an embedding, one attention layer and a fused LM head. Stores its inputs."""

    CONTRACT, CONTRACT_VERSION = "model", "0.8"
    architectures = ("Tiny",)
    soft_cap, sliding_window = 0.0, 0

    def __init__(self, context):
        super().__init__()
        self.context, self.sizes = context, []
        weight_VD = torch.empty(V, D, dtype=context.dtype, device=context.device)
        self.embedding = nn.Parameter(weight_VD, requires_grad=False)
        self.mix = MergedColumnParallelLinear(context, "mix", D, {"left": D // 2, "right": D // 2})
        heads = HeadShape(num_heads=1, num_kv_heads=1, head_size=D)
        self.attn = Attention(heads, 0, soft_cap=self.soft_cap, sliding_window=self.sliding_window)
        self.head = RowParallelLinear(context, "head", D, V)

    def forward(self, input_ids_T, positions_T, attention):
        self.sizes.append(len(input_ids_T))
        assert int(positions_T.max()) < self.context.max_model_len
        x_T1D = self.mix(self.embedding[input_ids_T]).unsqueeze(1)
        return self.attn(x_T1D, x_T1D, x_T1D, attention)

    def compute_logits(self, hidden_SD):
        return self.head(hidden_SD)


class Capped(Tiny):
    soft_cap, sliding_window = 5.0, 3


class SinkModel(Tiny):
    """A model with an attention sink."""

    def __init__(self, context):
        super().__init__(context)
        self.attn.sinks = torch.tensor([3.0])


class Packing(TorchLinearMethod):
    """Counts how often each layer is packed."""

    packed: ClassVar[list] = []

    def pack(self, layer):
        Packing.packed.append(layer.shape.name)
        assert layer.weight.abs().sum() > 0, "packed before it was loaded"


class Registry(PluginRegistry):
    """A plugin registry that finds the models of this file by their architecture."""

    def resolve(self, kind, reference):
        if kind == "model":
            reference = f"{__name__}:{reference}"
        return super().resolve(kind, reference)

    def load(self, kind, reference):
        here = {"Tiny": Tiny, "Capped": Capped, "SinkModel": SinkModel}
        return here[reference] if kind == "model" else super().load(kind, reference)


@pytest.fixture
def model_dir(tmp_path):
    generator = torch.Generator().manual_seed(5)
    shapes = {"embedding": (V, D), "left.weight": (D // 2, D), "right.weight": (D // 2, D)}
    weights = {
        name: torch.randn(shape, generator=generator)
        for name, shape in (shapes | {"head.weight": (V, D)}).items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    write_config(tmp_path)
    return tmp_path


def write_config(folder, **changes):
    stated = {"architectures": ["Tiny"], "vocab_size": V, "max_position_embeddings": 48}
    (folder / "config.json").write_text(json.dumps(stated | changes))


@pytest.fixture
def make(model_dir):
    def build(**options):
        platform = Somewhere()
        engine_args = {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
            "block_size": 4,
            "attention_backend": FakeAttentionBackend,
            "gpu_memory_utilization": 0.5,
            "num_threads": 1,
        }
        args = EngineArgs(model=model_dir, **(engine_args | options))
        config = resolve(args.create_engine_config(), platform).worker_config()
        context = WorkerContext(config=config, platform=platform, plugins=Registry(), local_rank=3)
        return TorchWorker(context), platform.given

    return build


@pytest.fixture
def loaded(make):
    def build(**options):
        worker, runtime = make(**options)
        worker.init_device()
        worker.load_model()
        return worker, runtime

    return build


def start(worker, num_blocks=20):
    groups = group_layers([worker.get_kv_cache_spec()], block_size=4, max_model_len=64)
    worker.initialize_cache(KVCacheConfig(num_blocks=num_blocks, groups=groups))
    worker.compile_or_warm_up_model()


def test_creating_a_worker_uses_no_device(make):
    _, runtime = make()
    assert runtime.calls == []


def test_the_worker_activates_the_device_of_its_local_rank(make):
    worker, runtime = make(num_threads=2)
    worker.init_device()
    assert runtime.calls == [("activate", 3, 2)]


def test_the_model_is_loaded_and_packed_once(loaded):
    Packing.packed = []
    worker, _ = loaded(linear_method=Packing)
    assert Packing.packed == ["mix", "head"]
    assert worker.get_model_info() == ModelInfo(vocab_size=V)
    assert not worker._model.training
    context = worker._model.context
    assert context.max_model_len == 48 and context.dtype == torch.float32


def test_each_layer_has_a_kv_cache_spec(loaded):
    worker, _ = loaded(block_size=8)
    (spec,) = worker.get_kv_cache_spec().values()
    assert (spec.block_size, spec.num_kv_heads, spec.head_size) == (8, 1, D)
    assert spec.dtype == "float32" and spec.page_size_bytes == 2 * 8 * D * 4


def test_the_cache_gets_the_memory_that_the_largest_step_does_not_use(loaded):
    worker, runtime = loaded()
    runtime.calls.clear()
    # Expected: half of the memory, minus the memory in use, minus twice the peak of half a step.
    assert worker.determine_available_memory() == 500_000 - 100_000 - 2 * 3_200
    assert worker._model.sizes == [1, 32]  # the first run is at the last position
    assert runtime.calls == ["reset_peak", "synchronize", "peak"]


def test_the_error_for_too_little_cache_memory_states_the_memory_in_use(loaded):
    worker, runtime = loaded(gpu_memory_utilization=0.1)
    runtime.total = 1_000_000
    with pytest.raises(CapacityError, match=r"gpu_memory_utilization=0\.1 allows .* raise gpu_mem"):
        worker.determine_available_memory()


def test_the_warm_up_is_one_run_of_a_short_prompt(loaded):
    """A run reads all weights: a tenth of a second for a billion parameters."""
    worker, runtime = loaded()
    start(worker)
    assert worker._model.sizes == [1, 8]
    assert runtime.calls[-1] == "synchronize"


def test_the_warm_up_of_a_model_uses_only_its_valid_positions(loaded):
    worker, _ = loaded(max_model_len=5)
    start(worker)
    assert worker._model.sizes == [1, 5]


def answer(worker, prompt, num_tokens):
    """Run one request step by step and return its tokens."""
    builder, tokens = StepBuilder(), []
    builder.join(
        NewRequest(
            request_id="a",
            row=0,
            generation=1,
            token_ids=array("i", prompt),
            num_prompt_tokens=len(prompt),
            sampling_params=SamplingParams(temperature=0, max_tokens=num_tokens),
            stop_token_ids=frozenset(),
            bad_words_token_ids=(),
            seed=0,
        )
    )
    builder.grow(0, [5, 2, 9])
    start, count = 0, len(prompt)
    for _ in range(num_tokens):
        builder.run(0, start, count, samples=True)
        worker.execute_model(builder.build())
        tokens += worker.sample_tokens().token_ids
        start, count = start + count, 1
    return tokens


def dense(worker, prompt, num_tokens):
    """Return the expected tokens: compute the whole sequence in each step, without a cache."""
    model, tokens = worker._model, list(prompt)
    for _ in range(num_tokens):
        x_TD = model.embedding[tokens] @ model.mix.weight.T
        scores = x_TD[-1] @ x_TD.T * D**-0.5
        tokens.append(int((scores.softmax(-1) @ x_TD @ model.head.weight.T).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("backend", ["torch", FakeAttentionBackend])
def test_the_worker_generates_the_same_tokens_as_the_model_without_a_cache(loaded, backend):
    if backend == "torch":
        pytest.importorskip("dovetail_attn_torch")
    worker, _ = loaded(attention_backend=backend)
    start(worker)
    assert answer(worker, [1, 2, 3, 4, 5], 6) == dense(worker, [1, 2, 3, 4, 5], 6)


def test_the_attention_backend_receives_the_requirements_of_the_model(
    loaded, model_dir, monkeypatch
):
    all_requirements = []
    refusals = classmethod(lambda cls, requirements: all_requirements.append(requirements) or ())
    monkeypatch.setattr(FakeAttentionBackend, "refusals", refusals)
    write_config(model_dir, architectures=["Capped"])
    loaded()
    (requirements,) = all_requirements
    assert requirements.features == {"soft_cap", "sliding_window"}
    assert (
        requirements.head_size,
        requirements.num_heads,
        requirements.num_kv_heads,
        requirements.block_size,
    ) == (D, 1, 1, 4)
    assert requirements.dtype == requirements.kv_cache_dtype == "float32"


def test_attention_sinks_become_a_requirement_and_are_passed_to_the_layer(
    loaded, model_dir, monkeypatch
):
    all_requirements, contexts = [], []

    def create_layer(context):
        contexts.append(context)
        return FakeAttentionLayer(context)

    refusals = classmethod(lambda cls, requirements: all_requirements.append(requirements) or ())
    monkeypatch.setattr(FakeAttentionBackend, "refusals", refusals)
    monkeypatch.setattr(FakeAttentionBackend, "create_layer", staticmethod(create_layer))
    write_config(model_dir, architectures=["SinkModel"])
    worker, _ = loaded()
    start(worker)
    assert all_requirements[0].features == {"sinks"}
    assert contexts[0].sinks is worker._model.attn.sinks


def test_an_attention_backend_that_rejects_the_requirements_is_not_used(loaded, monkeypatch):
    refusals = classmethod(lambda cls, requirements: ["it is Sunday"])
    monkeypatch.setattr(FakeAttentionBackend, "refusals", refusals)
    with pytest.raises(PluginError, match=r"'FakeAttentionBackend' was requested .*: it is Sunday"):
        loaded()


def test_the_error_for_an_unknown_plugin_contains_its_name(loaded):
    with pytest.raises(PluginNotFoundError, match="no ops plugin 'tosch'"):
        loaded(ops="tosch")


@pytest.mark.parametrize("actual", [None, "many", 1.5])
def test_a_model_config_without_an_integer_vocab_size_is_rejected(loaded, model_dir, actual):
    write_config(model_dir, vocab_size=actual)
    with pytest.raises((ConfigError, ModelError), match=rf"vocab_size.*{actual!r}"):
        loaded()


def test_a_worker_can_be_shut_down_at_any_time_and_twice(make, loaded):
    worker, _ = make()
    worker.shutdown()
    worker, _ = loaded()
    worker.shutdown()
    worker.shutdown()
    assert not hasattr(worker, "_model") and not hasattr(worker, "_runner")
