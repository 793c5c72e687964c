"""Keys, hosts, web pages, TLS, admin routes and limits of connections."""

import asyncio
import http.client
import json

import pytest

from dovetail.errors import ConfigError
from dovetail_server.protocol.errors import APIError
from dovetail_server.routes.table import Access
from dovetail_server.settings import ServerSettings
from dovetail_server.transport.exchange import Exchange
from dovetail_server.transport.guard import Guard
from dovetail_server.transport.keys import KeyRing, admin_keys, client_keys

pytestmark = pytest.mark.costly  # the tests share servers

KEY, OTHER, ADMIN = "key-of-clients", "another-key", "key-of-operators"
LIMIT = 20_000


@pytest.fixture(scope="module")
def closed(serving, tmp_path_factory):
    """A server with keys, an admin key, and small limits."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# a comment\n\n{OTHER}\n")
    options = ("--api-key", KEY, "--api-key-file", str(file), "--admin-key", ADMIN)
    limits = (
        "--max-body-bytes",
        str(LIMIT),
        "--header-timeout-s",
        "2",
        "--strict-params",
        "--verbose",
    )
    tls = ("--cors-origin", "https://example.org", "--cache-salt-by", "key")
    with serving("--model", "demo", "--max-model-len", "128", *options, *limits, *tls) as running:
        yield running.wait_until_ready()


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


PATHS = [
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/demo"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/score"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("POST", "/classify"),
    ("POST", "/pooling"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/openapi.json"),
    ("POST", "/pause"),
    ("POST", "/abort"),
    ("POST", "/unknown"),
    ("PUT", "/v1/completions"),
    ("POST", "//v1/completions"),
    ("POST", "/live/../v1/completions"),
    ("GET", "/v1%2Fmodels"),
    ("GET", "/live/v1/models"),
]


@pytest.mark.parametrize(("method", "path"), PATHS, ids=str)
def test_every_route_but_health_needs_a_key(closed, method, path):
    for headers in ({}, bearer("wrong"), bearer(""), {"Authorization": KEY}):
        reply = closed.send(method, path, {} if method == "POST" else None, headers)
        assert reply.status == 401 and reply.error["code"] == "invalid_api_key", headers
        assert reply.headers["www-authenticate"] == "Bearer"


def test_health_routes_need_no_key(closed):
    for path in ("/live", "/health", "/ready"):
        assert closed.get(path).status == 200


def test_each_key_is_accepted(closed):
    for headers in (bearer(KEY), bearer(OTHER), {"X-Api-Key": KEY}):
        assert closed.send("GET", "/v1/models", headers=headers).status == 200


def test_admin_routes_need_the_admin_key(closed):
    for key in (KEY, OTHER):
        assert closed.post("/resume", None, **bearer(key)).status == 401
    assert closed.post("/pause", {"scope": "new"}, **bearer(ADMIN)).json == {"paused": "new"}
    assert closed.get("/is_paused", **bearer(ADMIN)).json == {"paused": "new"}
    assert closed.post("/resume", {}, **bearer(ADMIN)).json == {"paused": None}
    assert closed.post("/reset_prefix_cache", {}, **bearer(ADMIN)).json == {"reset": True}
    for path, body, param in (
        ("/pause", {"scope": "some"}, "scope"),
        ("/abort", {}, "request_ids"),
        ("/abort", {"request_ids": [1]}, "request_ids"),
        ("/abort", {"all": 1}, "all"),
        ("/sleep", {"level": 3}, "level"),
        ("/resume", {"zzz": 1}, "zzz"),
    ):
        reply = closed.post(path, body, **bearer(ADMIN))
        assert reply.status == 400 and reply.error["param"] == param
    # The demo model's worker does not support it; the error says so.
    assert 400 <= closed.post("/sleep", {}, **bearer(ADMIN)).status < 500


def test_an_operator_aborts_a_request_by_its_id(closed):
    body = {
        "prompt": "one",
        "max_tokens": 100,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    closed.post("/pause", {}, **bearer(ADMIN))
    connection = http.client.HTTPConnection(closed.host, closed.port, timeout=60)
    headers = bearer(KEY) | {"Content-Type": "application/json", "X-Request-Id": "mine"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    aborted = 0
    while not aborted:
        reply = closed.post("/abort", {"request_ids": ["mine"]}, **bearer(ADMIN))
        aborted = reply.json["num_aborted"]
    response = connection.getresponse()
    assert response.status == 503 and json.loads(response.read())["error"]["code"] == "aborted"
    connection.close()
    closed.post("/resume", {}, **bearer(ADMIN))


def test_without_an_admin_key_there_are_no_admin_routes(server):
    for path in ("/pause", "/resume", "/abort", "/sleep", "/reset_prefix_cache"):
        assert server.post(path, {}).status == 404


def test_unknown_fields_are_rejected_with_the_strict_params_option(closed):
    reply = closed.post("/v1/completions", {"prompt": "a", "temprature": 1}, **bearer(KEY))
    assert reply.status == 400 and reply.error["param"] == "temprature"
    assert "temperature" in reply.error["message"]


def test_a_body_above_the_limit_is_rejected(closed):
    body = {"prompt": "a" * (2 * LIMIT)}
    assert closed.post("/v1/completions", body, **bearer(KEY)).status == 413
    with closed.connect() as connection:  # the length is not stated
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        )
        more = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(f"{head}{more}".encode() + b"%x\r\n" % (2 * LIMIT) + b"a" * 2 * LIMIT)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
    with closed.connect() as connection:  # rejected before the body is sent
        connection.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: 9999999\r\n\r\n".encode()
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_client_that_sends_connection_close_can_read_why_its_long_body_is_rejected(closed):
    body = b"a" * 30_000_000
    with closed.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            + f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        connection.sendall(body)
        reply = b""
        while piece := connection.recv(4096):
            reply += piece
    assert reply.startswith(b"HTTP/1.1 413") and b"connection: close" in reply.lower()
    assert reply.endswith(b"}")


def test_long_headers_and_slow_clients_are_rejected(closed):
    with closed.connect() as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 40_000)
        connection.sendall(b"\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 431")
    with closed.connect() as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: loc")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")
    with closed.connect() as connection:
        connection.sendall(b"not http\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")


def test_only_web_pages_with_an_allowed_origin_may_send_requests(closed, server):
    requested = {"Access-Control-Request-Method": "POST"}
    allowed = closed.send(
        "OPTIONS", "/v1/completions", headers=requested | {"Origin": "https://example.org"}
    )
    assert allowed.status == 204
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    for item, origin in ((closed, "https://evil.example"), (server, "https://example.org")):
        reply = item.send("OPTIONS", "/v1/completions", headers=requested | {"Origin": origin})
        assert "access-control-allow-origin" not in reply.headers


def test_a_local_server_without_keys_accepts_only_local_hosts(server, closed):
    for host in ("localhost", "localhost:80", "127.0.0.1:1", "[::1]:8000"):
        assert server.get("/live", Host=host).status == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example"):
        assert server.get("/live", Host=host).error["code"] == "host_not_allowed"
    assert closed.get("/live", Host="evil.example").status == 200


def test_callers_with_different_keys_do_not_share_cached_prefixes(closed):
    prompt = "one two three four five six seven eight nine ten " * 4

    def num_cached(key):
        body = {"prompt": prompt, "max_tokens": 1}
        usage = closed.post("/v1/completions", body, **bearer(key)).json["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert num_cached(KEY) == 0 and num_cached(KEY) > 0
    assert num_cached(OTHER) == 0


def test_no_key_is_written_to_the_log(closed):
    closed.send("GET", "/v1/models", headers=bearer("a-wrong-key"))
    log = "\n".join(line for line in closed.lines if line)
    assert not any(key in log for key in (KEY, OTHER, ADMIN, "a-wrong-key"))
    assert KEY not in repr(ServerSettings(api_keys=(KEY,), admin_keys=(ADMIN,)))


@pytest.mark.parametrize("key", ["", "abc", "a b c d", "ключ-ключ", "a" * 600])
def test_a_key_that_no_header_can_contain_is_rejected(key):
    with pytest.raises(ConfigError, match="--api-key: a key must have 4 to 512"):
        KeyRing([key])
    with pytest.raises(ConfigError, match="--admin-key: a key must have"):
        admin_keys(ServerSettings(admin_keys=(key,)))


def test_an_unusable_key_file_is_rejected(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for file in (empty, tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match="--api-key-file"):
            client_keys(ServerSettings(api_key_file=str(file)))


def test_keys_with_any_bytes_are_compared_without_an_error():
    async def check():
        ring = KeyRing([KEY])
        guard = Guard(ServerSettings(), ring, KeyRing())
        for value in (b"Bearer \xff\xfe", b"bearer " + KEY.encode(), b"Bearer " + b"a" * 10_000):
            scope = {"method": "GET", "path": "/", "query_string": b""}
            exchange = Exchange(
                scope | {"headers": [(b"authorization", value)]}, None, None, None, None
            )
            if value.lower().endswith(KEY.encode()):
                guard.check(exchange, Access.KEY)
                assert exchange.caller.startswith("key-")
            else:
                with pytest.raises(APIError, match="API key"):
                    guard.check(exchange, Access.KEY)

    asyncio.run(check())


def test_the_verbose_option_logs_the_startup_phases_and_the_memory(closed, server):
    log = "\n".join(line for line in closed.lines if line)
    for word in ("load_model", "warm_up", "weights", "activations", "KV cache", "--quantization"):
        assert word in log
    assert "--quantization" not in "\n".join(line for line in server.lines if line)
