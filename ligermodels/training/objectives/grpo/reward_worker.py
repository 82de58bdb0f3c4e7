"""The process that runs reward functions of files. `rewards.py` starts it; it imports nothing of the package.

A function may keep the interpreter for ever, fork or exit. This process can be killed; that of the run cannot. It
serves one request at a time. Requests and replies are JSON, so that functions get copies of what is trained on:

    {spec, file, name} -> {parameters, is_async}: opens a function, which gets the next number; without a file, the
        built-in one of a regular expression, which may take for ever as well
    {calls, state, places, seconds} -> {values, extras, metrics}: calls are those of one function or of async ones

An error is {error}, and {error, late} where it is that of the time limit: SIGUSR2 says that the time is over.
"""

import asyncio
import ctypes
import importlib.util
import inspect
import json
import math
import os
import re
import reprlib
import signal
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1


class RewardFunction(NamedTuple):
    """spec is as it was given, without its weight. Metrics and errors have the name. file defines it, if any does."""

    spec: str
    name: str
    function: Any  # what is called, or a `ProcessFunction`
    weight: float = 1.0
    file: Path | None = None


class TrainerState(NamedTuple):
    """What a reward function may know of the run. global_step: completed steps. max_steps: of the whole run."""

    global_step: int
    max_steps: int


class Parameter(NamedTuple):
    """A parameter of a function. kind: that of `inspect.Parameter`."""

    name: str
    kind: int
    has_default: bool


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [Parameter(p.name, int(p.kind), p.default is not p.empty) for p in parameters]


class CallRequest(NamedTuple):
    """A request to call a function. helpers: the names of those arguments that only this process can make."""

    number: int
    arguments: dict[str, Any]
    helpers: list[str]


