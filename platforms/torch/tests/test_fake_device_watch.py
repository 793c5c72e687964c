"""The fake device detects faults of incorrect programs and reports none for correct programs."""

import threading

import pytest
import torch

from dovetail_torch.accelerator.queues import AcceleratorQueues
from dovetail_torch.fake_device import DEVICE, NAME, FlightError, HiddenWaitError, install


@pytest.fixture(autouse=True)
def module():
    device_module = install()
    DEVICE.reset()
    yield device_module
    DEVICE.reset()


@pytest.fixture
def x():
    return torch.arange(8.0, device=NAME)


@pytest.fixture
def queues(module):
    return AcceleratorQueues(module, DEVICE.flights.pinned_zeros)


@pytest.fixture
def pinned(queues):
    return queues.pinned_zeros(32).view(torch.float32)


WAITS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] == 0),
    "tolist": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 3],
    "write by a mask": lambda x: x.index_put_((x > 3,), x[:4] + 1),
    "masked_select": lambda x: x.masked_select(x > 3),
    "unique": lambda x: x.unique(),
    "where": lambda x: torch.where(x > 3),
    "repeat": lambda x: x.repeat_interleave(x.long()),
    "list as index": lambda x: x[[1, 2]],
    "new from a list": lambda x: torch.tensor([1.0], device=x.device),
    "from the host": lambda x: torch.ones(2).to(x.device),
    "from the host, not pinned": lambda x: x.copy_(torch.ones(8), non_blocking=True),
    "pinned memory": lambda x: DEVICE.flights.pinned_zeros(4),
    "synchronize": lambda x: install().synchronize(),
}


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_operations_that_make_the_host_wait_are_detected(name, mode, x):
    with torch.inference_mode(mode):
        DEVICE.watch.forget()
        WAITS[name](x.clone())
        locations = list(DEVICE.watch.synchronizations)
        assert locations and all(location.startswith(__file__) for location in locations)
        with DEVICE.strict(), pytest.raises(HiddenWaitError, match="keep the value"):
            WAITS[name](x.clone())
        WAITS[name](x.clone())  # waiting is allowed again


PASSES = {
    "arithmetic": lambda x: (x * 2 + 1).sum().sqrt(),
    "set numbers": lambda x: x.clone().__setitem__(slice(3), 1.0),
    "fill where": lambda x: x.clone().__setitem__(x > 3, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 3, 0),
    "gather": lambda x: x[x.long()].index_copy_(0, x.long(), x),
    "repeat": lambda x: x.repeat_interleave(x.long(), output_size=28),
    "made there": lambda x: torch.zeros(4, device=x.device) + torch.arange(4, device=x.device),
    "other dtype": lambda x: x.to(torch.float16).long(),
    "number of the host": lambda x: torch.where(x > 3, x, torch.tensor(0.0)),
    "sort": lambda x: x.sort(descending=True).values.topk(3),
}


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("name", PASSES)
def test_operations_that_do_not_wait_are_allowed(name, mode, x):
    with torch.inference_mode(mode), DEVICE.strict():
        PASSES[name](x)
    assert not DEVICE.watch.synchronizations


def test_strict_mode_raises_only_for_waits_of_the_thread_that_enabled_it(x):
    done = []
    with DEVICE.strict():
        thread = threading.Thread(target=lambda: done.append(x.tolist()))
        thread.start()
        thread.join()
    assert done == [list(range(8))]


def test_a_copy_to_the_host_is_complete_at_its_event(x, queues, pinned):
    DEVICE.watch.forget()
    with DEVICE.strict():
        event = queues.fetch([x], [pinned])
        assert not event.query() and pinned.tolist() != x.host.tolist()
        event.synchronize()
    assert event.query() and pinned.tolist() == list(range(8))
    assert DEVICE.watch.waits == 1 and not DEVICE.watch.synchronizations
    DEVICE.check()


def test_the_source_of_a_copy_to_the_device_may_be_written_after_its_event(x, queues, pinned):
    pinned.fill_(3)
    with DEVICE.strict():
        x.copy_(pinned, non_blocking=True)
        event = queues.record()
        event.synchronize()
    pinned.fill_(4)
    DEVICE.check()
    assert x.tolist() == [3] * 8


