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
pytestmark = [pytest.mark.costly, pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")]

HOSTILE = """\
<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 1">
[click](javascript:window.hacked=1) [ok](https://example.org/a) ![x](https://example.org/x.png)
# <iframe src="https://example.org"></iframe>
- <svg onload="window.hacked = 1">
```html
<style>body { display: none }</style>
```
> > > > > > > > > > > > deep
7. seven\r
- one\u2028two\r
**bold** `code` *em*
- a\r
- b\u2028c
"""
LARGE = (
    "'x' + '`'.repeat(100000)",
    "'*a* '.repeat(49000)",
    "'# a\\n'.repeat(49000)",
    "'['.repeat(199999)",
    "'- a\\r\\n\\r\\n'.repeat(9000)",
    "'>'.repeat(199999)",
)
"""Texts whose rendering once took too long, or failed."""
STUB = """(chunks, rest) => {
  const encoder = new TextEncoder();
  window.fetch = async (path, options) => {
    if (!path.endsWith("chat/completions")) return new Response("{}", {status: 404});
    window.sent = JSON.parse(options.body);
    const write = (delta) => "data: " + JSON.stringify({choices: [{delta}]}) + "\\n\\n";
    return new Response(new ReadableStream({async start(controller) {
      for (const event of [...chunks.map(write), rest]) controller.enqueue(encoder.encode(event));
      controller.close();
    }}));
  };
}"""
"""Replaces the server: the response has these deltas, and then the text `rest`."""
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
        result = next(
            filter(None, map(re.compile(r"(http://\S+:\d+)/v1").search, self.process.stderr))
        )
        self.url = result[1]

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


def stub(page, deltas, remainder="data: [DONE]\n\n"):
    page.run(f"({STUB})({json.dumps(deltas)}, {json.dumps(remainder)})")


def answer(page):
    page.wait("!document.getElementById('regenerate').disabled")
    return page.run("[...document.querySelectorAll('article.assistant .body')].at(-1).innerText")


def test_a_message_gets_a_streamed_answer_with_metrics_and_survives_a_reload(page, server):
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


def test_escape_stops_the_request_in_the_engine(page, server):
    page.run(
        "(() => { const real = window.fetch; window.fetch = (path, options) => real(path, {"
        "...options, body: options?.body?.replace('{', '{\"ignore_eos\":true,')}); })()"
    )
    page.run("document.getElementById('max_tokens').value = 4000")
    page.press_when("document.querySelector('.assistant .body')?.textContent.length > 20", "Escape")
    ask(page)
    page.wait("document.querySelector('.assistant .figures').textContent != ''")
    assert page.run("document.querySelectorAll('.error').length") == 0
    assert "stopped" in page.run("document.querySelector('.assistant .figures').textContent")
    page.wait(
        "(window.load = 1, fetch('/load').then((reply) => reply.json())"
        ".then((load) => { window.running = load; }), window.running?.num_running === 0)",
        limit_s=5,
    )


def test_token_probabilities_are_shown(page):
    page.run("document.getElementById('show_probabilities').click()")
    ask(page)
    assert answer(page) == f"{ANSWER}<|eos|>"
    titles = page.run("[...document.querySelectorAll('.tokens span')].map((span) => span.title)")
    assert len(titles) > 5 and all(re.match(r"\d+\.\d %\n", title) for title in titles)


def test_tool_calls_are_shown_separately(page):
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


def test_hostile_markdown_is_shown_as_plain_text(page):
    page.run(
        "import('/web/markdown.js').then((markdown) => {"
        "const box = document.createElement('div'); box.id = 'box'; document.body.append(box);"
        f"markdown.render(box, {json.dumps(HOSTILE)}); }})"
    )
    page.wait("document.getElementById('box').children.length")
    tags = page.run(
        "[...new Set([...document.querySelectorAll('#box *')].map((node) => node.tagName))].sort()"
    )
    allowed = "A BLOCKQUOTE CODE EM H2 LI OL P PRE STRONG UL"
    assert set(tags) <= set(allowed.split())
    assert page.run("[...document.querySelectorAll('#box a')].map((link) => link.href)") == [
        "https://example.org/a",
        "https://example.org/x.png",
    ]
    assert page.run("window.hacked === undefined")
    attributes = page.run(
        "[...new Set([...document.querySelectorAll('#box *')]"
        ".flatMap((node) => node.getAttributeNames()))].sort()"
    )
    assert attributes == ["href", "rel", "start", "target"]


def test_hostile_output_in_a_stream_is_shown_as_plain_text(page):
    stub(page, [{"content": HOSTILE[:20]}, {"content": HOSTILE[20:]}])
    ask(page)
    text = answer(page)
    assert "<script>window.hacked = 1</script>" in text and "javascript:window" in text
    assert page.run("document.querySelectorAll('article :is(script,img,svg,iframe)').length") == 0
    assert page.run("document.querySelector('article ol').start") == 7
    assert page.run("window.hacked === undefined")


@pytest.mark.parametrize("text", LARGE)
def test_large_output_is_rendered_in_a_limited_time(page, text):
    milliseconds = page.run(
        "import('/web/markdown.js').then((markdown) => { const begin = performance.now();"
        f"markdown.render(document.createElement('div'), {text});"
        "return performance.now() - begin; })"
    )
    assert milliseconds < 5000


def test_reasoning_is_shown_separately(page):
    stub(page, [{"reasoning_content": "27 plus "}, {"reasoning_content": "58"}, {"content": "85"}])
    ask(page)
    assert answer(page) == "85"
    assert page.run("document.querySelector('.assistant .reasoning').textContent") == "27 plus 58"
    ask(page, "And now?")
    answer(page)
    assert [message["content"] for message in page.run("window.sent.messages")] == [
        "What is 27 + 58?",
        "85",
        "And now?",
    ]


@pytest.mark.parametrize(
    ("remainder", "message"),
    [
        ("data: {", "The connection was lost before the end of the response."),
        ('data: {"error": {"message": "The engine has failed."}}\n\n', "The engine has failed."),
    ],
)
def test_the_text_of_an_interrupted_stream_is_kept(page, remainder, message):
    stub(page, [{"content": "half of"}], remainder)
    ask(page)
    assert answer(page) == "half of"
    assert page.run("document.querySelector('.error').textContent") == message


def articles(page):
    return page.run("document.querySelectorAll('article').length")


def test_a_rejected_message_is_moved_from_the_conversation_back_to_the_input(page):
    ask(page)
    answer(page)
    page.run("document.getElementById('input').value = 'x '.repeat(2_500_000)")
    ask(page, "y")
    page.wait("document.querySelector('.error')")
    assert "--max-body-bytes" in page.run("document.querySelector('.error').textContent")
    assert page.run("document.getElementById('input').value.length") == 5_000_001
    assert articles(page) == 4
    page.run("document.getElementById('input').value = ''")
    ask(page)
    assert answer(page) == ANSWER
    assert articles(page) == 4
    assert page.run("document.querySelectorAll('.error').length") == 0
    page.errors.clear()  # the browser logs the status 413


def test_a_message_stopped_before_the_first_token_is_moved_back_to_the_input(page):
    page.run(
        "window.fetch = (path, { signal }) => new Promise((_, fail) => {"
        "signal.addEventListener('abort', () => fail(signal.reason)); })"
    )
    ask(page, "Hello")
    page.wait("!document.getElementById('stop').hidden")
    page.press("Escape")
    page.wait("document.getElementById('input').value == 'Hello'")
    assert page.run("sessionStorage.getItem('dovetail.conversation')") == "[]"


def test_an_empty_answer_can_be_regenerated(page):
    stub(page, [{"content": ""}])
    ask(page)
    assert answer(page) == ""
    assert articles(page) == 2


def test_the_settings_are_sent_with_the_request(page):
    stub(page, [{"content": "yes"}])
    for name, value in {"system": "Be brief.", "temperature": 0.5, "top_p": 0.9, "seed": 3}.items():
        page.run(f"document.getElementById('{name}').value = {json.dumps(value)}")
    ask(page, "Hello")
    answer(page)
    sent = page.run("window.sent")
    assert sent | {"temperature": 0.5, "top_p": 0.9, "seed": 3, "max_tokens": 512} == sent
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


@pytest.mark.parametrize(
    "attack",
    [
        "document.body.innerHTML = '<img src=x onerror=\"window.hacked = 1\">'",
        "const node = document.createElement('script'); node.textContent = 'window.hacked = 1';"
        "document.body.append(node)",
        "document.body.setAttribute('onclick', 'window.hacked = 1'); document.body.click()",
    ],
)
def test_the_content_security_policy_forbids_inline_scripts(page, attack):
    page.run(
        f"(() => {{ try {{ {attack} }} catch (error) {{ window.stopped = String(error); }} }})()"
    )
    assert page.run("window.hacked === undefined")
    assert page.run("window.stopped ?? ''") or page.errors
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
    first = page.run("document.getElementById('hint').textContent")
    page.run("document.getElementById('timeline').focus()")
    page.press("ArrowRight")
    second = page.run("document.getElementById('hint').textContent")
    assert first != second and re.search(r"request \d+: 1 token$", second)
    page.run("document.getElementById('pause').click()")
    assert page.run("document.getElementById('pause').textContent") == "Continue"


def test_the_live_view_removes_an_error_when_the_server_responds_again(page):
    trace = {"started_ns": 1, "now_ns": 2, "num_new_tokens": 0, "num_steps": 0, "steps": []}
    page.run(
        "window.fetch = async () => window.isReady"
        f" ? new Response(JSON.stringify({json.dumps(trace)}))"
        ' : new Response(\'{"error": {"message": "loading"}}\', {status: 503})'
    )
    page.run("document.getElementById('tab-live').click()")
    page.wait("document.getElementById('hint').textContent == 'loading'")
    page.run("window.isReady = true")
    page.wait("document.getElementById('hint').textContent.startsWith('No steps yet')")


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


def test_the_page_shows_an_error_when_the_server_has_exited(shared):
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
