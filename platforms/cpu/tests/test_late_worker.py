"""Workers and engines that use CPU tensors with the code path of asynchronous devices.

Tokens and log-probabilities must equal those of the CPU worker exactly.
"""

from typing import ClassVar

import pytest

from dovetail import LLM, SamplingParams
from dovetail_cpu.platform import CPUPlatform
from dovetail_cpu.worker import CPUWorker
from dovetail_devkit.contexts import make_worker_context
from dovetail_devkit.harnesses.late_device import LateDevice
from dovetail_devkit.suites.worker import check_worker
from dovetail_devkit.tiny_model import write_tiny_llama

pytest.importorskip("dovetail_models")


class LateCPUWorker(CPUWorker):
    """A CPU worker whose device claims to be asynchronous. devices: all devices created."""

    provides = CPUWorker.provides | {"async_output"}
    devices: ClassVar[list] = []

    def init_device(self):
        super().init_device()
        device = LateDevice()
        self._runtime.asynchronous = lambda: device
        LateCPUWorker.devices.append(device)


PARAMS = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0.8, "seed": 4, "top_k": 20, "min_p": 0.01, "logprobs": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    {"temperature": 1.0, "seed": 6, "frequency_penalty": 0.5, "logit_bias": {5: 2.0}},
    {"temperature": 0, "stop_token_ids": list(range(0, 160, 9)), "min_tokens": 3},
    {"temperature": 0, "allowed_token_ids": list(range(40, 60))},
]
PROMPTS = [[5 + n, 6, 7, *range(8, 8 + 3 * n)] for n in range(len(PARAMS))]
PROMPTS += [[1, 2, 3, 4] * 5 + [n] for n in range(4)]  # a common prefix


def generate(path, worker_cls, **options):
    """Return the outputs of an engine with a small cache: requests wait and are preempted."""
    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        worker_cls=worker_cls,
        max_model_len=64,
        block_size=16,
        num_threads=1,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        **options,
    )
    more = PARAMS + [{"temperature": 0}] * 4
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **item) for item in more]
    try:
        outputs = llm.generate([list(prompt) for prompt in PROMPTS], params, use_tqdm=False)
        return [
            (out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs)
            for out in outputs
        ]
    finally:
        llm.shutdown()


@pytest.fixture
def checkpoint(tmp_path):
    return write_tiny_llama(tmp_path, tie_word_embeddings=True, vocab_size=160)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_gives_the_same_outputs_as_with_the_cpu_worker(checkpoint, dtype):
    expected = generate(checkpoint, CPUWorker, dtype=dtype, num_gpu_blocks_override=12)
    for ahead in (False, True):
        LateCPUWorker.devices.clear()
        actual = generate(
            checkpoint,
            LateCPUWorker,
            dtype=dtype,
            num_gpu_blocks_override=12,
            async_scheduling=ahead,
        )
        assert actual == expected
        assert LateCPUWorker.devices[0].num_waits > 20


def test_the_worker_meets_its_contract(checkpoint):
    check_worker(LateCPUWorker, make_worker_context(checkpoint, CPUPlatform()))
