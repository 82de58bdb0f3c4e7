"""Reward functions: the names of --reward, the arguments they get, what they may return, and the time they have."""

import math
import os
import signal
from pathlib import Path

import pytest

from ligermodels.errors import InputError
from ligermodels.training.objectives.grpo import rewards as module
from ligermodels.training.objectives.grpo.reward_specs import RewardSpec, parse_reward
from ligermodels.training.objectives.grpo.reward_worker import TrainerState
from ligermodels.training.objectives.grpo.rewards import (
    CompletionBatch,
    call_rewards,
    check_columns,
    named_rewards,
    open_rewards,
)

A_PATH = "a.py/../../b.py"  # through a folder that is named like a file
CONVERSATION = [{"role": "user", "content": "3 + 4?"}]
JUDGED = CompletionBatch(
    prompts=["3 + 4?", "3 + 4?", CONVERSATION],
    completions=["7", "the sum is 1,007.0", [{"role": "assistant", "content": " 7 "}]],
    completion_ids=[[5], [5, 6, 7, 8, 9, 2], [5, 2]],
    columns={"answer": ["7", "1007", "7"], "level": [1, 2, None]},
    places=["sums.jsonl:1", "sums.jsonl:1", "sums.jsonl:9"],
)
STATE = TrainerState(4, 10)
CODE = """
import asyncio, os, re, sys, time

def even(completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

def levels(prompts, completions, completion_ids, answer, level, trainer_state, log_extra, log_metric):
    log_extra("guess", [len(ids) for ids in completion_ids])
    log_metric("seen", len(prompts))
    assert trainer_state.global_step == 4
    return level

started = []

async def first(completions):
    started.append("first")
    while len(started) < 2:
        await asyncio.sleep(0)
    return [True, 0, 2]

async def second(completions):
    started.append("second")
    return [0.5] * 3

def short(completions): return [1.0]
def text(completions): return "abc"
def words(completions): return ["a", 1, 1]
def nan(completions): return [1.0, float("nan"), 0.0]
def none(completions): pass
def fails(completions):
    return 1 / 0
def needs(completions, solution): return [0.0] * 3
def sleeps(completions):
    try:
        time.sleep(60)
    except Exception:
        return [0.0] * 3
async def sleeps_too(completions): await asyncio.sleep(60)
async def waits(completions): await asyncio.Event().wait()
async def blocks(completions): time.sleep(60)
async def computes(completions):
    while True:
        pass
async def blocks_in_a_group(completions):
    async with asyncio.TaskGroup() as group:
        group.create_task(blocks(completions))
async def has_a_limit(completions): raise TimeoutError("no answer")
def swallows(completions):
    try:
        time.sleep(60)
    except:
        return [0.0] * 3
def matches(completions): return [re.fullmatch("(a|a)*b", "a" * 40) is None] * 3
def never_ends(completions):
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
def exits(completions): sys.exit(0)
async def exits_too(completions): sys.exit(0)
def dies(completions): os._exit(3)
def unordered(completions): return {0.0, 1.0, 2.0}
def edits(prompts, completions, completion_ids, answer):
    for values in (prompts, completions, completion_ids[0], answer):
        values.reverse()
    prompts[0][0]["content"] = completions[0][0]["content"] = "edited"
    return [0.0] * 3
def sees(prompts, completions, completion_ids, answer):
    return [prompts[2][0]["content"] == "3 + 4?", completions[0] == answer[0] == "7", len(completion_ids[0])]
def forks(completions):
    os.fork()
    return [os.getpid() > 0] * 3
calls = 0
def counts(completions):
    global calls
    calls += 1
    print("call", calls)
    return [calls] * 3
def other_process(completions): return [float(os.getpid())] * 3

class Raises:
    def __float__(self): return self.raised("float")
    def __repr__(self): return self.raised("repr")
    def __len__(self): return 3
    def __iter__(self): return self.raised("iter")
    def raised(self, name):
        raise KeyError(name)
def no_float(completions): return [Raises()] * 3
def no_iter(completions): return Raises()
def long_number(completions): return [10**400] * 3
def longer_number(completions): return [10**40000] * 3
def meta(completions):
    import torch
    return torch.zeros(3, device="meta")
def circular(completions, log_extra):
    values = []
    values.append(values)
    log_extra("values", [values] * 3)
    return [0.0] * 3
def answers_itself(completions):
    for number in range(3, 32):
        try:
            os.write(number, b"\\x7f\\xff\\xff\\xff")  # a reply of 2 GB, which never comes
        except OSError:
            pass
    return [0.0] * 3
class Model:
    pass
model = 3
"""


def opened(specs, max_completion_length):
    functions = named_rewards(specs, max_completion_length)
    open_rewards(functions)
    return functions


