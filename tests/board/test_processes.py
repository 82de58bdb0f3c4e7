"""Runs that the board starts, stops, resumes and talks to, as processes of their own."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from ligermodels.board.folders import Place
from ligermodels.board.processes import Processes
from ligermodels.errors import InputError
from ligermodels.training.data.embedded_stories import stories
from ligermodels.weights.writing import lock_file
from tests.board.serving import serving, write_run

SETTINGS = {"model": "qwen2", "steps": "200", "batch_size": "1", "sequence_length": "32", "eval_every": "200"}


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    before = dict(os.environ)
    os.environ |= {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    (folder / "own.txt").write_text("\n".join(text for text, _ in stories(3, 100)))
    with serving(folder) as board:
        yield board
        for process in board.actions.processes.started.values():
            if process.poll() is None:
                process.kill()
            process.wait()
    os.environ.clear()
    os.environ |= before


def settings(board):
    """Of a run on a few texts: the embedded ones take longer to tokenise than the run to train."""
    return SETTINGS | {"data": str(board.actions.folders[0] / "own.txt")}


def ended(board, name):
    board.actions.processes.started[name].wait(timeout=800)
    return board.get(f"/api/process?name={name}")


@pytest.fixture(scope="module")
def stopped(board):
    """A run that was started and stopped by requests; its summary."""
    status, answer = board.post("/api/start", {"name": "first", "settings": settings(board)})
    assert (status, answer) == (200, {"run": "0:first", "process": "first"})
    running = board.summary("0:first", lambda run: run["state"] == "running" and (run["step"] or 0) >= 3)
    assert running["steps"] == 200
    assert "is running already" in board.refused("/api/start", {"name": "first", "settings": settings(board)})
    assert "is running" in board.refused("/api/resume", {"run": "0:first"})
    assert board.post("/api/stop", {"run": "0:first"}) == (200, {})
    seen = ended(board, "first")
    assert seen["status"] == 128 + signal.SIGTERM and "SIGTERM: stopping after this step" in seen["output"]
    return board.summary("0:first", lambda run: run["state"] == "stopped")


def test_a_run_is_started_and_stopped_with_a_checkpoint(board, stopped):
    details = board.get("/api/run?run=0:first")
    assert 3 <= stopped["step"] < 200 and details["checkpoints"] == [f"step-{stopped['step']:06d}"]
    assert details["resumable"] and details["resume"].startswith("ligermodels train --resume ")
    assert "no process of this machine trains it" in board.refused("/api/stop", {"run": "0:first"})


def test_a_checkpoint_is_talked_to(board, stopped):
    model = next(model for model in board.get("/api/models") if model["kind"] == "checkpoint")
    assert model["step"] == stopped["step"] and model["name"] == "first"
    body = {"model": model["id"], "slot": 0, "prompt": "Once upon a time", "max_new_tokens": 5, "temperature": 0.0}
    parts = chat(board, body)
    assert parts[0] == {"state": "loading"} and parts[-1] == {"end": True}
    pieces = [part for part in parts if "text" in part]
    assert 1 <= len(pieces) <= 5 and pieces[-1]["finish"] in ("length", "stop")
    again = chat(board, body)
    assert {"state": "loading"} not in again and [p for p in again if "text" in p] == pieces
    talk = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    assert chat(board, body | {"messages": talk})[-1] == {"end": True}


def chat(board, body):
    status, _, content = board.raw("POST", "/api/chat", body, Content_Type="application/json")
    assert status == 200, content
    return [json.loads(event.removeprefix("data: ")) for event in content.decode().split("\n\n") if event]


def test_a_stopped_run_is_resumed_to_its_end(board, stopped):
    status, answer = board.post("/api/resume", {"run": "0:first"})
    assert status == 200 and answer == {"process": "first"}
    assert ended(board, "first")["status"] == 0
    done = board.summary("0:first", lambda run: run["state"] == "finished")
    assert done["step"] == 200
    assert board.get("/api/run?run=0:first")["exports"] == ["model"]


def test_the_last_checkpoint_of_a_finished_run_is_talked_to(board, stopped):
    if board.get("/api/run?run=0:first")["state"] != "finished":  # the test before was not selected
        test_a_stopped_run_is_resumed_to_its_end(board, stopped)
    body = {"model": "0:first:200", "slot": 0, "prompt": "Once", "max_new_tokens": 3, "temperature": 0.0}
    assert chat(board, body)[-1] == {"end": True}


def test_an_export_is_talked_to(board, stopped):
    model = next((model for model in board.get("/api/models") if model["kind"] == "model"), None)
    if model is None:  # the test before was not selected
        test_a_stopped_run_is_resumed_to_its_end(board, stopped)
        model = next(model for model in board.get("/api/models") if model["kind"] == "model")
    body = {"model": model["id"], "slot": 1, "prompt": "Once", "max_new_tokens": 3, "temperature": 0.7, "seed": 1}
    assert chat(board, body)[-1] == {"end": True}
    refused = chat(board, body | {"prompt": "x " * 200_000})[-1]["error"]
    assert "is longer than the 16,384 that the engine holds for one request" in refused


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "0:../secret"}, 404), ({"model": "/etc"}, 404), ({"model": None}, 404), ({"slot": 2}, 400),
        ({"slot": "0"}, 400), ({"max_new_tokens": 0}, 400), ({"max_new_tokens": 10**9}, 400),
        ({"temperature": -1}, 400),
        ({"temperature": "hot"}, 400), ({"messages": "x"}, 400), ({"messages": [{"role": "root", "content": ""}]}, 400),
        ({"messages": [{"role": "user", "content": [1]}]}, 400),
    ],
)  # fmt: skip
def test_a_chat_that_is_none_is_refused(board, stopped, change, status):
    model = next(model["id"] for model in board.get("/api/models"))
    body = {"model": model, "slot": 0, "prompt": "x", "max_new_tokens": 3} | change
    assert board.post("/api/chat", body)[0] == status


def test_a_run_that_is_killed_has_died_and_one_that_fails_says_why(board):
    board.post("/api/start", {"name": "killed", "settings": settings(board)})
    board.summary("0:killed", lambda run: run["state"] == "running" and (run["step"] or 0) >= 2)
    board.actions.processes.started["killed"].kill()
    assert ended(board, "killed")["status"] == -signal.SIGKILL
    assert board.summary("0:killed", lambda run: run["state"] != "running")["state"] == "died"


def test_a_lock_file_that_names_another_process_does_not_end_it(tmp_path):
    """Also one that holds a lock of its own."""
    folder = write_run(tmp_path / "run")
    script = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as innocent:
        (folder / "lock").write_text(f"process {innocent.pid} on {socket.gethostname()}\n")
        with pytest.raises(InputError, match="no process of this machine trains it"):
            Processes(tmp_path).stop(Place(tmp_path, "run"))
        for content in ("process 1 on elsewhere\n", "process x on y\n", f"process 0 on {socket.gethostname()}\n", "",
                        f"process 9999999999 on {socket.gethostname()}\n"):  # fmt: skip
            (folder / "lock").write_text(content)
            assert Processes(tmp_path).holder(Place(tmp_path, "run")) is None
        assert innocent.poll() is None
    with lock_file(folder / "lock"):
        holder = Processes(tmp_path).holder(Place(tmp_path, "run"))
        assert holder is not None
        os.close(holder)


def test_a_link_in_place_of_the_boards_own_folder_is_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs/.board").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a link"):
        Processes(tmp_path / "runs").start({"model": "qwen2"}, "x")
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_log_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "runs/.board").mkdir(parents=True)
    (tmp_path / "precious").write_text("text")
    (tmp_path / "runs/.board/x.log").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="cannot be written"):
        Processes(tmp_path / "runs").start({"model": "qwen2"}, "x")
    assert (tmp_path / "precious").read_text() == "text"


@pytest.mark.parametrize("is_read", [True, False])
def test_a_log_that_is_a_pipe_keeps_nobody_waiting(tmp_path, is_read):
    (tmp_path / ".board").mkdir()
    os.mkfifo(tmp_path / ".board/x.log")
    reader = os.open(tmp_path / ".board/x.log", os.O_RDONLY | os.O_NONBLOCK)
    if not is_read:
        os.close(reader)
    with pytest.raises(InputError, match=r"x\.log: (is not a regular file|cannot be written: .*); remove it"):
        Processes(tmp_path).start({"model": "qwen2"}, "x")
    if is_read:
        os.close(reader)


def test_settings_that_are_a_pipe_keep_nobody_waiting(board):
    folder = write_run(board.actions.folders[0] / "pipe")
    board.summary("0:pipe")
    (folder / "train.toml").unlink()
    os.mkfifo(folder / "train.toml")
    assert "is not a regular file" in board.refused("/api/resume", {"run": "0:pipe"})


def test_a_run_with_links_that_lead_outside_is_neither_resumed_nor_talked_to(board, tmp_path):
    folder = write_run(board.actions.folders[0] / "linked", settings='model = "qwen2"\n')
    (folder / "checkpoints").mkdir()
    (tmp_path / "elsewhere").mkdir()
    board.summary("0:linked")
    (folder / "checkpoints/step-000001").symlink_to(tmp_path / "elsewhere")
    assert "has links that lead outside" in board.refused("/api/resume", {"run": "0:linked"})
    body = {"model": "0:linked:1", "slot": 0, "prompt": "x", "max_new_tokens": 1}
    assert "has links that lead outside" in board.refused("/api/chat", body)
    (folder / "checkpoints/step-000001").unlink()
    (folder / "train.toml").unlink()
    (folder / "train.toml").symlink_to("/etc/passwd")
    assert "has links that lead outside" in board.refused("/api/resume", {"run": "0:linked"})


def test_a_run_that_names_files_outside_is_not_resumed(board, tmp_path):
    write_run(board.actions.folders[0] / "hostile", settings=f'model = "qwen2"\ndata = ["{tmp_path}/own.txt"]\n')
    (tmp_path / "own.txt").write_text("text\n" * 100)
    board.summary("0:hostile")
    assert "outside of the folders" in board.refused("/api/resume", {"run": "0:hostile"})
    rewards = tmp_path / "evil.py"
    rewards.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef one(**_): return []\n")
    text = f'model = "qwen2"\nobjective = "grpo"\nreward = ["{rewards}:one"]\n'
    (board.actions.folders[0] / "hostile/train.toml").write_text(text)
    assert "outside of the folders" in board.refused("/api/resume", {"run": "0:hostile"})
    (board.actions.folders[0] / "hostile/checkpoints/step-000001").mkdir(parents=True)
    body = {"model": "0:hostile:1", "slot": 0, "prompt": "x", "max_new_tokens": 1}
    assert "outside of the folders" in chat(board, body)[-1]["error"]
    assert not (tmp_path / "ran").exists()
