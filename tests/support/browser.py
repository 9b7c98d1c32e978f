"""A headless browser that opens pages, presses keys and evaluates expressions in the page.

Chromium is driven by its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)
through a pair of pipes, so that no package is needed. `CKPTTOOL_BROWSER` names its executable; with
``required``, a test fails without a browser instead of being skipped.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
)
KEYS = {
    "ArrowDown": 40,
    "ArrowUp": 38,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "Enter": 13,
    "Escape": 27,
    "Home": 36,
    "End": 35,
}
PATIENCE = 20.0  # seconds


def executable() -> str:
    """Return the browser's path; skip the test if there is none, or fail if it is required."""
    setting = os.environ.get("CKPTTOOL_BROWSER", "")
    names = NAMES if setting in ("", "required") else (setting,)
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        (pytest.fail if setting else pytest.skip)(
            f"no browser: none of {', '.join(names)} is installed"
        )
    return found


class Browser:
    """A browser with one page. `console` lists errors and violations of the content security
    policy.
    """

    def __init__(self, folder: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()  # to the browser, from it
        command = [executable(), *OPTIONS, f"--user-data-dir={folder}", "about:blank"]

        def pipes() -> None:
            """Chromium reads from descriptor 3 and writes to 4; our own pipes may already use these
            numbers.
            """
            high = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (ours[0], theirs[1])]
            for number, one in zip((3, 4), high):
                os.dup2(one, number)

        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdout=quiet, stderr=quiet, close_fds=False, preexec_fn=pipes
        )
        os.close(ours[0])
        os.close(theirs[1])
        self.out, self.into = (
            os.fdopen(ours[1], "wb", buffering=0),
            os.fdopen(theirs[0], "rb", buffering=0),
        )
        self.rest, self.count, self.session, self.console = b"", 0, "", list[str]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.out.close()
        self.into.close()
        self.process.terminate()
        self.process.wait(PATIENCE)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of one protocol call; messages that arrive meanwhile are added to
        `console`.
        """
        self.count += 1
        session = {"sessionId": self.session} if self.session else {}
        message = {"id": self.count, "method": method, "params": params, **session}
        self.out.write(json.dumps(message).encode() + b"\0")
        while (heard := self._hear()).get("id") != self.count:
            self._note(heard)
        assert "error" not in heard, heard
        return heard["result"]

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            data = self.into.read(1 << 20)
            assert data, "the browser has ended"
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _note(self, heard: dict[str, Any]) -> None:
        if heard["method"] == "Runtime.exceptionThrown":
            self.console.append(str(heard["params"]["exceptionDetails"]))
        elif heard["method"] == "Log.entryAdded" or (
            heard["method"] == "Runtime.consoleAPICalled"
            and heard["params"]["type"] in ("error", "warning")
        ):
            self.console.append(str(heard["params"]))

    def open(self, page: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Open a file and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        address = page.resolve().as_uri()
        self.call("Page.navigate", url=address)
        until = time.monotonic() + PATIENCE
        while self.ask("[location.href, document.readyState]") != [address, "complete"]:
            assert time.monotonic() < until, "the page does not load"
            time.sleep(0.02)

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page, after its promises are resolved."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys one after another, each a letter or a name in `KEYS`."""
        for key in keys:
            event: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, 0)}
            text = {"text": "\r"} if key == "Enter" else {} if key in KEYS else {"text": key}
            self.call(
                "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event, **text
            )
            self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def picture(self, file: Path) -> None:
        """Save a screenshot as PNG."""
        file.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )
