"""The sections of the GPU check, their metrics and the targets of these metrics.

The check runs the sections of this list; the printed table and `docs/gpu.md` show them. A metric
that a run does not measure is shown as "never run". The script uses the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEEDS_DEVICE = frozenset({"needs a GPU"})
"""Accepted state of sections that some devices do not support."""
_OPTIONAL = frozenset({"lacks a package"})

H200_COPY_GB_S = 4300
"""Bandwidth of copies on an NVIDIA H200, from published measurements. Speed targets refer to it."""

TOTAL_S = 595.0
"""Time limit of the whole check: ten minutes, less some seconds to write the result."""

DEVICE_PLUGINS = (
    "platform:cuda",
    "worker:cuda",
    "attention:triton",
    "attention:flash_attn",
    "attention:flashinfer",
    "ops:triton",
    "ops:flashinfer",
    "platform:rocm",
    "worker:rocm",
    "platform:xpu",
    "worker:xpu",
)
"""Plugins for devices other than the CPU. Their manifests state where they were verified."""


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric. what: a short description. at_least, at_most: the target; None for no target."""

    name: str
    what: str
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def aim(self) -> str:
        """The target as text for tables, or "" if there is no target."""
        if self.at_least is not None:
            return f"≥ {self.at_least:,g} {self.unit}".rstrip()
        return "" if self.at_most is None else f"≤ {self.at_most:,g} {self.unit}".rstrip()

    def reached(self, value: float) -> bool:
        """Return whether `value` reaches the target. NaN does not."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most


@dataclass(frozen=True, kw_only=True)
class SectionSpec:
    """One part of the check, which runs in a separate process.

    question: the question that the section answers.
    deadline_s: time limit on a device.
    on_cpu: whether its result is useful on a CPU.
    metrics: the metrics that it measures.
    module: the module with its `run`; "" for the module of the same name in `gpu.sections`.
    accepted: states, besides "ok", that are not a failure of the check.
    """

    name: str
    question: str
    deadline_s: float
    on_cpu: bool = True
    metrics: tuple[MetricSpec, ...] = ()
    module: str = ""
    accepted: frozenset[str] = frozenset()


_SCALED = f"tokens/s scaled to the copy bandwidth of an H200, {H200_COPY_GB_S:,d} GB/s"
_AGREEMENT = (
    MetricSpec(
        name="max_error",
        what="largest difference of logits, float32",
        unit="",
        at_most=1e-4,
    ),
    MetricSpec(name="qualify", what="share of positions without ties", unit="%", at_least=95),
    MetricSpec(name="equal", what="share of equal tokens, without ties", unit="%", at_least=100),
)
_THROUGHPUT = (
    MetricSpec(name="load_s", what="start-up time with random weights", unit="s"),
    MetricSpec(name="one", what="one request, 128 prompt and 256 output tokens", unit="tokens/s"),
    MetricSpec(name="many", what="256 requests, 128 prompt and 256 output tokens", unit="tokens/s"),
    MetricSpec(name="launch_ms", what="median launch time at batch size 256", unit="ms"),
    MetricSpec(name="host_ms", what="host time per step at batch size 256", unit="ms"),
)


SECTIONS = (
    SectionSpec(
        name="machine",
        question="Which hardware does the machine have, and which packages are installed?",
        deadline_s=35,
    ),
    SectionSpec(
        name="probes",
        question="Which bandwidth and compute rate do torch's operations reach?",
        deadline_s=15,
        metrics=(
            MetricSpec(name="copy_gb_s", what="copy bandwidth (reads and writes)", unit="GB/s"),
            MetricSpec(name="read_gb_s", what="read bandwidth", unit="GB/s"),
            MetricSpec(name="gemm_tflop_s", what="bf16 matrix multiplication", unit="TFLOP/s"),
        ),
    ),
    SectionSpec(
        name="conformance",
        question="Do plugins pass the conformance kit, and do kernels match float64 results?",
        deadline_s=130,
    ),
    SectionSpec(
        name="parity",
        question="Do logits and tokens of generated models match transformers?",
        deadline_s=90,
        metrics=(
            *_AGREEMENT,
            MetricSpec(name="bf16_kl", what="mean KL divergence of bf16 from float32", unit="nat"),
            MetricSpec(name="bf16_top1", what="top-1 agreement, bf16 and float32", unit="%"),
        ),
    ),
    SectionSpec(
        name="backends",
        question="Do two attention backends give the same tokens, by the margin rule?",
        deadline_s=40,
        metrics=_AGREEMENT,
    ),
    SectionSpec(
        name="demo",
        question="How accurate is the demo model?",
        deadline_s=35,
        metrics=(MetricSpec(name="right", what="correct answers", unit="%", at_least=95),),
    ),
    SectionSpec(
        name="synchronization",
        question="Does the host wait for the device within a step?",
        deadline_s=30,
        on_cpu=False,
        metrics=(MetricSpec(name="waits", what="blocking synchronizations", unit="", at_most=0),),
    ),
    SectionSpec(
        name="memory",
        question="Is the memory limit respected, and is memory use constant?",
        deadline_s=40,
        metrics=(
            MetricSpec(name="used", what="memory use with a limit of 50 %", unit="%", at_most=52),
            MetricSpec(name="device_mib", what="device memory growth", unit="MiB", at_most=1),
            MetricSpec(name="host_mib", what="host memory growth", unit="MiB", at_most=32),
        ),
    ),
    SectionSpec(
        name="graphs",
        question="Do logits and tokens of all graph modes match transformers?",
        deadline_s=40,
        on_cpu=False,
        metrics=(
            *_AGREEMENT,
            MetricSpec(name="ratio", what="speed of one request, relative to eager", unit="%"),
        ),
    ),
    SectionSpec(
        name="sleep",
        question="Are tokens equal after sleep, and is the memory free meanwhile?",
        deadline_s=25,
        on_cpu=False,
        metrics=(
            MetricSpec(
                name="equal", what="share of requests with equal tokens", unit="%", at_least=100
            ),
            MetricSpec(
                name="released",
                what="share of weights and cache that is free",
                unit="%",
                at_least=95,
            ),
        ),
        accepted=_NEEDS_DEVICE,
    ),
    SectionSpec(
        name="offload",
        question="Are tokens equal with weights in host memory?",
        deadline_s=20,
        on_cpu=False,
        metrics=(
            MetricSpec(
                name="equal", what="share of requests with equal tokens", unit="%", at_least=100
            ),
            MetricSpec(name="ratio", what="speed of one request, relative to no offload", unit="%"),
        ),
    ),
    SectionSpec(
        name="compilation",
        question="Do compiled engines generate the tokens of eager engines?",
        deadline_s=40,
        on_cpu=False,
        metrics=(
            MetricSpec(
                name="equal", what="share of requests with equal tokens", unit="%", at_least=100
            ),
            MetricSpec(name="ratio", what="speed of one request, relative to eager", unit="%"),
            MetricSpec(
                name="seconds", what="time of the compiled engine, with its start", unit="s"
            ),
        ),
    ),
    SectionSpec(
        name="fp8_cache",
        question="Do engines with fp8 KV caches run, and how many tokens equal those of bf16?",
        deadline_s=30,
        on_cpu=False,
        metrics=tuple(
            MetricSpec(name=name, what=f"share of tokens equal to bf16: {what}", unit="%")
            for name, what in (
                ("e4m3_token", "e4m3, per-token scales"),
                ("e4m3_layer", "e4m3, per-layer scales"),
                ("e5m2_layer", "e5m2, per-layer scales"),
            )
        ),
        accepted=_NEEDS_DEVICE,
    ),
    SectionSpec(
        name="small_model",
        question="How fast is a model of the shape of Qwen3-0.6B, in bf16?",
        deadline_s=40,
        metrics=(
            *_THROUGHPUT[:-1],
            MetricSpec(name="host_ms", what=_THROUGHPUT[-1].what, unit="ms", at_most=3),
            MetricSpec(name="one_h200", what=f"one request, {_SCALED}", at_least=850),
            MetricSpec(name="many_h200", what=f"256 requests, {_SCALED}", at_least=22_000),
        ),
    ),
    SectionSpec(
        name="large_model",
        question="How fast is a model of the shape of Qwen3-8B, in bf16?",
        deadline_s=45,
        on_cpu=False,
        metrics=(
            *_THROUGHPUT,
            MetricSpec(
                name="read_share",
                what="weight bytes per second of one request, relative to reads",
                unit="%",
                at_least=78,
            ),
        ),
    ),
    SectionSpec(
        name="vllm",
        question="How fast is vLLM with the same model and requests, if it is installed?",
        deadline_s=55,
        on_cpu=False,
        metrics=(
            MetricSpec(name="one", what="one request, relative to vLLM", unit="%"),
            MetricSpec(name="many", what="256 requests, relative to vLLM", unit="%"),
        ),
        accepted=_OPTIONAL,
    ),
    SectionSpec(
        name="attention_kernels",
        question="Which share of the device's copy bandwidth does attention reach?",
        deadline_s=35,
        on_cpu=False,
        metrics=(
            MetricSpec(
                name="decode_copy_share",
                what="bandwidth of KV-cache reads in decode, relative to copies",
                unit="%",
                at_least=70,
            ),
        ),
    ),
    SectionSpec(
        name="ops_kernels",
        question="How fast are the kernels of other operations?",
        deadline_s=25,
        on_cpu=False,
    ),
)
"""All sections in execution order.

Deadlines are shares of the time that is left: a section gets more if earlier ones were fast, and
less if the installation or earlier sections took longer. Their sum is at most 1.3 times `TOTAL_S`.
"""


def section(name: str) -> SectionSpec:
    """Return a section by name. Raise KeyError if it does not exist."""
    return {item.name: item for item in SECTIONS}[name]
