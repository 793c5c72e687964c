import random

import pytest

from dovetail.request import EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling.waiting_queue import HeapQueue, SortedQueue


def request(sequence, priority=0):
    requested = EngineCoreRequest(
        request_id=f"r{sequence}",
        prompt_token_ids=(1,),
        sampling_params=SamplingParams(),
        max_tokens=1,
        priority=priority,
    )
    return Request(requested, max_model_len=8, sequence=sequence)


def by_priority(first):
    return first.priority


def take(queue):
    """Remove and return the next request."""
    queue.discard(first := queue.peek())
    return first


def drain(queue):
    queue.begin_step()
    return [take(queue).sequence for _ in range(len(queue))]


@pytest.fixture(params=[HeapQueue, SortedQueue])
def queue(request):
    return request.param(by_priority)


def test_the_request_of_the_lowest_rank_is_first_and_ties_are_in_arrival_order(queue):
    for sequence, priority in [(0, 5), (1, 1), (2, 5), (3, 0), (4, 1)]:
        queue.push(request(sequence, priority))
    queue.begin_step()
    assert [item.sequence for item in queue] == [3, 1, 4, 0, 2]
    assert len(queue) == 5 and queue.peek().sequence == 3
    assert drain(queue) == [3, 1, 4, 0, 2]


def test_a_requeued_request_keeps_its_arrival_order(queue):
    requests = [request(sequence) for sequence in range(3)]
    for item in requests:
        queue.push(item)
    queue.begin_step()
    first = take(queue)
    queue.defer(first)
    assert len(queue) == 3 and queue.num_ready == 2
    assert [item.sequence for item in queue] == [
        1,
        2,
    ]  # a deferred request is not part of the order
    assert drain(queue) == [0, 1, 2]


def test_a_removed_request_is_not_returned_by_the_queue(queue):
    requests = [request(sequence) for sequence in range(4)]
    for item in requests:
        queue.push(item)
    queue.begin_step()
    for item in (requests[0], requests[2]):
        queue.discard(item)
    assert len(queue) == 2
    assert [item.sequence for item in queue] == [1, 3]
    assert queue.peek().sequence == 1
    queue.push(requests[0])
    assert drain(queue) == [0, 1, 3]


def test_an_empty_queue_has_no_next_request(queue):
    queue.begin_step()
    assert queue.peek() is None
    first = request(0)
    queue.push(first)
    queue.begin_step()
    queue.discard(first)
    assert queue.peek() is None and list(queue) == []


def test_a_deferred_request_can_be_removed(queue):
    first = request(0)
    queue.defer(first)
    queue.discard(first)
    assert len(queue) == 0 and drain(queue) == []


def test_requests_removed_during_an_iteration_are_skipped(queue):
    requests = [request(sequence) for sequence in range(9)]
    for item in requests[::-1]:
        queue.push(item)
    queue.begin_step()
    seen = []
    for item in queue:
        seen.append(item.sequence)
        queue.discard(item)
        if item.sequence < 4:
            queue.discard(requests[8 - item.sequence])
    assert seen == [0, 1, 2, 3, 4] and len(queue) == 0


def test_a_heap_drops_requests_removed_from_its_middle():
    queue = HeapQueue(by_priority)
    requests = [request(sequence) for sequence in range(100)]
    for item in requests:
        queue.push(item)
    for item in requests[10:]:
        queue.discard(item)
    queue.begin_step()
    assert len(queue._heap) == 10 and drain(queue) == list(range(10))


@pytest.mark.parametrize("seed", range(8))
def test_both_queue_kinds_agree_with_a_sorted_list(seed):
    rng = random.Random(seed)
    heap, kept = HeapQueue(by_priority), SortedQueue(by_priority)
    inside, outside = [], [request(i, rng.randrange(4)) for i in range(20)]
    for _ in range(150):
        if outside and rng.random() < 0.5:
            inside.append(outside.pop(rng.randrange(len(outside))))
            heap.push(inside[-1])
            kept.push(inside[-1])
        elif inside and rng.random() < 0.4:
            first = inside.pop(rng.randrange(len(inside)))
            heap.discard(first)
            kept.discard(first)
            outside.append(first)
        elif inside:
            kept.begin_step()
            best = min(inside, key=lambda item: (item.priority, item.sequence))
            assert [*heap] == [*kept]
            assert take(heap) is take(kept) is best
            inside.remove(best)
            outside.append(best)
        assert len(heap) == len(kept) == len(inside)


def test_dynamic_ranks_are_computed_in_each_step():
    ranks = {0: 1, 1: 2}
    queue = SortedQueue(lambda item: ranks[item.sequence])
    queue.push(request(0))
    queue.push(request(1))
    queue.begin_step()
    assert queue.peek().sequence == 0
    ranks[0] = 3
    assert queue.peek().sequence == 0  # ranks do not change within a step
    assert drain(queue) == [1, 0]


def test_a_static_rank_is_computed_once():
    requested = []
    queue = HeapQueue(lambda item: requested.append(item.sequence) or item.sequence)
    for sequence in range(5):
        queue.push(request(sequence))
    assert drain(queue) == requested == [0, 1, 2, 3, 4]
