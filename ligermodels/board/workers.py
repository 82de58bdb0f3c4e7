"""Processes that answer questions of the board: lines of JSON in, lines of JSON out.

Models and plans are not computed in the server's process: it stays quick, and nothing that fails there ends it. The
worker's side is `answer_questions`.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ligermodels.errors import InputError, exhausted_memory, first_line

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
