"""Uses chat completions with LangChain."""

import sys

from langchain_openai import ChatOpenAI
from openai import BadRequestError

given = {"model": "demo", "base_url": sys.argv[1], "api_key": "any", "max_tokens": 8}
chat = ChatOpenAI(temperature=0, **given)
whole = chat.invoke("Anna")
assert whole.content and whole.usage_metadata["output_tokens"]
assert "".join(piece.content for piece in chat.stream("Anna")) == whole.content
try:
    ChatOpenAI(temperature=-1, **given).invoke("Anna")
except BadRequestError:
    print("done")
