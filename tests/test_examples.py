"""Every file of examples/ runs on a CPU as its reader would run it."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
DISTRIBUTED = {EXAMPLES / "fsdp2_loop.py": ["--steps", "2", "--length", "32"]}  # with their arguments


@pytest.mark.parametrize("path", sorted(set(EXAMPLES.glob("*.py")) - DISTRIBUTED.keys()), ids=lambda path: path.name)
def test_the_example_runs(path, script_server, tmp_path):
    status, output = script_server.run(path, folder=tmp_path)
    assert status == 0, output
    assert output, "an example prints what it did"


@pytest.mark.parametrize("path", DISTRIBUTED, ids=lambda path: path.name)
def test_the_example_runs_on_two_processes(path, script_server, tmp_path):
    status, output = script_server.run(path, tmp_path, *DISTRIBUTED[path], ranks=2)
    assert status == 0, output
    assert output, "an example prints what it did"
