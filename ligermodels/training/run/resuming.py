"""When a run may be resumed: it is not finished, and its settings and data have not changed, unless that is allowed.

A run is finished when it is exported, or with --no-export validated, after its last step. More steps lengthen it: it
goes on from its last checkpoint. A run whose data or export fail saves its last step, so that resuming it repeats
nothing but what failed.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError, InputError
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.checkpoints.files import checkpoint_step, committed_steps, read_record
from ligermodels.training.data import DataError
from ligermodels.training.reporting.metrics import METRICS_FILE, read_metrics
from ligermodels.training.run.folder import CHECKPOINTS
from ligermodels.training.run.validations import Validations, validation_losses
from ligermodels.training.settings.config import FIELDS, RunConfig, TrainConfig
from ligermodels.training.settings.settings import SETTINGS_FILE, differences, read_settings
from ligermodels.units import counted
from ligermodels.weights.config_file import CONFIG_FILE

# Settings that decide which tensors a checkpoint has, and in which dtypes.
CHECKPOINT_SETTINGS = (
    *("param_dtype", "param_rounding", "optimizer", "optimizer_state_dtype"),
    *("lora_rank", "lora_targets", "modules_to_save", "adapter", "train_parts"),
)
MODEL_FINGERPRINT = "model_fingerprint"  # among the settings that a checkpoint records
WRITTEN_BY_TOOLS = {"transformers_version", "_name_or_path", "architectures", "torch_dtype", "dtype", "use_cache"}


def refuse_other_settings(config: TrainConfig) -> None:
    """Raises InputError where the settings of the run to resume have changed. Its length is compared later."""
    if config.resume is None:
        return
    changed = differences(settings_before(config.resume), config)
    steps = last_step(config.resume)
    misfits = [change for change in changed if steps and change.partition(":")[0] in CHECKPOINT_SETTINGS]
    if misfits:
        raise InputError(
            f"--resume {config.resume}: {'; '.join(misfits)}: its checkpoints do not fit; keep the setting, or start "
            "another run"
        )
    if changed and not config.allow_changes:
        raise InputError(f"--resume {config.resume}: {'; '.join(changed)}: keep the setting, or add --allow-changes")


def settings_before(folder: Path) -> dict[str, Any]:
    """The settings of the newest checkpoint's own record; without a checkpoint those of train.toml, which is the
    user's to edit."""
    checkpoints = committed_steps(folder / CHECKPOINTS)
    if not checkpoints:
        return read_settings(folder / SETTINGS_FILE)
    recorded = read_record(checkpoints[-1])["settings"]
    return {name: value for name, value in recorded.items() if name in FIELDS}


def refuse_finished(config: RunConfig) -> None:
    """Raises InputError where the run to resume is finished, or has taken or planned more steps than it now gets.

    config: with its number of steps.
    """
    if config.resume is None:
        return
    checkpoints, taken = committed_steps(config.resume / CHECKPOINTS), last_step(config.resume)
    if config.steps < taken:
        raise InputError(
            f"--resume {config.resume}: it has taken {counted(taken, 'step')}, more than the {config.steps} now given; "
            "give more --epochs or --steps"
        )
    planned = read_record(checkpoints[-1])["settings"].get("steps", 0) if checkpoints else 0
    if config.steps < planned and not config.allow_changes:
        raise InputError(
            f"--resume {config.resume}: steps: {config.steps}, was {planned}: keep the setting, or add --allow-changes"
        )
    file = config.resume / METRICS_FILE
    records = read_metrics(file) if os.path.lexists(file) else []
    end = last_end(config, records, taken)
    if end is None:
        return
    losses = {step: loss for step, loss in validation_losses(records).items() if step <= end}
    stopped_early = Validations(config, losses).end_run
    if stopped_early or end >= config.steps:
        remedy = f"more than --early-stopping {config.early_stopping}" if stopped_early else "more --epochs or --steps"
        export = ", or --no-export off to export it" if config.no_export else ""
        raise InputError(
            f"--resume {config.resume}: the run is finished, after {counted(end, 'step')}; to lengthen it, give "
            f"{remedy}{export}"
        )
    if not checkpoints:
        raise InputError(
            f"--resume {config.resume}: the run is finished, and has no checkpoint from which it could go on; start "
            "another run from its export"
        )


