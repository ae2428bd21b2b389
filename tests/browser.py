"""A headless Chromium over its debugging pipe: enough to load a page, ask it things, hear its complaints, look at it.

`SORTYARD_BROWSER` names the program; without it the usual names are looked up. A test that finds none is skipped, or
fails where SORTYARD_NEEDS_BROWSER is set. Knows the protocol, nothing of pages.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE_S = 120.0  # a busy machine starts a browser slowly


def find_browser() -> str:
    """The program. Skips the test where there is none."""
    named = os.environ.get("SORTYARD_BROWSER")
    program = named or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        reason = "no Chromium found; give one as SORTYARD_BROWSER=/path/to/it"
        if os.environ.get("SORTYARD_NEEDS_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    return program


class Browser:
    """One browser with one page. Use as a context manager. `events`: all that it told, oldest first."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.events: list[dict[str, Any]] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._buffer, self._last_id, self._session = b"", 0, ""
        (to_read, self._out), (self._in, to_write) = os.pipe(), os.pipe()
        # Away from 3 and 4, where the browser wants them.
        child = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_read, to_write)]

        def place() -> None:
            os.dup2(child[0], 3)
            os.dup2(child[1], 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (to_read, to_write, *child):
            os.close(fd)

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        wanted = self._last_id
        self._listen(lambda: wanted in self._answers, method)
        answer = self._answers.pop(wanted)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, path: Path, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        """Load a file and wait until it is there."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        start = len(self.events)
        self.call("Page.navigate", url=path.as_uri())
        self._listen(lambda: any(each["method"] == "Page.loadEventFired" for each in self.events[start:]), "the page")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def take_picture(self, path: Path) -> None:
        """The whole page, from top to bottom, as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    @property
    def requests(self) -> list[str]:
        """The addresses that the pages asked for."""
        found = [each for each in self.events if each["method"] == "Network.requestWillBeSent"]
        return [each["params"]["request"]["url"] for each in found]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """What went to the console, the browser's own errors and warnings included."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [each["params"] for each in self.events if each["method"] in kinds]

    def _listen(self, is_there: Any, what: str) -> None:
        """Take in messages until the wanted one has come."""
        end = time.monotonic() + PATIENCE_S
        while not is_there():
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            assert ready, f"the browser did not answer in {PATIENCE_S:g} s: {what}"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, f"the browser ended with {self._process.wait()} instead of an answer: {what}"
            *messages, self._buffer = (self._buffer + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]] = message
                else:
                    self.events.append(message)
