"""Reward functions: their names, how they are called, and what they may return. The signature is that of TRL:

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

All arguments are passed by name, as lists with one value for each completion. `prompts` and `completions` are texts, or
of conversations lists of messages; every column of the data is passed under its own name. A function gets those
arguments that it names, and all with `**kwargs`. Beside these: `trainer_state`, `log_extra(column, values)` for columns
of completions.jsonl, and `log_metric(name, value)`. Async functions run at the same time.
"""

import asyncio
import importlib.util
import inspect
import math
import signal
import sys
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from ligermodels.errors import InputError
from ligermodels.training.objectives.grpo.built_in_rewards import RewardCallable, built_in_reward
from ligermodels.training.objectives.grpo.reward_specs import REWARD_KINDS, parse_reward
from ligermodels.training.reward_function import ModelReward

RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class RewardFunction(NamedTuple):
    """spec is as it was given, without its weight. Metrics and errors have the name. file defines it, if any does."""

    spec: str
    name: str
    function: RewardCallable
    weight: float
    file: Path | None = None


class TrainerState(NamedTuple):
    """What a reward function may know of the run. global_step: completed steps. max_steps: of the whole run."""

    global_step: int
    max_steps: int


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


def open_rewards(specs: Sequence[str], max_completion_length: int) -> list[RewardFunction]:
    """The functions of --reward: FILE.py:FUNCTION, model:FOLDER or the name of a built-in one, each with =WEIGHT or
    without.

    Files are run as Python code. Raises InputError for a name that is not found, a file that does not run, two
    functions of one name.
    """
    if not specs:
        raise InputError(f"--reward is missing: {REWARD_KINDS}")
    modules: dict[Path, ModuleType] = {}  # a file runs once, however many functions it has
    functions = [open_reward(spec, max_completion_length, modules) for spec in specs]
    name, count = Counter(function.name for function in functions).most_common(1)[0]
    if count > 1:
        raise InputError(f"--reward has {count} functions with the name {name}: metrics need one name each; rename one")
    return functions


def open_reward(text: str, max_completion_length: int, modules: dict[Path, ModuleType]) -> RewardFunction:
    spec = parse_reward(text)
    if spec.model is not None:
        return RewardFunction(spec.text, Path(spec.model).name, ModelReward(spec.model), spec.weight)
    if spec.file is None:
        function = built_in_reward(spec.text, max_completion_length)
        return RewardFunction(spec.text, spec.text.partition(":")[0], function, spec.weight)
    if spec.file not in modules:
        modules[spec.file] = run_reward_file(spec.file, spec.text)
    found = getattr(modules[spec.file], spec.function, None)
    if not callable(found):
        raise InputError(f"--reward {spec.text}: the file has no function of this name")
    return RewardFunction(spec.text, spec.function, found, spec.weight, spec.file)


def run_reward_file(file: Path, spec: str) -> ModuleType:
    if not file.is_file():
        raise InputError(f"--reward {spec}: the file does not exist")
    module_spec = importlib.util.spec_from_file_location(f"reward_file_{file.resolve()}", file)
    assert module_spec is not None and module_spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # where dataclasses and pickle look for it
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"--reward {spec}: the file does not run: {described(error, file)}") from error
    return module


