"""A real browser for tests: headless Chromium over chromedriver's HTTP, with the standard library alone."""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

HINT = "needs Chromium and its driver: apt-get install -y chromium chromium-driver"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--force-color-profile=srgb"),
)
PATIENCE = 240  # seconds, after which a condition is taken for false


def is_installed():
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


class Browser:
    """One window. A context manager. folder: an empty one, for the browser's files."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self):
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        line = next(line for line in self.driver.stdout if "started successfully on port" in line)
        self.base = f"http://127.0.0.1:{line.split()[-1].rstrip('.')}"
        options = {"args": [*FLAGS, f"--user-data-dir={self.folder}", "--window-size=1440,1000"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = ""
        self.session = self.call("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        return self

    def __exit__(self, *_):
        try:
            if self.session:
                self.call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()
            self.driver.stdout.close()

    def call(self, method, path, body=None):
        address = f"{self.base}/session" + (f"/{self.session}{path}" if self.session else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from error

    def open(self, address):
        self.call("POST", "/url", {"url": address})

    def run(self, script, *arguments):
        """The value of a script, whose arguments it knows as `arguments`."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script, *arguments):
        """Waits until a script returns something true, and returns it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            value = self.run(script, *arguments)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}\n{self.text()}")

    def element(self, selector):
        self.until("return document.querySelector(arguments[0])", selector)
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        return next(iter(found.values()))

    def click(self, selector):
        self.call("POST", f"/element/{self.element(selector)}/click", {})

    def type(self, selector, text):
        element = self.element(selector)
        self.call("POST", f"/element/{element}/clear", {})
        self.call("POST", f"/element/{element}/value", {"text": text})

    def choose(self, selector, value):
        self.element(selector)
        script = "const e = document.querySelector(arguments[0]); e.value = arguments[1]; "
        self.run(script + "e.dispatchEvent(new Event('change'))", selector, value)

    def text(self):
        return self.run("return document.body.innerText")

    def resize(self, width, height):
        self.call("POST", "/window/rect", {"width": width, "height": height})

    def prefer(self, scheme):
        """Has the system prefer "dark" or "light"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [feature]}}
        self.call("POST", "/goog/cdp/execute", command)

    def picture(self, file):
        file.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def errors(self):
        """What the console has said since the last call, beyond notes."""
        entries = self.call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
