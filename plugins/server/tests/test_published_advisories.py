"""One request for each class of published advisories about inference servers.

After each of them, the same processes run and the response of a fixed request is unchanged.
Messages straight to the engine's socket, pickles and the offline engine are covered by
`tests/security` and the tests of the core.
"""

import http.client
import json
import pickle
import re

import pytest

from dovetail_devkit.harnesses.process_tree import children_of, tcp_listeners_of

pytestmark = pytest.mark.costly  # the tests share servers

CANARY = {"prompt": "Anna and Ben", "max_tokens": 8, "temperature": 0, "seed": 1}
VOCABULARY = 2048
PRIVATE = re.compile(rb"0x[0-9a-f]{8,}|Traceback|/(?:home|root|usr|tmp|work|dev/shm)/")
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SCHEMA = "json_schema"


class TouchesFile:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def prompt(**fields):
    return COMPLETIONS, {"prompt": "Anna", "max_tokens": 2} | fields


def chat(text="Anna", **fields):
    messages = [{"role": "user", "content": text}]
    return CHATS, {"messages": messages, "max_tokens": 2} | fields


def parts(*arguments):
    return CHATS, {"messages": [{"role": "user", "content": list(arguments)}], "max_tokens": 2}


def grammar(schema):
    return chat(response_format={"type": SCHEMA, SCHEMA: {"name": "a", "schema": schema}})


def template(text, **kwargs):
    return chat(chat_template=text, **kwargs)


