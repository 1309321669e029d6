"""A headless Chromium at the other end of a pipe, by its DevTools protocol: no library between."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe")

BEGIN = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The protocol's two ends are descriptors 3 and 4 of the browser's process."""


class Browser:
    """One page."""

    def __init__(self, sent: int, received: int):
        self._sent, self._received = sent, received
        self._held, self._number, self._session, self._loaded = b"", 0, "", 0
        self.errors: list[str] = []
        """What the page's console called an error, and exceptions that nothing caught."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        said = {"id": self._number, "method": method, "params": parameters} | ({"sessionId": self._session} if self._session else {})
        os.write(self._sent, json.dumps(said).encode() + b"\0")
        while True:
            heard = self._next()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard["error"]
                return heard["result"]
            self._note(heard)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            data = os.read(self._received, 1 << 16)
            assert data, "the browser has ended"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def _note(self, heard: dict[str, Any]) -> None:
        what = heard.get("params", {})
        self._loaded += heard.get("method") == "Page.loadEventFired"
        if heard.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(what["exceptionDetails"].get("exception", {}).get("description", what["exceptionDetails"]["text"])))
        if heard.get("method") == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")

    def open(self, url: str, width: int = 1320, height: int = 860, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        before = self._loaded
        self.call("Page.navigate", url=url)
        while self._loaded == before:
            self._note(self._next())

    def evaluate(self, expression: str) -> Any:
        """The value of a script; a promise's, once it has one."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, within_s: int = 20) -> Any:
        """The value of ``condition`` as soon as it is true."""
        look = f"const v = {condition}; if (v) return v; await new Promise(r => setTimeout(r, 20));"
        found = self.evaluate(f"(async () => {{ for (let k = 0; k < {within_s * 50}; k++) {{ {look} }} return null; }})()")
        assert found, f"{condition} never held; the page says {self.evaluate('document.body.innerText')!r}, errors {self.errors}"
        return found

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27}[key]
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser whose files lie under ``profile``; it ends with this."""
    assert PROGRAM is not None
    to_read, to_write = os.pipe(), os.pipe()
    theirs = (to_read[0], to_write[1])
    command = [sys.executable, "-ISc", BEGIN, *map(str, theirs), PROGRAM, *ARGUMENTS, f"--user-data-dir={profile}"]
    with subprocess.Popen(command, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        for end in theirs:
            os.close(end)
        try:
            yield Browser(to_read[1], to_write[0])
        finally:
            process.kill()
            for end in (to_read[1], to_write[0]):
                os.close(end)
