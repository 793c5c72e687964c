"""One plugin of each kind, written outside of this repository. Each counts its calls.

The tests copy this file to an empty directory on sys.path and name its classes.
"""

from __future__ import annotations

from collections import Counter

import torch
from safetensors.torch import load_file
from torch import nn

from dovetail.errors import ContractError
from dovetail.interfaces import (
    Executor,
    LinearMethod,
    Ops,
    Platform,
    PlatformInfo,
    Policy,
    Probe,
    Ready,
    WeightLoader,
    WorkerContext,
)
from dovetail.scheduling import Scheduler
from dovetail_cpu.runtime import CPURuntime
from dovetail_devkit.fakes.attention import FakeAttentionBackend, FakeAttentionLayer
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_models.families.llama import LlamaForCausalLM
from dovetail_torch.weights import build_weight_table
from dovetail_torch.worker import TorchWorker

CALLS: Counter[str] = Counter()


class MyScheduler(Scheduler):
    def schedule(self):
        CALLS["schedule"] += 1
        return super().schedule()


class MyPolicy(Policy):
    """Serves the newest request first (LIFO)."""

    def rank(self, request, view):
        CALLS["rank"] += 1
        return -request.sequence


class MyWorker(TorchWorker):
    def execute_model(self, plan):
        CALLS["execute_model"] += 1
        super().execute_model(plan)


class MyExecutor(Executor):
    """An executor that calls one worker directly."""

    def __init__(self, context):
        self._worker = context.worker_cls(
            WorkerContext(
                config=context.config.worker, platform=context.platform, plugins=context.plugins
            )
        )
        self._worker.init_device()
        self._worker.load_model()

    def collective_rpc(self, operation, *, args=(), kwargs=None, unique_reply_rank=None, **more):
        if isinstance(operation, str):
            if not hasattr(self._worker, operation):
                raise ContractError(f"no operation {operation!r}")
            response = getattr(self._worker, operation)(*args, **(kwargs or {}))
        else:
            response = operation(self._worker, *args, **(kwargs or {}))
        return [response] if unique_reply_rank is None else response

    def execute_model(self, plan):
        CALLS["executor"] += 1
        return Ready(self._worker.execute_model(plan))

    def sample_tokens(self, grammar=None):
        return Ready(self._worker.sample_tokens(grammar))

    def check_health(self):
        pass

    def shutdown(self):
        self._worker.shutdown()


class MyLayer(FakeAttentionLayer):
    def forward(self, *tensors):
        CALLS["attention"] += 1
        super().forward(*tensors)


class MyAttention(FakeAttentionBackend):
    name = "mine"

    @staticmethod
    def create_layer(context):
        return MyLayer(context)


class MyOps(Ops):
    def rms_norm(self, x_TD, weight_D, eps):
        CALLS["norm"] += 1
        return x_TD * torch.rsqrt(x_TD.pow(2).mean(-1, keepdim=True) + eps) * weight_D

    def add_rms_norm(self, x_TD, residual_TD, weight_D, eps):
        total_TD = x_TD + residual_TD
        return self.rms_norm(total_TD, weight_D, eps), total_TD

    def rotary_embedding(self, q_THS, k_TKS, positions_T, cos_sin_PS):
        cos_T1F, sin_T1F = cos_sin_PS[positions_T].unsqueeze(1).chunk(2, dim=-1)
        return tuple(self._turn(x, cos_T1F, sin_T1F) for x in (q_THS, k_TKS))

    @staticmethod
    def _turn(x, cos, sin):
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def silu_and_mul(self, x_T2D):
        gate, up = x_T2D.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * up


class MyLinear(LinearMethod):
    """Keeps the weights transposed."""

    def create(self, layer, shape):
        weight = torch.empty(shape.out_features, shape.in_features, dtype=shape.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)

    def pack(self, layer):
        CALLS["pack"] += 1
        layer.turned = layer.weight.t().contiguous()

    def apply(self, layer, x_TI):
        CALLS["linear"] += 1
        return x_TI @ layer.turned


class MyLoader(WeightLoader):
    def __init__(self, context):
        self.context = context

    def load(self, model):
        CALLS["load"] += 1
        weights = load_file(self.context.model_dir / "model.safetensors")
        table = build_weight_table(model)
        with torch.no_grad():
            for name, assignment in table.select(weights.keys(), "mine").items():
                assignment.target.copy_(weights[name])
        return 1


class MyTokenizer(ByteTokenizer):
    def encode(self, text, *, add_special_tokens=True):
        CALLS["encode"] += 1
        return super().encode(text, add_special_tokens=add_special_tokens)


class MyRuntime(CPURuntime):
    def activate(self, local_rank, *, num_threads):
        CALLS["activate"] += 1
        return super().activate(local_rank, num_threads=num_threads)


class MyPlatform(Platform):
    info = PlatformInfo(name="mine", device_type="cpu")

    @classmethod
    def probe(cls):
        return Probe(usable=True)

    def capabilities(self):
        return frozenset({"dtype.float32"})

    def total_memory_bytes(self, local_rank=0):
        return 1 << 30

    def prefer(self, kind):
        CALLS["prefer"] += 1
        names = {
            "worker": "cpu",
            "executor": "uniproc",
            "attention": "torch",
            "linear_method": "onednn",
        }
        return (names.get(kind, "torch"),)

    def runtime(self):
        return MyRuntime()


class MyModel(LlamaForCausalLM):
    architectures = ("MineForCausalLM",)

    def forward(self, *tensors):
        CALLS["forward"] += 1
        return super().forward(*tensors)
