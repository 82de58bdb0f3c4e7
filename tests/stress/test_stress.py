"""A few kills of the stress test; `python -m tests.stress` makes hundreds."""

from tests.stress.runs import stress


def test_runs_that_are_killed_end_as_one_that_was_not(launch_server, tmp_path):
    outcome = stress(launch_server.within(tmp_path), kills=6, seed=0)
    assert outcome["at a file operation"] == 3 and outcome["at a random moment"] >= 3
    assert outcome["new"] > 80 and outcome["resumed"] > 40  # file operations of a run