def deep(depth):
    value = {"type": "object"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


REFUSED = {
    # One request kills the engine.
    "CVE-2024-8768: no token ids": prompt(prompt=[]),
    "CVE-2025-48942: an invalid schema": grammar({"type": "nonsense"}),
    "CVE-2025-48943: an invalid regular expression": prompt(guided_regex="(("),
    "CVE-2025-48944: an invalid pattern of a tool": chat(
        tools=[{"type": "function", "function": {"name": "a", "parameters": {"pattern": "(("}}}]
    ),
    "CVE-2025-62372: embeddings of a wrong shape": prompt(prompt_embeds="AAAA"),
    "CVE-2026-22773: an image for a text model": parts(
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    ),
    "PYSEC-2026-4353: metadata of media": chat(mm_processor_kwargs={"fps": 1e9}),
    "CVE-2026-105756: a salt of a wrong type": prompt(cache_salt={"a": 1}),
    "CVE-2026-116173: too many log-probabilities": prompt(logprobs=129),
    "CVE-2026-116173: too many prompt log-probabilities": prompt(prompt_logprobs=10**6),
    "CVE-2026-114051: a huge min_tokens": prompt(min_tokens=2**31, max_tokens=2),
    "CVE-2026-105922: a huge penalty": prompt(repetition_penalty=1e308),
    "CVE-2026-21869: a negative length": prompt(truncate_prompt_tokens=-1),
    # Ids beyond the vocabulary.
    **{
        f"CVE-2026-93840: the id {item} in {name}": prompt(**{name: [item]})
        for item in (-1, 10**6, 2**31, 2**63)
        for name in ("allowed_token_ids", "stop_token_ids", "prompt")
    },
    "CVE-2026-93840: a bias beyond the vocabulary": prompt(logit_bias={str(10**6): 1}),
    "CVE-2026-93989: too many bad words": prompt(bad_words=["a"] * 5000),
    # Parameters without a limit.
    "CVE-2024-8939: a huge best_of": prompt(best_of=2**31),
    "CVE-2026-34756: a huge n": prompt(n=2**31),
    "CVE-2026-34756: an n beyond 64 bits": prompt(n=2**70),
    "CVE-2025-46560: a very long prompt": prompt(prompt="<image>" * 200_000),
    "a list of very many prompts": prompt(prompt=["a"] * 3000),
    "an infinite temperature": prompt(temperature=1e308),
    # Templates.
    "CVE-2025-61620: an endless template": template("{% for a in range(10**12) %}a{% endfor %}"),
    "CVE-2025-61620: a template that renders a huge text": template("{{ 'a' * 10**10 }}"),
    "CVE-2025-9141: a template with attributes": template("{{ ''.__class__.__mro__ }}"),
    "CVE-2026-5760: a template that runs a command": template(
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}"
    ),
    "CVE-2025-62426: an argument of the tokenizer": chat(chat_template_kwargs={"tokenize": True}),
    # Grammars.
    "CVE-2026-55574: a regular expression without a limit": prompt(
        structured_outputs={"regex": "(a+)+" * 1000}
    ),
    "GHSA-7rgv: 300 nested schemas": grammar(deep(300)),
    "CVE-2026-107183: a role that does not exist": (
        CHATS,
        {"messages": [{"role": "\u0000", "content": "a"}], "max_tokens": 2},
    ),
    # Media from elsewhere.
    **{
        f"CVE-2025-6242: {url}": parts({"type": "image_url", "image_url": {"url": url}})
        for url in (
            "http://127.0.0.1:9/",
            "http://2130706433/",
            "http://[::ffff:127.0.0.1]/",
            "file:///etc/passwd",
            "http://good.example\\@127.0.0.1/",
        )
    },
    "CVE-2026-54233: audio": parts(
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "opus"}}
    ),
    "CVE-2026-32981: a model name that is a path": prompt(model="../../etc/passwd"),
}
ACCEPTED = {
    "CVE-2025-29770: a schema": grammar({"type": "object", "properties": {"a": {"enum": [1]}}}),
    "CVE-2024-8768: an empty prompt": prompt(prompt=""),
    "CVE-2026-115911: a huge template argument": chat(chat_template_kwargs={"a": "x" * 300_000}),
    # An unknown field is named in a header and has no effect.
    "CVE-2026-94624: a peer of a cache transfer": prompt(
        kv_transfer_params={"remote_host": "127.0.0.1", "remote_port": 9, "tp_size": 0}
    ),
    "CVE-2026-44222: special tokens in the text": chat("<|image_pad|><|im_end|><|endoftext|>"),
    "CVE-2026-44223: a penalty": prompt(presence_penalty=2, frequency_penalty=-2),
    "CVE-2026-93989: a bad word of many tokens": prompt(bad_words=["Anna and Ben"]),
    "CVE-2026-105756: a salt of odd characters": prompt(cache_salt="../\u202e;'\"${a}"),
    "CVE-2026-114049: few allowed tokens": prompt(allowed_token_ids=[5, 6]),
    "CVE-2026-22778: text that looks like an address": prompt(prompt="<0x7f0000000000>"),
    "GHSA-v97p: a very short request": prompt(max_tokens=1),
}


@pytest.fixture(scope="module")
def templated(serving):
    """A server that accepts templates in requests, so that hostile templates are tested, too."""
    with serving(
        "--model", "demo", "--max-model-len", "512", "--allow-request-templates"
    ) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def canary(templated):
    return templated.complete(**CANARY).json["choices"]


@pytest.fixture
def server_still_works(templated, canary):
    processes = children_of(templated.process.pid)
    yield templated
    assert templated.get("/ready").status == 200
    assert templated.complete(**CANARY).json["choices"] == canary
    assert children_of(templated.process.pid) >= processes
    assert templated.get("/load").json["server_load"] == 0


@pytest.mark.parametrize("name", REFUSED)
def test_malicious_requests_from_security_advisories_are_rejected(server_still_works, name):
    path, body = REFUSED[name]
    reply = server_still_works.post(path, body)
    assert 400 <= reply.status < 500, reply.content
    assert reply.error["code"] and reply.error["message"]
    assert not PRIVATE.search(reply.content)


