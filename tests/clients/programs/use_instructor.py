"""Uses tools and formats with instructor."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


base = OpenAI(base_url=sys.argv[1], api_key="any", max_retries=0)
given = {
    "model": "demo",
    "temperature": 0,
    "max_tokens": 100,
    "max_retries": 0,
    "messages": [{"role": "user", "content": "Write this as JSON: name Yuki, age 7"}],
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(base, mode=mode)
    found = client.chat.completions.create(response_model=Person, **given)
    assert isinstance(found, Person)
client = instructor.from_openai(base, mode=instructor.Mode.TOOLS)
parts = list(client.chat.completions.create_partial(response_model=Person, **given))
assert parts[-1].age is not None
print("done")
