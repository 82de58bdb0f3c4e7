"""Optional loggers in addition to metrics.jsonl: TensorBoard, Weights & Biases, Trackio and MLflow (`--log-to`).

A record is a line of metrics.jsonl: {"step": n, name: value, …}. A logger's package is imported only if the logger is
enabled.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ligermodels.errors import InputError, first_line, shorten
from ligermodels.lazy_imports import import_package

MAX_PARAMETER = 6000  # characters of a parameter of MLflow


class Logger(Protocol):
    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def check_logger_packages(names: Iterable[str]) -> None:
    """Raises InputError if the package of a logger is missing."""
    for name in names:
        import_package(name, f"--log-to {name}")


def open_loggers(names: Sequence[str], folder: Path, settings: Mapping[str, Any], done: int = 0) -> list[Logger]:
    """Opens the loggers of these names. Only the rank that writes calls it.

    folder: the folder of the run. done: steps already completed by a resumed run. Raises InputError if a logger is not
    available; nothing is written then.
    """
    check_logger_packages(names)
    return [logger(folder, settings, done) for name, logger in LOGGERS.items() if name in names]


class TensorBoard:
    """Event files in `folder`/tensorboard. On resume, events after the checkpoint are hidden."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder / "tensorboard", purge_step=done + 1 if done else None)
        if not done:
            rows = "\n".join(f"    {name} = {value!r}" for name, value in settings.items())
            self.writer.add_text("settings", rows)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, record["step"])
            elif name != "step" and value is not None:
                self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A Weights & Biases run with the name of the folder, in the project `ligermodels` or WANDB_PROJECT.

    Its files are in `folder`. A resumed run continues the same Weights & Biases run.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        import wandb

        id_file = folder / "wandb" / "run-id"
        run_id = id_file.read_text(encoding="utf-8") if done and id_file.exists() else None
        project = os.environ.get("WANDB_PROJECT", "ligermodels")
        try:
            self.run = wandb.init(
                project=project, name=folder.name, dir=folder, id=run_id, resume="allow", config=dict(settings)
            )
        except wandb.errors.Error as error:
            raise InputError(
                f"--log-to wandb: {first_line(error)} Run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(self.run.id, encoding="utf-8")
        self.run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        self.run.log(dict(record))

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """A Trackio run with the name of the folder, in the project `ligermodels` or TRACKIO_PROJECT.

    Trackio keeps it in its own folder on this machine, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say. A resumed
    run continues the newest run of that name and project: Trackio finds runs by their names.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "ligermodels")
        resume = "allow" if done else "never"
        try:
            self.run = trackio.init(
                project=project, name=folder.name, config=dict(settings), resume=resume, embed=False
            )
        except (ValueError, OSError) as error:  # a project's name, a login, a server's token
            raise InputError(f"--log-to trackio: {first_line(error)}") from error

    def write(self, record: Mapping[str, Any]) -> None:
        self.run.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """An MLflow run with the name of the folder, in the experiment `ligermodels` or MLFLOW_EXPERIMENT_NAME.

    It is kept where MLFLOW_TRACKING_URI says. A resumed run continues the same MLflow run.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        id_file = folder / "mlflow-run-id"
        try:
            self.client = MlflowClient()
            if done and id_file.exists():
                self.run_id = id_file.read_text(encoding="utf-8")
                self.client.update_run(self.run_id, status="RUNNING")
                return
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ligermodels")
            found = self.client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self.client.create_experiment(name)
            self.run_id = self.client.create_run(experiment, run_name=folder.name).info.run_id
            for setting, value in settings.items():
                self.client.log_param(self.run_id, setting, shorten(str(value), MAX_PARAMETER))
        except (MlflowException, OSError) as error:
            raise InputError(
                f"--log-to mlflow: {first_line(error)}; MLFLOW_TRACKING_URI says where it is kept"
            ) from error
        id_file.write_text(self.run_id, encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        for name, value in record.items():
            if isinstance(value, str):
                self.client.log_text(self.run_id, value, f"{name}/{step}.txt")
            elif name != "step" and isinstance(value, int | float):
                self.client.log_metric(self.run_id, name, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


LOGGERS: dict[str, Callable[[Path, Mapping[str, Any], int], Logger]] = {
    "wandb": WeightsAndBiases,  # all but the last can raise
    "trackio": Trackio,
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
}
