"""The process in which chat templates run: what it may take, how it is asked, and what its end means.

It runs `template_worker.py`, starts with the first template, serves all threads in turn, and is replaced where it has
been ended. Knows no messages.
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

SECONDS = 5.0
CHARACTERS = 10_000_000
MEMORY_BYTES = 2**29
MAX_REPLY_BYTES = 6 * CHARACTERS + 2**20  # a control character's escape has six


class TemplateProcess:
    """One process and its pipes; it is asked by one thread at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, template: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The worker's reply: {text, spans} or {error, line}.

        Raises InputError for variables that are not JSON, and where the process was ended over a limit.
        """
        request = {"template": template, "variables": variables, "seconds": SECONDS, "characters": CHARACTERS}
        try:
            line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"what a chat template is given must be plain JSON values: {error}") from None
        with self.lock:
            try:
                reply = self.exchange(line)
            except BaseException:
                self.stop()  # it owes a reply, which the next request would get
                raise
            if reply.endswith(b"\n"):
                return json.loads(reply.decode("utf-8", "surrogatepass"))
            status = self.stop()
        reason = f"takes more than {SECONDS:g} seconds" if status == -signal.SIGPROF else f"ends with status {status}"
        return {"error": f"the process that renders it {reason}", "line": None}

    def exchange(self, request: bytes) -> bytes:
        """The reply, without its end if the process ended first."""
        process = self.running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        return process.stdout.readline(MAX_REPLY_BYTES)

    def running(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.process.poll() is not None:  # ended by another's hand since the last reply
            self.stop()
        if self.process is None:
            worker = Path(__file__).with_name("template_worker.py")
            # -P: the script's folder holds modules of common names, none of which the worker means by `import`.
            command = [sys.executable, "-P", str(worker), str(MEMORY_BYTES)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self.process

    def stop(self) -> int:
        """Ends the process, where it has not ended itself; returns its exit status."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.kill()
        process.communicate()
        return process.returncode

    def forget(self) -> None:
        """After a fork: the process is the parent's."""
        self.process = None
        self.lock.release()


PROCESS = TemplateProcess()
atexit.register(PROCESS.stop)
os.register_at_fork(before=PROCESS.lock.acquire, after_in_parent=PROCESS.lock.release, after_in_child=PROCESS.forget)
