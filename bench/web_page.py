"""Measure the web page in a headless Chromium, and the cost of its live view for the server.

Page. The time from the start of the navigation to the first paint, with an empty cache: the median
of the repeats. Then a response of 1,000 tokens is streamed as fast as the demo model generates it,
and the page measures the time between frames; the script prints the longest one and the number of
frames.

Live view. The server of `server_cost.py` (a worker without a model, paced steps) streams to 256
clients, whose requests finish one after another. Windows with and without a reader of `GET /steps`
alternate; the reader reads twice per second, as the page does. The script prints the CPU time of
the server process and the engine process, in percent of a core, and the median of the differences
of adjacent windows.

    python bench/web_page.py [--repeats R] [--streams N] [--step-ms MS] [--window-s S]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from server_cost import Server, cpu_seconds, start, stream_forever

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser.chromium import Browser, browser
from docs.record_server import serving

NUM_TOKENS = 1000
STREAM_TOKENS = 500
FRAMES = """(() => {
  const real = window.fetch;
  window.fetch = (path, options) => real(path, {
    ...options, body: options?.body?.replace("{", '{"ignore_eos":true,'),
  });
  window.frames_ms = [];
  let last = performance.now();
  const next = (now) => { frames_ms.push(now - last); last = now; requestAnimationFrame(next); };
  requestAnimationFrame(next);
})()"""


def measure_paint(page: Browser, url: str, repeats: int) -> list[float]:
    """Return the milliseconds to the first paint of several loads."""
    times = []
    for index in range(repeats):
        page.open(f"{url}/?{index}")
        page.wait("performance.getEntriesByName('first-contentful-paint').length")
        code = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        times.append(float(page.run(code)))
    return times


def measure_frames(page: Browser, url: str) -> list[float]:
    """Return the milliseconds between frames while a response is streamed."""
    page.open(f"{url}/?frames")
    page.wait("document.documentElement.dataset.ready")
    page.run(FRAMES)
    page.run(f"document.getElementById('max_tokens').value = {NUM_TOKENS}")
    page.run("document.getElementById('input').focus()")
    page.type("What is 27 + 58?")
    page.run("frames_ms.length = 0")
    page.press("Enter")
    page.wait("!document.getElementById('regenerate').disabled", 120)
    frames: list[float] = page.run("frames_ms")
    text = page.run("document.querySelector('.assistant .figures').textContent")
    assert f"{NUM_TOKENS} tokens" in text, text
    print(text)
    return frames


class Reader(threading.Thread):
    """Reads the steps of a server twice per second while `active` is set."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.active = threading.Event()
        self.num_steps = 0
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=60)

    def run(self) -> None:
        """Read while `active` is set, until the process exits."""
        after = 0
        while self.active.wait():
            self._connection.request("GET", f"/steps?after={after}&max_steps=1024")
            steps = json.loads(self._connection.getresponse().read())["steps"]
            after = steps[-1]["number"] if steps else 0
            self.num_steps += len(steps)
            time.sleep(0.5)


async def measure_live(server: Server, args: argparse.Namespace) -> list[list[float]]:
    """Return the CPU time per second in windows without and with a reader, in percent."""
    pids = [server.process.pid, *_children(server.process.pid)]
    reader = Reader(server)
    reader.start()
    clients = [
        asyncio.create_task(
            stream_forever(server, 1 + STREAM_TOKENS * index // args.streams, STREAM_TOKENS)
        )
        for index in range(args.streams)
    ]
    await asyncio.sleep(5)
    windows: list[list[float]] = [[], []]
    for index in range(2 * args.repeats):
        if index % 2:
            reader.active.set()
        else:
            reader.active.clear()
            await asyncio.sleep(12)  # the recording ends ten seconds after the last call
        begin_s, used_s = time.monotonic(), cpu_seconds(pids)
        await asyncio.sleep(args.window_s)
        spent_s = cpu_seconds(pids) - used_s
        windows[index % 2].append(100 * spent_s / (time.monotonic() - begin_s))
    reader.active.clear()
    await asyncio.sleep(1)
    for client in clients:
        assert not client.done(), client.exception()
        client.cancel()
    print(f"{reader.num_steps} steps read")
    return windows


def _children(pid: int) -> list[int]:
    matches: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            matches += [child, *_children(child)]
    return matches


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=40)
    parser.add_argument("--window-s", type=float, default=20)
    args = parser.parse_args()
    with (
        serving("demo") as address,
        tempfile.TemporaryDirectory() as folder,
        browser(Path(folder)) as page,
    ):
        url = f"http://{address}"
        paints = measure_paint(page, url, args.repeats)
        frames = measure_frames(page, url)
    print(f"first paint: {statistics.median(paints):.0f} ms ({min(paints):.0f}–{max(paints):.0f})")
    print(f"longest of {len(frames)} frames: {max(frames):.0f} ms")
    server = start(args.streams, 1, args.step_ms)
    try:
        without, reading = asyncio.run(measure_live(server, args))
    finally:
        server.process.terminate()
        server.process.wait(60)
    rises = [after - before for before, after in zip(without, reading, strict=True)]
    print(f"without a reader: {statistics.median(without):.1f} % of a core")
    print(f"with a reader: {statistics.median(reading):.1f} % of a core")
    print(f"difference: {statistics.median(rises):.2f} % ({min(rises):.2f}–{max(rises):.2f})")


if __name__ == "__main__":
    main()
