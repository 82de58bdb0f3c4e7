import itertools
import sys

import pytest

from ligermodels.training.data.formats import streams
from ligermodels.training.data.formats.streams import ReadingProgress


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""
    now = [100.0]
    monkeypatch.setattr(streams.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_line_a_minute_shows_the_remaining_time(clock, capsys):
    with ReadingProgress("Tokenising d.jsonl", 4_000_000) as shown:
        for seconds in range(0, 200, 2):
            clock[0] = 100.0 + seconds
            shown.show(20_000 * seconds)
    assert capsys.readouterr().err.splitlines() == [
        "Tokenising d.jsonl: 2% of 4.0 MB, 20.0 KB/s, ETA 3:16",
        "Tokenising d.jsonl: 32% of 4.0 MB, 20.0 KB/s, ETA 2:16",
        "Tokenising d.jsonl: 62% of 4.0 MB, 20.0 KB/s, ETA 1:16",
        "Tokenising d.jsonl: 92% of 4.0 MB, 20.0 KB/s, ETA 0:16",
        "Tokenising d.jsonl: done in 3:18",
    ]


def test_nothing_is_printed_for_short_reads_or_by_ranks_other_than_the_first(clock, capsys, monkeypatch):
    with ReadingProgress("a", 10) as shown:
        shown.show(10)
    monkeypatch.setenv("RANK", "1")
    with ReadingProgress("b", 10) as shown:
        clock[0] += 1000
        shown.show(10)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_one_bar_covers_all_files(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    positions = iter([0, 5, 9, 0, 3])
    with ReadingProgress("a", 20) as shown:
        shown.follow(lambda: next(positions))
        for number in shown.track(itertools.count()):
            clock[0] += 1
            if number == 2:
                shown.finish(10)
                shown.follow(lambda: next(positions))
            if number == 4:
                break
        assert shown.bar.n == 13 and shown.bar.total == 20
