"""Measure decode steps of one request at long contexts, compared with llama.cpp and OpenVINO.

Run `python bench/long_context.py --llamacpp-python PY` with the interpreter of an environment that
contains llama-cpp-python, gguf and numpy, and add `--openvino-python PY --openvino-model DIR` for
OpenVINO with a converted model (peers/README.md). Without them, only Dovetail is measured.

Method: the engines run in child processes with the same random weights in int8 (GGUF: Q8_0) and
the same prompt, whose prefill is not measured: all of them keep it as a cached prefix. A step is
the difference between outputs of 1 and of 1 + STEPS tokens, divided by STEPS. Engines alternate,
and each waits until the others are idle; each result is the median of the rounds. A round in which
other processes used more than 3 % of the machine is marked. `--layers` cuts the shape, because the
prefill of a very long prompt takes minutes: then a step has a larger share of the output layer. KV
caches: `auto` is bf16 (llama.cpp and OpenVINO: f16), `int8` has a scale per token and head
(llama.cpp: Q8_0, scales per 32; OpenVINO: u8). If the context is longer than the checkpoint's
maximum, Dovetail gets a higher maximum; the other engines do not check it.
`--plain` is needed for llama-cpp-python 0.3.36 on processors with AMX: its AMX layout crashes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from cases import HIGHEST_ID, LOWEST_ID
from peers.child import BENCH, Child
from peers.race import Watch, settle

OURS = "dovetail"
STEPS = 24
ROOM = STEPS + 8
"""Positions after the prompt that every engine has room for."""

DEADLINE_S = 900.0
GGML_Q8_0 = 8
LLAMACPP_CACHE = {
    "auto": {},
    "int8": {"type_k": GGML_Q8_0, "type_v": GGML_Q8_0, "flash_attn_type": 1},
}
OPENVINO_CACHE = {"auto": {"KV_CACHE_PRECISION": "f16"}, "int8": {"KV_CACHE_PRECISION": "u8"}}


class Contender:
    """An engine in a child process with one prompt in its cache."""

    def __init__(
        self, python: str, engine: str, model: Path, threads: int, options: Mapping[str, Any]
    ) -> None:
        self._child = Child(python, f"peers.engine_{engine}")
        self.pid = self._child.pid
        self._child.ask(
            "load",
            DEADLINE_S,
            model=str(model),
            weights="int8",
            threads=threads,
            options=dict(options),
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


def our_options(model: Path, context: int, cache: str) -> dict[str, Any]:
    """Return Dovetail's options: a cache of dtype `cache` with room for the context.

    If the checkpoint has a lower maximum of positions, the options raise it.
    """
    length = context + ROOM
    options: dict[str, Any] = {"max_model_len": length, "kv_cache_dtype": cache}
    maximum = json.loads((model / "config.json").read_text("utf-8"))["max_position_embeddings"]
    if length > maximum:
        options["hf_overrides"] = {"max_position_embeddings": length}
    return options


def contenders_of(requested: Any, model: Path) -> dict[str, Contender]:
    """Start the engines. Convert the checkpoint for llama.cpp on first use."""
    threads, cache = requested.threads, requested.cache
    ours = our_options(model, requested.context, cache)
    result = {OURS: Contender(sys.executable, OURS, model, threads, ours)}
    if requested.llamacpp_python:
        python, prefix = requested.llamacpp_python, model.with_name(f"{model.name}-gguf")
        file = Path(f"{prefix}-int8.gguf")
        if not file.exists():
            script = str(BENCH / "peers/convert_llamacpp.py")
            subprocess.run([python, script, str(model), str(prefix)], check=True)
        options = {
            "keep_prefix": True,
            "use_extra_bufts": not requested.plain,
            **LLAMACPP_CACHE[cache],
        }
        if requested.llamacpp_backend:
            options["backend"] = requested.llamacpp_backend
        result["llamacpp"] = Contender(python, "llamacpp", file, threads, options)
    if requested.openvino_python:
        python, converted = requested.openvino_python, requested.openvino_model
        options = OPENVINO_CACHE[cache]
        result["openvino"] = Contender(python, "openvino", converted, threads, options)
    return result


def measure(
    contenders: Mapping[str, Contender], prompt: list[int], rounds: int
) -> dict[str, list[tuple[float, bool]]]:
    """Return for each engine the milliseconds per step of each round, and if it was disturbed."""
    steps: dict[str, list[tuple[float, bool]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            idle = [other.pid for other in contenders.values() if other is not contender]
            settle(idle)
            with Watch(idle) as watch:
                step_ms = contender.step_ms(prompt)
            steps[name].append((step_ms, watch.seen()["disturbed"]))
    return steps


def main() -> None:
    """Print the step time of each engine in milliseconds, and the ratios."""
    requested = _parser().parse_args()
    if requested.openvino_python and not requested.openvino_model:
        raise SystemExit("--openvino-python needs --openvino-model")
    if not requested.model:
        from checkpoints import SHAPES, make_checkpoint

        if requested.shape not in SHAPES:
            raise SystemExit(f"--shape {requested.shape}: choose from {sorted(SHAPES)}")
        folder = Path(".bench").resolve()
        requested.model = make_checkpoint(requested.shape, folder, num_layers=requested.layers)
    source = random.Random(requested.context)
    prompt = [source.randint(LOWEST_ID, HIGHEST_ID) for _ in range(requested.context)]
    contenders = contenders_of(requested, requested.model)
    try:
        for name, contender in contenders.items():
            print(f"{name}: prefill in {contender.seconds(prompt, 1 + STEPS):.1f} s", flush=True)
        steps = measure(contenders, prompt, requested.rounds)
    finally:
        for contender in contenders.values():
            contender.close()
    middle = {name: median(ms for ms, _ in rounds) for name, rounds in steps.items()}
    for name, rounds in steps.items():
        spread = f"{min(rounds)[0]:.1f} - {max(rounds)[0]:.1f}"
        disturbed = sum(is_disturbed for _, is_disturbed in rounds)
        mark = f", disturbed in {disturbed} of {len(rounds)} rounds" if disturbed else ""
        print(f"{name}: {middle[name]:.2f} ms per step ({spread}{mark})")
    for name in (name for name in middle if name != OURS):
        ratio = middle[name] / middle[OURS]
        print(f"context {requested.context}, cache {requested.cache}: {ratio:.2f} x {name}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--cache", default="auto", choices=sorted(LLAMACPP_CACHE))
    parser.add_argument("--shape", default="qwen3-0.6b-shape", help="a name of checkpoints.py")
    parser.add_argument("--layers", type=int, default=0, help="0 for the layers of the shape")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="checkpoint; default: the shape in .bench")
    parser.add_argument("--llamacpp-python", default="", help="interpreter with llama-cpp-python")
    parser.add_argument(
        "--llamacpp-backend", default="", help="library of a CPU backend that is built separately"
    )
    parser.add_argument("--openvino-python", default="", help="interpreter with openvino-genai")
    parser.add_argument("--openvino-model", type=Path, help="the checkpoint, converted with int8")
    parser.add_argument(
        "--plain", action="store_true", help="llama.cpp keeps the layout of the file's weights"
    )
    return parser


if __name__ == "__main__":
    main()
