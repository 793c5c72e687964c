"""Uses the Messages API with the package anthropic."""

import sys

from anthropic import Anthropic, BadRequestError

TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
# The base address of this client has no "/v1".
client = Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key="any", max_retries=0)
given = {"model": "demo", "max_tokens": 64, "extra_body": {"temperature": 0}}
question = [{"role": "user", "content": "What is 27 + 58?"}]

whole = client.messages.create(messages=question, **given)
assert whole.content[0].text == "27 + 58 = 85." and whole.stop_reason == "end_turn"
with client.messages.stream(messages=question, **given) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
counted = client.messages.count_tokens(model="demo", messages=question).input_tokens
assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens

messages = [{"role": "user", "content": "What is 1234 + 4321?"}]
for streamed in (False, True):
    fields = {"messages": messages, "tools": [TOOL], **given}
    if streamed:
        with client.messages.stream(**fields) as stream:
            called = stream.get_final_message()
    else:
        called = client.messages.create(**fields)
    (call,) = (block for block in called.content if block.type == "tool_use")
    assert call.input == {"a": 1234, "b": 4321} and called.stop_reason == "tool_use"
result = {"type": "tool_result", "tool_use_id": call.id, "content": "5555"}
messages.append({"role": "assistant", "content": [block.to_dict() for block in called.content]})
messages.append({"role": "user", "content": [result]})
answer = client.messages.create(messages=messages, tools=[TOOL], **given)
assert answer.content[0].text == "1234 + 4321 = 5555."

try:
    client.messages.create(messages=question, model="demo", max_tokens=0)
    raise AssertionError("an invalid number of tokens is accepted")
except BadRequestError as error:
    assert error.body["error"]["param"] == "max_tokens"
print("done")
