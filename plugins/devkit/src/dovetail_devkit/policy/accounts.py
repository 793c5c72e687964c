"""Checks that a policy receives each event of its requests exactly once, with correct values.

Policies that count service (fairness, quotas, aging) depend on these hooks. This module uses the
views of `dovetail.interfaces.policy`, and no scheduler.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, cast

from dovetail.interfaces.policy import RequestView, SchedulerView
from dovetail.request import Request
from dovetail_devkit.expectation import expect


@dataclass(slots=True, kw_only=True)
class _Account:
    """The events that were reported about one request.

    rank: the last rank that the policy returned. computed: number of computed tokens, -1 while the
    request waits. is_fresh: whether it was evicted in this step.
    """

    request: RequestView
    rank: Any = None
    computed: int = -1
    num_outputs: int = 0
    num_evictions: int = 0
    is_fresh: bool = False


@dataclass(slots=True, kw_only=True)
class PolicyAccounts:
    """All events that a policy received.

    static_rank: whether the policy declares `static_rank`. plans: whether the policy overrides
    `plan`; then plans need not follow the ranks. admitted: running requests, in the order of
    admission.
    """

    static_rank: bool = True
    plans: bool = False
    alive: dict[str, _Account] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    num_evicted: int = 0
    last_sequence: int = -1

    @property
    def waiting(self) -> list[_Account]:
        """The waiting requests."""
        return [account for account in self.alive.values() if account.computed < 0]

    def arrive(self, request: RequestView) -> None:
        """Record a new request."""
        name = request.request_id
        expect(name not in self.alive, f"on_arrival was called for {name} a second time")
        expect(
            request.sequence > self.last_sequence,
            f"{name} has sequence={request.sequence}, but the request before it has "
            f"{self.last_sequence}; it must be larger",
        )
        self.last_sequence = request.sequence
        self.alive[name] = _Account(request=request)

    def ranked(self, request: RequestView, rank: Any) -> None:
        """Record the rank of a request."""
        account = self.alive.get(request.request_id)
        if account is not None:
            account.rank = rank

    def grant(self, request: RequestView, num_tokens: int, block_size: int) -> None:
        """Record a grant of tokens to a running request."""
        account = self._account(request, "on_granted")
        name, computed = request.request_id, request.num_computed_tokens
        expect(
            num_tokens > 0,
            f"on_granted for {name} reports {num_tokens} tokens; expected at least 1",
        )
        if account.computed < 0:
            self._check_order(account, block_size)
            self.admitted.append(name)
            account.computed = computed - num_tokens
        expect(
            account.computed >= 0 and account.computed + num_tokens == computed,
            f"{name} had {account.computed} computed tokens and was granted {num_tokens} tokens, "
            f"but has num_computed_tokens={computed}",
        )
        account.computed = computed

    def output(self, request: RequestView, num_tokens: int) -> None:
        """Record output tokens of a request."""
        account = self._account(request, "on_output")
        account.num_outputs += num_tokens
        if account.computed >= 0:  # rejected drafts reduce the number of computed tokens
            account.computed = min(account.computed, request.num_computed_tokens)
        self._check_outputs(account)

    def evict(self, request: RequestView, num_tokens_lost: int) -> None:
        """Record that a request lost its row."""
        account = self._account(request, "on_evict")
        name, had = request.request_id, max(0, account.computed)
        expect(
            num_tokens_lost == had,
            f"on_evict for {name} reports {num_tokens_lost} lost tokens; it had {had} computed "
            "tokens",
        )
        account.num_evictions += 1
        expect(
            request.num_preemptions == account.num_evictions,
            f"{name} has num_preemptions={request.num_preemptions} after "
            f"{account.num_evictions} calls of on_evict",
        )
        expect(
            request.num_computed_tokens == 0,
            f"{name} was evicted, but has num_computed_tokens={request.num_computed_tokens}",
        )
        self._leave(account)
        account.is_fresh = True
        self.num_evicted += 1

    def finish(self, request: RequestView) -> None:
        """Record the end of a request."""
        account = self._account(request, "on_finish")
        self._check_outputs(account)
        self._leave(account)
        del self.alive[request.request_id]

    def check_view(self, view: SchedulerView) -> None:
        """Compare a view with the recorded events, after a step."""
        waiting = len(self.waiting)
        expect(
            view.num_waiting == waiting,
            f"the view has num_waiting={view.num_waiting}; expected {waiting}",
        )
        shown = [request.request_id for request in view.running]
        expect(
            shown == self.admitted,
            f"the view has the running requests {shown}; expected {self.admitted}, in the order of "
            "admission",
        )
        for account in self.waiting:
            account.is_fresh = False
        expect(
            view.num_free_blocks >= 0,
            f"the view has num_free_blocks={view.num_free_blocks}; it must not be negative",
        )

    def _check_order(self, admitted: _Account, block_size: int) -> None:
        """Check that no request is admitted while a request with a better rank waits.

        Requests of equal rank must be in arrival order. A request that is evicted in a step is
        checked from the next step on. If a waiting request has the same first block as a running
        request, it may be skipped until this block is computed.
        """
        if self.plans:
            return
        admitted_key = admitted.rank, admitted.request.sequence
        for other in self.waiting:
            if other.is_fresh:
                continue
            other_key = other.rank, other.request.sequence
            expect(
                not other_key < admitted_key or self._may_follow(other, block_size),
                f"the scheduler admits {admitted.request.request_id} with rank {admitted_key}, "
                f"although {other.request.request_id} with the better rank {other_key} waits",
            )

    def _may_follow(self, waiting: _Account, block_size: int) -> bool:
        first = _first_block(waiting.request, block_size)
        running = (self.alive[name].request for name in self.admitted)
        return any(_first_block(request, block_size) == first for request in running)

    def _check_outputs(self, account: _Account) -> None:
        has = account.request.num_output_tokens
        expect(
            account.num_outputs == has,
            f"{account.request.request_id} has {has} output tokens, but calls of on_output report "
            f"{account.num_outputs}",
        )
        expect(
            account.computed >= 0 or not has or account.num_evictions > 0,
            f"{account.request.request_id} has output tokens, but on_granted was not called for it",
        )

    def _leave(self, account: _Account) -> None:
        if account.computed >= 0:
            self.admitted.remove(account.request.request_id)
        account.computed = -1

    def _account(self, request: RequestView, hook: str) -> _Account:
        name = request.request_id
        if name not in self.alive:
            raise AssertionError(f"{hook} was called for {name}, which is not an active request")
        return self.alive[name]


def _first_block(request: RequestView, block_size: int) -> tuple[str, array[int]]:
    return request.cache_salt, cast("Request", request).token_ids[:block_size]
