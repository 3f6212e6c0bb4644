"""A headless Chromium, driven by its DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PROGRAM = shutil.which("chromium")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Browser:
    """One page of a browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.console: list[str] = []
        """Errors that the console shows, such as violations of the content security policy."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result. Raises RuntimeError if it fails."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.console.append(parameters["entry"]["text"])

    def set_cookie(self, url: str, name: str, value: str) -> None:
        self.command("Network.setCookie", url=url, name=name, value=value)

    def show(self, width: int, height: int, theme: str = "light") -> None:
        """Set the size of the window, and the color scheme of the system."""
        is_phone = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return the value of a script, awaited if it is a promise. Raises RuntimeError if it throws."""
        found = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 60) -> Any:
        """Return the value of a script as soon as it is true."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(RuntimeError):  # between two documents
                if found := self.evaluate(script):
                    return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s} s: {script}; console: {self.console}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, file: Path) -> None:
        found = self.command("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A Chromium with one blank page, until the block ends."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-chromium-", ignore_cleanup_errors=True) as profile:
        command = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = _port(Path(profile) / "DevToolsActivePort", process)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
            with connect(pages[0]["webSocketDebuggerUrl"], max_size=None) as socket:
                yield Browser(socket)
        finally:
            process.terminate()
            process.wait(30)


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"chromium did not start: exit code {process.poll()}")
        time.sleep(0.05)
    return int(file.read_text().splitlines()[0])