class RewardError(Exception):
    """A reward function did not do what it must. late says whether it took too long."""

    def __init__(self, message: str, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class TimeLimitExceeded(BaseException):
    """Not an Exception, so that an `except Exception` in the code that is stopped does not hold it back."""


# -- a call, in this process or in that of the run


def call_one(function: RewardFunction, arguments: Mapping[str, Any], places: Sequence[str], seconds: float) -> Any:
    """What the function returns. places: where the prompt of each completion was read. Raises RewardError."""
    try:
        return function.function(**arguments)
    except TimeLimitExceeded:
        raise too_slow(function.spec, places, seconds) from None
    except (Exception, SystemExit) as error:
        raise failed(function, places, error) from error


def failed(function: RewardFunction, places: Sequence[str], error: BaseException) -> RewardError:
    return RewardError(f"--reward {function.spec}: raised {described(error, function.file)}, for {prompts_of(places)}")


def too_slow(spec: str, places: Sequence[str], seconds: float) -> RewardError:
    return RewardError(
        f"--reward {spec}: did not return within {seconds:g} s, for {prompts_of(places)}; give the function a "
        "limit of its own, or raise --reward-timeout",
        late=True,
    )


def prompts_of(places: Sequence[str]) -> str:
    """Where the prompts were read: the first and the last."""
    first, last = places[0], places[-1]
    return f"the prompt of {first}" if first == last else f"the prompts of {first} to {last}"


def described(error: BaseException, file: Path | None) -> str:
    """An exception with the last line of the file that took part in it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and Path(frame.filename) == file]
    where = f" in {file}:{frames[-1].lineno}" if frames else ""
    text = ""
    with suppress(Exception):  # of an exception's own __str__
        text = str(error)
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def checked_values(function: RewardFunction, values: Any, places: Sequence[str]) -> list[float | None]:
    """The rewards that a function returned, one finite number or None for each place. Raises RewardError."""
    count = len(places)
    try:
        is_list = hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping | Set)
        listed = list(values) if is_list else None
    except Exception as error:  # of an __iter__ or a __len__
        raise failed(function, places, error) from error
    if listed is None:
        raise RewardError(
            f"--reward {function.spec}: returned {type(values).__name__}; must return a list of {count} numbers, one "
            "for each completion"
        )
    if len(listed) != count:
        raise RewardError(
            f"--reward {function.spec}: returned {len(listed)} rewards for {count} completions, for "
            f"{prompts_of(places)}; must return one for each"
        )
    return [checked_reward(function, value, place) for value, place in zip(listed, places, strict=True)]


def checked_reward(function: RewardFunction, value: Any, place: str) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except Exception:  # of a __float__, and of a tensor on the meta device
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"--reward {function.spec}: returned {shortened_value(value)} for a completion of the prompt of {place}; "
            "must be a finite number, or None where there is no reward"
        )
    return number


def shortened_value(value: Any) -> str:
    """A value in an error, shortened."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"<{type(value).__name__}>"


# -- in this process


def text_of(completion: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a completion; of a conversation, of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def format_reward(pattern: str) -> Callable[..., list[float]]:
    """1 where the whole completion matches the pattern, else 0. A dot matches any character, also the end of a line."""
    expression = re.compile(pattern, re.DOTALL)

    def format(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(expression.fullmatch(text_of(completion)) is not None) for completion in completions]

    return format


class Functions:
    """The functions that were opened, by number."""

    def __init__(self) -> None:
        self.modules: dict[Path, ModuleType] = {}  # a file runs once, however many functions it has
        self.opened: list[RewardFunction] = []

    def open(self, spec: str, file: str | None, name: str) -> dict[str, Any]:
        path = None if file is None else Path(file)
        found = format_reward(name) if path is None else self.function(spec, path, name)
        self.opened.append(RewardFunction(spec, name, found, file=path))
        return {"parameters": parameters_of(found), "is_async": inspect.iscoroutinefunction(found)}

    def function(self, spec: str, file: Path, name: str) -> Callable[..., Any]:
        if file not in self.modules:
            self.modules[file] = run_reward_file(file, spec)
        found = getattr(self.modules[file], name, None)
        if not callable(found):
            raise RewardError(f"--reward {spec}: the file has no function of this name")
        return found

    def call(self, calls: list[Any], state: list[int], places: list[str], seconds: float) -> dict[str, Any]:
        """Runs one function, or several async ones at the same time."""
        extras: dict[str, list[Any]] = {}
        metrics: dict[str, list[float]] = defaultdict(list)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            extras[column] = list(values)

        def log_metric(name: str, value: float) -> None:
            metrics[name].append(float(value))

        available = {"trainer_state": TrainerState(*state), "log_extra": log_extra, "log_metric": log_metric}
        made = [
            (self.opened[number], arguments | {name: available[name] for name in helpers})
            for number, arguments, helpers in calls
        ]
        if inspect.iscoroutinefunction(made[0][0].function):
            returned = call_async(made, places, seconds)
        else:
            returned = [call_one(function, arguments, places, seconds) for function, arguments in made]
        values = [checked_values(made[index][0], value, places) for index, value in enumerate(returned)]
        return {"values": values, "extras": extras, "metrics": metrics}


def run_reward_file(file: Path, spec: str) -> ModuleType:
    module_spec = importlib.util.spec_from_file_location(f"reward_file_{file.resolve()}", file)
    assert module_spec is not None and module_spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # where dataclasses and pickle look for it
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        raise RewardError(f"--reward {spec}: the file does not run: {described(error, file)}") from error
    return module


def call_async(
    calls: Sequence[tuple[RewardFunction, dict[str, Any]]], places: Sequence[str], seconds: float
) -> list[Any]:
    """Runs async functions at the same time. Returns what they return, in order."""
    returned: dict[int, Any] = {}

    async def one(index: int, function: RewardFunction, arguments: dict[str, Any]) -> None:
        try:
            returned[index] = await function.function(**arguments)
        except (TimeLimitExceeded, BaseExceptionGroup):  # the latter from a TaskGroup
            raise too_slow(function.spec, places, seconds) from None
        except (Exception, SystemExit) as error:
            raise failed(function, places, error) from error

    async def all_of_them() -> None:
        await asyncio.gather(*(one(index, *call) for index, call in enumerate(calls)))

    try:
        asyncio.run(all_of_them())
    except TimeLimitExceeded:  # while all of them waited
        waiting = next(index for index in range(len(calls)) if index not in returned)
        raise too_slow(calls[waiting][0].spec, places, seconds) from None
    return [returned[index] for index in range(len(calls))]


def answer(functions: Functions, request: Mapping[str, Any]) -> bytes:
    """The reply to a request."""
    try:
        reply = functions.call(**request) if "calls" in request else functions.open(**request)
        return json.dumps(reply, default=str).encode()
    except RewardError as error:
        reply = {"error": str(error), "late": error.late}
    except BaseException as error:
        spec = request["spec"] if "spec" in request else functions.opened[request["calls"][0][0]].spec
        reply = {"error": f"--reward {spec}: {described(error, None)}", "late": False}
    return json.dumps(reply).encode()


def expire(number: int, frame: FrameType | None) -> None:
    raise TimeLimitExceeded


def serve_rewards(connection: Connection) -> None:
    """Answers requests until the connection is closed."""
    process, functions = os.getpid(), Functions()
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        reply = answer(functions, request)
        if os.getpid() != process:  # a fork that a function made, and that returned like it
            os._exit(0)
        with suppress(Exception):  # a function may have closed or replaced it
            sys.stdout.flush()
        connection.send_bytes(reply)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a function that never returns must not outlive the run
    handle, *sys.path[:] = sys.argv[1:]
    sys.argv[1:] = []
    os.set_inheritable(int(handle), False)
    signal.signal(signal.SIGUSR2, expire)
    serve_rewards(Connection(int(handle)))
