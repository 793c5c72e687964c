"""Plans and results round-trip as frames, and malformed frames are rejected."""

import os
from array import array
from dataclasses import fields
from random import Random

import pytest

from dovetail.clock import ManualClock
from dovetail.errors import MessageError, RequestError
from dovetail.interfaces import SchedulerContext
from dovetail.plan import NewRequest, StepBuilder
from dovetail.request import EncoderInput, EngineCoreRequest
from dovetail.result import LogprobColumns, ModelRunnerOutput
from dovetail.sampling_params import (
    ReasoningParams,
    SamplingParams,
    StructuredOutputsParams,
)
from dovetail.scheduling import Scheduler
from dovetail.transport.columns import pack_columns, unpack_columns
from dovetail.transport.plan_frame import PLAN, decode_plan, encode_plan
from dovetail.transport.result_frame import RESULT, decode_result, encode_result
from dovetail.transport.wire_types import read_request, wire_request
from dovetail_devkit.scheduler.random_programs import random_program, random_request

SEED = 20261121


class Bomb:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def random_logprobs(rng, num_positions):
    counts = array("i", [rng.randint(1, 4) for _ in range(num_positions)])
    return LogprobColumns(
        counts=counts,
        token_ids=array("i", [rng.randrange(99) for _ in range(sum(counts))]),
        logprobs=array("f", [-rng.random() for _ in range(sum(counts))]),
        ranks=array("i", [rng.randint(1, 99) for _ in counts]),
    )


def random_result(rng, num_runs):
    num_sampled = array("B", [rng.choice((0, 1, 1, 3)) for _ in range(num_runs)])
    runs = [run for run in range(num_runs) if rng.random() < 0.3]
    return ModelRunnerOutput(
        step_id=rng.randrange(1 << 40),
        num_sampled=num_sampled,
        token_ids=array("i", [rng.randrange(1 << 31) for _ in range(sum(num_sampled))]),
        logprobs={run: random_logprobs(rng, num_sampled[run]) for run in runs},
        prompt_logprobs={run: random_logprobs(rng, rng.randint(0, 5)) for run in runs},
        num_drafts=array("B", [rng.randint(0, 3) for _ in num_sampled])
        if rng.random() < 0.5
        else array("B"),
        kv_transfer=rng.choice((b"", b"\0moved")),
        errors={run: f"run {run} failed" for run in runs if rng.random() < 0.2},
    )


def join(**arguments):
    message = {
        "request_id": "a",
        "row": 3,
        "generation": 1,
        "token_ids": array("i", range(7)),
        "num_prompt_tokens": 7,
        "sampling_params": SamplingParams(
            stop=["end"], logit_bias={3: 1.5}, extra_args={"depth": [1, {"x": None}]}
        ),
        "stop_token_ids": frozenset({2, 5}),
        "bad_words_token_ids": ((1, 2), (3,)),
        "seed": 2**64 - 1,
        "encoder_inputs": (EncoderInput(position=0, num_tokens=2, content_hash=b"\xff"),),
    }
    return NewRequest(**message | arguments)


def full_plan():
    builder = StepBuilder(num_groups=2)
    builder.build()
    builder.leave(4)
    builder.join(join())
    builder.grow(3, [7, 8], group=1)
    builder.grow(3, [9])
    builder.run(3, 0, 7, samples=True)
    builder.run(5, 2, 3, samples=True, num_drafts=2)
    builder.run(6, 2, 3, samples=False)
    builder.encode(3, 0)
    builder.free_encoded(b"old")
    builder.transfer(b"load")
    return builder.build()


def test_a_plan_with_all_fields_round_trips():
    plan = full_plan()
    assert decode_plan(encode_plan(plan)) == plan


