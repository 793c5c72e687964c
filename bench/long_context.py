"""Measure decode steps of one request at long contexts, compared with llama.cpp.

Run `python bench/long_context.py --peer-python PY` with the interpreter of an environment that
contains llama-cpp-python, gguf and numpy (peers/README.md). Without it, only Dovetail is measured.

Method: both engines run in child processes with the same random weights in int8 (GGUF: Q8_0) and
the same prompt, whose prefill is not measured: both keep it as a cached prefix. A step is the
difference between outputs of 1 and of 1 + STEPS tokens, divided by STEPS. Engines alternate; each
result is the median of the rounds. `--layers` cuts the 0.6B shape, because the prefill of a very
long prompt takes minutes: then a step has a larger share of the output layer. KV caches: `auto` is
bf16 (llama.cpp: f16), `int8` has a scale per token and head (llama.cpp: Q8_0, scales per 32).
`--plain` is needed for llama-cpp-python 0.3.36 on processors with AMX: its AMX layout crashes.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from cases import HIGHEST_ID, LOWEST_ID
from peers.child import BENCH, Child

STEPS = 24
DEADLINE_S = 900.0
GGML_Q8_0 = 8
PEER_CACHE = {
    "auto": {},
    "int8": {"type_k": GGML_Q8_0, "type_v": GGML_Q8_0, "flash_attn_type": 1},
}


class Contender:
    """An engine in a child process with one prompt in its cache."""

    def __init__(self, python: str, engine: str, model: Path, requested: Any, options: Any) -> None:
        self._child = Child(python, f"peers.engine_{engine}")
        self._child.ask(
            "load",
            DEADLINE_S,
            model=str(model),
            weights="int8",
            threads=requested.threads,
            options=options,
        )

    def seconds(self, prompt: list[int], num_tokens: int) -> float:
        """Return the seconds of one response. The cache has room for the longest one."""
        response = self._child.ask(
            "generate", DEADLINE_S, prompts=[prompt], output_lens=[num_tokens]
        )
        return float(response["seconds"])

    def step_ms(self, prompt: list[int]) -> float:
        """Return the mean time of a step after the prompt, in milliseconds."""
        first = self.seconds(prompt, 1)
        return (self.seconds(prompt, 1 + STEPS) - first) / STEPS * 1e3

    def close(self) -> None:
        """Terminate the process."""
        self._child.close()


def contenders_of(requested: Any, model: Path) -> dict[str, Contender]:
    """Start the engines. Convert the checkpoint for llama.cpp on first use."""
    ours = {"max_model_len": requested.context + 256, "kv_cache_dtype": requested.cache}
    result = {"dovetail": Contender(sys.executable, "dovetail", model, requested, ours)}
    if requested.peer_python:
        prefix = model.with_name(f"{model.name}-gguf")
        file = Path(f"{prefix}-int8.gguf")
        if not file.exists():
            script = str(BENCH / "peers/convert_llamacpp.py")
            subprocess.run([requested.peer_python, script, str(model), str(prefix)], check=True)
        options = {
            "keep_prefix": True,
            "use_extra_bufts": not requested.plain,
            **PEER_CACHE[requested.cache],
        }
        result["llamacpp"] = Contender(requested.peer_python, "llamacpp", file, requested, options)
    return result


def main() -> None:
    """Print the step time of each engine in milliseconds, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--cache", default="auto", choices=sorted(PEER_CACHE))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="checkpoint; default: the 0.6B shape in .bench")
    parser.add_argument("--peer-python", default="")
    parser.add_argument(
        "--plain", action="store_true", help="llama.cpp keeps the layout of the file's weights"
    )
    requested = parser.parse_args()
    if not requested.model:
        from checkpoints import make_checkpoint

        folder = Path(".bench").resolve()
        requested.model = make_checkpoint("qwen3-0.6b-shape", folder, num_layers=requested.layers)
    source = random.Random(requested.context)
    prompt = [source.randint(LOWEST_ID, HIGHEST_ID) for _ in range(requested.context)]
    contenders = contenders_of(requested, requested.model)
    try:
        for name, contender in contenders.items():
            print(f"{name}: prefill in {contender.seconds(prompt, 1 + STEPS):.1f} s", flush=True)
        steps: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(requested.rounds):
            for name, contender in contenders.items():
                steps[name].append(contender.step_ms(prompt))
    finally:
        for contender in contenders.values():
            contender.close()
    for name, times in steps.items():
        spread = f"{min(times):.1f} - {max(times):.1f}"
        print(f"{name}: {median(times):.2f} ms per step ({spread})")
    if len(steps) > 1:
        ratio = median(steps["llamacpp"]) / median(steps["dovetail"])
        print(f"context {requested.context}, cache {requested.cache}: {ratio:.2f} x llama.cpp")


if __name__ == "__main__":
    main()
