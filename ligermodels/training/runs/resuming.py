"""When a run may be resumed: it is not finished, and its settings and data have not changed, unless that is allowed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError
from ligermodels.training.checkpoints.files import checkpoint_step, committed_steps
from ligermodels.training.config import TrainConfig
from ligermodels.training.reporting.metrics import METRICS_FILE, is_validated
from ligermodels.training.runs.folder import ADAPTER, CHECKPOINTS, MODEL
from ligermodels.training.runs.settings import SETTINGS_FILE, differences
from ligermodels.training.runs.settings_file import read_settings
from ligermodels.units import counted

# Settings that decide which tensors a checkpoint has, and in which dtypes.
CHECKPOINT_SETTINGS = (
    *("param_dtype", "optimizer", "optimizer_state_dtype"),
    *("lora_rank", "lora_targets", "modules_to_save", "adapter"),
)


def refuse_resuming(config: TrainConfig) -> None:
    """Raises InputError where the run to resume is finished, or its settings have changed."""
    if config.resume is None:
        return
    changed = differences(read_settings(config.resume / SETTINGS_FILE), config)
    steps = last_step(config.resume)
    misfits = [change for change in changed if steps and change.partition(":")[0] in CHECKPOINT_SETTINGS]
    if misfits:
        raise InputError(
            f"--resume {config.resume}: {'; '.join(misfits)}: its checkpoints do not fit; keep the setting, or start "
            "another run"
        )
    if changed and not config.allow_changes:
        raise InputError(f"--resume {config.resume}: {'; '.join(changed)}: keep the setting, or add --allow-changes")
    for exported, another in ((MODEL, f"start another with --model {config.resume / MODEL}, or "), (ADAPTER, "")):
        if (config.resume / exported).exists():
            raise InputError(
                f"--resume {config.resume}: the run is finished; {another}move {config.resume / exported} away to "
                "resume from the last checkpoint"
            )
    if (
        config.steps
        and steps >= config.steps
        and config.no_export
        and is_validated(config.resume / METRICS_FILE, steps)
    ):
        raise InputError(
            f"--resume {config.resume}: it has taken {counted(steps, 'step')} already; give more --steps with "
            "--allow-changes, or --no-export off"
        )


def last_step(output: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max(map(checkpoint_step, committed_steps(output / CHECKPOINTS)), default=0)


def refuse_other_data(config: TrainConfig, saved: Mapping[str, Any] | None, fingerprint: str) -> None:
    """saved: the settings in the newest checkpoint. Raises InputError where it was trained on other data."""
    if saved is not None and saved.get("data_fingerprint") != fingerprint and not config.allow_changes:
        raise InputError(
            f"--resume {config.resume}: the data have changed: documents, their order or their tokens differ; restore "
            "them, or add --allow-changes"
        )