@pytest.mark.parametrize("seed", range(SEED, SEED + 40))
def test_plans_of_random_scheduler_calls_round_trip(seed):
    rng, program = Random(seed), random_program(seed, plain=True)
    scheduler = Scheduler(
        SchedulerContext(limits=program.limits, kv_cache=program.kv_cache, clock=ManualClock())
    )
    for number in range(12):
        scheduler.add_request(random_request(rng, f"r{number}", program.limits))
    num_joins = 0
    for _ in range(12):
        plan = scheduler.schedule()
        assert decode_plan(encode_plan(plan)) == plan
        num_joins += len(plan.joins)
        sampled = array("i", [rng.randrange(1, 31) for sample in plan.samples if sample])
        result = ModelRunnerOutput(
            step_id=plan.step_id, num_sampled=plan.samples, token_ids=sampled
        )
        scheduler.update_from_output(plan, decode_result(encode_result(result)))
    assert num_joins


@pytest.mark.parametrize("num_runs", [0, 1, 7, 300])
def test_step_results_round_trip(num_runs):
    rng = Random(SEED + num_runs)
    for _ in range(20):
        result = random_result(rng, num_runs)
        assert decode_result(encode_result(result)) == result


def corrupt_frame(rng, frame):
    """Return the frame with bytes changed, removed or added, or fully random."""
    kind = rng.randrange(4)
    if kind == 0:
        changed = bytearray(frame)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind == 1:
        return frame[: rng.randrange(len(frame))]
    if kind == 2:
        return frame + rng.randbytes(rng.randint(1, 9))
    return rng.randbytes(rng.randrange(200))


@pytest.mark.parametrize(("encoded", "decode"), [("plan", decode_plan), ("result", decode_result)])
def test_a_corrupted_frame_is_rejected_or_decodes_to_valid_data(encoded, decode):
    """A changed token can be a valid token. Otherwise MessageError is raised."""
    rng = Random(SEED)
    frame = encode_plan(full_plan())
    if encoded == "result":
        frame = encode_result(random_result(rng, 30))
    num_rejected = 0
    for _ in range(3000):
        try:
            decode(corrupt_frame(rng, frame))
        except MessageError:
            num_rejected += 1
    assert num_rejected > 1500


def forged(change):
    actual = unpack_columns(encode_plan(full_plan()), PLAN, minimum=9)
    columns = [bytes(column) for column in actual.columns]
    numbers = list(actual.numbers)
    change(columns, numbers)
    return pack_columns(PLAN, columns, tuple(numbers))


def ints(*values):
    return array("i", values).tobytes()


def set_to(index, content):
    return lambda columns, numbers: columns.__setitem__(index, content)


@pytest.mark.parametrize(
    "change",
    [
        set_to(0, ints(3, -5, 6)),
        set_to(0, ints(3, 5)),
        set_to(1, ints(0, -1, 2)),
        set_to(2, ints(7, 0, 6)),
        set_to(2, ints(7, 3, 2)),
        set_to(2, b"\1\2\3"),
        set_to(3, b"\1\2\0"),
        set_to(4, ints(-1)),
        set_to(5, ints(1)),
        set_to(6, ints(1, 2)),
        set_to(8, b"\xc1"),
        set_to(8, b"\x91" * 100_000),
        set_to(10, ints(2)),
        set_to(11, ints(9, -9)),
        lambda columns, numbers: columns.pop(),
        lambda columns, numbers: columns.__delitem__(slice(4, None)),
        lambda columns, numbers: numbers.__setitem__(1, 14),
        lambda columns, numbers: numbers.__setitem__(0, -1),
    ],
)
def test_an_inconsistent_plan_is_rejected(change):
    assert decode_plan(forged(lambda columns, numbers: None)) == full_plan()
    with pytest.raises(MessageError):
        decode_plan(forged(change))


@pytest.mark.parametrize(
    "arguments",
    [
        {"row": -1},
        {"num_prompt_tokens": 8},
        {"num_prompt_tokens": 0},
        {"token_ids": array("i", [1, -1, 1, 1, 1, 1, 1])},
    ],
)
def test_inconsistent_data_of_a_new_request_is_rejected(arguments):
    builder = StepBuilder()
    builder.join(join(**arguments))
    with pytest.raises(MessageError):
        decode_plan(encode_plan(builder.build()))


