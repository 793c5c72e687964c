"""Controls a headless Chromium through its debugging pipe (DevTools protocol), without a driver."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
LIMIT_S = 60.0


class Browser:
    """One page of a browser. errors: messages of the console and uncaught exceptions."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._last_id = 0
        self._session = ""
        self.errors: list[str] = []
        self.requested: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            reply = self._receive(deadline_s)
            if reply.get("id") == self._last_id:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                result: dict[str, Any] = reply["result"]
                return result
            self._note(reply)

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], deadline_s - time.monotonic())
            if not ready:
                raise TimeoutError("the browser does not respond")
            part = os.read(self._from, 1 << 20)
            if not part:
                raise ConnectionError("the browser has ended")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
        elif event.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """Load a page."""
        self._call("Page.navigate", url=url)
        self.wait(f"location.href == {json.dumps(url)} && document.readyState == 'complete'")

    def run(self, code: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        done = self._call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"])[:500])
        return done["result"].get("value")

    def wait(self, code: str, limit_s: float = LIMIT_S) -> None:
        """Wait until a JavaScript expression is true."""
        deadline_s = time.monotonic() + limit_s
        while not self.run(f"(() => {{ try {{ return Boolean({code}) }} catch {{ }} }})()"):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not true after {limit_s} s: {code}")
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Enter text into the element with the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key, such as "Enter"."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def press_when(self, condition: str, key: str) -> None:
        """Let the page press a key as soon as a change of its content makes `condition` true."""
        self.run(
            "new MutationObserver((changes, observer) => {"
            f" if (!({condition})) return;"
            " observer.disconnect();"
            " document.activeElement.dispatchEvent("
            f"new KeyboardEvent('keydown', {{key: {json.dumps(key)}, bubbles: true}})); }})"
            ".observe(document.body, {childList: true, subtree: true, characterData: true})"
        )

    def emulate(self, *, width: int = 1000, height: int = 700, dark: bool = False) -> None:
        """Set the size of the window and the colors that the user prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path) -> None:
        """Save a screenshot of the window as PNG."""
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Run a browser with a new profile in `folder`."""
    assert PROGRAM is not None
    read_by_browser, to_browser = os.pipe()
    from_browser, written_by_browser = os.pipe()
    # The browser reads from descriptor 3 and writes to descriptor 4.
    program = f'exec "$@" 3<&{read_by_browser} 4>&{written_by_browser}'
    process = subprocess.Popen(
        ["bash", "-c", program, "bash", PROGRAM, *OPTIONS, f"--user-data-dir={folder}/profile"],
        pass_fds=(read_by_browser, written_by_browser),
        stderr=subprocess.DEVNULL,
    )
    os.close(read_by_browser)
    os.close(written_by_browser)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.close(to_browser)
        os.close(from_browser)
        process.terminate()
        process.wait(30)
