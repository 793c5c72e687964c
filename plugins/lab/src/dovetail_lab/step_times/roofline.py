"""The step-time model "roofline": a rough estimate from a model's sizes and a device's data sheet.

A step takes the longer of its computing time and its memory time (S. Williams et al., "Roofline: an
insightful visual performance model", 2009), plus a constant per step. Errors of 25 to 50 % are
usual: the model knows nothing about kernels. Use a calibration for times, and this model to see how
policies differ.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.errors import UserError
from dovetail.plan import SchedulerOutput
from dovetail_lab.simulation.previous_step import After
from dovetail_lab.simulation.setup import Times
from dovetail_lab.simulation.step_times import StepFeatures

_MAX_FILE_BYTES = 2**16
_MAX_STEP_NS = 10**15
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class DeviceSheet(BaseModel):
    """The properties of a device in its data sheet.

    tflops: dense matrix products of 16-bit numbers, in 10^12 operations per second.
    bandwidth_gb_s: memory bandwidth, in 10^9 bytes per second. compute_share, memory_share: the
    fractions of tflops and of the bandwidth that kernels achieve.
    step_us, layer_us: constant time per step, and per step and layer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tflops: Positive
    bandwidth_gb_s: Positive
    compute_share: Share = 0.6
    memory_share: Share = 0.8
    step_us: Annotated[float, Field(ge=0, le=1e9)] = 500.0
    layer_us: Annotated[float, Field(ge=0, le=1e9)] = 10.0


DEVICES: Mapping[str, DeviceSheet] = {
    "a100-80gb": DeviceSheet(tflops=312, bandwidth_gb_s=2039),
    "h100-sxm": DeviceSheet(tflops=989, bandwidth_gb_s=3350),
    "h200": DeviceSheet(tflops=989, bandwidth_gb_s=4800),
    "l4": DeviceSheet(tflops=121, bandwidth_gb_s=300),
    "mi300x": DeviceSheet(tflops=1307, bandwidth_gb_s=5300),
}
"""Device sheets by name, with the values of the vendors."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a dense decoder.

    token_flops, run_flops, pair_flops: operations per token, per sampled position, and per pair of
    a query token and a key token. weight_bytes: bytes that every step reads. kv_bytes: keys and
    values of one token.
    """

    num_layers: int
    token_flops: int
    run_flops: int
    pair_flops: int
    weight_bytes: int
    kv_bytes: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Return the sizes of a configuration. Raises UserError if it is not a dense decoder."""
        if any("expert" in name for name in config):
            raise UserError("step_times: roofline supports dense models, not mixtures of experts.")
        try:
            hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
            heads = int(config["num_attention_heads"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            head = int(config.get("head_dim") or hidden // heads)
            inner, vocab = int(config["intermediate_size"]), int(config["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"step_times: the model's configuration has no usable field {error}; roofline "
                "needs hidden_size, num_hidden_layers, num_attention_heads, intermediate_size and "
                "vocab_size."
            ) from error
        size = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
        layer = hidden * head * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
        return cls(
            num_layers=layers,
            token_flops=2 * layers * layer,
            run_flops=2 * vocab * hidden,
            pair_flops=4 * layers * heads * head,
            weight_bytes=size * (layers * layer + vocab * hidden),
            kv_bytes=2 * size * layers * kv_heads * head,
        )


class RooflineStepTimes:
    """Computes step times from a model's sizes and a device."""

    def __init__(self, name: str, sizes: ModelSizes, device: DeviceSheet) -> None:
        self.name = f"roofline:{name} (rough)"
        self._sizes = sizes
        self._flops_per_ns = device.tflops * 1e3 * device.compute_share
        self._bytes_per_ns = device.bandwidth_gb_s * device.memory_share
        self._constant_ns = 1e3 * (device.step_us + device.layer_us * sizes.num_layers)

    def step_ns(self, plan: SchedulerOutput) -> int:
        """Return the time of one step."""
        features = StepFeatures.of(plan)
        num_tokens = features.num_prefill_tokens + features.num_decodes
        num_runs = features.num_prefills + features.num_decodes
        pairs = features.num_kv_tokens + features.num_context_pairs
        kv_tokens = features.num_kv_tokens + num_tokens
        return int(self._times(num_tokens, num_runs, np.array([pairs]), np.array([kv_tokens]))[0])

    def decode_times_ns(self, num_requests: int, num_kv_tokens: int, num_steps: int) -> Times:
        """Return the times of consecutive decode steps of the same requests."""
        pairs = num_kv_tokens + num_requests * np.arange(num_steps, dtype=np.int64)
        return self._times(num_requests, num_requests, pairs, pairs + num_requests)

    def _times(self, num_tokens: int, num_runs: int, pairs: Times, kv_tokens: Times) -> Times:
        sizes = self._sizes
        flops = float(sizes.token_flops * num_tokens + sizes.run_flops * num_runs)
        compute_ns = (flops + float(sizes.pair_flops) * pairs) / self._flops_per_ns
        memory_ns = (sizes.weight_bytes + float(sizes.kv_bytes) * kv_tokens) / self._bytes_per_ns
        times = self._constant_ns + np.maximum(compute_ns, memory_ns)
        return np.clip(times, 1, _MAX_STEP_NS).astype(np.int64)

    def batch_change_ns(self, after: After) -> int:
        """Return 0: the data sheet does not contain it."""
        return 0

    def gap_ns(self, num_runs: int, num_prefill_tokens: int = 0) -> int:
        """Return 0: the constant per step includes the host's time."""
        return 0


def read_device(reference: str) -> DeviceSheet:
    """Return a sheet of `DEVICES` by name, or the sheet in a TOML file."""
    if reference in DEVICES:
        return DEVICES[reference]
    path = Path(reference)
    if not os.path.isfile(path):
        raise UserError(
            f"step_times: the device {reference!r} is neither a file nor one of "
            f"{', '.join(DEVICES)}."
        )
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UserError(f"{reference!r} is larger than {_MAX_FILE_BYTES:,} bytes.")
        return DeviceSheet.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{reference!r} is not a device sheet: {error}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "file"
        raise UserError(f"{reference!r}: {name}: {first['msg']}.") from error