def last_end(config: TrainConfig, records: Sequence[Mapping[str, Any]], taken: int) -> int | None:
    """The step after which the run was exported, or would have been with an export; None if it never was.

    records: of metrics.jsonl. taken: the step of the newest checkpoint. An export that was moved away does not count.
    """
    folder = config.resume or Path()
    exports = (record for record in records if "exported" in record)
    ends = [record["step"] for record in exports if (folder / str(record["exported"])).is_dir()]
    if config.no_export and taken and taken in validation_losses(records):
        ends.append(taken)
    return max(ends, default=None)


def last_step(output: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max(map(checkpoint_step, committed_steps(output / CHECKPOINTS)), default=0)


def refuse_other_data(config: TrainConfig, saved: Mapping[str, Any] | None, fingerprint: str) -> None:
    """Raises InputError where the newest checkpoint, whose settings are `saved`, was trained on other data."""
    if saved is not None and saved.get("data_fingerprint") != fingerprint and not config.allow_changes:
        raise InputError(
            f"--resume {config.resume}: the data have changed: documents, their order or their tokens differ; restore "
            "them, or add --allow-changes"
        )


def refuse_other_model(config: TrainConfig, saved: Mapping[str, Any] | None, fingerprint: str) -> None:
    """Raises InputError where the newest checkpoint, whose settings are `saved`, was trained with another config.json;
    one that was written before they were recorded is taken."""
    if saved is not None and saved.get(MODEL_FINGERPRINT, fingerprint) != fingerprint and not config.allow_changes:
        raise InputError(
            f"--resume {config.resume}: the model's {CONFIG_FILE} has changed since its last checkpoint; restore it, "
            "or add --allow-changes"
        )


def config_fingerprint(raw: Mapping[str, Any]) -> str:
    """A hash of what config.json says of the computation."""
    read = {name: value for name, value in raw.items() if name not in WRITTEN_BY_TOOLS}
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def rescued(
    checkpoints: Checkpoints, save: Callable[[], None] | None, command: str, say: Callable[[str], None]
) -> Iterator[None]:
    """Waits for the run's last checkpoint, then runs the body, which exports.

    Where the body raises, on all ranks, the error says whether the last step is saved. A checkpoint that could not be
    written does not keep the run from its export; it is a warning then.
    save: saves the last step, for a run without a checkpoint of it. command: resumes the run. say: gets the warning.
    """
    unsaved = save_error(checkpoints.wait)
    try:
        yield
    except Exception as error:
        if save is not None:
            unsaved = save_error(save) or save_error(checkpoints.wait)
        saved = f"the last step is saved; to export it again: {command}"
        if unsaved:
            saved = f"the last step could not be saved either: {unsaved}"
        if isinstance(error, InputError | OSError):
            raise InputError(f"{error}; {saved}") from error
        error.add_note(saved)
        raise
    if unsaved:
        say(f"warning: {unsaved}")


@contextmanager
def reading_data(checkpoints: Checkpoints, save: Callable[[], None], step: int, command: str) -> Iterator[None]:
    """Runs the body, which reads data of the run, such as images, and changes nothing.

    Where they cannot be read, on all ranks, the error says that the last step is saved, and how to continue.
    save: saves the last step, `step`; there is nothing to save at 0. command: resumes the run.
    """
    try:
        yield
    except DataError as error:
        if not step:
            raise
        unsaved = save_error(save) or save_error(checkpoints.wait)
        if unsaved:
            raise InputError(f"{error}; step {step} could not be saved either: {unsaved}") from error
        raise InputError(f"{error}; step {step} is saved; to continue from it: {command}") from error


def save_error(save: Callable[[], None]) -> CheckpointError | None:
    try:
        save()
    except CheckpointError as error:
        return error
    return None
