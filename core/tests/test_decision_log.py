"""The decision log: recorded data, omitted data, and damaged files."""

import json
import logging
from array import array
from collections import Counter

import pytest

from dovetail.clock import ManualClock
from dovetail.decision_log import (
    DecisionRecorder,
    LogHeader,
    LogReader,
    Plain,
    PlanDecoder,
    PlanEncoder,
    RecordedScheduler,
    RecordKind,
    decode_names,
    decode_output,
    decode_request,
    split_readings,
)
from dovetail.decision_log.encoding import encode_output
from dovetail.errors import ConfigError, RequestError, UserError
from dovetail.interfaces import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LatentAttentionSpec,
    PauseScope,
    Policy,
    SchedulerContext,
    SchedulerLimits,
    StateSpec,
)
from dovetail.plan import BlockColumns, EncoderRun, SchedulerOutput
from dovetail.request import EncoderInput, EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler

SECRET = 77_777_777


class Ticking(ManualClock):
    """A clock that advances by one nanosecond each time it is read."""

    def now_ns(self):
        self.advance(1)
        return super().now_ns()


def make_context(**arguments):
    window = FullAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=6
    )
    latent = LatentAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=3, dtype="float32", value_size=2
    )
    groups = (
        KVCacheGroup(layer_names=("a",), spec=window),
        KVCacheGroup(layer_names=("b",), spec=StateSpec(block_size=4, num_bytes=8, snapshots=True)),
        KVCacheGroup(layer_names=("c",), spec=latent),
    )
    fields = {
        "limits": SchedulerLimits(
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_model_len=64,
            max_num_encoder_tokens=8,
            encoder_cache_tokens=8,
        ),
        "kv_cache": KVCacheConfig(num_blocks=40, groups=groups),
        "clock": Ticking(),
        "seed": 5,
    }
    return SchedulerContext(**fields | arguments)


def make_request(name="a", prompt=(SECRET, 5, SECRET), **arguments):
    params = SamplingParams(
        max_tokens=8,
        stop=["a secret"],
        stop_token_ids=[SECRET],
        bad_words=["another secret"],
        logit_bias={SECRET: 1.0},
        extra_args={"expected_tokens": 3, "listed": [1, 2]},
    )
    fields = {
        "request_id": name,
        "prompt_token_ids": array("i", prompt),
        "sampling_params": params,
        "max_tokens": 8,
        "stop_token_ids": frozenset({SECRET, 2}),
        "bad_words_token_ids": ((SECRET,),),
        "cache_salt": "salted secret",
        "tenant": "t",
    }
    return EngineCoreRequest(**fields | arguments)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "decisions.log"


@pytest.fixture
def record(path):
    """Make a scheduler that records a decision log: `record(**context)`."""
    created = []

    def make(**arguments):
        recorder = DecisionRecorder(path, Scheduler, make_context(**arguments))
        created.append(RecordedScheduler(Scheduler(recorder.context), recorder))
        return created[-1]

    yield make
    for scheduler in created:
        scheduler.shutdown()


def read(path):
    """Return the records, each as (kind, clock readings, payload)."""
    return [(record.kind, *split_readings(record.payload)) for record in LogReader(path)]


def step(scheduler, token=9):
    plan = scheduler.schedule()
    tokens = array("i", [token]) * len(plan.rows)
    output = ModelRunnerOutput(step_id=plan.step_id, num_sampled=plan.samples, token_ids=tokens)
    return plan, scheduler.update_from_output(plan, output)


def test_only_calls_that_affect_scheduling_decisions_are_recorded(record, path):
    scheduler = record()
    scheduler.add_request(make_request())
    step(scheduler)
    scheduler.depth()
    scheduler.pause(PauseScope.NEW)
    scheduler.resume()
    assert scheduler.abort_requests(["a", "nobody"]) == ["a"]
    scheduler.reset_prefix_cache()
    scheduler.shutdown()
    records = read(path)
    kinds = [kind for kind, *_ in records]
    assert kinds[:4] == [RecordKind.HEADER, RecordKind.ADD, RecordKind.PLAN, RecordKind.OUTPUT]
    assert kinds[4:] == [RecordKind.PAUSE, RecordKind.RESUME, RecordKind.ABORT, kinds[-1]]
    assert kinds[-1] is RecordKind.RESET_PREFIX_CACHE
    assert decode_names(records[4][2]) == ["new"]
    assert decode_names(records[6][2]) == ["a", "nobody"]
    report = [reading for _, readings, _ in records for reading in readings]
    assert report == [*range(1, len(report) + 1)] and len(report) >= 4


