import functools
import itertools
import math
import re

import pytest

from ligermodels.training.data import embedded_stories as grammar
from ligermodels.training.data.embedded_stories import (
    Story,
    conversation_question,
    conversations,
    stories,
    story_question,
)


def every_story():
    """All derivations of the grammar: counts through the digits that stand for choices, the last digit fastest."""
    digits = []
    while True:
        radices = []
        story = Story(functools.partial(follow, digits, radices))
        yield story.text(), story.nats
        digits += [0] * (len(radices) - len(digits))
        while digits and digits[-1] + 1 == radices[len(digits) - 1]:
            digits.pop()
        if not digits:
            return
        digits[-1] += 1


def follow(digits, radices, options):
    """A draw that takes the next digit, or 0 after the last one, and records the number of options."""
    radices.append(options)
    return digits[len(radices) - 1] if len(radices) <= len(digits) else 0


@pytest.fixture
def tiny_grammar(monkeypatch):
    word_lists = ("CHARACTER_NAMES", "ANIMALS", "PLACES", "THINGS", "LOSSES")
    for name in (*word_lists, "OPENINGS", "SUMS", "DIFFERENCES", "ENDINGS"):
        monkeypatch.setattr(grammar, name, getattr(grammar, name)[:2])
    monkeypatch.setattr(grammar, "ADDENDS", range(1, 4))
    monkeypatch.setattr(grammar, "MINUENDS", range(2, 5))


def test_all_stories_of_a_tiny_grammar_have_probabilities_that_sum_to_one(tiny_grammar):
    stories = list(every_story())
    assert math.isclose(math.fsum(math.exp(-nats) for _, nats in stories), 1.0, rel_tol=1e-12)
    assert len({text for text, _ in stories}) == len(stories) > 1000


def derivations(text):
    """(number of derivations, nats of one), found by regular expressions; shares only word lists with the grammar."""
    words = {
        "hero": grammar.CHARACTER_NAMES, "friend": grammar.CHARACTER_NAMES, "animal": grammar.ANIMALS,
        "place": grammar.PLACES, "thing": grammar.THINGS, "loss": grammar.LOSSES,
    }  # fmt: skip
    found = []
    for events, opening, ending in itertools.product(
        (grammar.SUMS, grammar.DIFFERENCES),
        range(len(grammar.OPENINGS)),
        range(len(grammar.ENDINGS)),
    ):
        for event in events:
            template = " ".join((grammar.OPENINGS[opening], event, grammar.ENDINGS[ending]))
            slots = match(template, text, words)
            if slots:
                choices = [2, len(grammar.OPENINGS), len(events), len(grammar.ENDINGS)]
                choices += [len(words[slot]) - (slot == "friend") for slot in slots if slot in words]
                choices += [12, 12] if "sum" in slots else [23, int(slots["many"]) - 1]
                found.append(sum(math.log(n) for n in choices))
    return len(found), found[0] if found else math.inf


def match(template, text, words):
    pattern, seen = "", set()
    for literal, slot in re.findall(r"([^{]*)(?:\{(\w+)\})?", template):
        pattern += re.escape(literal)
        if slot:
            values = "|".join(map(re.escape, words[slot])) if slot in words else r"\d+"
            pattern += f"(?P={slot})" if slot in seen else f"(?P<{slot}>{values})"
            seen.add(slot)
    found = re.fullmatch(pattern, text)
    return found.groupdict() if found else None


def test_each_story_has_one_derivation_and_its_nats_match_an_independent_count():
    for text, nats in stories(seed=3, count=12):
        number, recount = derivations(text)
        assert number == 1, text
        assert math.isclose(nats, recount, rel_tol=1e-12), text


def test_no_value_of_a_slot_is_a_prefix_of_another():
    """Otherwise a story could be read in two ways although only one template matches."""
    for values in (
        grammar.CHARACTER_NAMES,
        grammar.ANIMALS,
        grammar.PLACES,
        grammar.THINGS,
        grammar.LOSSES,
    ):
        assert not [(a, b) for a, b in itertools.permutations(values, 2) if b.startswith(a)]


def test_stories_follow_from_the_seed_and_their_sums_are_right():
    first, again, other = (list(stories(seed, 200)) for seed in (5, 5, 6))
    assert first == again != other
    assert first[0][0].startswith("There is a legend about Tilda, the brave walrus who filled the post office")
    for text, _ in first:
        a, sign, b, c = re.search(r"(\d+) ([+-]) (\d+) = (\d+)", text).groups()
        assert int(a) + int(sign + b) == int(c) <= 24


BEGINNINGS = (
    (r"had (?P<a>\d+) \w+, and \w+ brought (?P<b>\d+) more\.", "+"),
    (r"On Monday \w+ found (?P<a>\d+) \w+, on Tuesday (?P<b>\d+)\.", "+"),
    (r"behind the (?P<a>\d+) \w+ hid (?P<b>\d+) others\.", "+"),
    (r"There were (?P<a>\d+) \w+, but (?P<b>\d+) of them .*\.", "-"),
    (r"had (?P<a>\d+) \w+ and gave (?P<b>\d+) of them to \w+\.", "-"),
    (r"wanted to buy (?P<b>\d+) of the (?P<a>\d+) \w+\.", "-"),
)


def calculation(question, before):
    """The answer to a user's message, such as "7 + 5 = 12.". before: the number of things; None in the first turn."""
    if before is None:
        found = [(match, sign) for pattern, sign in BEGINNINGS if (match := re.search(pattern, question))]
        ((match, sign),) = found
        a, b = int(match["a"]), int(match["b"])
    else:
        (number,) = re.findall(r"\d+", question)
        a, sign, b = before, "+" if "more" in question else "-", int(number)
    result = a + b if sign == "+" else a - b
    return f"{a} {sign} {b} = {result}.", result


def test_every_answer_of_a_conversation_equals_an_independent_calculation():
    answers = set()
    for messages in conversations(seed=7, count=300):
        turns = messages[1:] if messages[0]["role"] == "system" else messages
        number = None
        for user, assistant in zip(turns[::2], turns[1::2], strict=True):
            assert (user["role"], assistant["role"]) == ("user", "assistant")
            answer, number = calculation(user["content"], number)
            assert assistant["content"] == answer
            assert 1 <= number <= 24
            answers.add(answer)
    assert len(answers) > 250


def test_conversations_follow_from_the_seed_with_one_to_three_questions_and_sometimes_a_system_prompt():
    first, again, other = (list(conversations(seed, 400)) for seed in (5, 5, 6))
    assert first == again != other
    systems = [messages for messages in first if messages[0]["role"] == "system"]
    assert 70 < len(systems) < 130
    questions = [sum(message["role"] == "assistant" for message in messages) for messages in first]
    assert set(questions) == {1, 2, 3} and min(map(questions.count, (1, 2, 3))) > 100


def test_the_prompt_of_a_question_is_the_text_before_the_last_answer():
    text = "Ada had 7 keys. They counted: 7 + 5 = 12. That night Ada dreamt of keys."
    assert story_question(text) == ("Ada had 7 keys. They counted: 7 + 5 =", "12.")
    messages = next(conversations(seed=0, count=1))
    assert conversation_question(messages) == (messages[:-1], "2 - 1 = 1.")
