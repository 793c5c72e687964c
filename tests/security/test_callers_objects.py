"""Tests values of a caller's own classes, and values that change after a call.

A guard catches the exceptions of such objects' methods, the objects do not reach the engine, and
later changes do not affect running requests.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from contextlib import suppress

import pytest
from security.engines import AsyncFrontEnd, engine_options, open_llm

from dovetail import SamplingParams
from dovetail.config import EngineArgs
from dovetail.errors import DovetailError, RequestError, UserError
from dovetail.interfaces.sampling_support import FULL_SAMPLING
from dovetail.value_checks import shorten
from dovetail_devkit.fakes.worker import FakeWorker

pytestmark = pytest.mark.costly  # the tests share servers

VALID = SamplingParams(max_tokens=4, seed=7, ignore_eos=True)
TEXT = "the valid request"
METHODS = (
    *("__len__", "__iter__", "__eq__", "__bool__", "__str__", "__repr__", "__getitem__"),
    *("__hash__", "__index__", "__int__", "__float__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__format__", "__bytes__", "encode", "items", "keys", "get", "isascii"),
)


class Panic(BaseException):
    """An error like a panic in an extension module: it is not a subclass of Exception."""


class Capable(FakeWorker):
    """Declares every sampling capability, so that the engine accepts every parameter."""

    provides = FakeWorker.provides | FULL_SAMPLING


def hostile(base, value, error):
    """Return `value` as an object of a subclass of `base`. All its methods raise."""

    def fail(self, *arguments):
        raise error("hostile")

    return type("Hostile", (base,), dict.fromkeys(METHODS, fail))(value)


HOSTILE = {"a text": (str, "text"), "an int": (int, 5), "a float": (float, 0.5)} | {
    "a list": (list, [5, 6]),
    "a dict": (dict, {"prompt": "a"}),
    "bytes": (bytes, b"ab"),
}
PARAMS = tuple(SamplingParams.__dataclass_fields__)


def tokens_of(output):
    return [completion.token_ids for completion in output.outputs]


@pytest.fixture(scope="module", params=["in process", "engine process"])
def llm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with open_llm(request.param, engine_options(folder, worker_cls=Capable)) as llm:
        yield llm


@pytest.fixture(scope="module")
def front_end(tmp_path_factory):
    front_end = AsyncFrontEnd(engine_options(tmp_path_factory.mktemp("model"), worker_cls=Capable))
    yield front_end
    front_end.close()


def check_another_request(llm, **changes):
    """Send a changed request between two valid requests. Return the three outputs."""
    kwargs = {"prompt": "b", "params": VALID, "priority": 0} | changes
    try:
        outputs = llm.generate(
            [TEXT, kwargs["prompt"], TEXT],
            [VALID, kwargs["params"], VALID],
            priority=[0, kwargs["priority"], 0],
            on_error="return",
        )
    except DovetailError as error:
        assert len(str(error)) < 1000
        return
    alone = llm.generate(TEXT, VALID)[0]
    assert tokens_of(outputs[0]) == tokens_of(outputs[2]) == tokens_of(alone)


@pytest.mark.parametrize("error", [OSError, Panic])
@pytest.mark.parametrize("kind", HOSTILE)
def test_objects_with_methods_that_raise_are_read_or_rejected(llm, kind, error):
    value = hostile(*HOSTILE[kind], error)
    check_another_request(llm, prompt=value)
    check_another_request(llm, prompt={"prompt": "a", "cache_salt": value})
    check_another_request(llm, prompt={"prompt": "a", "deadline_s": value})
    check_another_request(llm, params=value)
    check_another_request(llm, priority=value)
    for name in PARAMS:
        for arguments in (value, [value]):
            try:
                params = SamplingParams(**{"max_tokens": 2, name: arguments})
            except RequestError as rejection:
                assert rejection.parameter == name
                continue
            check_another_request(llm, params=params)


@pytest.mark.parametrize("error", [OSError, Panic])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_arguments_of_a_stream_are_rejected(front_end, kind, error):
    value = hostile(*HOSTILE[kind], error)

    async def send(**arguments):
        stream = front_end.llm.generate(**{"prompt": TEXT, "params": VALID, **arguments})
        return tokens_of([output async for output in stream][-1])

    async def send_all():
        for name in ("request_id", "cache_salt", "priority", "timeout_s", "output_kind"):
            arguments = await asyncio.gather(send(), send(**{name: value}), return_exceptions=True)
            assert isinstance(arguments[0], list)
            assert isinstance(arguments[1], (list, DovetailError)), (name, arguments[1])
        for call in (
            lambda: front_end.llm.abort(value),
            lambda: front_end.llm.pause(value),
            lambda: front_end.llm.check_health(max_silence_s=value),
        ):
            with suppress(DovetailError):
                await call()
        await front_end.llm.check_health()

    front_end.loop.run_until_complete(asyncio.wait_for(send_all(), 30))


def test_a_prompt_key_that_cannot_be_compared_is_rejected(llm):
    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            raise Panic("hostile")

    with pytest.raises(RequestError) as caught:
        llm.generate({Key("prompt"): "a"}, VALID)
    assert caught.value.parameter == "prompt"


def test_changing_parameters_after_a_call_has_no_effect(llm):
    params = SamplingParams(max_tokens=4, seed=3, logit_bias={5: 100.0}, extra_args={"a": 1})
    before = tokens_of(llm.generate("b", params)[0])
    engine, by_name = llm.llm_engine, {}
    engine.add_request("changed", "b", params)
    engine.add_request("valid", TEXT, VALID)
    params.logit_bias[10**6] = "no number"
    params.extra_args["b"] = object()
    while engine.has_unfinished_requests():
        by_name |= {item.request_id: item for item in engine.step()}
    assert tokens_of(by_name["changed"]) == before
    assert tokens_of(by_name["valid"]) == tokens_of(llm.generate(TEXT, VALID)[0])
    with pytest.raises(RequestError) as caught:  # its current values are invalid
        llm.generate("b", params)
    assert caught.value.parameter == "logit_bias"


def test_an_empty_extra_args_mapping_is_copied():
    kwargs = {}
    params = SamplingParams(extra_args=kwargs)
    kwargs["a"] = object()
    assert params.extra_args == {}


def test_a_subclass_of_sampling_params_is_read_once(llm, front_end):
    class Unchecked(SamplingParams):
        def __post_init__(self):
            pass

    for changes in ({"n": "2"}, {"max_tokens": None, "min_tokens": "1"}, {"stop": 5}):
        with pytest.raises(RequestError):
            llm.generate("b", Unchecked(**changes))
        request = {"request_id": "a", "prompt": "b", "params": Unchecked(**changes)}
        assert isinstance(front_end.ask_all([request])[0], RequestError)
    check_another_request(llm, params=Unchecked(max_tokens=2))


def test_error_messages_do_not_contain_large_values():
    start = time.thread_time()
    for value in (array("i", [5]) * 3_000_000, deque([5]) * 10**6, dict.fromkeys([5] * 10).keys()):
        assert len(shorten(value)) < 80
    assert shorten(SamplingParams(stop_token_ids=list(range(1000)))) == "<SamplingParams>"
    assert time.thread_time() - start < 0.1


def test_a_template_variable_with_the_name_of_an_argument_is_rejected(llm):
    llm.get_tokenizer()
    with pytest.raises(RequestError) as caught:
        llm.chat([{"role": "user", "content": "a"}], chat_template_kwargs={"self": 5})
    assert caught.value.parameter == "chat_template_kwargs"


def test_an_operation_that_is_not_callable_is_rejected(llm):
    for operation in (5, ["x"] * 10**5, None):
        with pytest.raises(UserError) as caught:
            llm.llm_engine.collective_rpc(operation)
        assert len(str(caught.value)) < 300


def test_the_request_ids_of_an_abort_are_read_in_chunks(front_end):
    async def abort():
        turns, last = [], time.thread_time()

        async def watch():
            nonlocal last
            while True:
                await asyncio.sleep(0)
                turns.append(time.thread_time() - last)
                last = time.thread_time()

        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await front_end.llm.abort(["unknown"] * 500_000)
        watcher.cancel()
        with pytest.raises(RequestError) as caught:
            await front_end.llm.abort(["unknown"] * 2_000_000)
        assert caught.value.parameter == "request_ids"
        return max(turns)

    assert front_end.loop.run_until_complete(abort()) < 0.05


def test_truncating_a_prompt_in_a_deque_keeps_its_last_tokens(llm):
    params = SamplingParams(max_tokens=2, truncate_prompt_tokens=3)
    output = llm.generate([deque(range(5, 100))], params)[0]
    assert list(output.prompt_token_ids) == [97, 98, 99]


@pytest.mark.parametrize("option", ["scheduling_policy", "served_model_name", "quantization"])
def test_an_option_may_be_a_subclass_of_str(option, tmp_path):
    value = hostile(str, "text", Panic)
    with suppress(DovetailError):
        EngineArgs(**engine_options(tmp_path, **{option: value})).create_engine_config()
