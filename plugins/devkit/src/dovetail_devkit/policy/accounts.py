"""What a policy is told, held against what its requests show: the truth, the whole and once.

A policy that accounts (fairness, quotas, ageing) stands on these hooks. Knows the views of
`dovetail.interfaces.policy`, and no scheduler.
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
    """What was reported about one request.

    rank: as last asked. computed: tokens, -1 while it waits. is_fresh: it was evicted in this step.
    """

    request: RequestView
    rank: Any = None
    computed: int = -1
    num_outputs: int = 0
    num_evictions: int = 0
    is_fresh: bool = False


@dataclass(slots=True, kw_only=True)
class PolicyAccounts:
    """All that a policy was told.

    static_rank: its own word. plans: whether it brings a plan of its own, which then need not go by
    its ranks. admitted: requests that run, in the order of their admission.
    """

    static_rank: bool = True
    plans: bool = False
    alive: dict[str, _Account] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    num_evicted: int = 0
    last_sequence: int = -1

    @property
    def waiting(self) -> list[_Account]:
        """Those that wait."""
        return [account for account in self.alive.values() if account.computed < 0]

    def arrive(self, request: RequestView) -> None:
        """Take in a new request."""
        name = request.request_id
        expect(name not in self.alive, f"{name} arrives a second time")
        expect(
            request.sequence > self.last_sequence,
            f"{name} has sequence {request.sequence} after {self.last_sequence}; it is the order "
            "of arrival",
        )
        self.last_sequence = request.sequence
        self.alive[name] = _Account(request=request)

    def ranked(self, request: RequestView, rank: Any) -> None:
        """Note the rank that was given to a request."""
        account = self.alive.get(request.request_id)
        if account is not None:
            account.rank = rank

    def grant(self, request: RequestView, num_tokens: int, block_size: int) -> None:
        """Hear that a request was brought forward."""
        account = self._account(request, "on_granted")
        name, computed = request.request_id, request.num_computed_tokens
        expect(num_tokens > 0, f"{name} was granted {num_tokens} tokens")
        if account.computed < 0:
            self._check_order(account, block_size)
            self.admitted.append(name)
            account.computed = computed - num_tokens
        expect(
            account.computed >= 0 and account.computed + num_tokens == computed,
            f"{name} had {account.computed} tokens computed, was granted {num_tokens} and has "
            f"{computed}",
        )
        account.computed = computed

    def output(self, request: RequestView, num_tokens: int) -> None:
        """Hear that a request got tokens."""
        account = self._account(request, "on_output")
        account.num_outputs += num_tokens
        if account.computed >= 0:  # less than was granted, if drafts were wrong
            account.computed = min(account.computed, request.num_computed_tokens)
        self._check_outputs(account)

    def evict(self, request: RequestView, num_tokens_lost: int) -> None:
        """Hear that a request lost its row."""
        account = self._account(request, "on_evict")
        name, had = request.request_id, max(0, account.computed)
        expect(num_tokens_lost == had, f"{name} had {had} tokens and lost {num_tokens_lost}")
        account.num_evictions += 1
        expect(
            request.num_preemptions == account.num_evictions,
            f"{name} says num_preemptions={request.num_preemptions} after "
            f"{account.num_evictions} evictions",
        )
        expect(request.num_computed_tokens == 0, f"{name} was evicted and keeps what it computed")
        self._leave(account)
        account.is_fresh = True
        self.num_evicted += 1

    def finish(self, request: RequestView) -> None:
        """Hear that a request has ended."""
        account = self._account(request, "on_finish")
        self._check_outputs(account)
        self._leave(account)
        del self.alive[request.request_id]

    def check_view(self, view: SchedulerView) -> None:
        """Hold what a view shows against what was told; after a step."""
        waiting = len(self.waiting)
        expect(
            view.num_waiting == waiting,
            f"the view shows num_waiting={view.num_waiting}; {waiting} wait",
        )
        shown = [request.request_id for request in view.running]
        expect(
            shown == self.admitted,
            f"the view shows {shown} running; {self.admitted} were admitted, in that order",
        )
        for account in self.waiting:
            account.is_fresh = False
        expect(view.num_free_blocks >= 0, f"num_free_blocks is {view.num_free_blocks}")

    def _check_order(self, admitted: _Account, block_size: int) -> None:
        """Nobody waits who has a better rank than one that is admitted; ties go by arrival.

        Who is evicted in a step has a place in the next. Who shares a first block with one that
        runs may be passed over, until what they share is computed.
        """
        if self.plans:
            return
        mine = admitted.rank, admitted.request.sequence
        for other in self.waiting:
            if other.is_fresh:
                continue
            theirs = other.rank, other.request.sequence
            expect(
                not theirs < mine or self._may_follow(other, block_size),
                f"{admitted.request.request_id} of rank {mine} is admitted, and "
                f"{other.request.request_id} of rank {theirs} waits",
            )

    def _may_follow(self, waiting: _Account, block_size: int) -> bool:
        first = _first_block(waiting.request, block_size)
        running = (self.alive[name].request for name in self.admitted)
        return any(_first_block(request, block_size) == first for request in running)

    def _check_outputs(self, account: _Account) -> None:
        has = account.request.num_output_tokens
        expect(
            account.num_outputs == has,
            f"{account.request.request_id} has {has} output tokens; the policy has heard of "
            f"{account.num_outputs}",
        )
        expect(
            account.computed >= 0 or not has or account.num_evictions > 0,
            f"{account.request.request_id} has output, and the policy has heard of no grant",
        )

    def _leave(self, account: _Account) -> None:
        if account.computed >= 0:
            self.admitted.remove(account.request.request_id)
        account.computed = -1

    def _account(self, request: RequestView, hook: str) -> _Account:
        name = request.request_id
        if name not in self.alive:
            raise AssertionError(f"{hook} reports {name}, which has ended or never arrived")
        return self.alive[name]


def _first_block(request: RequestView, block_size: int) -> tuple[str, array[int]]:
    return request.cache_salt, cast("Request", request).token_ids[:block_size]