def described(error: BaseException, file: Path | None) -> str:
    """An exception with the last line of the file that took part in it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and Path(frame.filename) == file]
    where = f" in {file}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}" if str(error) else f"{type(error).__name__}{where}"


def arguments_of(function: RewardFunction, available: Mapping[str, Any]) -> dict[str, Any]:
    """Picks the arguments that a function takes. Raises InputError for one that is not available."""
    parameters = inspect.signature(function.function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        taken = dict(available)
    else:
        taken = {p.name: available[p.name] for p in parameters if p.name in available}
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for parameter in needed:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InputError(f"--reward {function.spec}: takes {parameter.name} by position; take all by name")
        if parameter.name not in taken:
            raise InputError(
                f"--reward {function.spec}: needs {parameter.name}, which the prompts do not have; their columns are "
                f"{', '.join(sorted(available.keys() - set(RESERVED))) or 'none'}"
            )
    return taken


def check_columns(functions: Sequence[RewardFunction], columns: Mapping[str, Any]) -> None:
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
    rewards = Rewards([])

    def log_extra(column: str, values: Sequence[Any]) -> None:
        rewards.extras[column] = list(values)

    def log_metric(name: str, value: float) -> None:
        rewards.metrics[name].append(float(value))

    lists = {"prompts": batch.prompts, "completions": batch.completions, "completion_ids": batch.completion_ids}
    helpers = {"trainer_state": state, "log_extra": log_extra, "log_metric": log_metric}
    available = {**batch.columns, **lists, **helpers}
    calls = [(function, arguments_of(function, available)) for function in functions]
    returned = call_async(calls, batch, seconds)
    for function, arguments in calls:
        if not inspect.iscoroutinefunction(function.function):
            returned[function.name] = call_one(function, arguments, batch, seconds)
    rewards.values.extend(checked_values(function, returned[function.name], batch) for function in functions)
    for column, values in rewards.extras.items():
        if len(values) != len(batch.completions):
            raise InputError(
                f"log_extra({column!r}) has {len(values)} values; must have one for each of "
                f"{len(batch.completions)} completions"
            )
    return rewards


def call_async(
    calls: Sequence[tuple[RewardFunction, dict[str, Any]]], batch: CompletionBatch, seconds: float
) -> dict[str, Any]:
    """Runs the async functions at the same time. Returns what they return, by name."""
    awaited = [(function, arguments) for function, arguments in calls if inspect.iscoroutinefunction(function.function)]
    returned: dict[str, Any] = {}

    async def one(function: RewardFunction, arguments: dict[str, Any]) -> None:
        try:
            returned[function.name] = await function.function(**arguments)
        except Exception as error:
            raise failed(function, batch, error) from error
        except (TimeLimitExceeded, BaseExceptionGroup):  # the latter from a TaskGroup
            raise too_slow(function, batch, seconds) from None

    async def all_of_them() -> None:
        await asyncio.gather(*(one(function, arguments) for function, arguments in awaited))

    try:
        with time_limit(seconds):  # not a timeout of asyncio, which a function that blocks would hold back
            asyncio.run(all_of_them())
    except TimeLimitExceeded:  # while all of them waited
        for function, _ in awaited:
            if function.name not in returned:
                raise too_slow(function, batch, seconds) from None
    return returned


def call_one(function: RewardFunction, arguments: dict[str, Any], batch: CompletionBatch, seconds: float) -> Any:
    try:
        with time_limit(seconds):
            return function.function(**arguments)
    except TimeLimitExceeded:
        raise too_slow(function, batch, seconds) from None
    except Exception as error:
        raise failed(function, batch, error) from error


def failed(function: RewardFunction, batch: CompletionBatch, error: Exception) -> InputError:
    return InputError(f"--reward {function.spec}: raised {described(error, function.file)}, for {prompts_of(batch)}")


def too_slow(function: RewardFunction, batch: CompletionBatch, seconds: float) -> InputError:
    return InputError(
        f"--reward {function.spec}: did not return within {seconds:g} s, for {prompts_of(batch)}; give the function a "
        "limit of its own, or raise --reward-timeout"
    )


def prompts_of(batch: CompletionBatch) -> str:
    """Where the prompts were read: the first and the last."""
    first, last = batch.places[0], batch.places[-1]
    return f"the prompt of {first}" if first == last else f"the prompts of {first} to {last}"


def checked_values(function: RewardFunction, values: Any, batch: CompletionBatch) -> list[float | None]:
    count = len(batch.completions)
    if not hasattr(values, "__len__") or isinstance(values, str | bytes | Mapping):
        raise InputError(
            f"--reward {function.spec}: returned {type(values).__name__}; must return a list of {count} numbers, one "
            "for each completion"
        )
    if len(values) != count:
        raise InputError(
            f"--reward {function.spec}: returned {len(values)} rewards for {count} completions, for "
            f"{prompts_of(batch)}; must return one for each"
        )
    return [checked_reward(function, value, place) for value, place in zip(values, batch.places, strict=True)]


def checked_reward(function: RewardFunction, value: Any, place: str) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(
            f"--reward {function.spec}: returned {value!r} for a completion of the prompt of {place}; must be a finite "
            "number, or None where there is no reward"
        )
    return number


class TimeLimitExceeded(BaseException):
    """Not an Exception, so that an `except Exception` in the code that is stopped does not hold it back."""


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
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR2, before)
