"""Readers of traces: each documented format, and invalid files with their line."""

import gzip
import json
from array import array

import pytest

from dovetail.clock import ManualClock
from dovetail.decision_log import DecisionRecorder, RecordedScheduler
from dovetail.errors import UserError
from dovetail.interfaces import SchedulerContext, SchedulerLimits
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler
from dovetail_devkit.scheduler.random_programs import make_kv_cache
from dovetail_lab.workloads.readers import lines
from dovetail_lab.workloads.readers.sharegpt import read_sharegpt
from dovetail_lab.workloads.readers.trace_row import TraceError
from dovetail_lab.workloads.readers.trace_source import SHIPPED, find_trace

NS = 1_000_000_000
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
NEWER = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)


def rows_of(tmp_path, text, name="trace.txt", **options):
    path = tmp_path / name
    path.write_text(text)
    return list(find_trace(str(path), **options).rows())


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "count", "mean_prompt"),
    [
        ("azure:code", 8819, 2048),
        ("azure:conv", 19366, 1155),
        ("mooncake:conversation", 12031, 12035),
        ("mooncake:synthetic", 3993, 15325),
    ],
)
def test_a_shipped_trace_has_its_published_size(name, count, mean_prompt):
    rows = list(find_trace(name).rows())
    assert len(rows) == count
    assert round(sum(row.num_prompt_tokens for row in rows) / count) == mean_prompt
    assert bool(rows[0].prefix_hashes) == name.startswith("mooncake")


def test_the_shipped_traces_have_an_attribution_and_are_small():
    source = find_trace("azure:conv")
    folder = source.path.parent
    text = (folder / "README.md").read_text()
    assert all(file in text for file in SHIPPED.values())
    assert "CC-BY-4.0" in text and "Apache-2.0" in text
    assert sum(path.stat().st_size for path in folder.iterdir()) < 600_000


def test_azure_rows_of_both_years_keep_every_digit_of_the_time(tmp_path):
    text = AZURE + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319601,3180,8\n"
    first, second = rows_of(tmp_path, text)
    assert (first.num_prompt_tokens, first.num_output_tokens, first.line) == (4808, 10, 2)
    assert second.arrival_ns - first.arrival_ns == 52_000_100
    text = AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 02:00:00+02:00,1,1\n"
    with pytest.raises(TraceError, match="earlier than the row before"):
        rows_of(tmp_path, text)


