"""Run a trace in Vidur with the step-time model of `lab_vs_vidur.py`. The script prints JSON.

The script runs in an interpreter that has Vidur's requirements, in Vidur's checkout:

    python vidur_run.py TRACE.csv BATCH_SIZE CHUNK NUM_BLOCKS
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

from vidur.config import (
    ClusterConfig,
    MetricsConfig,
    SarathiSchedulerConfig,
    SimulationConfig,
    TraceRequestGeneratorConfig,
)
from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
from vidur.request_generator import RequestGeneratorRegistry
from vidur.simulator import Simulator

MAX_TOKENS = 16_384


class LinearTime:
    """The duration of a step: constants that `lab_vs_vidur.py` passes, in seconds."""

    def __init__(self, times: dict[str, float], batch: object) -> None:
        prefill = decodes = context = 0
        for request, count in zip(batch.requests, batch.num_tokens, strict=True):
            if count == 1:
                decodes += 1
                context += request.num_processed_tokens
            else:
                prefill += count
        self.total_time = self.model_time = (
            times["step"]
            + times["prefill_token"] * prefill
            + times["decode"] * decodes
            + times["kv_token"] * context
        )
        self.model_time_ms = self.model_time * 1e3


class LinearPredictor:
    """Implements the methods of an execution-time predictor that the simulator calls."""

    def __init__(self, times: dict[str, float]) -> None:
        self._times = times

    def get_execution_time(self, batch: object, pipeline_stage: int) -> LinearTime:
        """Return the time of a batch."""
        return LinearTime(self._times, batch)


def main() -> None:
    """Simulate and print the results."""
    trace, batch_size, chunk, num_blocks, times = sys.argv[1:6]
    constants = json.loads(times)
    ExecutionTimePredictorRegistry.get = lambda *_, **__: LinearPredictor(constants)
    requests = []
    create = RequestGeneratorRegistry.get

    def keep_requests(*arguments: object, **named: object) -> object:
        generator = create(*arguments, **named)
        generate = generator.generate

        def generated() -> list[object]:
            requests[:] = generate()
            return requests

        generator.generate = generated
        return generator

    RequestGeneratorRegistry.get = keep_requests
    with tempfile.TemporaryDirectory() as folder:
        config = SimulationConfig(
            log_level="error",
            cluster_config=ClusterConfig(
                replica_scheduler_config=SarathiSchedulerConfig(
                    batch_size_cap=int(batch_size),
                    chunk_size=int(chunk),
                    num_blocks=int(num_blocks),
                    block_size=16,
                )
            ),
            request_generator_config=TraceRequestGeneratorConfig(
                trace_file=trace, max_tokens=MAX_TOKENS
            ),
            metrics_config=MetricsConfig(
                write_metrics=False,
                enable_chrome_trace=False,
                store_plots=False,
                store_request_metrics=False,
                store_batch_metrics=False,
                store_utilization_metrics=False,
                output_dir=folder,
            ),
        )
        simulator = Simulator(config)
        simulator._write_output = lambda: None
        begun_s = time.process_time()
        simulator.run()
        cpu_s = time.process_time() - begun_s
    ttft = [item.prefill_completed_at - item.arrived_at for item in requests]
    e2e = [item.completed_at - item.arrived_at for item in requests]
    figures = {"cpu_s": cpu_s, "ttft_s": sum(ttft) / len(ttft), "e2e_s": sum(e2e) / len(e2e)}
    print(json.dumps({**figures, "num_requests": len(requests)}))


if __name__ == "__main__":
    main()
