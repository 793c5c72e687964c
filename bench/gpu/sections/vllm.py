"""Runs vLLM and Dovetail with the same model shape and requests, if vLLM is installed.

The shape of 0.6 B parameters with random bf16 weights, 128 random prompt tokens and 256 output
tokens, greedy, without prefix caches: as in the `small_model` section. Each engine runs in its own
process, one by one. Metrics are the rates of Dovetail relative to those of vLLM.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from gpu.processes import python_path, run_until
from gpu.report import Report, Task

_ENGINES = ("dovetail", "vllm")
_SIZES = {"num_in": 128, "num_out": 256, "num_many": 256}
_SMALL_SIZES = {"num_in": 8, "num_out": 8, "num_many": 4}
_REST_S = 5.0


def run(task: Task, report: Report) -> None:
    """Measure both engines. Raises ModuleNotFoundError if vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    from gpu.shapes import write_shape

    model = write_shape("tiny" if task.small else "qwen3-0.6b", task.folder)
    sizes = _SMALL_SIZES if task.small else _SIZES
    rates = {engine: _measure(engine, model, sizes, task, report) for engine in _ENGINES}
    if not all(rates.values()):
        return
    for name in ("one", "many"):
        own, other = rates["dovetail"][name], rates["vllm"][name]
        report.metric(name, 100 * own / other, note=f"{own:,.0f} and {other:,.0f} tokens/s")


def _measure(
    engine: str, model: Path, sizes: dict[str, int], task: Task, report: Report
) -> dict[str, float]:
    """Return the rates of an engine, or {} after reporting its failure."""
    folder = Path(mkdtemp(dir=task.folder))
    options = task.parts.options if engine == "dovetail" else {}
    output = {"engine": engine, "model": str(model), "options": options, "seed": task.seed, **sizes}
    ended = run_until(
        [sys.executable, "-m", "gpu.sections.vllm", json.dumps(output)],
        environment=python_path(),
        folder=folder,
        deadline_s=max((task.deadline_s - _REST_S) / len(_ENGINES), 1.0),
        apart=False,
    )
    rates = folder / "rates.json"
    if rates.is_file():
        result: dict[str, float] = json.loads(rates.read_text("utf-8"))
        return result
    report.fail(f"{engine} exited with code {ended.code}: {ended.output}")
    return {}


def main() -> None:
    """Measure one engine in this process, and write its rates to rates.json."""
    output: dict[str, Any] = json.loads(sys.argv[1])
    from gpu.engine_runs import random_prompts

    length = output["num_in"] + output["num_out"]
    common = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": length,
        "max_num_seqs": output["num_many"],
        "max_num_batched_tokens": 8192,
        **output["options"],
    }
    if output["engine"] == "vllm":
        from vllm import LLM, SamplingParams

        def wrap(prompts: list[list[int]]) -> list[Any]:
            return [{"prompt_token_ids": prompt} for prompt in prompts]

        common |= {"gpu_memory_utilization": 0.8}
    else:
        from dovetail import LLM, SamplingParams

        wrap = list
        common |= {"num_gpu_blocks_override": output["num_many"] * length // 16 + 64}
    llm = LLM(model=output["model"], **common)
    params = SamplingParams(temperature=0.0, max_tokens=output["num_out"], ignore_eos=True)
    rates = {}
    for name, number in (("one", 1), ("many", output["num_many"])):
        lengths = [output["num_in"]] * number
        for repeat in range(2):  # the first run warms up
            prompts = random_prompts(lengths, vocab_size=1000, seed=output["seed"] + repeat)
            start = time.perf_counter()
            llm.generate(wrap(prompts), params, use_tqdm=False)
            rates[name] = number * output["num_out"] / (time.perf_counter() - start)
    Path("rates.json").write_text(json.dumps(rates), "utf-8")


if __name__ == "__main__":
    main()