@pytest.fixture
def rewards(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(CODE)

    def open_them(*names):
        return opened([f"{file}:{name}" for name in names], 10)

    return open_them


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("exact", RewardSpec("exact", 1.0)), ("format:a.py:f=2", RewardSpec("format:a.py:f", 2.0)),
        ("length:x.py:f", RewardSpec("length:x.py:f", 1.0)),
        ("model:a.py:f", RewardSpec("model:a.py:f", 1.0, "a.py:f")),
        ("a.py:f=0.5", RewardSpec("a.py:f", 0.5, None, Path("a.py"), "f")),
        (f"{A_PATH}:f", RewardSpec(f"{A_PATH}:f", 1.0, None, Path(A_PATH), "f")),
        ("a.py:b.py:f", RewardSpec("a.py:b.py:f", 1.0, None, Path("a.py:b.py"), "f")),
    ],
)  # fmt: skip
def test_a_reward_is_built_in_a_model_or_a_file_that_is_run_whole(text, spec):
    assert parse_reward(text) == spec


def call(functions, seconds=20):
    return call_rewards(functions, JUDGED, STATE, seconds)


def test_functions_get_what_they_name_and_return_rewards_in_order(rewards):
    functions = rewards("even", "levels=2", "first", "second=-0.5")
    assert [(function.name, function.weight) for function in functions] == [
        ("even", 1.0), ("levels", 2.0), ("first", 1.0), ("second", -0.5)
    ]  # fmt: skip
    found = call(functions)
    assert found.values == [[0.0, 0.5, 0.5], [1.0, 2.0, None], [1.0, 0.0, 2.0], [0.5, 0.5, 0.5]]
    assert found.extras == {"guess": [1, 6, 2]} and found.metrics == {"seen": [3.0]}


def test_built_in_functions():
    exact, number, form, length = opened(["exact", "number=0.5", r"format:.*\d", "length:4"], 6)
    assert (number.weight, form.name) == (0.5, "format")
    assert call([exact, number, form, length]).values == [
        [1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, -1.0, 0.0],
    ]  # fmt: skip
    (length,) = opened(["length"], 10)  # the last fifth
    assert length.function(completion_ids=[[0] * n for n in (8, 9, 10)]) == [0.0, -0.5, -1.0]


@pytest.mark.parametrize(
    "name, message",
    [
        ("short", "short: returned 1 rewards for 3 completions, for the prompts of sums.jsonl:1 to sums.jsonl:9"),
        ("text", "text: returned str; must return a list of 3 numbers"),
        ("none", "none: returned NoneType; must return a list of 3 numbers"),
        ("words", "words: returned 'a' for a completion of the prompt of sums.jsonl:1; must be a finite number"),
        ("nan", "nan: returned nan for a completion of the prompt of sums.jsonl:1; must be a finite number, or None"),
        ("fails", r"fails: raised ZeroDivisionError: division by zero in \S*rewards.py:31, for the prompts of"),
        ("has_a_limit", r"has_a_limit: raised TimeoutError: no answer in \S*rewards.py:\d+, for the prompts of"),
        ("exits", r"exits: raised SystemExit: 0 in \S*rewards.py:\d+, for the prompts of"),
        ("exits_too", r"exits_too: raised SystemExit: 0 in \S*rewards.py:\d+, for the prompts of"),
        ("dies", "dies: ended its process, with status 3; must return"),
        ("unordered", "unordered: returned set; must return a list of 3 numbers"),
        ("no_float", "no_float: returned <Raises instance at .*> for a completion of the prompt of sums.jsonl:1; must"),
        ("no_iter", r"no_iter: raised KeyError: 'iter' in \S*rewards.py:\d+, for the prompts of"),
        ("long_number", r"long_number: returned 10{10,}\.\.\.0{10,} for a completion"),
        ("longer_number", "longer_number: returned <int> for a completion"),
        ("meta", "meta: returned tensor.* for a completion of the prompt of sums.jsonl:1; must be a finite number"),
        ("circular", "circular: ValueError: Circular reference detected"),
        ("needs", "needs: needs solution, which the prompts do not have; their columns are answer, level"),
    ],
)
def test_what_a_function_may_not_do_is_named(rewards, name, message):
    with pytest.raises(InputError, match=message):
        call(rewards(name))


@pytest.mark.parametrize(
    "name", ["sleeps", "sleeps_too", "blocks", "computes", "blocks_in_a_group", "swallows", "matches", "never_ends"]
)
def test_a_function_that_does_not_return_is_stopped(rewards, name):
    with pytest.raises(InputError, match=rf"{name}: did not return within 0.1 s, .* or raise --reward-timeout"):
        call(rewards(name), seconds=0.1)


