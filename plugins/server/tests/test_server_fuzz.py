"""Random valid and hostile requests do not make the server fail or change its other responses.

The bodies come from the server's OpenAPI document. Each field may appear twice, with values of any
type. The raw requests break the rules of HTTP itself.
"""

import json
import re
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dovetail_devkit.harnesses.process_tree import children_of

WAIT_S = 60
NUM_SHORT, NUM_LONG = 380, 8000
NUM_RAW_SHORT, NUM_RAW_LONG = 120, 2000
CANARY = {"prompt": "Anna and Ben", "max_tokens": 8, "temperature": 0, "logprobs": 2}
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
SECRET = re.compile(r"0x[0-9a-f]{8,}|Traceback|/(?:home|root|usr|tmp|work)/")
UNDER_TEST = settings(
    database=None,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

HOSTILE = (
    *("null", "true", "[]", "{}", '""', "0", "-1", "1.5", "1e999", "-1e308", "1" * 400),
    *("2147483648", "9223372036854775808", "18446744073709551616", "NaN", "-0.0", "1E-999"),
    *('"\\ud800"', '"\\u0000"', '"\\udfff\\ud800"', '"%s"' % ("x" * 5000), '[[[["a"]]]]'),
    *("[" * 10_000 + "]" * 10_000, '{"a":' * 500 + "1" + "}" * 500, "[null]", "[-1]", "[1e9]"),
    *('{"1": null}', '{"type": "json_object"}', '{"": ""}', "[{}]", '[{"role": "user"}]'),
    *('"<|im_start|>system"', '"{{ 7 * 7 }}"', '"%s%n"', "\x00", "\u2028", '"\\', "'a'"),
)
"""Raw values to insert into any field. Some are valid JSON, and some are not."""
VALID = {
    "boolean": ("true", "false"),
    "integer": ("1", "2", "3", "0"),
    "number": ("0", "1", "0.5", "2"),
    "string": ('"a"', '"Anna"', '"é 🎉"', '""'),
    "array": ("[]", "[1]", "[5, 6]", '["a"]'),
    "object": ("{}", '{"5": 1}'),
}
EXPENSIVE = ("n", "best_of", "max_tokens", "max_completion_tokens")
"""Fields for which large valid values would only make the tests slow."""
START = {
    "/v1/completions": (("prompt", '"Anna and Ben"'), ("max_tokens", "2")),
    "/v1/chat/completions": (
        ("messages", '[{"role": "user", "content": "reverse: robot"}]'),
        ("max_tokens", "2"),
    ),
    "/tokenize": (("prompt", '"Anna"'),),
    "/detokenize": (("tokens", "[5, 6]"),),
}


@pytest.fixture(scope="module")
def document(server):
    return server.get("/openapi.json").json


def resolve(document, schema):
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def kinds_of(document, schema):
    """Return the JSON types that a schema allows."""
    schema = resolve(document, schema)
    arguments = schema.get("type", [])
    actual = [arguments] if isinstance(arguments, str) else list(arguments)
    for part in schema.get("anyOf", ()):
        actual += kinds_of(document, part)
    return actual


def fields_of(document, path):
    """Return the fields of a route's body, with the strings of valid values."""
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    fields = {}
    for part in schema.get("anyOf", [schema]):
        for name, own in resolve(document, part)["properties"].items():
            texts = [text for kind in kinds_of(document, own) for text in VALID.get(kind, ())]
            fields[name] = ("1", "2") if name in EXPENSIVE else tuple(texts) or ("{}",)
    return fields


def conforms(document, schema, value):
    """Whether a value has the type and the required fields of a schema of the document."""
    schema = resolve(document, schema)
    types = {"object": dict, "array": list, "string": str, "integer": int, "null": type(None)}
    arguments = schema.get("type", [])
    named = [types[item] for item in ([arguments] if isinstance(arguments, str) else arguments)]
    if named and type(value) not in named:
        return False
    if isinstance(value, dict):
        own = schema.get("properties", {})
        return value.keys() >= set(schema.get("required", ())) and all(
            conforms(document, own[name], item) for name, item in value.items() if name in own
        )
    items = schema.get("items", {})
    return not isinstance(value, list) or all(conforms(document, items, item) for item in value)


def check(document, path, reply):
    """Check the status and the form of a response."""
    assert reply.status < 500 or reply.status == 503, (reply.status, reply.content)
    responses = document["paths"][path]["post"]["responses"]
    assert not SECRET.search(reply.content.decode())
    if reply.headers["content-type"].startswith("text/event-stream"):
        ends = [event for event in reply.events if event == "[DONE]" or "error" in event]
        assert len(ends) == 1 and ends[0] == reply.events[-1]
        return
    name = "200" if reply.status == 200 else "4XX" if reply.status < 500 else "503"
    schema = responses[name]["content"]["application/json"]["schema"]
    assert conforms(document, schema, reply.json), reply.content


@pytest.fixture
def unharmed(server):
    """Check that a test terminates no process and changes no response."""
    expected, processes = server.complete(**CANARY).json["choices"], children_of(server.process.pid)
    yield
    assert server.complete(**CANARY).json["choices"] == expected
    assert children_of(server.process.pid) >= processes
    assert server.get("/ready").status == 200


def fuzz_bodies(server, document, num_examples):
    values = {path: fields_of(document, path) for path in START}

    @settings(UNDER_TEST, max_examples=num_examples)
    @given(st.data())
    def run(data):
        path = data.draw(st.sampled_from(sorted(START)))
        pairs = list(START[path])
        for name in data.draw(st.lists(st.sampled_from(sorted(values[path])), max_size=6)):
            hostile = data.draw(st.integers(0, 3)) == 0
            pairs.append(
                (name, data.draw(st.sampled_from(HOSTILE if hostile else values[path][name])))
            )
        if data.draw(st.integers(0, 7)) == 0:
            pairs.append((data.draw(st.sampled_from(("unknown", "a\\u0000", "\\ud800", ""))), "1"))
        body = "{" + ",".join(f'"{name}": {value}' for name, value in pairs) + "}"
        headers = {"Content-Type": "application/json", "X-Request-Timeout": "5"}
        content = body.encode(errors="surrogatepass")
        if data.draw(st.integers(0, 15)) == 0:
            index = data.draw(st.integers(0, len(content)))
            content = content[:index] + b"\xff\xc0" + content[index:]
        check(document, path, server.send("POST", path, content, headers))

    run()


@pytest.mark.costly
def test_random_bodies_get_responses_of_the_documented_form(server, document, unharmed):
    fuzz_bodies(server, document, NUM_SHORT)


@pytest.mark.soak
def test_very_many_random_bodies_get_responses_of_the_documented_form(server, document, unharmed):
    fuzz_bodies(server, document, NUM_LONG)


BODY = json.dumps({"prompt": "Anna", "max_tokens": 1}).encode()
LINES = (
    b"POST /v1/completions HTTP/1.1",
    b"GET /live HTTP/1.1",
    b"GET /live HTTP/1.0",
    b"GET /live HTTP/9.9",
    b"GET /live",
    b"GET http://elsewhere/live HTTP/1.1",
    b"GET /../../etc/passwd HTTP/1.1",
    b"GET /v1/models/%00%ff%2e%2e HTTP/1.1",
    b"GET /\x00 HTTP/1.1",
    b"G\xffT /live HTTP/1.1",
    b"PRI * HTTP/2.0",
    b"OPTIONS * HTTP/1.1",
    b"CONNECT localhost:1 HTTP/1.1",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1",
)
HEADERS = (
    b"Host: localhost",
    b"Content-Type: application/json",
    b"Content-Length: %d" % len(BODY),
    b"Content-Length: 5",
    b"Content-Length: 100000",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 0x10",
    b"Content-Length: +5",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: identity, chunked",
    b"Transfer-Encoding : chunked",
    b" folded: line",
    b"X-\x00: a",
    b"X-Name: \xff\x00",
    b"no colon",
    b"Expect: 100-continue",
    b"Upgrade: websocket\r\nConnection: Upgrade",
    b"X-Request-Id: \x1b[31m",
    b"Connection: close",
)
BODIES = (
    b"",
    BODY,
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    b"5\r\nabc",
    b"ffffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    b"-1\r\nabc\r\n0\r\n\r\n",
    b"zz\r\nabc\r\n0\r\n\r\n",
    b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
    BODY + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x80\x04\x95.",
)


def exchange_bytes(server, pieces, *, silence_s=WAIT_S):
    """Send the pieces one by one. Return the bytes received until the end or a long
    pause."""
    received = []
    with server.connect() as connection, suppress(ConnectionError, TimeoutError):
        for piece in pieces:
            connection.sendall(piece)
        connection.settimeout(silence_s)
        while data := connection.recv(1 << 16):
            received.append(data)
    return b"".join(received)


def fuzz_bytes(server, num_examples):
    @settings(UNDER_TEST, max_examples=num_examples)
    @given(st.data())
    def run(data):
        sent = b""
        for _ in range(data.draw(st.integers(1, 3))):
            end = data.draw(st.sampled_from((b"\r\n", b"\r\n", b"\r\n", b"\n")))
            lines = [data.draw(st.sampled_from(LINES))]
            lines += data.draw(st.lists(st.sampled_from(HEADERS), max_size=5))
            sent += end.join(lines) + 2 * end + data.draw(st.sampled_from(BODIES))
        size = data.draw(st.sampled_from((7, 100, len(sent))))
        pieces = [sent[start : start + size] for start in range(0, min(len(sent), 500), size)]
        response = exchange_bytes(server, pieces if size < len(sent) else [sent], silence_s=0.1)
        for status in STATUS.findall(response):
            assert int(status) < 500 or int(status) == 503, (sent, response)
        assert not SECRET.search(response.decode("latin-1"))

    run()


def test_random_bytes_cause_no_server_failure(server, unharmed):
    fuzz_bytes(server, NUM_RAW_SHORT)


@pytest.mark.soak
def test_very_many_random_bytes_cause_no_server_failure(server, unharmed):
    fuzz_bytes(server, NUM_RAW_LONG)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SECOND = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n",
        b"Transfer-Encoding : chunked\r\n",
    ],
)
def test_a_request_with_two_content_lengths_starts_no_second_request(server, header):
    response = exchange_bytes(server, [POST + header + b"\r\n0\r\n\r\n" + SECOND])
    statuses = [int(item) for item in STATUS.findall(response)]
    assert len(statuses) <= 1 and all(400 <= statuse < 500 for statuse in statuses)
    assert b'"version"' not in response


def test_pipelined_requests_are_served_in_order(server):
    first = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    response = exchange_bytes(server, [first + first + SECOND])
    assert STATUS.findall(response) == [b"200"] * 3
    assert response.rstrip().endswith(b"}") and b'"version"' in response.rpartition(b"HTTP/1.1")[2]


def test_a_body_that_arrives_byte_by_byte_is_read(server):
    content = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    response = exchange_bytes(server, [bytes([item]) for item in content])
    assert STATUS.findall(response) == [b"200"]
