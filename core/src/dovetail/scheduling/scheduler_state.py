"""The state of a scheduler: batch slots, blocks, a step's budget, and the requests that hold them.

`mechanism` changes the state when it grants actions, and `view` shows it to the policy.
"""

from __future__ import annotations

from dovetail.interfaces.scheduler import SchedulerContext
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.plan import StepBuilder
from dovetail.request import Request
from dovetail.rows import RowAllocator
from dovetail.scheduling.decode_batch import DecodeBatch
from dovetail.scheduling.draft import StepDraft
from dovetail.scheduling.encoder_budget import EncoderBudget
from dovetail.scheduling.held_requests import HeldRequests
from dovetail.scheduling.remote_loads import RemoteLoads

MAX_BLOCKS_HASHED = 8_192
"""Maximum blocks of waiting prompts that one step hashes; this takes about 10 ms."""


class SchedulerState:
    """Batch slots, blocks, requests and the step being planned.

    requests: all unfinished requests, by id. held_requests: requests that cannot be admitted yet.
    running: requests with a batch slot, in order of admission. loads: requests with blocks but no
    batch slot yet.
    encoder: the encoder budget. num_groups: KV-cache groups, each with its own blocks. draft: the
    step that is being planned, or the last one. last_step: the last plan that was emitted. now_ns:
    time of the last call to the scheduler.
    """

    def __init__(self, context: SchedulerContext) -> None:
        limits = context.limits
        self.limits = limits
        self.rows = RowAllocator(limits.max_num_seqs)
        self.kv_cache = KVCacheManager(
            context.kv_cache,
            enable_prefix_caching=limits.enable_prefix_caching,
            max_step_tokens=limits.max_num_batched_tokens + limits.num_lookahead_tokens,
        )
        self.loads = RemoteLoads(context, self.kv_cache)
        self.num_groups = len(context.kv_cache.groups)
        self.builder = StepBuilder(num_groups=self.num_groups)
        self.requests: dict[str, Request] = {}
        self.held_requests = HeldRequests(context.gates, context.admission_timeout_s)
        self.decode_batch = DecodeBatch(context.kv_cache.block_size)
        self.running = self.decode_batch.running
        self.encoder = EncoderBudget(limits)
        self.draft = StepDraft(limits.max_num_batched_tokens, self.encoder)
        self.last_step = -1
        self.now_ns = 0

    @property
    def has_pending_releases(self) -> bool:
        """Whether plans in flight will free batch slots or blocks. Then no request is preempted."""
        return bool(self.rows.num_retiring or self.kv_cache.num_due)

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of the request are in the prefix cache.

        The number may be too small: such calls compute at most `MAX_BLOCKS_HASHED` block hashes in
        each step, and only hashed blocks count. Nothing else changes.
        """
        maximum = MAX_BLOCKS_HASHED - self.draft.num_blocks_hashed
        num_tokens, num_hashed = self.kv_cache.find_cached(request, maximum)
        self.draft.num_blocks_hashed += num_hashed
        return num_tokens
