"""What the check of a GPU consists of: its sections, their figures and what these must reach.

The one list that the check runs, the table prints and `docs/gpu.md` shows; what a run does not
bring is "never run". Depends on neither how anything is measured nor any device. Standard library
only.
"""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_S = 595.0
"""The whole check, at most: ten minutes, with some seconds to say what came of it."""

DEVICE_PLUGINS = (
    "platform:cuda",
    "worker:cuda",
    "attention:triton",
    "ops:triton",
    "platform:xpu",
    "worker:xpu",
)
"""Plugins that are made for devices other than the CPU: their manifests say where they ran."""


@dataclass(frozen=True, kw_only=True)
class FigureSpec:
    """One number. what: in a few words. at_least, at_most: what it must reach; None for no aim."""

    name: str
    what: str
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def aim(self) -> str:
        """What it must reach, as tables show it; "" for nothing."""
        if self.at_least is not None:
            return f"≥ {self.at_least:,g} {self.unit}".rstrip()
        return "" if self.at_most is None else f"≤ {self.at_most:,g} {self.unit}".rstrip()

    def reached(self, value: float) -> bool:
        """Return whether `value` is what it must be; a NaN never is."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most


@dataclass(frozen=True, kw_only=True)
class SectionSpec:
    """One part of the check, run in a process of its own.

    question: what it answers. deadline_s: how long it may take on a device. on_cpu: whether it has
    a meaning without one. figures: what it measures. module: whose `run` it is; "" for the one of
    its name in `gpu.sections`.
    """

    name: str
    question: str
    deadline_s: float
    on_cpu: bool = True
    figures: tuple[FigureSpec, ...] = ()
    module: str = ""


_THROUGHPUT = (
    FigureSpec(name="load_s", what="start with random weights", unit="s"),
    FigureSpec(name="one", what="one request, 128 in, 256 out", unit="tokens/s"),
    FigureSpec(name="many", what="256 requests, 128 in, 256 out each", unit="tokens/s"),
    FigureSpec(name="launch_ms", what="to launch a step of 256, median", unit="ms"),
    FigureSpec(name="host_ms", what="host's part of a step of 256", unit="ms"),
)


def _aimed(figures: tuple[FigureSpec, ...], **aims: FigureSpec) -> tuple[FigureSpec, ...]:
    return tuple(aims.get(one.name, one) for one in figures)


SECTIONS = (
    SectionSpec(
        name="machine",
        question="What is this machine, and what is installed?",
        deadline_s=40,
    ),
    SectionSpec(
        name="probes",
        question="What can the device do, with torch's own operations?",
        deadline_s=20,
        figures=(
            FigureSpec(name="copy_gb_s", what="copy, bytes read and written", unit="GB/s"),
            FigureSpec(name="gemm_tflop_s", what="bf16 matrix product", unit="TFLOP/s"),
        ),
    ),
    SectionSpec(
        name="conformance",
        question="Do the plugins keep their contracts here, kernels against float64 references?",
        deadline_s=130,
    ),
    SectionSpec(
        name="parity",
        question="Are logits and tokens those of transformers, on models made here?",
        deadline_s=90,
        figures=(
            FigureSpec(name="max_error", what="logits, float32, at most", unit="", at_most=1e-4),
            FigureSpec(name="qualify", what="positions clear of ties", unit="%", at_least=95),
            FigureSpec(name="equal", what="clear positions, same token", unit="%", at_least=100),
            FigureSpec(name="bf16_kl", what="bf16 against float32, mean KL divergence", unit="nat"),
            FigureSpec(name="bf16_top1", what="bf16 against float32, same best token", unit="%"),
        ),
    ),
    SectionSpec(
        name="backends",
        question="Do two attention backends give the same tokens, by the margin rule?",
        deadline_s=40,
        figures=(
            FigureSpec(name="max_error", what="logits, float32, at most", unit="", at_most=1e-4),
            FigureSpec(name="qualify", what="positions clear of ties", unit="%", at_least=95),
            FigureSpec(name="equal", what="clear positions, same token", unit="%", at_least=100),
        ),
    ),
    SectionSpec(
        name="demo",
        question="How often is the demo model right?",
        deadline_s=40,
        figures=(FigureSpec(name="right", what="right answers", unit="%", at_least=95),),
    ),
    SectionSpec(
        name="synchronisation",
        question="Does the host wait for the device within a step?",
        deadline_s=30,
        on_cpu=False,
        figures=(FigureSpec(name="waits", what="places that wait", unit="", at_most=0),),
    ),
    SectionSpec(
        name="memory",
        question="Is the share of memory kept, and does nothing grow?",
        deadline_s=40,
        figures=(
            FigureSpec(name="used", what="of the memory at a share of 50 %", unit="%", at_most=52),
            FigureSpec(name="device_mib", what="growth on the device", unit="MiB", at_most=1),
            FigureSpec(name="host_mib", what="growth on the host", unit="MiB", at_most=32),
        ),
    ),
    SectionSpec(
        name="small_model",
        question="How fast is the shape of 0.6 B parameters (Qwen3), in bf16?",
        deadline_s=50,
        figures=_aimed(
            _THROUGHPUT,
            one=FigureSpec(
                name="one", what="one request, 128 in, 256 out", unit="tokens/s", at_least=250
            ),
            many=FigureSpec(
                name="many", what="256 requests, the same each", unit="tokens/s", at_least=8000
            ),
            host_ms=FigureSpec(
                name="host_ms", what="host's part of a step of 256", unit="ms", at_most=3
            ),
        ),
    ),
    SectionSpec(
        name="large_model",
        question="How fast is the shape of 8 B parameters (Qwen3), in bf16?",
        deadline_s=55,
        on_cpu=False,
        figures=_THROUGHPUT,
    ),
    SectionSpec(
        name="attention_kernels",
        question="How near is attention to what the device can?",
        deadline_s=35,
        on_cpu=False,
        figures=(
            FigureSpec(
                name="decode_copy_share",
                what="decode's KV bytes, of copy bandwidth",
                unit="%",
                at_least=70,
            ),
        ),
    ),
    SectionSpec(
        name="ops_kernels",
        question="How fast are the other operations?",
        deadline_s=25,
        on_cpu=False,
    ),
)
"""All sections, in their order; the deadlines together are within `TOTAL_S`."""


def section(name: str) -> SectionSpec:
    """Return the section of that name; raise KeyError."""
    return {one.name: one for one in SECTIONS}[name]
