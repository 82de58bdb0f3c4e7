"""Reward functions: their names, how they are called, and what they may return. The signature is that of TRL:

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

All arguments are passed by name, as lists with one value for each completion. `prompts` and `completions` are texts, or
of conversations lists of messages; every column of the data is passed under its own name. A function gets those
arguments that it names, and all with `**kwargs`. Beside these: `trainer_state`, `log_extra(column, values)` for columns
of completions.jsonl, and `log_metric(name, value)`. Async functions run at the same time.

Functions of files run in a process of their own, and so does `format:REGEX`; the others in this one. The process runs
`reward_worker.py`, from the first function that is opened until the run ends, so that the state of the files' modules
lasts over all calls.
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
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ligermodels.errors import InputError
from ligermodels.training.objectives.grpo.reward_specs import REWARD_KINDS, built_in_reward, parse_reward
from ligermodels.training.objectives.grpo.reward_worker import (
    CallRequest,
    Parameter,
    RewardError,
    RewardFunction,
    TimeLimitExceeded,
    TrainerState,
    call_one,
    checked_values,
    parameters_of,
    too_slow,
)
from ligermodels.training.reward_function import ModelReward

HELPERS = ("trainer_state", "log_extra", "log_metric")
VARIABLE = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
RESERVED = ("prompts", "completions", "completion_ids", *HELPERS)
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


class CompletionBatch(NamedTuple):
    """Completions that get rewards, and what belongs to each; all lists have one value for each completion.

    columns: by name. places: where each prompt was read.
    """

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: Mapping[str, list[Any]]
    places: list[str]


@dataclass(frozen=True)
class Rewards:
    """What reward functions have returned.

    values has, for each function in order, the rewards of all completions. extras are columns of completions.jsonl.
    metrics has what the functions have logged, by name.
    """

    values: list[list[float | None]]
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def named_rewards(specs: Sequence[str], max_completion_length: int) -> list[RewardFunction]:
    """The functions of --reward: FILE.py:FUNCTION, model:FOLDER or the name of a built-in one, each with =WEIGHT or
    without. Their files are run by `open_rewards`. Raises InputError for a name that is not found, and two functions of
    one name."""
    if not specs:
        raise InputError(f"--reward is missing: {REWARD_KINDS}")
    process = RewardProcess()
    functions = [named_reward(spec, max_completion_length, process) for spec in specs]
    name, count = Counter(function.name for function in functions).most_common(1)[0]
    if count > 1:
        raise InputError(f"--reward has {count} functions with the name {name}: metrics need one name each; rename one")
    return functions


def named_reward(text: str, max_completion_length: int, process: RewardProcess) -> RewardFunction:
    spec = parse_reward(text)
    if spec.model is not None:
        return RewardFunction(spec.text, Path(spec.model).name, ModelReward(spec.model), spec.weight)
    if spec.file is not None:
        if not spec.file.is_file():
            raise InputError(f"--reward {spec.text}: the file does not exist")
        function = ProcessFunction(process, spec.text, spec.file, spec.function)
        return RewardFunction(spec.text, spec.function, function, spec.weight, spec.file)
    built_in = built_in_reward(spec.text, max_completion_length)
    kind, _, argument = spec.text.partition(":")
    if kind == "format":  # whose search may take for ever
        return RewardFunction(spec.text, kind, ProcessFunction(process, spec.text, None, argument), spec.weight)
    return RewardFunction(spec.text, kind, built_in, spec.weight)


def with_limit(function: RewardFunction, max_completion_length: int) -> RewardFunction:
    """The function, with another most tokens of a completion: of the built-in ones, `length` reads it."""
    if function.spec.partition(":")[0] != "length":
        return function
    return function._replace(function=built_in_reward(function.spec, max_completion_length))


def open_rewards(functions: Sequence[RewardFunction], seconds: float = LONGEST_WAIT) -> None:
    """Runs the functions' files as Python code, each within so many seconds. Raises InputError for a file that does not
    run, or has no such function."""
    for function in functions:
        if isinstance(function.function, ProcessFunction):
            function.function.process.open(function.function, seconds)


def arguments_of(function: RewardFunction, available: Mapping[str, Any]) -> dict[str, Any]:
    """Picks the arguments that a function takes. Raises InputError for one that is not available."""
    found = function.function
    parameters = found.parameters if isinstance(found, ProcessFunction) else parameters_of(found)
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        taken = dict(available)
    else:
        taken = {p.name: available[p.name] for p in parameters if p.name in available}
    for parameter in (p for p in parameters if not p.has_default and p.kind not in VARIABLE):
        if parameter.kind == inspect.Parameter.POSITIONAL_ONLY:
            raise InputError(f"--reward {function.spec}: takes {parameter.name} by position; take all by name")
        if parameter.name not in taken:
            raise InputError(
                f"--reward {function.spec}: needs {parameter.name}, which the prompts do not have; their columns are "
                f"{', '.join(sorted(available.keys() - set(RESERVED))) or 'none'}"
            )
    return taken


def check_columns(functions: Sequence[RewardFunction], columns: Collection[str]) -> None:
    """Raises InputError for a function that needs a column that the data does not have, or for a reserved name."""
    if reserved := [name for name in columns if name in RESERVED]:
        raise InputError(f"--data: column {reserved[0]} has the name of an argument of reward functions; rename it")
    for function in functions:
        arguments_of(function, dict.fromkeys([*RESERVED, *columns]))


def call_rewards(
    functions: Sequence[RewardFunction], batch: CompletionBatch, state: TrainerState, seconds: float
) -> Rewards:
    """The rewards of all completions. seconds: that the functions have.

    Raises InputError, which names the function and the prompts, where a function raises, does not return in time, or
    returns anything but one finite number or None for each completion.
    """
    lists = {"prompts": batch.prompts, "completions": batch.completions, "completion_ids": batch.completion_ids}
    available = {**dict.fromkeys(HELPERS), **batch.columns, **lists}
    calls = [RewardCall(function, arguments_of(function, available)) for function in functions]
    asynchronous = [call for call in calls if call.is_async]
    rewards, returned = Rewards([]), {}
    for part in [asynchronous, *([call] for call in calls if not call.is_async)]:
        for call, values in zip(part, values_of(part, batch, state, seconds, rewards), strict=True):
            returned[call.function.name] = values
    rewards.values.extend(returned[function.name] for function in functions)
    for column, values in rewards.extras.items():
        if len(values) != len(batch.completions):
            raise InputError(
                f"log_extra({column!r}) has {len(values)} values; must have one for each of "
                f"{len(batch.completions)} completions"
            )
    return rewards


class RewardCall(NamedTuple):
    """A function with the arguments that it takes."""

    function: RewardFunction
    arguments: dict[str, Any]

    @property
    def is_async(self) -> bool:
        made = self.function.function
        return isinstance(made, ProcessFunction) and made.is_async

    @property
    def request(self) -> CallRequest:
        """What the process of the function reads."""
        plain = {name: value for name, value in self.arguments.items() if name not in HELPERS}
        return CallRequest(self.function.function.number, plain, [name for name in self.arguments if name in HELPERS])


def values_of(
    calls: Sequence[RewardCall], batch: CompletionBatch, state: TrainerState, seconds: float, rewards: Rewards
) -> list[list[float | None]]:
    """Calls one function, or several async ones, adds what they log to `rewards`, and returns their values."""
    if not calls:
        return []
    function, arguments = calls[0]
    try:
        if not isinstance(function.function, ProcessFunction):
            with time_limit(seconds):
                return [checked_values(function, call_one(function, arguments, batch.places, seconds), batch.places)]
        reply = function.function.process.call([call.request for call in calls], state, batch.places, seconds)
    except RewardError as error:
        raise InputError(str(error)) from error
    rewards.extras.update(reply["extras"])
    for name, values in reply["metrics"].items():
        rewards.metrics[name] += values
    return reply["values"]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitExceeded in the block after this time, also where it sleeps or waits for a network.

    It uses SIGUSR2, and leaves SIGALRM to the code of others, which uses it for limits of its own. Python runs signal
    handlers in the main thread alone: in any other thread there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeLimitExceeded

    before = signal.signal(signal.SIGUSR2, expire)
    timer = threading.Timer(min(seconds, LONGEST_WAIT), signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR2, before)