def test_a_process_that_was_stopped_is_gone_with_its_forks(rewards):
    (function, late) = rewards("other_process", "never_ends")
    (process,) = set(call([function]).values[0])
    assert process != os.getpid()
    with pytest.raises(InputError, match=r"did not return within 0.1 s"):
        call([late], seconds=0.1)
    with pytest.raises(ProcessLookupError):
        os.killpg(int(process), 0)


def test_a_process_that_reads_no_more_does_not_hold_up_a_long_request(rewards, monkeypatch):
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    (function,) = rewards("even")
    process = function.function.process.process
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(InputError, match=r"even: did not return within 0.1 s"):
        call_rewards([function], JUDGED._replace(prompts=["a" * 10**6] * 3), STATE, 0.1)
    assert process.returncode == -signal.SIGKILL


def test_a_reply_that_never_ends_is_not_waited_for(rewards, monkeypatch):
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    with pytest.raises(InputError, match=r"answers_itself: did not return within 0.1 s"):
        call(rewards("answers_itself"), seconds=0.1)


def test_functions_get_copies(rewards):
    functions = rewards("edits", "sees")
    for _ in range(2):
        assert call(functions).values == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert CONVERSATION == [{"role": "user", "content": "3 + 4?"}] and JUDGED.completion_ids[0] == [5]


def test_the_state_of_a_file_lasts_and_its_output_shows(rewards, capfd):
    functions = rewards("counts", "forks")  # of which a fork returns, too, and must not answer
    for number in (1, 2, 3):
        assert call(functions).values == [[number] * 3, [1.0] * 3]
    assert capfd.readouterr().out == "call 1\ncall 2\ncall 3\n"


def test_the_time_limit_may_be_longer_than_timers_count(rewards):
    assert call(rewards("even"), seconds=1e18).values == [[0.0, 0.5, 0.5]]
    assert call(opened(["exact"], 10), seconds=1e18).values == [[1.0, 0.0, 1.0]]


def test_the_async_function_that_holds_up_the_others_is_named(rewards):
    with pytest.raises(InputError, match=r"blocks: did not return within 0.1 s"):
        call(rewards("first", "waits", "second", "blocks"), seconds=0.1)
    with pytest.raises(InputError, match=r"waits: did not return within 0.1 s"):
        call(rewards("first", "second", "waits"), seconds=0.1)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("accuracy", r"--reward accuracy: must be FILE.py:FUNCTION, model:FOLDER of a reward model, or one of exact"),
        ("model:no/folder/there", "no/folder/there"),
        ("no.py:f", "--reward no.py:f: the file does not exist"),
        ("format:(", r"--reward format:\(: is no regular expression: missing \)"),
        ("format:a{99999999999}", r"is no regular expression: the repetition number is too large; correct it"),
        ("format:" + 3000 * "(" + 3000 * ")", r"is no regular expression: maximum recursion depth exceeded"),
        ("length:" + 5000 * "9", r"must be length:TOKENS with 1 to 10 \(--max-completion-length\) tokens"),
        ("length:11", r"--reward length:11: must be length:TOKENS with 1 to 10 \(--max-completion-length\) tokens"),
        ("exact=inf", "--reward exact=inf: the weight is inf; must be a finite number"),
    ],
)
def test_names_that_are_no_function(spec, message):
    with pytest.raises(InputError, match=message):
        opened([spec], 10)


def test_files_that_have_no_such_function(rewards, tmp_path):
    with pytest.raises(InputError, match=r"rewards.py:model: the file has no function of this name"):
        rewards("model")
    with pytest.raises(InputError, match="--reward has 2 functions with the name even"):
        rewards("even", "even=2")
    (tmp_path / "broken.py").write_text("x = 1\nraise KeyError('x')\n")
    with pytest.raises(InputError, match=r"broken.py:f: the file does not run: KeyError: 'x' in \S*broken.py:2$"):
        opened([f"{tmp_path}/broken.py:f"], 10)
    with pytest.raises(InputError, match=r"--reward is missing: FILE.py:FUNCTION, model:FOLDER of a reward model"):
        opened([], 10)


def test_columns_are_checked_before_the_run(rewards):
    check_columns(rewards("levels"), {"answer": "7", "level": 1})
    with pytest.raises(InputError, match="needs level, which the prompts do not have; their columns are answer"):
        check_columns(rewards("levels"), {"answer": "7"})
    with pytest.raises(InputError, match="--data: column prompts has the name of an argument of reward functions"):
        check_columns([], {"prompts": 1})


def test_a_format_with_an_equals_sign_keeps_it():
    (function,) = opened(["format:a=b"], 10)
    batch = CompletionBatch(["", ""], ["a=b", "a"], [[5], [5]], {}, ["1", "1"])
    assert function.weight == 1 and call_rewards([function], batch, STATE, 20).values == [[1.0, 0.0]]
    assert math.isclose(opened(["format:a=b=0.25"], 10)[0].weight, 0.25)
