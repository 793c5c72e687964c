"""Uses the Responses, Files and Batches APIs with the package openai."""

import json
import sys
import time

from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Person(BaseModel):
    name: str
    age: int


client = OpenAI(base_url=sys.argv[1], api_key="any", max_retries=0)
given = {"model": "demo", "temperature": 0, "max_output_tokens": 64}

whole = client.responses.create(input="What is 27 + 58?", **given)
assert whole.output_text == "27 + 58 = 85." and whole.status == "completed"
with client.responses.stream(input="What is 27 + 58?", **given) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == stream.get_final_response().output_text == whole.output_text

called = client.responses.create(input="What is 1234 + 4321?", tools=[TOOL], **given)
(call,) = (item for item in called.output if item.type == "function_call")
assert json.loads(call.arguments) == {"a": 1234, "b": 4321}
result = {"type": "function_call_output", "call_id": call.call_id, "output": "5555"}
answer = client.responses.create(
    input=[result], previous_response_id=called.id, tools=[TOOL], **given
)
assert answer.output_text == "1234 + 4321 = 5555."

parsed = client.responses.parse(
    input="Write this as JSON: name Yuki, age 7", text_format=Person, **given
)
assert parsed.output_parsed == Person(name="Yuki", age=7)

client.responses.delete(whole.id)
try:
    client.responses.retrieve(whole.id)
    raise AssertionError("a deleted response is returned")
except NotFoundError:
    pass
try:
    client.responses.create(input="Anna", model="demo", temperature=-1)
    raise AssertionError("an invalid temperature is accepted")
except BadRequestError as error:
    assert error.param == "temperature"

line = {"custom_id": "a", "method": "POST", "url": "/v1/responses"}
line["body"] = {"input": "What is 27 + 58?", **given}
lines = f"{json.dumps(line)}\nno JSON\n".encode()
file = client.files.create(file=("lines.jsonl", lines), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
)
deadline_s = time.monotonic() + 60
while batch.status not in ("completed", "failed"):
    assert time.monotonic() < deadline_s, batch
    time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
record = json.loads(client.files.content(batch.output_file_id).text)
assert record["response"]["body"]["output"][0]["content"][0]["text"] == "27 + 58 = 85."
assert batch.request_counts.failed == 1 and batch.error_file_id
print("done")
