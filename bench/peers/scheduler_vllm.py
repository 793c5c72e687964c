"""A child process that measures the host time of vLLM's scheduler, as `step_overhead.py` does.

It runs `vllm.v1.core.sched.scheduler.Scheduler` with prefix caching and statistics and without a
model. Each step is `schedule` and `update_from_output`, and only these two calls are timed; the
synthetic result between them (token 7 for every request) is not. It runs in an environment with
vLLM; the parent sends the numbers of requests, tokens and steps.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.serving import serve

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
SAMPLED = 7


def measure(
    num_requests: int, prompt_len: int, num_steps: int, num_warm_up: int, block_size: int
) -> dict[str, Any]:
    """Return the milliseconds per step for a number of decoding requests: median, p10, p90."""
    scheduler = _scheduler(num_requests, prompt_len, num_steps, block_size)
    _add_requests(scheduler, num_requests, prompt_len, num_steps, block_size)
    gc.collect()
    gc.freeze()
    seconds = []
    while scheduler.has_unfinished_requests():
        begin = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        result = _result(list(plan.num_scheduled_tokens))
        answered = time.perf_counter()
        scheduler.update_from_output(plan, result)
        seconds.append(planned - begin + time.perf_counter() - answered)
    if len(seconds) != num_steps:
        raise RuntimeError(
            f"{len(seconds)} steps instead of {num_steps}: not all requests ran at the same time"
        )
    decodes = sorted(seconds[num_warm_up : num_steps - 1])
    return {
        "num_requests": num_requests,
        "median_ms": statistics.median(decodes) * 1e3,
        "p10_ms": decodes[len(decodes) // 10] * 1e3,
        "p90_ms": decodes[len(decodes) * 9 // 10] * 1e3,
    }


def _scheduler(num_requests: int, prompt_len: int, num_steps: int, block_size: int) -> Any:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    length = prompt_len + num_steps + 2
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            block_size=block_size,
            max_model_len=2 * length,
            max_num_seqs=num_requests,
            max_num_batched_tokens=max(2048, num_requests * prompt_len),
            enable_prefix_caching=True,
            async_scheduling=False,
        ).create_engine_config()
    num_blocks = num_requests * -(-length // block_size) + 64
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=8, head_size=64, dtype=torch.bfloat16
    )
    group = KVCacheGroupSpec(["layer"], spec)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=True,
    )


def _add_requests(
    scheduler: Any, num_requests: int, prompt_len: int, num_steps: int, block_size: int
) -> None:
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_of = get_hash_fn_by_name(scheduler.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_of)
    hasher = get_request_block_hasher(block_size, hash_of)
    for number in range(num_requests):
        scheduler.add_request(
            Request(
                request_id=f"request-{number}",
                prompt_token_ids=[number % 31_000 + index for index in range(prompt_len)],
                sampling_params=SamplingParams(
                    max_tokens=num_steps, temperature=0.0, stop_token_ids=[2]
                ),
                pooling_params=None,
                block_hasher=hasher,
            )
        )


def _result(request_ids: list[str]) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={name: index for index, name in enumerate(request_ids)},
        sampled_token_ids=[[SAMPLED] for _ in request_ids],
    )


if __name__ == "__main__":
    serve({"measure": measure})
