"""Draws the pictures of pages in docs/pictures: `python tests/browser/draw_pictures.py`.

SmolLM2 answers on the web page; the trace shows a simulated run. The script needs Chromium;
downloads the model (93 MB) on first use.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser.chromium import Browser, browser
from docs.record_server import serving

from dovetail.cli.app import main

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


def draw(page: Browser, url: str) -> None:
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


def draw_trace(page: Browser, folder: Path) -> None:
    """Draw the page of `dovetail trace` for a simulated run."""
    log, file = str(folder / "run.log"), folder / "run.html"
    words = ("--trace", "chat", "--requests", "60", "--load", "1.5", "--decision-log", log)
    assert main(["lab", "run", "fcfs", *words]) == 0
    assert main(["trace", log, "--html", str(file), "--steps", "0:900"]) == 0
    page.emulate(width=1000, height=680)
    page.open(file.as_uri())
    page.wait("document.documentElement.dataset.ready")
    page.run(POINT)
    page.screenshot(PICTURES / "trace.png")


if __name__ == "__main__":
    with (
        serving("smollm2") as address,
        tempfile.TemporaryDirectory() as folder,
        browser(Path(folder)) as opened,
    ):
        draw_trace(opened, Path(folder))
        draw(opened, f"http://{address}")
