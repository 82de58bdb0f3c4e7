"""Checkpoints of a run: saved in the background, written atomically, restored for a bit-exact resume.

    checkpoints/step-000500/rank-00000.safetensors …    trained weights, optimizer state, random number generators
                            training.json               progress, settings, fingerprints of the frozen weights
                            manifest.json               size and SHA-256 of each file

Each rank writes its own shards into a folder that all ranks share. Resume is bit-exact on the same number of ranks. On
another number of ranks the weights, the optimizer state and the data order are exact, and random numbers start anew.
This file saves and restores, and compares a checkpoint with the run that restores it. state.py collects the tensors;
files.py defines the files.
"""

import dataclasses
import errno
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ligermodels.distributed import is_first, rank, same_on_all, world_size
from ligermodels.errors import CheckpointError
from ligermodels.training.checkpoints import files, state
from ligermodels.training.checkpoints.state import RUNNING_NORM
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.weights.files import shortened
from ligermodels.weights.sharding import reshard
from ligermodels.weights.writing import write_error

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # errors that removing older checkpoints can solve

# A run without torchrun is a single process; the library would warn about it at every save.
warnings.filterwarnings("ignore", "torch.distributed is disabled", module=r"torch\.distributed\.checkpoint")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run.

    step: completed steps. rows: rows taken from the data, which is the data position. tokens: positions trained on,
    padding included. seconds: training time.
    """

    step: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Checkpoints:
    """The checkpoints in a folder. A context manager; every rank creates one while the process group exists.

    keep: how many of the newest checkpoints stay, at least 1. settings: the run's settings as JSON values; each
    checkpoint stores them. protected: the step of a checkpoint that stays although it is older; set by the caller, to
    the same on all ranks. objective: what it keeps is saved and restored too; None where nothing is.
    The first save allocates host memory for this rank's weights and optimizer state (pinned if they are on a GPU).
    Later saves reuse this memory and are faster.
    """

    def __init__(
        self, folder: Path, keep: int, settings: Mapping[str, Any], objective: state.Keeper | None = None
    ) -> None:
        self.folder, self.keep, self.settings = folder, keep, settings
        self.objective = objective or state.NothingKept()
        self.group = distributed.new_group(backend="gloo") if distributed.is_initialized() else None
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.copies = state.HostCopies()
        self.thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self.running: futures.Future[None] | None = None
        self.frozen: dict[str, list[Any]] | None = None  # computed once: frozen weights do not change during a run
        self.saved: Path | None = None  # the newest checkpoint of this process: it is committed, or being written
        self.saved_at = time.monotonic()
        self.protected: int | None = None
        if is_first():
            files.remove_unfinished(folder)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.thread.shutdown()  # also when the run fails: a save in progress is completed
        if error is None:
            self.wait()

    @property
    def failed(self) -> bool:
        """Whether the last save is known to have failed on this rank. `wait` then raises on all ranks."""
        return self.running is not None and self.running.done() and self.running.exception() is not None

    @property
    def minutes_since_save(self) -> float:
        """Minutes since the last save began, or since this object was made; not the same on all ranks."""
        return (time.monotonic() - self.saved_at) / 60

    def wait(self) -> None:
        """Waits until the last save is committed. Every rank calls it.

        Raises CheckpointError on all ranks if the save failed. The checkpoints before it are unchanged.
        """
        running, self.running = self.running, None
        if running is not None:
            saved, self.saved = self.saved, None  # a save that failed may be repeated
            running.result()
            self.saved = saved

    def save(self, model: nn.Module, optimizer: AdamW, progress: Progress) -> None:
        """Copies the run's state to host memory, and starts to write it in the background. Every rank calls it.

        Waits for the previous save, and raises its error if it failed. If this step is saved, or being written, nothing
        is done.
        """
        folder = files.step_folder(self.folder, progress.step)
        if folder == self.saved:
            return
        self.wait()
        self.saved, self.saved_at = folder, time.monotonic()
        reshard(model)
        if self.frozen is None:
            self.frozen = state.frozen_weights(model)
        weights, optimizer_state = state.trained_weights(model), state.optimizer_state(model, optimizer)
        kept = {state.own_prefix() + name: tensor for name, tensor in self.objective.state().items()}
        tensors = weights | optimizer_state | state.objective_tensors(self.objective) | kept
        tensors |= state.random_states(self.device)
        record = {
            "format": files.FORMAT, "progress": dataclasses.asdict(progress), "settings": dict(self.settings),
            "ranks": world_size(), "device": self.device.type, "optimizer": type(optimizer).__name__,
            "frozen": self.frozen,
        }  # fmt: skip
        copies = self.copies.copy(tensors)
        writer = files.CheckpointWriter(folder, record, self.keep, self.protected)
        self.running = self.thread.submit(self.write, writer, tensors, copies)

    def write(self, writer: files.CheckpointWriter, tensors: dict[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """Writes and commits a checkpoint. Runs in the background thread."""
        try:
            try:
                self.write_once(writer, tensors, copies)
            except OSError as error:
                if not self.make_room(error):
                    raise
                self.write_once(writer, tensors, copies)
        except OSError as error:
            raise self.save_error(writer.folder, error) from error

    def write_once(
        self, writer: files.CheckpointWriter, tensors: dict[str, Tensor], copies: Mapping[str, Tensor]
    ) -> None:
        """Leaves no files if it fails. If one rank fails, the library raises the same error on all ranks."""
        try:
            dcp.save(tensors, storage_writer=writer, planner=files.HostCopyPlanner(copies), **of_ranks(self.group))
        except CheckpointException as failure:
            if is_first():
                shutil.rmtree(writer.temporary, ignore_errors=True)
            raise first_failure(failure) from failure

    def make_room(self, error: OSError) -> bool:
        """If the disk is full, removes the checkpoints that the new one will replace, but never the newest one.

        Returns whether it removed any.
        """
        if error.errno not in DISK_FULL:
            return False
        kept = max(1, self.keep - 1)
        replaced = same_on_all(files.superseded, self.folder, kept, self.protected, group=self.group)
        same_on_all(self.remove, replaced, group=self.group)
        return bool(replaced)

    def remove(self, checkpoints: Iterable[Path]) -> None:
        if is_first():
            for checkpoint in checkpoints:
                files.remove_checkpoint(checkpoint)

    def save_error(self, folder: Path, error: OSError) -> CheckpointError:
        """The error for a save that failed. It names the checkpoint from which the run can be resumed."""
        latest = self.latest()
        if latest:
            return write_error(folder, error, f"then --resume continues from {latest.name}")
        return write_error(folder, error, "and start again: there is no other checkpoint")

    def latest(self) -> Path | None:
        """Returns the folder of the newest checkpoint; None if there is none."""
        return next(reversed(files.committed_steps(self.folder)), None)

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, in order."""
        return [files.checkpoint_step(checkpoint) for checkpoint in files.committed_steps(self.folder)]

    def saved_settings(self) -> dict[str, Any] | None:
        """Returns the settings stored in the newest checkpoint; None if there is none.

        Raises CheckpointError if the checkpoint is damaged.
        """
        latest = self.latest()
        return None if latest is None else files.read_record(latest)["settings"]

    def restore(self, model: nn.Module, optimizer: AdamW, say: Callable[[str], Any]) -> Progress | None:
        """Loads the newest checkpoint into model and optimizer. Every rank calls it.

        model: in memory, with its frozen weights loaded. say: receives one line if the number of ranks or the device
        type differs, so that the resume is not bit-exact. Returns the progress, or None if there is no checkpoint.
        Raises CheckpointError on all ranks, before anything is changed, if a file is damaged, the frozen weights or the
        optimizer differ from those of the run, or names, shapes or dtypes of tensors differ.
        """
        checkpoint = same_on_all(self.latest, group=self.group)
        if checkpoint is None:
            return None
        reshard(model)
        record = self.verified_record(checkpoint)
        self.frozen = state.frozen_weights(model)
        check_same_run(checkpoint, record, type(optimizer).__name__, self.frozen)
        progress = read_progress(checkpoint, record["progress"])
        exact = record["ranks"] == world_size() and record["device"] == self.device.type
        random = state.random_states(self.device) if exact else {}
        kept = self.kept_of_objective(checkpoint) if exact else {}
        shared = state.trained_weights(model) | state.optimizer_state(model, optimizer)
        tensors = shared | state.objective_tensors(self.objective)
        load_tensors(checkpoint, tensors, random | kept, group=self.group)
        self.objective.restore({name.removeprefix(state.own_prefix()): tensor for name, tensor in kept.items()})
        if exact:
            state.set_random_states(random, self.device)
        else:
            say(
                f"{checkpoint.name} was saved on {record['ranks']} x {record['device']}: weights, optimizer state and "
                f"data order are exact on {world_size()} x {self.device.type}, random numbers (dropout) start anew"
            )
        self.saved = checkpoint
        return progress

    def restore_weights(self, model: nn.Module, step: int) -> None:
        """Loads the trained weights of one step's checkpoint, of this run, into the model. Every rank calls it.

        Raises CheckpointError on all ranks, before anything is changed, if a file is missing or damaged.
        """
        self.wait()
        checkpoint = files.step_folder(self.folder, step)
        self.verified_record(checkpoint)
        reshard(model)
        load_tensors(checkpoint, state.trained_weights(model), part="weights.", group=self.group)

    def kept_of_objective(self, checkpoint: Path) -> dict[str, Tensor]:
        """Tensors in host memory for what the objective of this rank had saved."""
        stored = HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in stored.items()
            if name.startswith(state.own_prefix()) and isinstance(entry, TensorStorageMetadata)
        }

    def verified_record(self, checkpoint: Path) -> dict[str, Any]:
        """Returns training.json of a checkpoint, after all ranks together have checked the hashes of its files."""
        same_on_all(files.verify_files, checkpoint, rank(), world_size(), group=self.group)
        return files.read_record(checkpoint)


