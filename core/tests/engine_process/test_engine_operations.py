"""Engine operations, called through every kind of client."""

import asyncio
import inspect

import pytest

from dovetail.engine.port import OPERATIONS, EnginePort
from dovetail.errors import CapacityError, ConfigError, MessageError, RequestError, UserError
from dovetail.interfaces import PauseScope


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["inproc", "sync"])
def test_a_sleeping_engine_runs_no_request_until_it_wakes_up(client_of, parts, traffic, kind):
    client = client_of(
        kind, options={"worker_cls": parts.SleepModeWorker, "enable_sleep_mode": True}
    )
    client.add_request(traffic.request("a", max_tokens=400))
    assert client.get_outputs(5) is not None
    with pytest.raises(UserError, match="Some requests are unfinished"):
        client.sleep()
    client.abort_requests(["a"])
    for level in (0, 3):
        with pytest.raises(UserError, match=f"level={level}"):
            client.sleep(level)
    with pytest.raises(UserError, match="is not asleep"):
        client.wake_up()
    client.sleep(2)
    assert client.paused is PauseScope.ALL
    client.add_request(traffic.request("b", max_tokens=3))
    for call in (client.sleep, client.resume):
        with pytest.raises(UserError, match="wake_up"):
            call()
    with pytest.raises(UserError, match="'attention'"):
        client.wake_up(("attention",))
    client.wake_up(("weights",))
    assert client.paused is PauseScope.ALL
    client.wake_up(("kv_cache",))
    assert client.paused is None
    assert len(traffic.Answers().collect_until(client, "b")[0]["b"]) == 3
    (calls,) = client.call_workers("calls_so_far")
    assert calls == ["sleep 2", "wake up weights", "wake up kv_cache"]


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["inproc", "sync"])
def test_the_error_for_a_worker_without_sleep_names_the_worker(client_of, kind):
    with pytest.raises(UserError, match='does not provide "sleep"'):
        client_of(kind).sleep()


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["inproc", "sync"])
def test_sleep_is_rejected_unless_sleep_mode_is_enabled(client_of, parts, kind):
    client = client_of(kind, options={"worker_cls": parts.SleepModeWorker})
    with pytest.raises(UserError, match="set enable_sleep_mode=True"):
        client.sleep()
    assert client.paused is None


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["inproc", "sync"])
def test_an_engine_stays_asleep_after_a_failed_wake_up(client_of, parts, traffic, kind):
    client = client_of(
        kind, options={"worker_cls": parts.FailsFirstWakeUp, "enable_sleep_mode": True}
    )
    client.sleep()
    with pytest.raises(CapacityError, match="3 GiB are missing"):
        client.wake_up()
    with pytest.raises(UserError, match="call wake_up instead"):
        client.resume()
    client.wake_up()
    assert client.paused is None
    client.add_request(traffic.request("a", max_tokens=3))
    assert len(traffic.Answers().collect_until(client, "a")[0]["a"]) == 3


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("tags", ["weights", ("gpu",), (1,), [["weights"]], 7])
def test_invalid_sleep_tags_are_rejected(client_of, parts, tags):
    client = client_of(
        "inproc", options={"worker_cls": parts.SleepModeWorker, "enable_sleep_mode": True}
    )
    client.sleep()
    with pytest.raises(UserError, match="tags="):
        client.wake_up(tags)
    client.wake_up(["weights", "kv_cache"])
    assert client.paused is None


@pytest.mark.costly
@pytest.mark.parametrize(
    ("option", "value"), [("enable_sleep_mode", True), ("cpu_offload_gb", 0.5)]
)
def test_an_option_that_the_worker_would_ignore_is_rejected(client_of, option, value):
    with pytest.raises(ConfigError, match=f"{option}={value} is not supported on the platform"):
        client_of("inproc", options={option: value})


@pytest.mark.costly
def test_custom_all_reduce_is_rejected_for_one_worker(client_of):
    with pytest.raises(ConfigError, match="no effect with tensor_parallel_size=1"):
        client_of("inproc", options={"custom_all_reduce": True})


@pytest.mark.costly
def test_engine_statistics_and_health_can_be_requested(client_of, traffic):
    client = client_of("sync")
    assert client.get_stats() is None and client.check_health() is None
    client.add_request(traffic.request("a", max_tokens=3))
    traffic.Answers().collect(client, 1)
    assert client.get_stats().step_id >= 2

    async def serve():
        other = client_of("async")
        await other.check_health()
        await other.add_request(traffic.request("a", max_tokens=3))
        await traffic.Answers().collect_async(other, 1)
        return await other.get_stats()

    assert asyncio.run(serve()).step_id >= 2


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["inproc", "sync"])
def test_the_step_trace_can_be_read_through_every_client(client_of, traffic, kind):
    client = client_of(kind)
    assert client.read_steps().steps == ()
    client.add_request(traffic.request("a", prompt=range(9), max_tokens=3))
    traffic.Answers().collect(client, 1)
    trace = client.read_steps(0, 2)
    assert trace.num_steps == 3 and [step.number for step in trace.steps] == [1, 2]
    assert trace.steps[0].joined == ((1, 9, 9),) and trace.steps[0].prefills == ((1, 0, 9),)
    assert trace.steps[1].decodes == (1,) and trace.stats.step_id >= 2
    assert client.read_steps(2).steps[0].ended == ((1, "length"),)
    with pytest.raises(UserError, match="max_steps=0"):
        client.read_steps(0, 0)


def test_the_types_of_operation_arguments_and_results_are_checked():
    pause = OPERATIONS["pause"]
    assert pause.decode_arguments(pause.encode_arguments((PauseScope.NEW,))) == (PauseScope.NEW,)
    with pytest.raises(UserError, match="pause: scope='sideways' cannot be sent to the engine"):
        pause.encode_arguments(("sideways",))
    with pytest.raises(UserError, match=r"sleep: level=10+ cannot be sent to the engine"):
        OPERATIONS["sleep"].encode_arguments((10**30,))
    with pytest.raises(TypeError):
        pause.bind()
    rejected = OPERATIONS["add_requests"]
    decoded = rejected.decode_result(
        rejected.encode_result({"a": RequestError("no", parameter="n")})
    )
    assert (str(decoded["a"]), decoded["a"].parameter) == ("no", "n")
    with pytest.raises(MessageError):
        OPERATIONS["reset_prefix_cache"].decode_result(rejected.encode_result({}))


@pytest.mark.costly
def test_arbitrary_functions_cannot_be_called_by_name_in_an_engine_process(client_of):
    with pytest.raises(UserError, match="operation='shutil:rmtree' cannot be sent"):
        client_of("sync").call_workers("shutil:rmtree", ("/nowhere",))


def test_every_operation_is_documented_and_typed():
    for operation in OPERATIONS.values():
        assert inspect.getdoc(operation), operation.name
        assert getattr(EnginePort, operation.name) is operation
