"""Tests of input rows and result rows: formats, sampling parameters, errors that name the line."""

import json

import pytest

from dovetail.errors import RequestError
from dovetail.interfaces import IOProcessorContext, IORequest, IOResult
from dovetail.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_io_jsonl import JSONLProcessor, read_rows, write_rows

DEFAULT = SamplingParams(temperature=0.5)


def make(tokenizer=None):
    return JSONLProcessor(
        IOProcessorContext(
            model=None,
            limits=None,
            tokenizer=tokenizer or ByteTokenizer(),
            default_sampling=DEFAULT,
        )
    )


def prompts(data, params=None, processor=None):
    request = IORequest(data=data, sampling_params=params)
    return (processor or make()).pre_process(request).prompts


def completion(index, text, reason="stop"):
    return CompletionOutput(index=index, text=text, token_ids=[1], finish_reason=reason)


def output(*completions, error=None):
    return RequestOutput(
        request_id="x",
        prompt=None,
        prompt_token_ids=[1],
        outputs=list(completions),
        finished=True,
        metrics=RequestMetrics(arrival_ns=0),
        error=error,
    )


def test_a_row_may_have_a_text_prompt_or_token_ids_or_messages():
    chat = [{"role": "user", "content": "hi"}]
    actual = prompts([{"prompt": "say"}, {"prompt_token_ids": [4, 5]}, {"messages": chat}])
    rendered = b"user: hi\nassistant: "
    assert [item.prompt for item in actual] == [
        "say",
        {"prompt_token_ids": [4, 5]},
        {"prompt_token_ids": list(rendered)},
    ]


def test_sampling_parameters_of_a_row_override_those_of_the_call():
    rows = [
        {"prompt": "a", "max_tokens": 3, "logit_bias": {"7": 1.5}, "priority": -2},
        {"prompt": "b"},
    ]
    first, second = prompts(rows, SamplingParams(top_k=5))
    assert first.sampling_params == SamplingParams(top_k=5, max_tokens=3, logit_bias={7: 1.5})
    assert (first.priority, second.priority) == (-2, 0)
    assert second.sampling_params == SamplingParams(top_k=5)
    assert prompts(rows)[1].sampling_params == DEFAULT


def test_rows_are_read_from_files_strings_and_lists(tmp_path):
    rows = [{"id": "ä", "prompt": "line\u2028separator"}, {"id": 2, "prompt": "b"}]
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    assert [row for _, row in read_rows(path)] == rows
    text = path.read_text("utf-8").replace("\n", "\r\n\r\n")
    assert [row for _, row in read_rows(text)] == rows
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert prompts(path) == prompts(rows) == prompts(text)
    assert prompts("") == ()
    assert sorted(actual.name for actual in tmp_path.iterdir()) == ["rows.jsonl"]


def test_result_rows_have_the_id_text_and_finish_reason(tmp_path):
    processor = make()
    rows = [{"prompt": "a"}, {"id": "b", "prompt": "b"}, {"id": 9, "prompt": "c", "n": 2}]
    request = IORequest(data=rows)
    batch = processor.pre_process(request)
    outputs = [
        output(completion(0, "one", "length")),
        output(error="too long"),
        output(completion(0, "two"), completion(1, "three")),
    ]
    actual = processor.post_process(IOResult(request=request, batch=batch, outputs=outputs))
    assert actual == [
        {"id": 0, "text": "one", "finish_reason": "length"},
        {"id": "b", "error": "too long"},
        {"id": 9, "index": 0, "text": "two", "finish_reason": "stop"},
        {"id": 9, "index": 1, "text": "three", "finish_reason": "stop"},
    ]
    write_rows(tmp_path / "out.jsonl", actual)
    lines = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == actual


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "data has the type int; pass a pathlib.Path"),
        ([{"prompt": "a"}, "b"], "row 1 has the type str"),
        ('{"prompt": "a"}\nnonsense', "line 2 is not JSON"),
        ("\n[1]", "line 2 is not a JSON object"),
        ([{}], "row 0: the row must have exactly one of prompt, messages, .*; got no prompt"),
        ([{"prompt": "a", "messages": []}], "got prompt and messages"),
        ([{"prompt": 3}], "prompt=3 must be a string"),
        ([{"messages": "hi"}], "row 0: messages='hi' must be a list of objects"),
        ([{"prompt": "a", "max_token": 3}], "cannot have the field 'max_token'.* 'max_tokens'"),
        ([{"prompt": "a", "top_p": 2}], "row 0: top_p=2 must be above 0 and at most 1"),
        ([{"prompt": "a", "logit_bias": {"x": 1}}], "all keys must be token ids"),
        ([{"prompt": "a", "priority": "high"}], "priority='high' must be an integer"),
        ([{"id": 1.5, "prompt": "a"}], "id=1.5 must be a string or an integer"),
        ([{"prompt": "a"}, {"id": 0, "prompt": "b"}], "row 1: id=0 is already used in row 0"),
        ([{"messages": []}], "row 0: messages is empty"),
    ],
)
def test_the_error_for_invalid_data_names_its_location(data, message):
    with pytest.raises(RequestError, match=message) as caught:
        prompts(data)
    assert caught.value.parameter == "data"
    assert not str(caught.value).endswith("..")


@pytest.mark.parametrize(
    "row",
    [
        {5: "a", "prompt": "a"},
        {"prompt": "a", "logit_bias": {(1, 2): 1.0}},
        {"prompt": "a", "logit_bias": {None: 1.0}},
        {"prompt": "a", "priority": [10**5000]},
        {"prompt": [10**5000]},
        {"prompt": "a", "id": [10**5000]},
    ],
)
def test_rows_with_values_that_json_does_not_have_are_rejected(row):
    with pytest.raises(RequestError, match="row 1: ") as caught:
        prompts([{"prompt": "a"}, row])
    assert len(str(caught.value)) < 1000


def test_a_large_id_that_is_used_twice_is_rejected():
    with pytest.raises(RequestError, match=r"row 1: id=an integer of .* bits is already used"):
        prompts([{"prompt": "a", "id": 10**5000}] * 2)


def test_the_error_for_an_unreadable_file_names_it(tmp_path):
    with pytest.raises(RequestError, match=r"nothing\.jsonl cannot be read"):
        prompts(tmp_path / "nothing.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    with pytest.raises(RequestError, match=r"bad\.jsonl: line 2: prompt=3"):
        prompts(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="cannot be read"):
        prompts(bad)


def test_messages_without_a_tokenizer_are_rejected():
    processor = make()
    processor._tokenizer = None
    with pytest.raises(RequestError, match="messages need a tokenizer"):
        prompts([{"messages": [{"role": "user", "content": "hi"}]}], processor=processor)


def test_a_failed_write_does_not_change_the_file(tmp_path):
    path = tmp_path / "out.jsonl"
    write_rows(path, [{"id": 1}])
    with pytest.raises(TypeError):
        write_rows(path, [{"id": 2}, {"id": object()}])
    assert path.read_text() == '{"id": 1}\n'