def load_tensors(
    checkpoint: Path, tensors: dict[str, Tensor], random: Mapping[str, Tensor] | None = None, *, part: str = "",
    group: distributed.ProcessGroup | None = None,
) -> None:  # fmt: skip
    """Fills tensors from a checkpoint, whose tensors with names that begin with `part` they must be.

    random: states of this rank's random number generators, which are filled too. group: of all ranks that load. Raises
    CheckpointError on all of them.
    """
    reader = HuggingFaceStorageReader(str(checkpoint))
    stored = {name: x for name, x in reader.read_metadata().state_dict_metadata.items() if name.startswith(part)}
    same_on_all(check_tensors_match, checkpoint, stored, tensors, group=group)
    try:
        dcp.load(tensors | dict(random or {}), storage_reader=reader, **of_ranks(group))
    except CheckpointException as failure:
        raise read_error(checkpoint, first_failure(failure)) from failure


def of_ranks(group: distributed.ProcessGroup | None) -> dict[str, Any]:
    """The arguments by which torch.distributed.checkpoint knows the ranks."""
    return {"process_group": group, "no_dist": group is None}


def read_progress(checkpoint: Path, values: Mapping[str, Any]) -> Progress:
    """The progress stored in a checkpoint. Raises CheckpointError unless it has all fields and is that of its step."""
    for field in dataclasses.fields(Progress):
        value = values.get(field.name)
        if not isinstance(value, field.type) or isinstance(value, bool) or value < 0:  # type: ignore[arg-type]
            raise files.damaged_field(checkpoint / files.RECORD, f"progress.{field.name}", value)
    if values.keys() > vars(Progress()).keys() or values["step"] != files.checkpoint_step(checkpoint):
        raise files.damaged_field(checkpoint / files.RECORD, "progress", dict(values))
    return Progress(**values)


def first_failure(failure: CheckpointException) -> BaseException:
    """Returns the error of the first rank that failed."""
    error, _ = next(iter(failure.failures.values()))
    return error


def read_error(checkpoint: Path, error: BaseException) -> BaseException:
    """Turns an OSError into a CheckpointError that says how to continue; returns other errors unchanged."""
    if not isinstance(error, OSError):
        return error
    return CheckpointError(
        f"{checkpoint}: cannot be read: {error.strerror or error}; {files.fallback_hint(checkpoint)}"
    )


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
