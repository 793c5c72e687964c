"""Draws the pictures of pages in docs/pictures: `python tests/browser/draw_pictures.py [NAME …]`.

All pictures show a server with SmolLM2: its web page, `dovetail top`, and the pages of `dovetail
trace` and `dovetail bench serve`. Without names, all of them are drawn. The script needs Chromium
and downloads the model (98 MB) on first use.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser.chromium import Browser, browser
from docs.record_server import serving
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from dovetail.cli.app import main

PROGRAM = str(Path(sys.executable).with_name("dovetail"))

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
QUESTIONS = (
    "Name three uses of a paged KV cache. Answer as a list.",
    "Write a Python function that adds two numbers.",
)
POINT = """(() => {
  const picture = document.getElementById("picture"), box = picture.getBoundingClientRect();
  picture.dispatchEvent(
    new PointerEvent("pointermove", {clientX: box.left + 300, clientY: box.top + 200})
  );
})()"""
"""Points at the picture of a trace."""
SHOW_SWEEP = """(() => {
  const titles = [...document.querySelectorAll("h2")];
  titles.find((title) => title.textContent == "Load sweep").scrollIntoView();
  window.scrollBy(0, -70);
})()"""
"""Scrolls a load report to its charts; 70 pixels for the bar at the top."""
LOAD = """(async () => {
  const texts = ["Tell a story about a fox.", "What is a queue?", "Name ten colors.", "Why?"];
  for (let index = 0; index < 16; index++) {
    const prompt = texts[index % 4].repeat(1 + index % 5);
    fetch("/v1/completions", {
      method: "POST",
      headers: {"Content-Type": "application/json"},
      body: JSON.stringify({prompt, max_tokens: 20 + 12 * (index % 7)}),
    });
    await new Promise((resume) => setTimeout(resume, 150));
  }
})()"""


LOAD_OPTIONS = (
    *("--request-rate", "1,2,4", "--num-prompts", "40", "--input-len", "64"),
    *("--output-len", "48", "--slo", "ttft:250,tpot:50"),
)
"""The load of the report: 40 requests at each of three rates."""
BUSY_OPTIONS = ("--request-rate", "3", "--num-prompts", "200", "--input-len", "96")
"""The load while the steps of the server are shown."""
TOP_S = 12.0
TOP_SIZE = (100, 26)
"""Columns and lines of the terminal of `dovetail top`."""
HOME = b"\x1b[H"
"""Precedes each picture of `dovetail top`."""
TERMINAL = """<!doctype html><meta charset="utf-8"><style>{stylesheet}
body {{ margin: 0; padding: 12px; background: {background}; color: {foreground}; }}
pre {{ margin: 0; font: 14px/1.25 monospace; }}</style><pre>{code}</pre>"""


def draw_web(page: Browser, folder: Path, url: str) -> None:
    """Draw the chat in light colors, and the live view in dark colors."""
    page.emulate(width=960, height=680)
    page.open(f"{url}/")
    page.wait("document.getElementById('model').textContent == 'smollm2'")
    page.run("document.getElementById('temperature').value = 0")
    page.run("document.getElementById('max_tokens').value = 160")
    for question in QUESTIONS:
        page.run("document.getElementById('input').focus()")
        page.type(question)
        page.press("Enter")
        page.wait("!document.getElementById('regenerate').disabled", 120)
    page.screenshot(PICTURES / "web_chat.png")
    page.emulate(width=400, height=700, dark=True)
    page.screenshot(PICTURES / "web_chat_narrow.png")
    page.emulate(width=960, height=480, dark=True)
    page.run("document.getElementById('tab-live').click()")
    page.run(LOAD)
    page.wait("Number(document.getElementById('timeline').dataset.steps) >= 110", 120)
    page.screenshot(PICTURES / "web_live.png")


def draw_trace(page: Browser, folder: Path, url: str) -> None:
    """Draw the page of `dovetail trace` for a server under load."""
    file = folder / "trace.html"
    with load(url):
        time.sleep(5)
        assert main(["trace", "--url", url, "--duration-s", "8", "--html", str(file)]) == 0
    page.emulate(width=1000, height=680)
    page.open(file.as_uri())
    page.wait("document.documentElement.dataset.ready")
    page.run(POINT)
    page.screenshot(PICTURES / "trace.png")


def draw_load(page: Browser, folder: Path, url: str) -> None:
    """Draw the report of `dovetail bench serve`."""
    file = folder / "load.html"
    assert main(["bench", "serve", "--url", url, *LOAD_OPTIONS, "--html", str(file)]) == 0
    page.emulate(width=1000, height=1000)
    page.open(file.as_uri())
    page.run(SHOW_SWEEP)
    page.screenshot(PICTURES / "load_report.png")


def draw_top(page: Browser, folder: Path, url: str) -> None:
    """Draw the display of `dovetail top` for a server under load."""
    file = folder / "top.html"
    with load(url):
        time.sleep(5)
        file.write_text(terminal_page(last_frame(top_output(url))), "utf-8")
    page.emulate(width=880, height=490, dark=True)
    page.open(file.as_uri())
    page.screenshot(PICTURES / "top.png")


@contextmanager
def load(url: str) -> Iterator[None]:
    """Send requests to a server during the block."""
    process = subprocess.Popen(
        [PROGRAM, "bench", "serve", "--url", url, *BUSY_OPTIONS], stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def top_output(url: str) -> bytes:
    """Return what `dovetail top` writes to a terminal in TOP_S seconds."""
    columns, lines = TOP_SIZE
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        [PROGRAM, "top", "--url", url], stdin=theirs, stdout=theirs, env=environment
    )
    os.close(theirs)
    parts = []

    def read() -> None:
        try:
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        except OSError:
            pass  # the process has ended

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(TOP_S)
    os.write(ours, b"q")
    process.wait(60)
    thread.join()
    os.close(ours)
    return b"".join(parts)


def last_frame(output: bytes) -> str:
    """Return the last complete screen in the output of `dovetail top`."""
    return output.split(HOME)[-2].decode().replace("\r\n", "\n")


def terminal_page(frame: str) -> str:
    """Return a page that shows the content of a terminal."""
    console = Console(file=StringIO(), record=True, width=TOP_SIZE[0], force_terminal=True)
    console.print(Text.from_ansi(frame))
    return console.export_html(theme=MONOKAI, code_format=TERMINAL)


DRAWN = {"web": draw_web, "trace": draw_trace, "load": draw_load, "top": draw_top}

if __name__ == "__main__":
    with (
        serving("smollm2") as address,
        tempfile.TemporaryDirectory() as folder,
        browser(Path(folder)) as opened,
    ):
        for name in sys.argv[1:] or DRAWN:
            DRAWN[name](opened, Path(folder), f"http://{address}")
