"""The process that runs chat templates: its limits, requests and replies, and restarts.

It runs `template_worker.py`. It is started with the first template, serves one request at a time for all threads, and
is restarted after it has ended.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError

SECONDS = 5.0  # of processor time, which other load on the machine does not count towards
ELAPSED_SECONDS = 60.0
CHARACTERS = 10_000_000
MEMORY_BYTES = 2**29
OUT_OF_MEMORY = 3  # the worker's exit status if it cannot even read a request or write a reply
MAX_REPLY_BYTES = 6 * CHARACTERS + 2**20  # a control character takes six bytes in JSON


class TemplateProcess:
    """A worker process and its pipes, used by one thread at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, template: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The worker's reply: {text, spans} or {error, line}; an error also if the process ended, as over a limit.
        Raises InputError if the variables are not JSON values."""
        limits = {"seconds": SECONDS, "elapsed_seconds": ELAPSED_SECONDS, "characters": CHARACTERS}
        request = {"template": template, "variables": variables, **limits}
        try:
            line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"the variables of a chat template must be plain JSON values: {error}") from None
        with self.lock:
            try:
                reply = self.exchange(line)
            except BaseException:
                self.stop()  # otherwise the next request would get the reply to this one
                raise
            if reply.endswith(b"\n"):
                return json.loads(reply.decode("utf-8", "surrogatepass"))
            status = self.stop()
        reasons = {
            -signal.SIGPROF: f"takes more than {SECONDS:g} seconds",
            -signal.SIGALRM: f"does not end within {ELAPSED_SECONDS:g} seconds",
            OUT_OF_MEMORY: "needs more memory than the limit",
        }
        reason = reasons.get(status, f"ends with status {status}")
        return {"error": f"the process that renders it {reason}", "line": None}

    def exchange(self, request: bytes) -> bytes:
        """Sends the request; returns the reply, which lacks its final newline if the process ended first."""
        process = self.running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        return process.stdout.readline(MAX_REPLY_BYTES)

    def running(self) -> subprocess.Popen[bytes]:
        """The worker process, started if necessary."""
        if self.process is not None and self.process.poll() is not None:  # something else ended it
            self.stop()
        if self.process is None:
            worker = Path(__file__).with_name("template_worker.py")
            # -P: do not search the script's folder for imports; it has modules with common names.
            command = [sys.executable, "-P", str(worker), str(MEMORY_BYTES), str(OUT_OF_MEMORY)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self.process

    def stop(self) -> int:
        """Ends the process if it is still running; returns its exit status."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.kill()
        process.communicate()
        return process.returncode

    def forget(self) -> None:
        """Called in the child after a fork: the worker process belongs to the parent."""
        self.process = None
        self.lock.release()


PROCESS = TemplateProcess()
atexit.register(PROCESS.stop)
os.register_at_fork(before=PROCESS.lock.acquire, after_in_parent=PROCESS.lock.release, after_in_child=PROCESS.forget)
