"""Lines of a batch are executed by an engine in this process, without a server."""

import asyncio
import json

import msgspec
import pytest

from dovetail import AsyncLLM
from dovetail_server.batches.lines import LineError, LineExecutor, is_success, read_line
from dovetail_server.batches.local import local_calls

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Anna"}], "max_tokens": 4, "temperature": 0}


def line(**fields):
    fields = {"custom_id": "a", "method": "POST", "url": CHAT, "body": BODY} | fields
    return json.dumps(fields).encode()


@pytest.mark.costly
def test_batch_requests_run_without_a_server_and_an_invalid_body_does_not_affect_others():
    async def execute():
        async with AsyncLLM("demo", max_model_len=512) as llm:
            executor = LineExecutor(local_calls(llm, served_model_name="demo"))
            bodies = (BODY, {**BODY, "temperature": -1}, {**BODY, "model": "absent"}, BODY)
            lines = [read_line(line(custom_id=str(i), body=body)) for i, body in enumerate(bodies)]
            return await asyncio.gather(
                *(executor.execute(item, record_id=f"r{item.custom_id}") for item in lines)
            )

    records = json.loads(msgspec.json.encode(asyncio.run(execute())))
    assert [item["response"]["status_code"] for item in records] == [200, 400, 404, 200]
    assert [is_success(item) for item in records] == [True, False, False, True]
    assert [item["custom_id"] for item in records] == ["0", "1", "2", "3"]
    first, invalid = records[0]["response"]["body"], records[1]["response"]["body"]
    assert first["usage"]["completion_tokens"] == 4 and invalid["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"{", "invalid_json"),
        (b"\xff", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"[]", "invalid_line"),
        (line(custom_id=5), "invalid_custom_id"),
        (line(custom_id="x" * 513), "invalid_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="/metrics"), "invalid_url"),
        (line(url=["a"]), "invalid_url"),
        (line(body="text"), "invalid_body"),
        (line(body={**BODY, "stream": True}), "unsupported_parameter"),
    ],
)
def test_the_error_for_an_invalid_line_has_a_code_and_its_custom_id(text, code):
    with pytest.raises(LineError) as caught:
        read_line(text)
    assert caught.value.code == code and str(caught.value).endswith(".")
    has_id = code in ("invalid_method", "invalid_url", "invalid_body", "unsupported_parameter")
    assert caught.value.custom_id == ("a" if has_id else "")