def test_a_rejected_request_is_not_recorded(record, path):
    scheduler = record()
    for invalid in (make_request(prompt=()), make_request(prompt=range(64))):
        with pytest.raises(RequestError):
            scheduler.add_request(invalid)
    scheduler.add_request(make_request())
    with pytest.raises(RequestError, match="in use"):
        scheduler.add_request(make_request())
    assert [kind for kind, *_ in read(path)] == [RecordKind.HEADER, RecordKind.ADD]


def test_the_log_header_restores_the_scheduler_context(record, path):
    class Own(Policy):
        """A policy class that is not installed as a plugin."""

        def __init__(self, options):
            self.options = options

    record(policy=Own, policy_options={"chunk": 3}, strict=True)
    header = LogHeader.decode(read(path)[0][2])
    clock, context = ManualClock(), make_context()
    assert header.scheduler == "dovetail.scheduling.scheduler:Scheduler"
    assert header.policy.endswith(
        ":test_the_log_header_restores_the_scheduler_context.<locals>.Own"
    )
    again = header.context(policy=Own, clock=clock)
    assert again == make_context(
        policy=Own, policy_options={"chunk": 3}, strict=True, clock=clock, limits=context.limits
    )


def test_the_decision_log_contains_no_tokens_text_or_salts(record, path):
    scheduler = record()
    content = EncoderInput(position=1, num_tokens=2, content_hash=b"hash secret")
    scheduler.add_request(make_request(encoder_inputs=(content,)))
    step(scheduler, token=SECRET - 1)
    scheduler.add_request(make_request("b", prompt=(5, SECRET - 1, SECRET)))
    scheduler.shutdown()
    everything = b"".join(payload for *_, payload in read(path))
    assert b"secret" not in everything and str(SECRET).encode() not in everything
    for number in (SECRET, SECRET - 1):
        assert number.to_bytes(4, "little") not in everything


def test_equal_tokens_have_equal_codes_in_the_log(record, path):
    scheduler = record()
    scheduler.add_request(make_request())
    step(scheduler, token=5)
    scheduler.add_request(make_request("b", prompt=(5, 2, 6), cache_salt="other"))
    scheduler.add_request(make_request("c", cache_salt=""))
    records = read(path)
    first, second, third = (
        decode_request(payload) for kind, _, payload in records if kind is RecordKind.ADD
    )
    assert list(first.prompt_token_ids) == [0, 1, 0]
    assert first.stop_token_ids == {0, 2} and first.sampling_params.stop_token_ids == (0,)
    assert list(second.prompt_token_ids) == [1, 2, 3]
    assert first.tenant == "t" and first.max_tokens == 8 and first.sampling_params.max_tokens == 8
    assert first.sampling_params.extra_args == {"expected_tokens": 3}
    assert len({first.cache_salt, second.cache_salt, ""}) == 3 and third.cache_salt == ""
    (output,) = (decode_output(payload) for kind, _, payload in records if kind == 7)
    assert list(output.token_ids) == [1] and list(output.num_sampled) == [1]


def test_failed_requests_are_recorded_without_their_error_messages():
    columns = {"num_sampled": array("B", [1, 1]), "token_ids": array("i", [4, 5])}
    output = ModelRunnerOutput(step_id=3, errors={1: "the user's text"}, **columns)
    payload = encode_output(output, Plain())
    assert b"text" not in payload
    assert decode_output(payload).errors == {1: ""}


def test_plans_in_the_log_round_trip():
    first = BlockColumns(rows=array("i", [3]), counts=array("i", [2]), block_ids=array("i", [7, 9]))
    none = BlockColumns(rows=array("i"), counts=array("i"), block_ids=array("i"))

    def plan(number, starts, **arguments):
        fields = {
            "num_tokens": array("i", [1, 1]),
            "samples": array("B", [1, 1]),
            "joins": (),
            "leaves": array("i"),
            "blocks": (none, first),
        }
        return SchedulerOutput(
            step_id=number,
            rows=array("i", [3, 0]),
            starts=array("i", starts),
            total_num_tokens=2,
            **fields | arguments,
        )

    plans = [
        plan(4, [6, 2]),
        plan(5, [7, 3]),
        plan(6, [7, 3]),
        plan(7, [8, 4], num_tokens=array("i", [4, 1]), samples=array("B", [1, 0])),
        plan(8, [9, 5], leaves=array("i", [2]), num_drafts=array("i", [1, 0])),
        plan(9, [10, 6], encoder=(EncoderRun(row=3, index=1),), encoder_frees=(b"2", b"0")),
    ]
    encoder, decoder = PlanEncoder(Plain(), None), PlanDecoder()
    sizes = []
    for arguments in plans:
        payload = encoder.encode(arguments)
        sizes.append(len(payload))
        decoded = decoder.decode(payload)
        for name in ("step_id", "rows", "starts", "num_tokens", "leaves", "num_drafts"):
            assert getattr(decoded, name) == getattr(arguments, name), name
        assert list(decoded.samples) == list(arguments.samples)
        assert decoded.blocks[1] == (first.rows, first.counts, first.block_ids)
    assert decoded.encoder == ((3, 1),) and decoded.encoder_frees == (2, 0)
    assert sizes[1] < sizes[2] < sizes[0], "a repeated decode step must be the smallest record"


