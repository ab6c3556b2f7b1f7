"""Headless Chromium over its debugging pipe: what a page asks for, what it complains of, how wide it is, how it looks."""

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
).split()


def found() -> str | None:
    """The browser of this machine, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in one browser; `events` is everything that it has said."""

    def __init__(self, profile, seconds=60):
        self.profile, self.deadline = profile, time.monotonic() + seconds
        self.events, self.ids, self.rest = [], itertools.count(1), b""

    def __enter__(self):
        theirs_in, self.write_end = os.pipe()
        self.read_end, theirs_out = os.pipe()

        def pipes():  # in the child: the browser reads from 3 and writes to 4
            one, two = os.dup(theirs_in), os.dup(theirs_out)
            for end, number in ((one, 3), (two, 4)):
                os.dup2(end, number)
                os.set_inheritable(number, True)

        command = [found(), *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=pipes,
            close_fds=False,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self.read_end, False)
        self.session = None
        targets = self("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self(f"{domain}.enable")
        return self

    def __exit__(self, *exc):
        os.close(self.write_end)
        os.close(self.read_end)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __call__(self, method, **params):
        """One command, and its answer."""
        number = next(self.ids)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        return self.until(lambda one: one.get("id") == number)["result"]

    def until(self, wanted):
        """What comes next and is wanted; everything on the way is kept."""
        while time.monotonic() < self.deadline:
            *whole, self.rest = self.rest.split(b"\0")
            messages = [json.loads(one) for one in whole]
            self.events += messages
            for message in messages:
                if wanted(message):
                    assert "error" not in message, message
                    return message
            try:
                self.rest += os.read(self.read_end, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
        raise TimeoutError("the browser has not answered")

    def show(self, path, width, dark=False, height=800):
        """Open a file in a window of so many pixels, in the light or in the dark."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        self("Page.navigate", url=path.resolve().as_uri())
        self.until(lambda one: one.get("method") == "Page.loadEventFired")

    def ask(self, expression):
        """The value of a JavaScript expression on the page."""
        return self("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def requests(self):
        """Addresses that the page has asked for, without those of what is inside it."""
        asked = (
            one["params"]["request"]["url"] for one in self.events if one.get("method") == "Network.requestWillBeSent"
        )
        return [url for url in asked if not url.startswith(("data:", "about:"))]

    def complaints(self):
        """What it has logged, and what went wrong."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.loadingFailed")
        return [one["params"] for one in self.events if one.get("method") in kinds]

    def photograph(self, path, top=0, height=None):
        """The page as PNG, from `top` on; as a whole where no height is given."""
        size = self("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": size["width"], "height": height or size["height"] - top, "scale": 1}
        data = self("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
