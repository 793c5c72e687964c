"""Explains in words why a request was or was not scheduled in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dovetail.cli.terminal import count_text
from dovetail.interfaces.policy import Denied
from dovetail_lab.inspection.observed_replay import ObservedStep
from dovetail_lab.inspection.step_view import Attempt, RequestState, StepView


def explain_request(step: ObservedStep, request_id: str) -> list[str]:
    """Return sentences that explain what happened to a request in a step."""
    view = step.view
    if request_id not in step.known:
        return [f"{request_id} had not arrived before step {view.step_id}."]
    if request_id in step.ended:
        return [f"{request_id} had ended before step {view.step_id}."]
    running = _find(view.running, request_id)
    waiting = _find(view.waiting, request_id)
    if running is not None:
        return list(_explain_running(step, running))
    if waiting is not None:
        return list(_explain_waiting(step, waiting))
    return [
        f"{request_id} was not in the policy's queue: it waits for an admission gate, for the end "
        "of a pause, or for its KV blocks to be loaded."
    ]


def describe_actions(view: StepView) -> list[str]:
    """Return one line per action of the policy, with its result."""
    return [_described(attempt) for attempt in view.attempts]


def _explain_running(step: ObservedStep, request: RequestState) -> Iterator[str]:
    view, name = step.view, request.request_id
    count = step.granted.get(name, 0)
    if count:
        rest = request.num_uncomputed - count
        left = f", {rest} of its tokens remain for later steps" if rest > 0 else ""
        computed = count_text(count, "token")
        yield f"{name} was running and was scheduled: it computed {computed}{left}."
        return
    yield (
        f"{name} was running ({request.num_computed} tokens in the cache, {request.num_uncomputed} "
        "to compute) and was not scheduled."
    )
    own = [item for item in view.attempts if item.request_id == name]
    if name in view.victims or any(item.action == "evict" and item.grant for item in own):
        yield (
            "It was preempted in this step: the policy chose it as the victim, because there were "
            f"not enough free blocks ({view.free_blocks} at the beginning of the step)."
            if name in view.victims
            else "The policy evicted it."
        )
    elif any(item.action == "hold" for item in own):
        yield "The policy held it: it kept its batch slot and blocks and was paused for this step."
    elif not request.num_uncomputed:
        yield "It had nothing to compute: its last token is sampled by a step in flight."
    elif own:
        yield _denial_text(own[-1], request, view)
    elif any(item.action == "continue" for item in view.attempts):
        yield (
            f"The policy continued all running requests, but the budget of {view.tokens_left} "
            "tokens or the free blocks were used by requests before it."
        )
    else:
        yield "The policy did not propose to run it in this step."


def _explain_waiting(step: ObservedStep, request: RequestState) -> Iterator[str]:
    view, name = step.view, request.request_id
    position = [item.request_id for item in view.waiting].index(name)
    rank = f", rank {request.rank}" if request.rank else ""
    yield (
        f"{name} was waiting at position {position + 1} of {len(view.waiting)} in the policy's "
        f"order{rank}. It has {count_text(request.num_uncomputed, 'token')} to compute"
        f"{f' and {request.num_cached} in the prefix cache' if request.num_cached else ''}."
    )
    if name in step.granted:
        yield f"It was admitted and computed {count_text(step.granted[name], 'token')}."
        return
    own = [item for item in view.attempts if item.request_id == name]
    if own:
        yield _denial_text(own[-1], request, view)
        return
    yield from _reason_not_tried(step, position)


def _reason_not_tried(step: ObservedStep, position: int) -> Iterator[str]:
    """Explain why the policy yielded no action for a waiting request."""
    view = step.view
    admissions = [
        item
        for item in view.attempts
        if item.action in ("run", "preempt_and_admit")
        and _find(view.waiting, item.request_id) is not None
    ]
    ahead = [item.request_id for item in view.waiting[:position]]
    denied = [item for item in admissions if item.grant.denied is not None]
    if denied:
        last = denied[-1]
        state = _find(view.waiting, last.request_id)
        where = "before" if last.request_id in ahead else "after"
        yield (
            f"The policy did not try it: {last.request_id}, which is {where} it in the order, was "
            "denied, and then the plan ended."
        )
        if state is not None:
            yield _denial_text(last, state, view)
        return
    if view.victims:
        yield (
            "A running request was preempted for lack of blocks in this step, so no request was "
            "admitted."
        )
        return
    used = sum(step.granted.values())
    if used >= view.tokens_left:
        yield f"The policy did not try it: the budget of {view.tokens_left} tokens was used."
    else:
        yield (
            f"The policy did not try it, although {view.tokens_left - used} tokens of the budget "
            f"and {max(0, view.seats_left - len(admissions))} batch slots were left: its plan "
            "ended."
        )


def _denial_text(attempt: Attempt, request: RequestState, view: StepView) -> str:
    """Return a sentence about a denied or empty grant, with the relevant numbers."""
    name, denied = attempt.request_id, attempt.grant.denied
    blocks = _needed_blocks(attempt, request, view)
    texts = {
        Denied.BUDGET: (
            f"{name} was denied: {attempt.tokens_left} tokens of the step's budget were left. That "
            "is none, too few for a prompt that must not be split, or reserved for a running "
            "request."
        ),
        Denied.SEATS: (
            f"{name} was denied: no batch slot was free (max_num_seqs requests are running)."
        ),
        Denied.BLOCKS: (
            f"{name} was denied: it needs about {blocks} more KV blocks, and "
            f"{attempt.free_blocks} were free."
        ),
        Denied.NOT_READY: (
            f"{name} was denied: it was preempted in this step, or blocks freed for it are still "
            "used by a step in flight."
        ),
        Denied.ENCODER: f"{name} was denied: the encoder budget or cache was full.",
        Denied.PRESSURE: (
            f"{name} was denied: a request was preempted for lack of blocks in this step, so no "
            "request is admitted."
        ),
        Denied.NOTHING: f"{name} was denied: it has nothing to compute.",
        Denied.ILLEGAL: f"{name} was denied: the contract of policies forbids the action.",
    }
    if denied is not None:
        return texts[denied]
    return (
        f"{name} was granted no tokens yet: its blocks are being loaded, or another request "
        "computes the same prefix in this step."
    )


def _needed_blocks(attempt: Attempt, request: RequestState, view: StepView) -> int:
    piece = min(request.num_uncomputed, attempt.tokens_left)
    piece = min(piece, attempt.max_tokens) if attempt.max_tokens else piece
    return -(-piece // view.block_size)


def _described(attempt: Attempt) -> str:
    grant = attempt.grant
    name = f"{attempt.action} {attempt.request_id}".strip()
    limit = f" (at most {attempt.max_tokens} tokens)" if attempt.max_tokens else ""
    if grant.denied is not None:
        result = f"denied: {grant.denied.value}"
    elif attempt.action in ("evict", "hold"):
        result = "done"
    else:
        cached = f", {grant.num_cached} cached" if grant.num_cached else ""
        result = f"{count_text(grant.num_tokens, 'token')}{cached}"
    tokens, seats, blocks = attempt.tokens_left, attempt.seats_left, attempt.free_blocks
    return f"{name}{limit}: {result} [{tokens} tokens, {seats} slots, {blocks} blocks left]"


def _find(states: Sequence[RequestState], request_id: str) -> RequestState | None:
    return next((item for item in states if item.request_id == request_id), None)
