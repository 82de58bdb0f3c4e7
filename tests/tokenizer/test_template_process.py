"""Harmful templates are stopped at their limits, and every request gets its own reply."""

import functools
import os
import threading

import pytest

from ligermodels.errors import InputError
from ligermodels.tokenizer import chat_template
from ligermodels.tokenizer.chat_template import PROCESS, ChatTemplate, render_chat

MEMORY = 2**27
DOUBLED = "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
NESTED = "{% set ns = namespace(a=[1], b=[1]) %}" + DOUBLED
GROWING = "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
TIME, SPACE, LENGTH = "takes more than 1 seconds", "needs more memory than the limit", "makes more than 100000 char"


@pytest.fixture(scope="module", autouse=True)
def limits():
    """Smaller limits, and a process that is started with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "SECONDS", 1)
        patch.setattr(chat_template, "CHARACTERS", 100_000)
        patch.setattr(chat_template, "MEMORY_BYTES", MEMORY)
        PROCESS.stop()
        yield
        PROCESS.stop()


def text_of(template, **variables):
    return PROCESS.ask(template, variables)["text"]


HARMFUL = {
    "a loop in a loop": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME),
    "a power": ("{{ 7 ** (10 ** 8) }}", TIME),
    "nested lists compared": (NESTED + "{{ ns.a == ns.b }}", TIME),
    "a long range": ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "a product": ("{{ 'x' * 10 ** 10 }}", SPACE),
    "a long list": ("{{ ([1] * 10 ** 9) | length }}", SPACE),
    "a percent format": ("{{ '%1000000000d' % 1 }}", SPACE),
    "a format": ("{{ '{:1000000000}'.format(1) }}", SPACE),
    "a filter": ("{{ 'x' | center(10 ** 10) }}", SPACE),
    "an indentation": ("{{ 'a\nb' | indent(10 ** 10) }}", SPACE),
    "a method": ("{{ 'x'.ljust(10 ** 10) }}", SPACE),
    "a replacement": ("{{ ('a' * 10 ** 5).replace('a', 'b' * 10 ** 5) }}", SPACE),
    "a join": ("{{ ([x] * 1000) | join }}", SPACE),
    "doubling": (
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        SPACE,
    ),
    "a nested list as text": (NESTED + "{{ ns.a }}", ""),
    "a nested list as JSON": (NESTED + "{{ ns.a | tojson }}", ""),
    "many pieces": ("{% for i in range(99999) %}{{ 'xx' }}{% endfor %}", LENGTH),
    "one piece": ("{{ 'x' * 100001 }}", LENGTH),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "brackets": ("{{" + "[" * 10_000 + "]" * 10_000 + "}}", "recursion"),
}


@pytest.mark.parametrize("harm", HARMFUL)
def test_a_harmful_template_is_stopped(harm):
    template, reason = HARMFUL[harm]
    assert reason in PROCESS.ask(template, {"x": "a" * 10**6})["error"]
    if PROCESS.process is not None:
        with open(f"/proc/{PROCESS.process.pid}/status") as status:
            peak = next(int(line.split()[1]) for line in status if line.startswith("VmPeak"))
        assert peak * 1024 <= MEMORY
    assert text_of("{{ x }}", x="user") == "user"


def test_a_template_is_stopped_after_elapsed_time_too(monkeypatch):
    """As a process that waits does, which takes no processor time."""
    monkeypatch.setattr(chat_template, "SECONDS", 10_000)
    monkeypatch.setattr(chat_template, "ELAPSED_SECONDS", 0.5)
    endless, reason = HARMFUL["a loop in a loop"][0], "the process that renders it does not end within 0.5 seconds"
    assert PROCESS.ask(endless, {}) == {"error": reason, "line": None}
    monkeypatch.setattr(chat_template, "ELAPSED_SECONDS", 10_000)
    assert text_of("{{ 1 }}") == "1"


def test_a_template_that_is_slow_each_time_is_stopped_over_all_of_its_chats(monkeypatch):
    """Each chat takes less than a second; all of them may take a tenth, and what their number and sizes allow."""
    monkeypatch.setattr(chat_template, "Cost", functools.partial(chat_template.Cost, allowed=0.1))
    slow = ChatTemplate(
        "{% for j in range(9) %}{% for i in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}",
        "slow.jinja",
    )
    taken = 0
    with pytest.raises(InputError, match=r"slow\.jinja: takes too long: [\d.]+ s a chat, ") as error:
        while True:
            assert render_chat(slow, [{"content": "x"}]).text == "x"
            taken += 1
    assert 0 < taken < 1000 and str(error.value).endswith(f" s for {taken}; choose a quicker template")
    for _ in range(200):
        assert text_of("{{ x }}", x="y" * 10_000) == "y" * 10_000


def test_a_chat_that_runs_out_of_time_counts_with_all_of_it(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.1)
    monkeypatch.setattr(chat_template, "Cost", functools.partial(chat_template.Cost, allowed=0.15))
    template = HARMFUL["a power"][0] + "{# another #}"
    replies = [PROCESS.ask(template, {})["error"] for _ in range(3)]
    assert [("takes more than 0.1 seconds" in reply) for reply in replies] == [True, True, False]
    assert "takes too long: 0.1 s a chat, 0 s for 2" in replies[2]


def test_a_request_that_does_not_fit_the_worker_s_memory_is_an_error_without_a_traceback(capfd):
    reason = "the process that renders it needs more memory than the limit"
    assert PROCESS.ask("{{ x }}", {"x": "a" * MEMORY}) == {"error": reason, "line": None}
    assert capfd.readouterr() == ("", "")
    assert text_of("{{ 1 }}") == "1"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ ''.__class__.__mro__ }}", "'__class__' of 'str' object is unsafe"),
        ("{{ (messages | attr('__class__')).__mro__ }}", "'__class__' of 'list' object is unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "'__class__' of 'int' object is unsafe"),
        ("{{ raise_exception.__globals__.json }}", "'__globals__' of 'function' object is unsafe"),
        ("{{ dict.__globals__.json }}", "'__globals__' of 'function' object is unsafe"),
        ("{{ namespace(_x=1) }}", "no attribute '_x'"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "no attribute '_x'"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{% include '/etc/hosts' %}", "no loader"),
        ("{{ lipsum() }}", "calls the function lipsum, which is not allowed"),
    ],
)
def test_the_sandbox_blocks_access_to_python_and_files(template, reason):
    reply = PROCESS.ask(template, {"messages": [{}]})
    assert reason in reply["error"] and reply["line"] == 1


def test_any_character_can_be_rendered():
    text = "".join(map(chr, [*range(0x300), 0x2028, 0xD83D, 0xE000, 0xFFFD, 0xFFFF, 0x1F600, 0x10FFFF]))
    assert text_of("{{ x }}", x=text) == text


def test_variables_that_are_not_json_are_refused():
    with pytest.raises(InputError, match="must be plain JSON values: Object of type set is not"):
        PROCESS.ask("", {"x": {1}})
    assert text_of("{{ x }}", x=1) == "1"


def test_threads_get_their_own_replies():
    replies = {}

    def ask(number):
        replies[number] = [text_of("{{ x }}", x=number) for _ in range(20)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {number: [str(number)] * 20 for number in range(4)}


def test_a_forked_process_starts_its_own_worker():
    assert text_of("{{ 1 }}") == "1"
    renderer = PROCESS.process.pid
    child = os.fork()
    if child == 0:
        right = text_of("{{ 2 }}") == "2" and PROCESS.process.pid != renderer
        PROCESS.stop()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert text_of("{{ 3 }}") == "3" and PROCESS.process.pid == renderer


def test_an_interrupted_request_leaves_no_reply_for_the_next_one(monkeypatch):
    def interrupted(request):
        process = PROCESS.running()
        process.stdin.write(request)
        process.stdin.flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PROCESS, "exchange", interrupted)
        PROCESS.ask("{{ 1 }}", {})
    assert text_of("{{ 2 }}") == "2"


def test_a_killed_worker_is_restarted():
    assert text_of("{{ 1 }}") == "1"
    PROCESS.process.kill()
    PROCESS.process.wait()
    assert text_of("{{ 2 }}") == "2"
