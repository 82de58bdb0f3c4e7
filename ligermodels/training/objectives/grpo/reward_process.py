"""The process that runs reward functions of files: its start, requests and replies, time limits and end.

It runs `reward_worker.py`, from the first function that is opened until the run ends, so that the state of the files'
modules lasts over all calls.
"""

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError
from ligermodels.training.objectives.grpo.reward_worker import CallRequest, Parameter, TrainerState, too_slow

GRACE_SECONDS = 1.0  # in which a function whose time is over can be named by the process itself
FEWEST_OPENING_SECONDS = 10.0  # a file imports libraries
LONGEST_WAIT = 2e6  # poll(2) counts milliseconds in 32 bits


class RewardProcess:
    """A worker process and its pipe, started with the first request."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.specs: list[str] = []  # of the functions that were opened, by number

    def open(self, function: "ProcessFunction", seconds: float) -> None:
        """Runs the function's file, unless it ran before, and finds the function. Raises InputError."""
        seconds, spec, file = max(seconds, FEWEST_OPENING_SECONDS), function.spec, function.file
        late = f"--reward {spec}: the file did not run within {seconds:g} s; raise --reward-timeout"
        request = {"spec": spec, "file": None if file is None else str(file), "name": function.name}
        reply = self.ask(request, seconds, late, spec)
        function.number, function.is_async = len(self.specs), reply["is_async"]
        function.parameters = [Parameter(*parameter) for parameter in reply["parameters"]]
        self.specs.append(spec)

    def call(
        self, calls: Sequence[CallRequest], state: TrainerState, places: Sequence[str], seconds: float
    ) -> dict[str, Any]:
        """What one function, or several async ones, return and log: values, extras, metrics. Raises InputError.

        places: where the prompt of each completion was read.
        """
        spec = " ".join(self.specs[call.number] for call in calls)
        request = {"calls": calls, "state": state, "places": places, "seconds": seconds}
        return self.ask(request, seconds, str(too_slow(spec, places, seconds)), spec)

    def ask(self, request: Mapping[str, Any], seconds: float, late: str, spec: str) -> dict[str, Any]:
        """The reply to a request. late: what to say after so many seconds. Raises InputError."""
        connection, in_time = self.running(), True
        allowed = min(seconds, LONGEST_WAIT)
        deadline = time.monotonic() + allowed
        # A process that neither reads nor writes on would hold up a request or a reply that a pipe does not hold.
        watchdog = threading.Timer(allowed + 2 * GRACE_SECONDS, kill_group, [self.process])
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.send_bytes(json.dumps(request).encode())
            in_time = connection.poll(max(0.0, deadline - time.monotonic()))
            if not in_time:
                os.kill(self.process.pid, signal.SIGUSR2)
            reply = json.loads(connection.recv_bytes()) if in_time or connection.poll(GRACE_SECONDS) else {}
        except (EOFError, OSError, ValueError):  # the latter of a function that writes to the connection
            self.stop()
            ended = f"--reward {spec}: ended its process, with status {self.process.returncode}; must return"
            raise InputError(ended if time.monotonic() < deadline else late) from None
        except BaseException:
            self.stop()  # otherwise the next request would get the reply to this one
            raise
        finally:
            watchdog.cancel()
        if not in_time:
            self.stop()
            raise InputError(reply["error"] if reply.get("late") else late)
        if "error" in reply:
            raise InputError(reply["error"])
        return reply

    def running(self) -> Connection:
        """The connection to the process, which is started if necessary."""
        if self.connection is None:
            self.connection, theirs = Pipe()
            worker = Path(__file__).with_name("reward_worker.py")
            # -P: its folder is not searched for imports. It searches where this process does.
            command = [sys.executable, "-P", str(worker), str(theirs.fileno()), *sys.path]
            # A session of its own: forks of functions end with it, and Ctrl-C is handled here.
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
            theirs.close()
            self.stop = weakref.finalize(self, stop_process, self.process, self.connection)
        return self.connection


def stop_process(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Ends the process and all that its functions started."""
    connection.close()
    kill_group(process)
    process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class ProcessFunction:
    """A function of a file, or a format, in the process, by its number there. parameters: known when it is opened;
    before, it takes all that there is.

    name: of the function; of a format, which has no file, the regular expression.
    """

    def __init__(self, process: RewardProcess, spec: str, file: Path | None, name: str) -> None:
        self.process, self.spec, self.file, self.name = process, spec, file, name
        self.number, self.is_async = -1, False
        self.parameters = [Parameter("columns", inspect.Parameter.VAR_KEYWORD, False)]
