"""TensorBoard, Weights & Biases in offline mode, and a stand-in for Trackio: nothing leaves the machine."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ligermodels.errors import InputError
from ligermodels.training.reporting.loggers import open_loggers
from tests.suites import slow


def test_without_log_to_no_logger_is_opened(tmp_path):
    assert open_loggers([], tmp_path, {}) == []
    assert not list(tmp_path.iterdir())


def tensorboard(folder, done, *records):
    (logger,) = open_loggers(["tensorboard"], folder, {"steps": 3}, done)
    for record in records:
        logger.write(record)
    logger.close()


def test_tensorboard_gets_scalars_and_texts_and_no_step_twice_after_a_resume(tmp_path):
    losses = [{"step": step, "loss": float(step), "grad_norm": None, "sample": "Once"} for step in (1, 2, 3)]
    tensorboard(tmp_path, 0, *losses)
    tensorboard(tmp_path, 2, {"step": 3, "loss": 30.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert set(events.Tags()["scalars"]) == {"loss"}
    assert {"sample/text_summary", "settings/text_summary"} <= set(events.Tags()["tensors"])


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)


@slow
def test_weights_and_biases_gets_the_settings_and_the_metrics(tmp_path, offline):
    (logger,) = open_loggers(["wandb"], tmp_path, {"steps": 3})
    logger.write({"step": 1, "loss": 2.5})
    logger.write({"step": 1, "validation_loss": 1.5})
    assert (logger.run.project, logger.run.name, logger.run.config["steps"]) == ("ligermodels", tmp_path.name, 3)
    assert [logger.run.summary[name] for name in ("step", "loss", "validation_loss")] == [1, 2.5, 1.5]
    logger.close()
    assert (tmp_path / "wandb" / "run-id").read_text() == logger.run.id
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


class FakeRun:
    """Replaces wandb.init, and records its arguments."""

    def __init__(self, **options):
        self.options, self.id = options, options["id"] or "new"

    def define_metric(self, *names, **options):
        pass


def test_a_resumed_run_continues_the_same_wandb_run_and_a_new_run_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("wandb.init", FakeRun)
    (first,) = open_loggers(["wandb"], tmp_path, {})
    assert first.run.options["id"] is None
    (tmp_path / "wandb" / "run-id").write_text("abc")
    (resumed,) = open_loggers(["wandb"], tmp_path, {}, done=5)
    assert resumed.run.options["id"] == "abc" and resumed.run.options["resume"] == "allow"
    (again,) = open_loggers(["wandb"], tmp_path, {})
    assert again.run.options["id"] is None


def test_without_a_wandb_login_the_error_says_how_to_log_in(tmp_path, monkeypatch):
    import wandb

    def fail(**options):
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr("wandb.init", fail)
    with pytest.raises(InputError, match=r"^--log-to wandb: No API key configured\..*wandb login.*WANDB_MODE=offline"):
        open_loggers(["tensorboard", "wandb"], tmp_path, {})
    assert not any(tmp_path.iterdir())


class TrackioRun:
    """What `trackio.init` returns, as far as it is used: its package is large."""

    def __init__(self, options):
        self.options, self.logged, self.finished = options, [], False

    def log(self, metrics, step=None):
        assert not {"project", "run", "timestamp", "step", "time", "metrics"} & metrics.keys()  # reserved names
        self.logged.append((step, metrics))

    def finish(self):
        self.finished = True


@pytest.fixture
def trackio(monkeypatch):
    module = ModuleType("trackio")
    module.__file__ = "trackio/__init__.py"

    def init(project, name=None, config=None, resume="never", embed=True):
        if project.startswith("registry-"):
            raise ValueError(f"Project name {project!r} is not allowed\nfor two lines")
        return TrackioRun({"project": project, "name": name, "config": config, "resume": resume, "embed": embed})

    module.init = init
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)


def test_trackio_gets_the_settings_and_the_metrics_by_step(tmp_path, trackio):
    (logger,) = open_loggers(["trackio"], tmp_path, {"steps": 3})
    assert logger.run.options == {
        "project": "ligermodels", "name": tmp_path.name, "config": {"steps": 3}, "resume": "never", "embed": False,
    }  # fmt: skip
    logger.write({"step": 1, "loss": 2.5})
    logger.write({"step": 1, "validation_loss": 1.5, "sample": "Once"})
    logger.close()
    assert logger.run.logged == [(1, {"loss": 2.5}), (1, {"validation_loss": 1.5, "sample": "Once"})]
    assert logger.run.finished


def test_a_resumed_run_continues_the_trackio_run_of_its_name(tmp_path, trackio, monkeypatch):
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    (resumed,) = open_loggers(["trackio"], tmp_path, {}, done=5)
    assert (resumed.run.options["project"], resumed.run.options["resume"]) == ("mine", "allow")
    monkeypatch.setenv("TRACKIO_PROJECT", "registry-x")
    with pytest.raises(InputError, match=r"^--log-to trackio: Project name 'registry-x' is not allowed$"):
        open_loggers(["trackio", "tensorboard"], tmp_path, {})
    assert not any(tmp_path.iterdir())


class MlflowStore:
    """What `mlflow.MlflowClient()` returns, as far as it is used: its package is large."""

    def __init__(self):
        self.calls = []

    def get_experiment_by_name(self, name):
        return None if name == "new" else SimpleNamespace(experiment_id=f"id of {name}")

    def create_run(self, experiment, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{run_name} in {experiment}"))

    def create_experiment(self, name):
        return f"created {name}"

    def __getattr__(self, name):
        return lambda *given, **options: self.calls.append((name, *given, *options.values()))


@pytest.fixture
def mlflow(monkeypatch):
    package, errors = ModuleType("mlflow"), ModuleType("mlflow.exceptions")
    package.__file__, package.MlflowClient = "mlflow/__init__.py", MlflowStore
    errors.MlflowException = type("MlflowException", (Exception,), {})
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", errors)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return package


def test_mlflow_gets_the_settings_and_the_metrics_by_step_and_goes_on_with_a_resumed_run(tmp_path, mlflow, monkeypatch):
    (logger,) = open_loggers(["mlflow"], tmp_path, {"steps": 3, "data": ["a"]})
    run = f"{tmp_path.name} in id of ligermodels"
    logger.write({"step": 1, "loss": 2.5, "grad_norm": None})
    logger.write({"step": 1, "validation_loss": 1.5, "sample": "Once"})
    logger.close()
    assert logger.client.calls == [
        ("log_param", run, "steps", "3"), ("log_param", run, "data", "['a']"), ("log_metric", run, "loss", 2.5, 1),
        ("log_metric", run, "validation_loss", 1.5, 1), ("log_text", run, "Once", "sample/1.txt"),
        ("set_terminated", run),
    ]  # fmt: skip
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "new")
    (resumed,) = open_loggers(["mlflow"], tmp_path, {"steps": 3}, done=2)
    assert resumed.client.calls == [("update_run", run, "RUNNING")]
    (again,) = open_loggers(["mlflow"], tmp_path, {})
    assert again.run_id == f"{tmp_path.name} in created new"


def test_an_error_of_mlflow_is_one_line_that_says_where_its_place_is_set(tmp_path, mlflow):
    def fail():
        raise sys.modules["mlflow.exceptions"].MlflowException("no such place\nmore")

    mlflow.MlflowClient = fail
    with pytest.raises(
        InputError, match=r"^--log-to mlflow: no such place; MLFLOW_TRACKING_URI says where it is kept$"
    ):
        open_loggers(["mlflow"], tmp_path, {})
    assert not any(tmp_path.iterdir())
