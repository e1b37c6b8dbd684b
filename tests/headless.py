"""A headless Chromium that a test can look through: opens a file without a network, tells what it drew, takes pictures.

Speaks the DevTools protocol over tornado's websocket client, which comes with Jupyter. `find()` says where the browser
is, or None.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WHY_NOT = f"no page was looked at in a browser: none of {', '.join(NAMES)} is here (Debian: apt-get install chromium)"


def find() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. requests: every address it asked for that is no file and no data; problems: what its console said."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._number = connection, 0
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._events: set[str] = set()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._connection.write_message(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (answer := await self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    async def open(self, file: Path, *, width: int, is_dark: bool) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=file.absolute().as_uri())
        while "Page.loadEventFired" not in self._events:
            await self._next()
        await asyncio.sleep(0.3)

    async def evaluate(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def picture(self, file: Path, height: int | None = None) -> None:
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    async def _next(self) -> dict[str, Any]:
        text = await asyncio.wait_for(self._connection.read_message(), 60)
        assert text is not None, "the browser closed the connection"
        message = json.loads(text)
        method, parameters = message.get("method", ""), message.get("params", {})
        self._events.add(method)
        if method == "Network.requestWillBeSent":
            address = parameters["request"]["url"]
            if not address.startswith(("file:", "data:", "blob:")):
                self.requests.append(address)
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
        return message


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Any]:
    """Yields `new_page()`. folder: where the browser keeps its profile."""
    from tornado.httpclient import AsyncHTTPClient
    from tornado.websocket import websocket_connect

    program = find()
    assert program is not None
    process = subprocess.Popen(
        [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run",
         "--disable-background-networking", f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        said = folder / "DevToolsActivePort"
        limit = time.monotonic() + 40
        while not (said.is_file() and len(said.read_text().split()) == 2):
            assert time.monotonic() < limit and process.poll() is None, "the browser did not start"
            await asyncio.sleep(0.1)
        port = said.read_text().split()[0]

        async def new_page() -> Page:
            address = f"http://127.0.0.1:{port}/json/new?about:blank"
            tab = json.loads((await AsyncHTTPClient().fetch(address, method="PUT", body="")).body)
            return Page(await websocket_connect(tab["webSocketDebuggerUrl"], max_message_size=2**28))

        yield new_page
    finally:
        process.terminate()
        process.wait(timeout=20)
