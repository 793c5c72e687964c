"""Every field of every route in the OpenAPI document rejects every value of a wrong type.

The table of wrong values is applied to all fields, so that a new field is covered without a change.
"""

import itertools

import pytest

WRONG = {
    "boolean": (1, 0, "true", "", [], {}, 1.5),
    "integer": ("1", 1.5, True, [], {}, 2**70, -(2**70), ""),
    "number": ("1", True, [], {}, "", "NaN"),
    "string": (1, True, [], {}, 1.5),
    "array": (1, True, "", "1", {}, 1.5),
    "object": (1, True, "", [], [{}], 1.5),
}
"""Values that are wrong for a JSON type; a field that allows several types allows some of them."""

START = {
    "/v1/completions": {"prompt": "Anna", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "Anna"},
    "/detokenize": {"tokens": [5]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/batches": {
        "input_file_id": "file-a",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
}
WITHOUT_MODEL = ("/v1/batches",)
CHAT_TOKENIZE = {"messages": [{"role": "user", "content": "a"}]}
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


def resolve(document, schema):
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def types_of(document, schema):
    schema = resolve(document, schema)
    arguments = schema.get("type", [])
    by_name = {arguments} if isinstance(arguments, str) else set(arguments)
    return by_name.union(*(types_of(document, item) for item in schema.get("anyOf", ())))


def fields_of(document, path):
    """Yield (start of the body, name, allowed types, whether it is required)."""
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    for part in map(lambda item: resolve(document, item), schema.get("anyOf", [schema])):
        start = CHAT_TOKENIZE if path == "/tokenize" and "messages" in part["properties"] else None
        for name, own in part["properties"].items():
            required = name in part.get("required", ())
            yield start or START[path], name, types_of(document, own), required


def wrong_values(allowed):
    """Return the values that no allowed type accepts."""
    values = itertools.chain.from_iterable(WRONG[item] for item in sorted(allowed & WRONG.keys()))
    collected = []
    for value in values:
        kind = TYPES.get(type(value), "object")
        fits = kind in allowed or (kind == "integer" and "number" in allowed)
        in_range = not isinstance(value, int) or abs(value) < 2**63
        if not (fits and in_range) and value not in collected:
            collected.append(value)
    return collected


def check_rejection(reply, field, value):
    case = (field, value, reply.content[:300])
    assert 400 <= reply.status < 500, case
    error = reply.error
    assert error["code"] and error["param"], case
    assert error["param"].split("[")[0].split(".")[0] == field, case
    assert field in error["message"] and error["message"].endswith("."), case
    assert len(error["message"]) > len(field) + 10, case


@pytest.mark.parametrize("path", START)
def test_every_field_rejects_every_value_of_a_wrong_type(server, path):
    document = server.get("/openapi.json").json
    num_cases = 0
    for start, name, allowed, required in fields_of(document, path):
        values = wrong_values(allowed)
        if required:
            values.append(None)
            without = {key: item for key, item in start.items() if key != name}
            if path != "/tokenize":
                check_rejection(server.post(path, without), name, "missing")
        for value in values:
            check_rejection(server.post(path, start | {name: value}), name, value)
            num_cases += 1
    assert num_cases >= (10 if path == "/detokenize" else 20)


def test_every_route_rejects_unsupported_methods_and_media_types_and_encodings_and_models(server):
    document = server.get("/openapi.json").json
    typed = {"Content-Type": "application/json"}
    for path, operations in document["paths"].items():
        own = path.replace("{name}", "demo")
        known = {operation.upper() for operation in operations}
        for method in {"PUT", "DELETE", "PATCH", "TRACE", "POST", "GET"} - known:
            reply = server.send(method, own)
            assert reply.status == 405 and reply.error["code"] == "method_not_allowed", path
            assert set(reply.headers["allow"].split(", ")) == known
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if "multipart/form-data" in content:
            assert server.send("POST", own, b"{}", typed).status == 415, path
        if "application/json" not in content:
            continue
        for body, headers, status in (
            (b"{}", {"Content-Type": "text/plain"}, 415),
            (b"{}", {}, 415),
            (b"{}", typed | {"Content-Encoding": "br"}, 415),
            (b"\xff\xfe{\x00}\x00", typed, 400),
            (b"{", typed, 400),
            (b"[]", typed, 400),
            (b"", typed, 400),
        ):
            reply = server.send("POST", own, body, headers)
            assert reply.status == status, (path, body, headers, reply.content)
            assert reply.error["code"] and reply.error["message"].endswith("."), path
        if path in WITHOUT_MODEL:
            continue
        unknown = server.post(own, START.get(path, {}) | {"model": "absent"})
        assert unknown.status == 404 and unknown.error["code"] == "model_not_found", path
        assert unknown.error["param"] == "model" and "absent" in unknown.error["message"]
