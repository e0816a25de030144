"""A headless Chromium, driven over its debugging protocol: what a page shows, asks for and complains about."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-quic --disable-extensions --disable-dev-shm-usage --hide-scrollbars --mute-audio"
).split()
DIALOG = "Page.javascriptDialogOpening"
SECONDS = 60.0


def find_chromium() -> str | None:
    """The command of an installed browser; CHROMIUM names another one."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


class Pipe:
    """The debugging protocol over two pipes (messages end in a zero byte): no port is opened."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        os.set_blocking(reading, False)

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Call a method and wait for its answer; what happens meanwhile is kept in `events`."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": session} if session is not None else {}
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, *methods: str) -> str:
        """The first of these events."""
        deadline = time.monotonic() + SECONDS
        while True:
            for event in self.events:
                if event.get("method") in methods:
                    return event["method"]
            self.events.append(self._receive(deadline))

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert time.monotonic() < deadline, f"the browser did not answer within {SECONDS:.0f} s"
            try:
                chunk = os.read(self._reading, 1 << 20)
                assert chunk, "the browser has ended"
                self._buffer += chunk
            except BlockingIOError:
                time.sleep(0.005)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@dataclass
class Tab:
    """A page that was opened, and everything that happened since."""

    pipe: Pipe
    session: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(
        self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False, touch: bool = False
    ) -> None:
        mode = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self._do("Emulation.setDeviceMetricsOverride", **size)
        self._do("Emulation.setEmulatedMedia", features=[mode])
        self.pipe.events.clear()
        self._do("Page.navigate", url=path.resolve().as_uri())
        while self.pipe.wait_for("Page.loadEventFired", DIALOG) == DIALOG:  # it holds the page up until it is answered
            self.look_around()
            self._do("Page.handleJavaScriptDialog", accept=True)
        self.look_around()

    def look_around(self) -> None:
        """Take note of what was asked for and complained about so far."""
        for event in self.pipe.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            elif method == "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled":
                self.complaints.append(str([arg.get("value") for arg in params["args"]]))
            elif method == "Runtime.exceptionThrown":
                self.complaints.append(params["exceptionDetails"]["text"])
            elif method == DIALOG:
                self.complaints.append(f"dialog: {params['message']}")
        self.pipe.events.clear()

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page, from outside its Content-Security-Policy."""
        found = self._do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def point_at(self, selector: str) -> None:
        """Move the pointer over the middle of an element."""
        box = self.ask(
            f"(() => {{const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]})()"
        )
        self._do("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def picture(self, path: Path, height: int | None = None) -> None:
        """A PNG of the page from its top, whole or this high."""
        size = self._do("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        data = self._do("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _do(self, method: str, **params: Any) -> dict[str, Any]:
        return self.pipe.send(method, self.session, **params)


@contextmanager
def chromium_tab() -> Iterator[Tab]:
    """A browser of its own with an empty profile and one tab; it is gone at the end."""
    command = find_chromium()
    assert command is not None, "install chromium first"
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = _start([command, *FLAGS, f"--user-data-dir={profile}"], to_browser[0], from_browser[1])
        try:
            pipe = Pipe(from_browser[0], to_browser[1])
            target = pipe.send("Target.createTarget", url="about:blank")["targetId"]
            session = pipe.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Log", "Runtime"):
                pipe.send(f"{domain}.enable", session)
            yield Tab(pipe, session)
            pipe.send("Browser.close")
        finally:
            os.close(to_browser[1])
            os.close(from_browser[0])
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(command: list[str], reading: int, writing: int) -> subprocess.Popen[bytes]:
    """The browser reads descriptor 3 and writes descriptor 4; a shell puts them there."""
    shell = f'exec "$@" --remote-debugging-pipe 3<&{reading} 4>&{writing}'
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(["bash", "-c", shell, "bash", *command], pass_fds=(reading, writing), **quiet)
    os.close(reading)
    os.close(writing)
    return process
