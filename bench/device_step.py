"""Measure the host time of a greedy decode step on an asynchronous device with graphs.

Run `python bench/device_step.py [--runs N] [--json FILE]`. No GPU is needed. The time of a step is
the sum of

- "engine": scheduling and outputs, with an executor that does nothing (`step_overhead.py`);
- "runner": inputs, sampling and results (`runner_step.py`, "device"): its tensors are on the host,
  so that an operation takes the time of torch's dispatch, as on a device;
- "launches": the operations that a step submits to a device, in addition to their dispatch:
  `LAUNCH_US` for each operation and `GRAPH_US` for each graph. The fake device counts them on its
  timeline. The two costs are assumptions, typical of drivers for NVIDIA devices.

The graph contains the model, so the host time does not depend on the number of layers. The times of
engine and runner are medians over steps; with several runs, the median and the slowest run are
shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import runner_step  # noqa: E402
import step_overhead  # noqa: E402
import torch  # noqa: E402
from gpu.device_parts import PARTS, prepare_device  # noqa: E402
from gpu.shapes import write_shape  # noqa: E402

from dovetail import LLM, SamplingParams  # noqa: E402

LAUNCH_US, GRAPH_US = 4.0, 25.0
TARGETS_MS = {8: 0.8, 256: 3.0}
NUM_STEPS = 300
NUM_RUNS = 5
_NUM_COUNTED, _NUM_WARM_UP = 4, 3
_NUM_IN = 4


@dataclass
class Submitted:
    """Numbers of operations, views and graphs that the host submits to the device in a step."""

    launches: int = 0
    views: int = 0
    graphs: int = 0

    @property
    def launch_ms(self) -> float:
        """The assumed time that the driver needs. Views are not submitted to the driver."""
        return (self.launches * LAUNCH_US + self.graphs * GRAPH_US) / 1e3


class Counter:
    """Counts the work that the host submits to the fake device.

    step: counts since the last reset.
    """

    def __init__(self) -> None:
        self.step = Submitted()
        self._is_inside = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count while the block runs."""
        from dovetail_torch.fake_device.graphs import FakeGraph
        from dovetail_torch.fake_device.tensor import FakeDeviceTensor

        dispatch, replay = FakeDeviceTensor.__torch_dispatch__, FakeGraph.replay

        def counted_dispatch(_: type, func: Any, *args: Any) -> Any:
            return self._count("views" if _is_view(func) else "launches", dispatch, func, *args)

        def counted_replay(graph: Any) -> None:
            self._count("graphs", replay, graph)

        FakeDeviceTensor.__torch_dispatch__ = classmethod(counted_dispatch)
        FakeGraph.replay = counted_replay
        try:
            yield
        finally:
            FakeDeviceTensor.__torch_dispatch__, FakeGraph.replay = dispatch, replay

    def _count(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        if self._is_inside:
            return call(*args)
        setattr(self.step, what, getattr(self.step, what) + 1)
        self._is_inside = True
        try:
            return call(*args)
        finally:
            self._is_inside = False


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(item.alias_info is not None and not item.alias_info.is_write for item in returns)


def count_submitted(num_requests: int) -> Submitted:
    """Return the work that a decode step of an engine submits to the fake device.

    The number does not depend on the step: a differing step raises RuntimeError.
    """
    prepare_device("fake")
    num_out = _NUM_COUNTED + 2 * _NUM_WARM_UP
    options: dict[str, Any] = {
        **PARTS["fake"].options,
        "graph_mode": "full",
        "max_graph_size": num_requests,
        "dtype": "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "max_model_len": 16,
        "max_num_seqs": num_requests,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": num_requests + 8,
    }
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    prompts = [[1 + number + place for place in range(_NUM_IN)] for number in range(num_requests)]
    counter, steps = Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_shape("one-layer", Path(folder)))
        with LLM(model, **options) as llm, counter.counting():
            for number, prompt in enumerate(prompts):
                llm.llm_engine.add_request(f"request-{number}", prompt, params)
            for _ in range(_NUM_WARM_UP + _NUM_COUNTED):
                counter.step = Submitted()
                llm.llm_engine.step()
                steps.append(counter.step)
    counted = steps[_NUM_WARM_UP:]
    if any(step != counted[0] for step in counted):
        raise RuntimeError(f"the decode steps submit different work to the device: {counted}")
    return counted[0]


def runner_ms(num_requests: int, num_steps: int = NUM_STEPS) -> float:
    """Return the milliseconds of a runner's step on the path of asynchronous devices."""
    torch.set_num_threads(1)
    parts = replace(runner_step.TORCH_PARTS, asynchronous=runner_step.AtOnce())
    runner = runner_step.make_runner(num_requests, parts)
    plans = list(runner_step.plans(num_requests, num_steps, runner_step.SETTINGS["greedy"]))
    return runner_step.measure(runner, plans) / 1e3


def measure(num_requests: int, submitted: Submitted) -> dict[str, float]:
    """Return the host milliseconds of a step and their parts."""
    parts = {
        "engine_ms": step_overhead.measure(num_requests)["median_ms"],
        "runner_ms": runner_ms(num_requests),
        "launch_ms": submitted.launch_ms,
    }
    return {"host_ms": sum(parts.values()), **parts}


def main() -> None:
    """Measure each number of requests in `TARGETS_MS` and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    submitted = count_submitted(min(TARGETS_MS))
    print(f"A step submits {submitted.launches} operations and {submitted.graphs} graph(s).")
    print("requests  host ms  slowest  target  engine ms  runner ms  launch ms")
    runs = [{size: measure(size, submitted) for size in TARGETS_MS} for _ in range(args.runs)]
    results = {}
    for size in TARGETS_MS:
        ordered = sorted((run[size] for run in runs), key=lambda parts: parts["host_ms"])
        results[size] = item = ordered[len(ordered) // 2]
        slowest = ordered[-1]["host_ms"]
        print(
            f"{size:>8} {item['host_ms']:>8.2f} {slowest:>8.2f} {TARGETS_MS[size]:>7}"
            f" {item['engine_ms']:>10.2f} {item['runner_ms']:>10.2f} {item['launch_ms']:>10.2f}"
        )
    if args.json:
        entries = {"submitted": asdict(submitted), "steps": results}
        args.json.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