def test_an_inconsistent_step_result_is_rejected():
    for result in (
        ModelRunnerOutput(step_id=1, num_sampled=array("B", [1]), token_ids=array("i")),
        ModelRunnerOutput(step_id=1, num_sampled=array("B", [1]), token_ids=array("i", [-1])),
        ModelRunnerOutput(
            step_id=1,
            num_sampled=array("B", [1]),
            token_ids=array("i", [1]),
            logprobs={1: random_logprobs(Random(1), 1)},
        ),
    ):
        with pytest.raises(MessageError):
            decode_result(encode_result(result))


def test_frames_of_other_versions_kinds_and_byte_orders_are_rejected():
    frame = encode_plan(full_plan())
    for index in (0, 4, 6, 12):
        changed = bytearray(frame)
        changed[index] ^= 1
        with pytest.raises(MessageError, match="kind"):
            decode_plan(bytes(changed))
    with pytest.raises(MessageError, match="kind"):
        decode_plan(frame[3::-1] + frame[4:])
    with pytest.raises(MessageError, match=f"expected .*{RESULT}"):
        decode_result(frame)


def test_a_pickle_in_a_frame_is_never_loaded(tmp_path):
    import pickle  # loading the pickle creates the file

    created = tmp_path / "fired"
    bomb = pickle.dumps(Bomb(created))
    offered = [bomb, encode_plan(full_plan())[:32] + bomb]
    offered += [forged(set_to(index, bomb)) for index in range(12)]
    for frame in offered:
        for decode in (decode_plan, decode_result, read_request):
            with pytest.raises(MessageError):
                decode(frame)
    assert not created.exists()
    pickle.loads(bomb)
    assert created.exists(), "the test pickle must create its file"


def request(**arguments):
    message = {
        "request_id": "one",
        "prompt_token_ids": array("i", [1, 2, 3]),
        "sampling_params": SamplingParams(max_tokens=4, stop_token_ids=[7], top_k=-1),
        "max_tokens": 4,
        "stop_token_ids": frozenset({0, 7}),
        "encoder_inputs": (EncoderInput(position=1, num_tokens=1, content_hash=b"h"),),
        "tenant": "t",
        "priority": -(2**63),
    }
    return EngineCoreRequest(**message | arguments)


def test_requests_in_frames_round_trip():
    assert read_request(wire_request(request())) == request()
    plain = request(prompt_token_ids=(1, 2, 3))
    assert list(read_request(wire_request(plain)).prompt_token_ids) == [1, 2, 3]


def test_every_field_of_sampling_params_round_trips():
    changed = {
        "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "seed": 5,
        "stop": ("x",), "stop_token_ids": (1,), "ignore_eos": True,
        "include_stop_str_in_output": True, "max_tokens": 9, "min_tokens": 1, "logprobs": 2,
        "prompt_logprobs": 1, "logit_bias": {1: 2.0}, "allowed_token_ids": (4,),
        "bad_words": ("w",), "truncate_prompt_tokens": 3, "skip_special_tokens": False,
        "extra_args": {"a": 1}, "detokenize": True,
        "structured_outputs": StructuredOutputsParams(form="regex", text="a+"),
        "reasoning": ReasoningParams(end="</think>", budget=7),
    }  # fmt: skip
    assert set(changed) == {field.name for field in fields(SamplingParams)}, (
        "a field is new: add it"
    )
    requested = request(sampling_params=SamplingParams(**changed))
    assert read_request(wire_request(requested)) == requested


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt_token_ids": ["a"]},
        {"prompt_token_ids": [2**31]},
        {"tenant": "a lone surrogate: \ud800"},
        {"seed": 2**64},
    ],
)
def test_the_error_for_a_request_that_cannot_be_serialized_names_it(arguments):
    with pytest.raises(RequestError):
        wire_request(request(**arguments))


def test_a_request_is_validated_when_its_frame_is_read():
    sent = wire_request(request(tenant="temperature"))
    spoilt = sent.replace(b"tenant", b"tenent")
    assert spoilt != sent
    with pytest.raises(MessageError, match="tenent"):
        read_request(spoilt)