@pytest.mark.parametrize("name", ["", "a b", "naïve ☃", "\ud800"])
def test_request_ids_of_any_characters_are_recorded(name, record, path):
    scheduler = record()
    scheduler.add_request(make_request(name))
    step(scheduler)
    scheduler.abort_requests([name])
    _, added, planned, _, aborted = (payload for *_, payload in read(path))
    (join,) = PlanDecoder().decode(planned).joins
    assert decode_request(added).request_id == join.request_id == name
    assert decode_names(aborted) == [name]


def test_a_truncated_log_is_read_up_to_its_last_complete_record(record, path, tmp_path):
    scheduler = record()
    scheduler.add_request(make_request())
    for _ in range(3):
        step(scheduler)
    scheduler.shutdown()
    content, whole = path.read_bytes(), read(path)
    numbers = Counter()
    begin = content.index(b"\n") + 1
    for end in range(begin, len(content) + 1):
        cut = tmp_path / "cut.log"
        cut.write_bytes(content[:end])
        reader = LogReader(cut)
        actual = [(record.kind, *split_readings(record.payload)) for record in reader]
        assert actual == whole[: len(actual)]
        numbers[len(actual), reader.truncated] += 1
    assert {number for number, _ in numbers} == {*range(len(whole) + 1)}
    untouched = [number for (number, truncated), _ in numbers.items() if not truncated]
    assert sorted(untouched) == [*range(len(whole) + 1)]
    assert all(numbers[number, False] == 1 for number in untouched)


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"dovetail decisions 2\nx", b"\n"])
def test_a_log_file_of_an_unknown_or_newer_format_is_rejected(content, path):
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a decision log of version 1"):
        LogReader(path)


def test_a_missing_log_file_is_rejected(path):
    with pytest.raises(UserError, match="cannot be read"):
        LogReader(path)


def test_a_damaged_record_is_reported_after_the_valid_records(record, path):
    scheduler = record()
    scheduler.add_request(make_request())
    step(scheduler)
    scheduler.shutdown()
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    collected = []
    with pytest.raises(UserError, match="is damaged at byte"):
        collected.extend(record.kind for record in LogReader(path))
    assert collected == [RecordKind.HEADER, RecordKind.ADD, RecordKind.PLAN]


@pytest.mark.parametrize("change", [{"limits": {"later": 1}}, {"seed": None, "more": 2}, None])
def test_a_log_header_of_a_different_version_is_rejected(change, record, path):
    record()
    report = json.loads(read(path)[0][2])
    payload = json.dumps(report | change if change else "text").encode()
    with pytest.raises(UserError, match="header cannot be read"):
        LogHeader.decode(payload)


def test_an_existing_log_file_is_not_overwritten(path):
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"decision_log=.*specify a new file"):
        DecisionRecorder(path, Scheduler, make_context())
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    "arguments", [{"gates": [object()]}, {"kv_connector": object()}, {"options": {"x": object()}}]
)
def test_a_config_that_cannot_be_replayed_is_rejected_and_leaves_no_file(arguments, path):
    with pytest.raises(ConfigError, match="decision_log"):
        DecisionRecorder(path, Scheduler, make_context(**arguments))
    assert not path.exists()


def test_a_full_disk_ends_the_log_but_not_the_engine(record, path, caplog):
    class Full:
        def write(self, content):
            raise OSError(28, "No space left on device")

    scheduler = record()
    scheduler.add_request(make_request())
    scheduler._recorder._log._file.close()
    scheduler._recorder._log._file = Full()
    with caplog.at_level(logging.WARNING):
        plan, _ = step(scheduler)
        step(scheduler)
    assert list(plan.rows) == [0]
    (message,) = caplog.messages
    assert "has stopped: No space left" in message
    assert [kind for kind, *_ in read(path)] == [RecordKind.HEADER, RecordKind.ADD]
