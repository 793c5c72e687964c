"""The page of `dovetail trace` in a headless Chromium: picture, keyboard, search, hostile names."""

from __future__ import annotations

import pytest
from browser.chromium import PROGRAM, browser

pytest.importorskip("dovetail_client_tools.trace.viewer")

from dovetail_client_tools.engine_steps.records import Step
from dovetail_client_tools.trace.slices import TraceBuilder
from dovetail_client_tools.trace.viewer import MAX_STEPS, ViewerPage

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")

HOSTILE = '</script><img src=x onerror="window.hacked = 1">@@DATA@@'
NUM_REQUESTS = 40
STEP_NS = 10_000_000


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened
        assert opened.errors == []
        assert [url for url in opened.requested if not url.startswith("file:")] == []


def write(path, num_steps, title="run"):
    content = ViewerPage()
    builder = TraceBuilder([content], lambda number: f"r{number} {HOSTILE}")
    for number in range(1, num_steps + 1):
        is_first = number <= NUM_REQUESTS
        builder.add(
            Step(
                number=number,
                step_id=number,
                begin_ns=number * STEP_NS,
                end_ns=(number + 1) * STEP_NS - 1_000_000,
                num_tokens=8 * is_first + min(number, NUM_REQUESTS),
                num_new_tokens=1,
                num_running=min(number, NUM_REQUESTS),
                num_used_blocks=number % 100,
                joined=((number, 8, 8),) if is_first else (),
                prefills=((number, 0, 8),) if is_first else (),
                decodes=tuple(range(1, number)) if is_first else None,
            )
        )
    builder.end()
    path.write_text(content.render(title, [("steps", HOSTILE)], [HOSTILE]), encoding="utf-8")
    return path.as_uri()


def hint(page):
    return page.run("document.getElementById('hint').textContent")


def data(page, name):
    return float(page.run(f"document.getElementById('picture').dataset.{name}"))


def colors(page):
    return page.run(
        "new Set(new Uint32Array(document.getElementById('picture').getContext('2d')"
        ".getImageData(100, 0, 500, 300).data.buffer)).size"
    )


def test_the_page_shows_steps_and_requests(page, tmp_path):
    page.emulate(width=1000, height=700)
    page.open(write(tmp_path / "page.html", 200, title=f"run {HOSTILE}"))
    page.wait("document.documentElement.dataset.ready")
    assert "200 steps and 40 requests" in hint(page)
    assert data(page, "rows") == NUM_REQUESTS and colors(page) > 4
    page.run("document.getElementById('picture').focus()")
    span = data(page, "span")
    page.run("document.getElementById('in').click()")
    assert data(page, "span") == span / 2
    start = data(page, "from")
    page.press("ArrowRight")
    assert data(page, "from") > start
    page.run("document.getElementById('all').click()")
    assert data(page, "span") == span
    page.run("document.getElementById('search').value = 'r7 '")
    page.run("document.getElementById('search').dispatchEvent(new Event('input'))")
    assert "Request r7 " in hint(page) and "8 prompt tokens" in hint(page)
    assert page.run("window.hacked === undefined && !document.querySelector('img')")
    assert HOSTILE in page.run("document.querySelector('h1').textContent")


def test_the_page_supports_dark_mode_and_narrow_windows(page, tmp_path):
    page.emulate(width=360, height=640, dark=True)
    page.open(write(tmp_path / "page.html", 100))
    page.wait("document.documentElement.dataset.ready")
    assert page.run("document.documentElement.scrollWidth") <= 360
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(20, 24, 29)"


@pytest.mark.clock
def test_the_largest_page_responds_immediately(page, tmp_path):
    page.emulate(width=1000, height=700)
    page.open(write(tmp_path / "page.html", MAX_STEPS))
    page.wait("document.documentElement.dataset.ready")
    assert f"{MAX_STEPS:,} steps" in hint(page)
    code = "(() => { const begin = performance.now(); "
    code += "document.getElementById('in').click(); return performance.now() - begin })()"
    assert page.run(code) < 2000


def test_an_empty_trace_is_shown(page, tmp_path):
    page.open(write(tmp_path / "page.html", 0))
    page.wait("document.documentElement.dataset.ready")
    assert "0 steps and 0 requests" in hint(page)
