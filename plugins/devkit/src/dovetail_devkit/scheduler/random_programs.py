"""Random programs for a scheduler: sequences of calls and requests, generated from a seed.

The limits and the KV cache of a program are too small for all requests. `SchedulerDriver` runs
programs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from dovetail.interfaces.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, NoCacheSpec
from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail.request import EncoderInput, EngineCoreRequest
from dovetail.sampling_params import SamplingParams

VOCAB_SIZE = 31


@dataclass(frozen=True, kw_only=True)
class Program:
    """A sequence of scheduler calls, generated from `seed`, and the scheduler's limits and cache.

    depth: number of plans in flight, 1 to 4. holds: whether the program pauses requests at times,
    and holds requests with a gate if the scheduler provides "gates". connected: whether the program
    uses an unreliable KV connector, if the scheduler provides "kv_connector". num_turns: number of
    turns with arrivals and aborts. After these turns, the remaining requests run to their end.
    """

    seed: int
    limits: SchedulerLimits
    kv_cache: KVCacheConfig
    depth: int = 1
    holds: bool = False
    connected: bool = False
    num_turns: int = 40

    def __str__(self) -> str:
        """Return the parameters of the program. The seed makes it reproducible."""
        limits, groups = self.limits, self.kv_cache.groups
        windows = [getattr(group.spec, "sliding_window", 0) for group in groups]
        return (
            f"program {self.seed}: depth={self.depth}, max_num_seqs={limits.max_num_seqs}, "
            f"max_num_batched_tokens={limits.max_num_batched_tokens}, "
            f"max_model_len={limits.max_model_len}, num_blocks={self.kv_cache.num_blocks}, "
            f"block_size={self.kv_cache.block_size}, windows={windows}"
        )


def make_kv_cache(
    *,
    num_blocks: int,
    block_size: int,
    keeps: bool = True,
    windows: Sequence[int] = (0,),
    multiples: Sequence[int] = (),
) -> KVCacheConfig:
    """Return a KV cache with one layer per group.

    keeps: whether the model has a KV cache.
    windows: the sliding window of each group, 0 for none. multiples: block size of each
    group as a multiple of `block_size`; empty for 1.
    """
    if not keeps:
        group = KVCacheGroup(layer_names=(), spec=NoCacheSpec(block_size=block_size))
        return KVCacheConfig(num_blocks=num_blocks, groups=(group,))
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype="float32")
    groups = tuple(
        KVCacheGroup(
            layer_names=(f"layers.{index}",),
            spec=replace(spec, sliding_window=window, block_size=block_size * multiple),
        )
        for index, (window, multiple) in enumerate(
            zip(windows, multiples or (1,) * len(windows), strict=True)
        )
    )
    return KVCacheConfig(num_blocks=num_blocks, groups=groups)


def random_program(
    seed: int,
    *,
    keeps_cache: bool = True,
    plain: bool = False,
    windows: Sequence[int] = (0,),
    multiples: Sequence[int] = (),
) -> Program:
    """Return a program whose cache, budget and batch slots are too small for all requests.

    Some programs use drafts, encoder inputs, pauses, gates or a KV connector.
    plain: whether to use none of these features.
    windows: the sliding window of each KV-cache group, 0 for none. There is no connector if there
        are several groups or a window.
    multiples: as for `make_kv_cache`.
    """
    rng = Random(seed)
    connected = not plain and keeps_cache and seed % 5 == 2 and not any(windows)
    chunked = rng.random() < 0.7
    max_num_seqs = rng.randint(1, 5)
    max_model_len = rng.randint(6, 40)
    block_size = rng.choice((1, 2, 4))
    minimum = -(-max_model_len // block_size)
    return Program(
        seed=seed,
        limits=SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.randint(max_num_seqs, max_num_seqs + 16),
            max_model_len=max_model_len,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng.choice((0, 0, 3)) if chunked else 0,
            enable_prefix_caching=rng.random() < 0.6,
            num_lookahead_tokens=0 if plain else (0, 0, 1, 3)[seed // 2 % 4],
            max_num_encoder_tokens=0 if plain else (0, 0, 5)[seed % 3],
            encoder_cache_tokens=0 if plain else (0, 0, 4 + seed % 7)[seed % 3],
        ),
        kv_cache=make_kv_cache(
            num_blocks=1 + len(windows) * (minimum + rng.randint(0, minimum * 3 // 2)),
            block_size=block_size,
            keeps=keeps_cache,
            windows=windows,
            multiples=multiples,
        ),
        depth=1 + seed % 2 + 2 * (seed % 7 > 3),
        holds=not plain and seed % 4 == 1,
        connected=connected and len(windows) == 1,
    )


def random_request(rng: Random, request_id: str, limits: SchedulerLimits) -> EngineCoreRequest:
    """Return a request within the limits. Prompts often share a prefix."""
    maximum = limits.max_model_len - 1
    if not limits.enable_chunked_prefill:
        maximum = min(maximum, limits.max_num_batched_tokens)
    length = rng.randint(1, min(maximum, 20))
    num_shared = rng.choice((0, length // 2, length - 1, length))
    shared = [(3 * i + 1) % VOCAB_SIZE for i in range(num_shared)]
    prompt = shared + [rng.randrange(VOCAB_SIZE) for _ in range(length - num_shared)]
    max_tokens = rng.randint(1, 12)
    own_stops = tuple(rng.sample(range(VOCAB_SIZE), 2)) if rng.random() < 0.5 else ()
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, min(3, max_tokens)),
        stop_token_ids=own_stops,
        logprobs=rng.choice((None, None, 0, 1)),
        prompt_logprobs=rng.choice((None, None, None, None, 0, 2)),
    )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=array("i", prompt),
        sampling_params=params,
        max_tokens=max_tokens,
        stop_token_ids=frozenset({0, *own_stops}),
        seed=rng.getrandbits(64) if rng.random() < 0.5 else 7,
        priority=rng.randint(-2, 2),
        arrival_ns=0,
        cache_salt=rng.choice(("", "", "", "tenant")),
        encoder_inputs=random_content(rng, length, limits),
    )


def random_content(
    rng: Random, num_tokens: int, limits: SchedulerLimits
) -> tuple[EncoderInput, ...]:
    """Return encoder inputs for a prompt of `num_tokens`, with four different contents.

    The inputs are within `limits`; the list is empty if `limits` allow no encoder inputs.
    """
    maximum = min(limits.max_num_encoder_tokens, limits.encoder_cache_tokens)
    if not maximum:
        return ()
    inputs: list[EncoderInput] = []
    position, at_once = rng.randint(0, 4), 0
    while position < num_tokens:
        kind = rng.randrange(4)
        size = 1 + kind % maximum
        at_once = size if limits.enable_chunked_prefill else at_once + size
        if at_once > maximum or position + size > num_tokens:
            break
        name = bytes([kind + 1])
        inputs.append(EncoderInput(position=position, num_tokens=size, content_hash=name))
        position += size + rng.randint(0, 4)
    return tuple(inputs)
