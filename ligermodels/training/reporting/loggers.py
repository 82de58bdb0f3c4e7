"""Where a run's metrics go beside metrics.jsonl: TensorBoard, and Weights & Biases. Only where asked for.

A record is a line of metrics.jsonl: {"step": n, name: value, …}. Both packages are imported when a run asks for them.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ligermodels.errors import InputError, first_line
from ligermodels.training.packages import import_package


class Logger(Protocol):
    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def require(names: Iterable[str]) -> None:
    """Raises InputError where a package is missing."""
    for name in names:
        import_package(name, f"--log-to {name}")


def open_loggers(names: Sequence[str], folder: Path, settings: Mapping[str, Any], done: int = 0) -> list[Logger]:
    """Those asked for, on the one rank that writes. done: steps a resumed run has taken already. Raises InputError
    where one cannot be had; nothing is written then."""
    require(names)
    return [logger(folder, settings, done) for name, logger in LOGGERS.items() if name in names]


class TensorBoard:
    """Event files in `folder`/tensorboard; of a resumed run, what was written after its checkpoint is hidden."""

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
    """A run of the project `ligermodels`, or that of WANDB_PROJECT, named like the folder, where its files are kept.

    A resumed run goes on in the same one.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        import wandb

        name_file = folder / "wandb" / "run-id"
        known = name_file.read_text(encoding="utf-8") if done and name_file.exists() else None
        project = os.environ.get("WANDB_PROJECT", "ligermodels")
        try:
            self.run = wandb.init(
                project=project, name=folder.name, dir=folder, id=known, resume="allow", config=dict(settings)
            )
        except wandb.errors.Error as error:
            raise InputError(
                f"--log-to wandb: {first_line(error)} Run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        name_file.parent.mkdir(parents=True, exist_ok=True)
        name_file.write_text(self.run.id, encoding="utf-8")
        self.run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        self.run.log(dict(record))

    def close(self) -> None:
        self.run.finish()


LOGGERS: dict[str, Callable[[Path, Mapping[str, Any], int], Logger]] = {
    "wandb": WeightsAndBiases,  # first, because it may refuse
    "tensorboard": TensorBoard,
}