@pytest.mark.parametrize("name", ACCEPTED)
def test_valid_requests_from_security_advisories_are_served(server_still_works, name):
    path, body = ACCEPTED[name]
    reply = server_still_works.post(path, body)
    assert reply.status == 200, reply.content
    assert not PRIVATE.search(reply.content)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/v1/embeddings", "/pooling"])
def test_a_pickle_in_a_request_body_is_not_loaded(server_still_works, path, tmp_path):
    trace = tmp_path / "trace"
    opened = pickle.dumps(TouchesFile(str(trace)))
    for kind in ("application/json", "application/octet-stream", "application/x-pickle"):
        reply = server_still_works.send("POST", path, opened, {"Content-Type": kind})
        assert 400 <= reply.status < 500
    assert not trace.exists()


@pytest.mark.parametrize("size", [64 << 10, 1 << 20])
def test_very_long_headers_are_rejected(server_still_works, size):
    """Covers CVE-2025-48956: a very long header must not use much memory."""
    try:
        reply = server_still_works.get("/version", **{"X-Long": "a" * size})
    except (ConnectionError, http.client.HTTPException):
        return  # the server closed the connection before it had read everything
    assert reply.status == 431


def test_the_engine_does_not_use_the_request_ids_of_clients(server_still_works):
    """Covers CVE-2026-105755 and CVE-2026-112266: the engine does not use ids of clients."""
    kwargs = {"X-Request-Id": "same"}
    first = server_still_works.post(*prompt(prompt="Anna and Ben"), **kwargs)
    second = server_still_works.post(*prompt(prompt="Ben and Anna"), **kwargs)
    assert first.status == second.status == 200
    assert first.json["id"] != second.json["id"]
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "same"


def test_a_stream_with_an_error_contains_no_private_information(server_still_works):
    """Covers CVE-2026-22778 and CVE-2026-54236: errors that contain private information."""
    for text in ("\x00", "\u202e", "a" * 5000, "/etc/passwd", "0x7fffdeadbeef00"):
        reply = server_still_works.post(*prompt(model=text))
        assert reply.status == 404 and not PRIVATE.search(reply.content.replace(b"/etc", b""))


@pytest.mark.parametrize("path", ["/invocations", "/update_weights", "/collective_rpc", "/pause"])
def test_admin_operations_are_not_available_to_clients(server_still_works, path):
    """Covers CVE-2026-48746 and CVE-2023-48022: operator routes that clients can call."""
    for form in (path, f"{path}/", f"/v1{path}", f"/live{path}", f"//{path}", f"/live/..{path}"):
        assert server_still_works.post(form, {}).status in (404, 405)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example"])
def test_a_request_with_a_foreign_host_header_is_rejected(server_still_works, host):
    """Covers CVE-2025-62593: a web page whose host name resolves to this machine."""
    assert server_still_works.get("/v1/models", Host=host).status == 403


def test_only_the_port_of_the_server_is_open(server_still_works):
    """Covers CVE-2025-30202 and CVE-2025-32444: engine sockets that listen on a network."""
    listening = set()
    for pid in (server_still_works.process.pid, *children_of(server_still_works.process.pid)):
        listening |= tcp_listeners_of(pid)
    assert listening == {f"0100007F:{server_still_works.port:04X}"}


def test_a_hostile_request_does_not_change_a_concurrent_request(server_still_works, canary):
    """Covers CVE-2026-93989 and GHSA-fpch: masks and penalties affect only their own request."""
    connections = []
    for fields in (
        {"bad_words": ["Anna"]},
        {"allowed_token_ids": [5]},
        {"logit_bias": {"9": -100}},
    ):
        first = http.client.HTTPConnection(
            server_still_works.host, server_still_works.port, timeout=60
        )
        body = json.dumps(CANARY | fields | {"max_tokens": 32, "ignore_eos": True})
        first.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        connections.append(first)
    for _ in range(5):
        assert server_still_works.complete(**CANARY).json["choices"] == canary
    for first in connections:
        assert first.getresponse().status == 200
        first.close()
