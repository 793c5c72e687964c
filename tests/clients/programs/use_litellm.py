"""Uses chat completions with litellm."""

import sys

import litellm

given = {
    "model": "openai/demo",
    "api_base": sys.argv[1],
    "api_key": "any",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Anna"}],
    "temperature": 0,
}
whole = litellm.completion(**given).choices[0].message.content
pieces = litellm.completion(stream=True, **given)
assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole and whole
try:
    litellm.completion(**{**given, "temperature": -1})
except litellm.BadRequestError:
    print("done")
