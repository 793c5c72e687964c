"""The files of the web page and the route /steps. tests/browser uses the page."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dovetail_server.web_page.routes import FILES, MAX_READERS, MIN_READ_PERIOD_S

MAX_PAGE_BYTES = 300_000


def test_the_page_is_served_without_a_key_and_is_small(server):
    page = server.get("/")
    assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    total = len(page.content)
    for name in FILES.keys() - {"index.html"}:
        reply = server.get(f"/web/{name}")
        assert (reply.status, reply.headers["content-type"]) == (200, FILES[name].decode())
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        total += len(reply.content)
    assert total < MAX_PAGE_BYTES


def test_the_files_reference_no_other_host(server):
    for name in FILES:
        text = server.get("/" if name == "index.html" else f"/web/{name}").content.decode()
        assert re.findall(r"https?://[a-z0-9]", text) == []


@pytest.mark.parametrize("path", ["/web/", "/web/routes.py", "/web/../settings.py", "/web/%2e%2e"])
def test_other_files_are_not_served(server, path):
    assert server.get(path).status == 404


def test_the_steps_of_a_request_can_be_read(server):
    first = server.get("/steps").json
    assert server.complete(prompt="Anna", max_tokens=4).status == 200
    trace = server.get(f"/steps?after={first['num_steps']}").json
    assert trace["started_ns"] == first["started_ns"]
    assert trace["num_new_tokens"] >= first["num_new_tokens"] + 1
    assert any(step["prefills"] for step in trace["steps"])
    assert trace["steps"][-1]["ended"] and trace["stats"]["num_running"] == 0
    text = server.get("/steps").content.decode()
    assert "Anna" not in text and "req-" not in text


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("after=-1", "after"),
        ("after=x", "after"),
        ("after=" + "9" * 40, "after"),
        ("max_steps=0", "max_steps"),
        ("max_steps=100000", "max_steps"),
        ("after=%00", "after"),
    ],
)
def test_an_invalid_query_is_rejected(server, query, param):
    reply = server.get(f"/steps?{query}")
    assert (reply.status, reply.error["param"]) == (400, param)


def test_many_readers_share_a_limited_rate_of_reads(server):
    begin_s = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: server.get("/steps"), range(8)))
    assert [reply.status for reply in replies] == [200] * 8
    assert time.monotonic() - begin_s >= 7 * MIN_READ_PERIOD_S


def test_readers_above_the_limit_are_rejected(server):
    with ThreadPoolExecutor(2 * MAX_READERS) as pool:
        replies = list(pool.map(lambda _: server.get("/steps"), range(2 * MAX_READERS)))
    statuses = {reply.status for reply in replies}
    assert statuses == {200, 429}
    rejected = next(reply for reply in replies if reply.status == 429)
    assert rejected.error["code"] == "too_many_readers" and rejected.headers["retry-after"] == "1"
    assert server.get("/steps").status == 200
