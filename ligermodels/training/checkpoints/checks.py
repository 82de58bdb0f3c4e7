"""Whether a checkpoint is of the run that restores it: its optimizer, its frozen weights, its tensors.

Compares names, shapes, dtypes and fingerprints.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ligermodels.errors import CheckpointError
from ligermodels.training.checkpoints.state import RUNNING_NORM
from ligermodels.weights.files import shortened


def check_same_run(checkpoint: Path, record: Mapping[str, Any], optimizer: str, frozen: Mapping[str, Any]) -> None:
    """Raises CheckpointError if the checkpoint has another optimizer or other frozen weights than this run."""
    if optimizer != record["optimizer"]:
        raise CheckpointError(
            f"{checkpoint}: its optimizer is {record['optimizer']}, not {optimizer}; give the same --optimizer"
        )
    saved = record["frozen"]
    different = sorted(name for name in saved.keys() | frozen.keys() if saved.get(name) != frozen.get(name))
    if different:
        raise CheckpointError(
            f"{checkpoint}: was trained with other frozen weights: {shortened(different)}; give the same --model, "
            "--revision, --dtype and --lora options"
        )


def check_tensors_match(
    checkpoint: Path, stored: Mapping[str, TensorStorageMetadata], expected: Mapping[str, Tensor]
) -> None:
    """Raises CheckpointError if names, shapes or dtypes differ. expected: the tensors of this run, which may go on
    without the running norm of one with updates in the backward pass."""
    saved = {name: entry for name, entry in stored.items() if not name.startswith("rank-")}
    if RUNNING_NORM not in expected:
        saved.pop(RUNNING_NORM, None)
    both = {name: (saved[name], expected[name]) for name in expected if name in saved}
    faults = {
        "missing": [name for name in expected if name not in saved],
        "unexpected": [name for name in saved if name not in expected],
        "misshapen": [
            f"{name} is {list(entry.size)} instead of {list(x.shape)}"
            for name, (entry, x) in both.items()
            if entry.size != x.shape
        ],
        "in another dtype": [
            f"{name} is {entry.properties.dtype} instead of {x.dtype}"
            for name, (entry, x) in both.items()
            if entry.properties.dtype != x.dtype
        ],
    }
    found = [f"{len(names)} {fault}: {shortened(names)}" for fault, names in faults.items() if names]
    if found:
        raise CheckpointError(
            f"{checkpoint}: does not fit this run: {'; '.join(found)}; give the settings it was saved with"
        )
