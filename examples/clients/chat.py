"""A client of a Dovetail server with the package openai: streams, retries, and handles errors.

dovetail serve --model demo &
python examples/clients/chat.py "What is 27 + 58?" --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import argparse
import os

from openai import APIConnectionError, APIStatusError, OpenAI


def main() -> int:
    """Send one message and print the response as it arrives. Return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("message", nargs="?", default="What is 27 + 58?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    arguments = parser.parse_args()

    # The client sends a request again after the statuses 429 and 503, at the time in Retry-After.
    key = os.environ.get("DOVETAIL_API_KEY", "none")
    client = OpenAI(base_url=arguments.url, api_key=key, max_retries=5, timeout=60)
    try:
        (model, *_) = client.models.list()
        stream = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": arguments.message}],
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for event in stream:
            for choice in event.choices:
                print(choice.delta.content or "", end="", flush=True)
            if event.usage:
                print(f"\n[{event.usage.completion_tokens} tokens]")
    except APIStatusError as error:
        print(f"The server rejected the request: {error.status_code} {error.message}")
        return 1
    except APIConnectionError as error:
        print(f"No connection to {arguments.url}: {error.__cause__}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