def test_a_write_to_the_source_of_a_copy_to_the_device_is_detected(x, queues, pinned):
    x.copy_(pinned, non_blocking=True)
    event = queues.record()
    pinned[5] = 9
    with pytest.raises(FlightError, match=r"a copy from .* wait for the copy's event"):
        event.synchronize()
    with pytest.raises(FlightError):
        DEVICE.check()


def test_an_event_recorded_before_a_copy_does_not_wait_for_the_copy(x, queues, pinned):
    event = queues.record()
    x.copy_(pinned, non_blocking=True)
    event.synchronize()
    pinned[0] = 1
    with pytest.raises(FlightError):
        DEVICE.check()


def test_a_write_to_the_target_of_a_copy_to_the_host_is_detected(x, queues, pinned):
    event = queues.fetch([x], [pinned])
    pinned[0] = 1
    with pytest.raises(FlightError, match="a copy to host memory"):
        event.synchronize()


def test_two_copies_to_the_same_host_memory_are_detected(x, queues, pinned):
    queues.fetch([x], [pinned])
    with pytest.raises(FlightError, match=r"still writes it; wait"):
        queues.fetch([x], [pinned])
    DEVICE.reset()
    x.copy_(pinned, non_blocking=True)
    with pytest.raises(FlightError, match=r"still reads it; wait"):
        queues.fetch([x], [pinned])


def test_half_a_buffer_may_be_used_while_the_other_half_is_in_flight(x, queues, pinned):
    event = queues.fetch([x[:4]], [pinned[:4]])
    x[:4].clone()
    later = queues.fetch([x[4:]], [pinned[4:]])
    later.synchronize()
    event.synchronize()
    DEVICE.check()
    assert pinned.tolist() == list(range(8))


def test_a_write_to_the_source_of_a_copy_to_the_host_is_detected(x, queues, pinned):
    event = queues.fetch([x], [pinned])
    with pytest.raises(FlightError, match="still reads"):
        x.add_(1)
    event.synchronize()
    x.add_(1)


def test_a_write_through_a_view_to_memory_in_flight_is_detected(x, queues, pinned):
    queues.fetch([x], [pinned])
    with pytest.raises(FlightError, match="still reads"):
        x[2:].zero_()


def test_a_stream_that_waits_for_a_copy_may_write_to_the_source_of_the_copy(
    x, queues, pinned, module
):
    event = queues.fetch([x], [pinned])
    module.current_stream().wait_event(event)
    x.add_(1)
    event.synchronize()
    DEVICE.check()
    assert pinned.tolist() == list(range(8))


def test_freeing_the_source_of_a_copy_to_the_host_is_detected(queues, pinned):
    event = queues.fetch([torch.arange(8.0, device=NAME)], [pinned])
    with pytest.raises(FlightError, match="freed while stream"):
        torch.zeros(1, device=NAME)
    event.synchronize()
    with pytest.raises(FlightError, match="were freed"):
        DEVICE.check()


def test_freeing_the_source_of_a_copy_after_its_event_is_allowed(queues, pinned):
    source = torch.arange(8.0, device=NAME)
    queues.fetch([source], [pinned]).synchronize()
    del source
    torch.zeros(1, device=NAME)
    DEVICE.check()


def test_a_stream_that_reads_memory_without_waiting_for_its_writer_is_detected(x, pinned, module):
    stream = module.Stream()
    with module.stream(stream), pytest.raises(FlightError, match="may not have written yet"):
        pinned.copy_(x, non_blocking=True)
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        pinned.copy_(x, non_blocking=True)
    stream.synchronize()
    assert pinned.tolist() == list(range(8))


def test_an_asynchronous_copy_to_the_host_is_not_complete_immediately(x):
    host = x.to("cpu", non_blocking=True)
    assert host.tolist() != list(range(8))
    install().synchronize()
    assert host.tolist() == list(range(8))


def test_fake_events_complete_after_some_operations_if_a_lag_is_set(x, queues, pinned):
    DEVICE.reset(lag=4, seed=1)
    event = queues.fetch([x], [pinned])
    num_queries = 0
    while not event.query():
        assert num_queries < 5
        torch.zeros(1, device=NAME)
        num_queries += 1
    assert pinned.tolist() == list(range(8))


def test_fake_events_complete_only_in_a_wait_if_no_lag_is_set(x, queues, pinned):
    event = queues.fetch([x], [pinned])
    for _ in range(100):
        torch.zeros(1, device=NAME)
    assert not event.query()
    event.synchronize()
    assert event.query()
