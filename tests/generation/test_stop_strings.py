"""Stop strings in text that is cut at every place."""

from itertools import combinations

import pytest

from ligermodels.generation.texts import StopStrings

CASES = [  # text, stop strings, visible text, stop string
    ("one two three", ["two"], "one ", "two"),
    ("one two three", ["four"], "one two three", None),
    ("one two thr", ["three"], "one two thr", None),
    ("aab", ["ab"], "a", "ab"),
    ("ababac", ["abac"], "ab", "abac"),
    ("two", ["two"], "", "two"),
    ("", ["x"], "", None),
    ("one", [], "one", None),
    ("abcd", ["abcd", "bc"], "a", "bc"),  # ends first, although the other begins first
    ("abcd", ["bcd", "abcd", "cd"], "", "abcd"),  # the longest of those that end together
    ("x\n\ny", ["\n\n", "\n"], "x", "\n"),
    ("Grüße 👋🏽 Welt", ["👋🏽 "], "Grüße ", "👋🏽 "),
    ("一二三四", ["三四", "二三"], "一", "二三"),
]


def pieces_of(text, cuts):
    ends = [*cuts, len(text)]
    return [text[start:end] for start, end in zip([0, *cuts], ends, strict=True)]


@pytest.mark.parametrize(("text", "stops", "visible", "matched"), CASES)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(text, stops, visible, matched):
    cuttings = [cuts for count in range(3) for cuts in combinations(range(len(text) + 1), count)]
    for cuts in [*cuttings, tuple(range(1, len(text)))]:
        row = StopStrings(stops)
        shown = [row.step(piece) for piece in pieces_of(text, cuts)]
        assert ("".join(shown) + row.end(), row.matched) == (visible, matched), cuts


def test_only_what_may_begin_a_stop_string_is_held_back():
    row = StopStrings(["</end>", "<|"])
    pieces = ["one", " <", "b> <", "/en", "d ", "<"]
    assert [row.step(piece) for piece in pieces] == ["one", " ", "<b> ", "", "</end ", ""]
    assert row.end() == "<" and row.end() == "" and row.matched is None


def test_nothing_is_visible_after_a_stop_string():
    row = StopStrings(["."])
    assert [row.step(piece) for piece in ("a", "b.c", "d", ".")] == ["a", "b", "", ""]
    assert row.end() == ""


@pytest.mark.parametrize(
    ("stops", "visible"),
    [(["<e>"], "ab"), (["b<e>"], "a"), (["<e>c"], "ab"), (["<e"], "ab"), (["bc"], "abc"), (["<e>x", "zz"], "abc")],
)
def test_special_tokens_are_seen_and_not_shown(stops, visible):
    row = StopStrings(stops)
    shown = [row.step("ab"), row.step("<e>", shown=False), row.step("c")]
    assert "".join(shown) + row.end() == visible
