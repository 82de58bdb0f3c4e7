"""The processes of the board: runs, which are started, resumed, and stopped with a checkpoint; and workers, which plan
and chat.

A run lives on when the board ends. It is stopped by the signal that Ctrl-C's sibling SIGTERM sends (run/stopping.py),
whoever has started it: to the process that has the run's lock open, which no file can make believe.

Workers answer questions: lines of JSON in, lines of JSON out. Models and plans are not computed in the server's
process: it stays quick, and nothing that fails there ends it. The worker's side is `answer_questions`.
"""

import json
import os
import queue
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ligermodels.board.folders import Place, open_inside, read_inside
from ligermodels.errors import InputError, exhausted_memory, first_line
from ligermodels.training.run.folder import LOCK
from ligermodels.training.settings.config import TrainConfig
from ligermodels.training.settings.settings import as_json_value, as_toml
from ligermodels.weights.writing import replace_file

OWN_FOLDER = ".board"  # in the first folder: settings and outputs of the runs that were started here
LOG_BYTES = 8192  # the end of an output
EXIT_SECONDS = 60
HOLDER = re.compile(rb"process (\d{1,10}) on (.*)\n")
Answers = Callable[[Mapping[str, Any], Callable[[], bool]], Iterable[Mapping[str, Any]]]


