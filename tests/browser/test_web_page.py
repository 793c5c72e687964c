"""The web page of the server in a headless Chromium: chat, live view, hostile output, access."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser.chromium import PROGRAM, browser

pytest.importorskip("dovetail_server.server")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")

HOSTILE = """\
<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 1">
[click](javascript:window.hacked=1) [ok](https://example.org/a) ![x](https://example.org/x.png)
# <iframe src="https://example.org"></iframe>
- <svg onload="window.hacked = 1">
```html
<style>body { display: none }</style>
```
> > > > > > > > > > > > deep
**bold** `code` *em*
- a\r
- b\u2028c
"""
ANSWER = "27 + 58 = 85."


class Server:
    def __init__(self, *options: str) -> None:
        program = str(Path(sys.executable).with_name("dovetail"))
        self.process = subprocess.Popen(
            [program, "serve", "--model", "demo", "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        found = next(
            filter(None, map(re.compile(r"(http://\S+:\d+)/v1").search, self.process.stderr))
        )
        self.url = found[1]

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def page(shared, server):
    shared.emulate()
    shared.open(f"{server.url}/")
    shared.wait("document.documentElement.dataset.ready")
    shared.run("sessionStorage.clear()")
    shared.open(f"{server.url}/?")
    shared.wait("document.documentElement.dataset.ready")
    shared.errors.clear()
    yield shared
    assert shared.errors == []
    assert [url for url in shared.requested if not url.startswith((server.url, "data:"))] == []


def ask(page, text="What is 27 + 58?"):
    page.run("document.getElementById('input').focus()")
    page.type(text)
    page.press("Enter")


def answer(page):
    page.wait("!document.getElementById('regenerate').disabled")
    return page.run("[...document.querySelectorAll('article.assistant .body')].at(-1).innerText")


def test_a_message_gets_a_streamed_answer_with_figures_and_survives_a_reload(page, server):
    ask(page)
    assert answer(page) == ANSWER
    figures = page.run("document.querySelector('.assistant .figures').textContent")
    assert "12 tokens" in figures and "tokens/s" in figures and "prompt tokens cached" in figures
    page.run("document.getElementById('regenerate').click()")
    assert answer(page) == ANSWER
    assert page.run("document.querySelectorAll('article').length") == 2
    page.open(f"{server.url}/?again")
    page.wait("document.querySelectorAll('article').length == 2")
    assert answer(page) == ANSWER
    page.run("document.getElementById('clear').click()")
    assert page.run("document.querySelectorAll('article').length") == 0
    assert page.run("document.activeElement.id") == "input"


def test_escape_stops_an_answer(page):
    page.run("document.getElementById('max_tokens').value = 900")
    page.run("document.getElementById('temperature').value = 2")
    ask(page, "Spell a b c d e f g h i j k l m n o p q r s t u v w x y z " * 5)
    page.wait("!document.getElementById('stop').hidden || document.querySelector('.figures')")
    page.press("Escape")
    page.wait("document.getElementById('stop').hidden")
    assert page.run("document.querySelectorAll('.error').length") == 0


def test_token_probabilities_are_shown(page):
    page.run("document.getElementById('show_probabilities').click()")
    ask(page)
    assert answer(page) == f"{ANSWER}<|eos|>"
    titles = page.run("[...document.querySelectorAll('.tokens span')].map((span) => span.title)")
    assert len(titles) > 5 and all(re.match(r"\d+\.\d %\n", title) for title in titles)


def test_tool_calls_are_shown_apart(page):
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    page.run(f"document.getElementById('tools').value = {json.dumps(json.dumps([tool]))}")
    page.run("document.getElementById('temperature').value = 0")
    ask(page, "What is 1234 + 4321?")
    answer(page)
    call = page.run("document.querySelector('.tool').textContent")
    assert call.startswith("add(") and "1234" in call


def test_hostile_markdown_becomes_text(page):
    page.run(
        "import('/web/markdown.js').then((markdown) => {"
        "const box = document.createElement('div'); box.id = 'box'; document.body.append(box);"
        f"markdown.render(box, {json.dumps(HOSTILE)}); }})"
    )
    page.wait("document.getElementById('box').children.length")
    tags = page.run(
        "[...new Set([...document.querySelectorAll('#box *')].map((node) => node.tagName))].sort()"
    )
    assert set(tags) <= {"A", "BLOCKQUOTE", "CODE", "EM", "H2", "LI", "P", "PRE", "STRONG", "UL"}
    assert page.run("[...document.querySelectorAll('#box a')].map((link) => link.href)") == [
        "https://example.org/a",
        "https://example.org/x.png",
    ]
    assert page.run("window.hacked === undefined")
    attributes = page.run(
        "[...new Set([...document.querySelectorAll('#box *')]"
        ".flatMap((node) => node.getAttributeNames()))].sort()"
    )
    assert attributes == ["href", "rel", "target"]


def test_the_policy_forbids_inline_scripts(page):
    page.run(
        "(() => { const node = document.createElement('script');"
        "node.textContent = 'window.hacked = 1'; document.body.append(node); })()"
    )
    assert page.run("window.hacked === undefined")
    page.run("1")
    assert any("Content Security Policy" in text for text in page.errors)
    page.errors.clear()


def test_the_live_view_shows_steps_and_can_be_paused(page):
    page.run("document.getElementById('tab-live').click()")
    page.wait("document.getElementById('num_running').textContent")
    page.run("document.getElementById('tab-chat').click()")
    ask(page)
    answer(page)
    page.run("document.getElementById('tab-live').click()")
    page.wait("Number(document.getElementById('timeline').dataset.steps) >= 3")
    assert page.run("Number(document.getElementById('timeline').dataset.rows)") >= 1
    page.run(
        "(() => { const box = document.getElementById('timeline').getBoundingClientRect();"
        "document.getElementById('timeline').dispatchEvent(new MouseEvent('mousemove',"
        "{clientX: box.left + 3, clientY: box.top + 3})); })()"
    )
    assert re.match(
        r"Step \d+: \d+ tokens in", page.run("document.getElementById('hint').textContent")
    )
    page.run("document.getElementById('pause').click()")
    assert page.run("document.getElementById('pause').textContent") == "Continue"


def test_views_can_be_selected_with_the_keyboard(page):
    page.run("document.getElementById('tab-chat').focus()")
    page.press("ArrowRight")
    assert page.run("!document.getElementById('live').hidden")
    assert page.run("document.activeElement.id") == "tab-live"


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_window_has_no_horizontal_scroll_bar(page, dark):
    page.emulate(width=400, dark=dark)
    for view in ("chat", "live"):
        page.run(f"document.getElementById('tab-{view}').click()")
        assert page.run("document.documentElement.scrollWidth") <= 400
    back = page.run("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") is not dark


def test_a_server_that_ends_gives_an_error_and_keeps_the_page(shared):
    other = Server("--api-key", "secret-key")
    try:
        shared.open(f"{other.url}/")
        shared.wait("document.getElementById('model').textContent.includes('Settings')")
        shared.run("document.getElementById('api_key').value = 'secret-key'")
        shared.run("document.getElementById('api_key').dispatchEvent(new Event('change'))")
        shared.wait("document.getElementById('model').textContent == 'demo'")
        ask(shared)
        assert answer(shared) == ANSWER
    finally:
        other.stop()
    ask(shared)
    shared.wait("document.querySelector('.error')")
    assert "cannot be reached" in shared.run("document.querySelector('.error').textContent")
    shared.run("sessionStorage.clear()")
    shared.errors.clear()