def test_burstgpt_rows_of_both_releases_are_found_by_column_name(tmp_path):
    old = rows_of(tmp_path, BURST + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,8,0,8,API\n")
    assert [(row.arrival_ns, row.num_prompt_tokens, row.tenant) for row in old] == [
        (5 * NS, 472, "ChatGPT")
    ]
    text = NEWER + "".join(
        f"{start},{session},1.5,GPT-4,{prompt},7,{prompt + 7},Conversation log\n"
        for start, session, prompt in ((0.25, "9", 10), (1.0, "nan", 5), (2.0, "9", 40))
    )
    newer = rows_of(tmp_path, text)
    assert [(row.session, row.turn) for row in newer] == [("9", 0), ("", 0), ("9", 1)]
    assert newer[0].arrival_ns == NS // 4


def test_mooncake_rows_have_prefix_hashes_and_times_in_milliseconds(tmp_path):
    row = {"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}
    (read,) = rows_of(tmp_path, json.dumps(row) + "\n")
    assert read.arrival_ns == 27_482_000_000 and read.prefix_hashes == (46, 47)


CONVERSATION = {
    "id": "abc",
    "conversations": [
        {"from": "human", "value": "x" * 40},
        {"from": "gpt", "value": "y" * 20},
        {"from": "human", "value": "z" * 4},
        {"from": "gpt", "value": "w" * 8},
    ],
}


@pytest.mark.parametrize("form", ["list", "indented", "lines"])
def test_sharegpt_replies_become_turns_whose_prompts_grow(form, tmp_path):
    several = [CONVERSATION, {"id": "no reply", "conversations": []}, CONVERSATION]
    text = {
        "list": json.dumps(several),
        "indented": json.dumps(several, indent=2),
        "lines": "\n".join(map(json.dumps, several)),
    }[form]
    rows = rows_of(tmp_path, text)
    assert [(r.num_prompt_tokens, r.num_output_tokens, r.turn) for r in rows] == [
        (10, 5, 0),
        (16, 2, 1),
    ] * 2
    assert rows[0].session == rows[1].session != rows[2].session
    assert rows[2].arrival_ns == 2 * NS


def test_sharegpt_lengths_can_be_counted_by_a_function(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([CONVERSATION]))
    assert [row.num_prompt_tokens for row in read_sharegpt(path, count=len)] == [40, 64]


def test_a_decision_log_becomes_a_trace_with_its_real_output_lengths(tmp_path):
    clock, path = ManualClock(5), tmp_path / "run.log"
    context = SchedulerContext(
        limits=SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=2048, max_model_len=2048),
        kv_cache=make_kv_cache(num_blocks=400, block_size=16),
        clock=clock,
    )
    recorder = DecisionRecorder(path, Scheduler, context)
    scheduler = RecordedScheduler(Scheduler(recorder.context), recorder)
    for number, max_tokens in enumerate((2, 3)):
        request = EngineCoreRequest(
            request_id=f"q{number}",
            prompt_token_ids=array("i", [1] * 512 + [number + 2] * 88),
            sampling_params=SamplingParams(max_tokens=max_tokens),
            max_tokens=max_tokens,
            tenant=f"t{number}",
            arrival_ns=100 - number,
        )
        scheduler.add_request(request)
    for _ in range(5):
        plan = scheduler.schedule()
        tokens = array("i", [8]) * sum(plan.samples)
        scheduler.update_from_output(
            plan,
            ModelRunnerOutput(step_id=plan.step_id, num_sampled=plan.samples, token_ids=tokens),
        )
    scheduler.shutdown()
    rows = list(find_trace(str(path)).rows())
    assert [(r.arrival_ns, r.num_output_tokens, r.tenant, r.max_tokens) for r in rows] == [
        (99, 3, "t1", 3),
        (100, 2, "t0", 2),
    ]
    (shared, first), (again, second) = (row.prefix_hashes for row in rows)
    assert shared == again and first != second
    path.write_bytes(path.read_bytes()[:60] + b"\x00\x01" + path.read_bytes()[62:])
    with pytest.raises(TraceError, match="damaged"):
        list(find_trace(str(path)).rows())


GOOD = "2023-11-16 18:17:03.5,10,10\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (AZURE + GOOD + "2023-11-16 18:17:04,-3,10\n", 3, "ContextTokens='-3' is not between"),
        (AZURE + GOOD + "2023-11-16 18:17:04,5,99999999999\n", 3, "GeneratedTokens=.* between"),
        (AZURE + GOOD + "2023-11-16 18:17:04,1e400,1\n", 3, "not finite"),
        (AZURE + GOOD + "2023-11-16 18:17:04,many,1\n", 3, "'many' is not a number"),
        (AZURE + GOOD + "2023-11-16 18:17:04,2.5,1\n", 3, "not an integer"),
        (AZURE + GOOD + "yesterday,5,1\n", 3, "not a date and time"),
        (AZURE + GOOD + "2023-13-16 18:17:04,5,1\n", 3, "not a date and time"),
        (AZURE + GOOD + "2023-11-16 18:17:04,5\n", 3, "has 2 fields; the header has 3"),
        (AZURE + GOOD + "2023-11-16 18:17:03,5,1\n", 3, "0.5 s earlier"),
        (AZURE + GOOD + "2043-11-16 18:17:03,5,1\n", 3, "more than ten years"),
        (AZURE + '"2023,1\n', 2, "not CSV"),
        (BURST + "-5,m,4,4,8,API\n", 2, "Timestamp='-5' is negative"),
        ('{"timestamp": 0, "input_length": 5}\n', 1, "no field 'output_length'"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n[1]\n', 2, "JSON object"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{oops\n', 2, "not JSON"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n',
            1,
            "1 entries; input_length=513 needs 2 blocks",
        ),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}\n', 1, "not a number"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}\n',
            1,
            "list of integers",
        ),
        ('[{"conversations": 5}]', 1, 'no list "conversations"'),
        ('[{"conversations": [{"from": "human"}]}]', 1, '"from" and "value"'),
        ('[{"conversations": [{"from": "cat", "value": "x"}]}]', 1, "'cat' is not known"),
        ('[{"conversations": []}', 1, "ends in the middle"),
        ("[5]", 1, "conversation object, got int"),
        ("hello\n", 1, "format is not known"),
        ("{" + '"a":[' * 50_000 + "\n", 1, "format is not known"),
        (BURST + "1e300,m,4,4,8,API\n", 2, "more than 10,000 years"),
        (AZURE + "1960-01-02 00:00:00,5,1\n1960-01-01 00:00:00,5,1\n", 3, "86400 s earlier"),
    ],
)
def test_the_error_for_an_invalid_trace_names_the_line(text, line, message, tmp_path):
    with pytest.raises(TraceError, match=message) as raised:
        rows_of(tmp_path, text)
    assert raised.value.line == line and raised.value.path.endswith("trace.txt")


def test_a_line_that_is_too_long_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 64)
    with pytest.raises(TraceError, match="longer than 64 bytes") as raised:
        rows_of(tmp_path, AZURE + "x" * 100)
    assert raised.value.line == 2


def test_a_damaged_compressed_file_is_rejected(tmp_path):
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress((AZURE + GOOD * 2000).encode())[:-20])
    with pytest.raises(TraceError, match="compressed file is damaged"):
        list(find_trace(str(path)).rows())
    path.write_bytes(b"not gzip at all")
    with pytest.raises(TraceError, match="damaged"):
        list(find_trace(str(path)).rows())


def test_a_file_that_is_not_utf8_is_rejected(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(AZURE.encode() + b"\xff\xfe,1,1\n")
    with pytest.raises(TraceError, match="not UTF-8"):
        list(find_trace(str(path)).rows())


def test_the_format_of_an_empty_file_is_not_known(tmp_path):
    path = tmp_path / "trace.csv"
    path.touch()
    with pytest.raises(TraceError, match="the line is empty"):
        find_trace(str(path))


def test_an_unknown_trace_name_is_rejected_with_a_suggestion():
    with pytest.raises(UserError, match=r"azure:convv.*Did you mean 'azure:conv'"):
        find_trace("azure:convv")


def test_times_before_1970_are_valid(tmp_path):
    times = [row.arrival_ns for row in rows_of(tmp_path, AZURE + "1969-12-31 23:59:59,5,1\n" * 2)]
    assert times == [-1_000_000_000] * 2


def test_a_format_can_be_named_before_the_path(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(BURST + "5,m,4,4,8,API\n")
    assert find_trace(f"burstgpt:{path}").format == "burstgpt"
    with pytest.raises(TraceError, match="no column 'TIMESTAMP'"):
        list(find_trace(f"azure:{path}").rows())


def test_only_the_requested_rows_are_read(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(AZURE + GOOD * 3 + "broken\n")
    source = find_trace(str(path))
    assert [row.line for row in source.rows(1, 2)] == [3, 4]
    with pytest.raises(TraceError):
        list(source.rows(1, 3))