class Answerer:
    """A process of answers.py, started when it is first asked: to "plan" or to "chat".

    environment: variables that it has besides ours.
    """

    def __init__(self, task: str, environment: Mapping[str, str] | None = None) -> None:
        self.task, self.environment = task, dict(environment or {})
        self.process: subprocess.Popen[str] | None = None
        self.turn = threading.Lock()
        self.asked = 0

    def ask(self, question: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The answers to a question, as they come. Questions wait for each other; closing the iterator cancels one.
        Raises InputError where the worker refuses the question, or ends."""
        with self.turn:
            if self.process is None or self.process.poll() is not None:
                self.process = self.start()
            process, ended = self.process, False
            self.asked += 1
            try:
                self.tell(process, {"number": self.asked, **question})
                for answer in iter(lambda: self.listen(process), None):
                    if "error" in answer:
                        ended = True
                        raise InputError(str(answer["error"]))
                    if "end" in answer:
                        ended = True
                        return
                    yield answer
            finally:
                if not ended and process.poll() is None:
                    self.cancel(process)
            status = process.wait()
            raise InputError(f"the process that answers has ended with status {status}; the board's output says why")

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "ligermodels.board.answers", self.task],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | self.environment, start_new_session=True,
        )  # fmt: skip

    def cancel(self, process: "subprocess.Popen[str]") -> None:
        with suppress(OSError):
            self.tell(process, {"cancel": self.asked})
        for answer in iter(lambda: self.listen(process), None):
            if "error" in answer or "end" in answer:
                return

    def tell(self, process: "subprocess.Popen[str]", message: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `listen` notices
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def listen(self, process: "subprocess.Popen[str]") -> Mapping[str, Any] | None:
        assert process.stdout is not None
        line = process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def end(self) -> None:
        """Ends the process, whatever it does."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def answer_questions(answers: Answers) -> None:
    """The worker's side: answers each line of standard input until there are no more.

    answers: gets a question, and a function that says whether it was cancelled. What else is printed goes to standard
    error.
    """
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    questions: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
    cancelled: set[int] = set()
    over = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "cancel" in message:
                cancelled.add(message["cancel"])
            else:
                questions.put(message)
        over.set()
        questions.put(None)

    def is_over(number: int) -> bool:
        return over.is_set() or number in cancelled

    def say(answer: Mapping[str, Any]) -> None:
        output.write(json.dumps(answer) + "\n")
        output.flush()

    threading.Thread(target=read, daemon=True).start()
    for question in iter(questions.get, None):
        stopped = partial(is_over, question["number"])
        try:
            for answer in answers(question, stopped):
                say(answer)
            say({"end": True})
        except Exception as error:
            exhausted = exhausted_memory(error)
            told = f"out of memory on the {exhausted}: {first_line(error)}" if exhausted else str(error)
            say({"error": told if isinstance(error, InputError) or exhausted else f"{type(error).__name__}: {told}"})


class Processes:
    """The runs that this board has started. folder: where new runs go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, settings: Mapping[str, Any], name: str) -> None:
        """Starts a run in the folder `name`. settings: as given, in the types of TrainConfig."""
        self.refuse_running(name)
        if os.path.lexists(self.folder / name):
            raise InputError(f"{name}: there is such a folder already; choose another name")
        TrainConfig(**settings)
        own = self.own_folder()
        lines = [f"{key} = {as_toml(as_json_value(value))}\n" for key, value in settings.items() if value is not None]
        file = own / f"{name}.toml"
        replace_file(file, "".join(lines).encode())
        self.launch(name, ["--config", str(file), "--output", str(self.folder / name)])

    def resume(self, place: Place) -> str:
        """Resumes a run in its folder; returns the name of its process."""
        name = place.relative.replace("/", "--") or "run"
        with suppress(KeyError, subprocess.TimeoutExpired):
            self.started[name].wait(EXIT_SECONDS)  # a process that has left its run takes a moment to exit
        self.refuse_running(name)
        self.launch(name, ["--resume", str(place.path)])
        return name

    def launch(self, name: str, arguments: list[str]) -> None:
        with self.open_log(name) as log:
            self.started[name] = subprocess.Popen(
                [sys.executable, "-m", "ligermodels", "train", *arguments], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def open_log(self, name: str) -> BinaryIO:
        """The file for the output of a run, empty. Raises InputError, also for a pipe, which would block."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            log = os.fdopen(os.open(self.own_folder() / f"{name}.log", flags, 0o666), "wb")
        except OSError as error:
            raise InputError(f"{OWN_FOLDER}/{name}.log: cannot be written: {error.strerror}; remove it") from error
        if not stat.S_ISREG(os.fstat(log.fileno()).st_mode):
            log.close()
            raise InputError(f"{OWN_FOLDER}/{name}.log: is not a regular file; remove it")
        return log

    def own_folder(self) -> Path:
        own = self.folder / OWN_FOLDER
        try:
            own.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"{own}: cannot be made: {error.strerror}; make room or give permission") from error
        if own.is_symlink():
            raise InputError(f"{own}: is a link; replace it by a folder")
        return own

    def refuse_running(self, name: str) -> None:
        process = self.started.get(name)
        if process is not None and process.poll() is None:
            raise InputError(f"{name}: is running already")

    def stop(self, place: Place) -> None:
        """Has a run finish its step, save and exit. Raises InputError where no process of this machine trains it."""
        holder = self.holder(place)
        if holder is None:
            raise InputError(f"{place.relative}: no process of this machine trains it; stop it where it was started")
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(holder, signal.SIGTERM)
        os.close(holder)

    def holder(self, place: Place) -> int | None:
        """A descriptor of the process that has a run's lock open; None where the one that the lock names has not."""
        lock = place.inside(LOCK)
        try:
            named = HOLDER.fullmatch(read_inside(lock, 300))
            if named is None or named[2] != socket.gethostname().encode():
                return None
            descriptor, there = os.pidfd_open(int(named[1])), lock.path.lstat()
        except (OSError, OverflowError):  # the latter for a number that no process has
            return None
        if any(os.path.samestat(there, status) for status in open_files(int(named[1]))):
            return descriptor
        os.close(descriptor)
        return None

    def cancel(self, name: str) -> None:
        """Ends a run that was started here and has not begun yet."""
        process = self.started.get(name)
        if process is None or process.poll() is not None:
            raise InputError(f"{name}: is not running")
        process.terminate()

    def seen(self, name: str) -> dict[str, Any]:
        """Whether a run that was started here still runs, its exit status, and the end of its output."""
        process = self.started.get(name)
        if process is None:
            return {"running": False, "status": None, "output": ""}
        status, output = process.poll(), ""
        with suppress(OSError), open_inside(Place(self.folder, f"{OWN_FOLDER}/{name}.log")) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
            output = log.read().decode(errors="replace")
        return {"running": status is None, "status": status, "output": output}


def open_files(process: int) -> list[os.stat_result]:
    """What a process has open, as far as this user may see it."""
    found = []
    with suppress(OSError):
        for name in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                found.append(os.stat(f"/proc/{process}/fd/{name}"))
    return found
