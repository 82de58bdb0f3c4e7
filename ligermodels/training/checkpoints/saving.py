"""Checkpoints of a run: saved while training goes on, committed whole or not at all, restored exactly.

    checkpoints/step-000500/rank-00000.safetensors …    what is trained, the optimizer's state, random numbers
                            training.json               progress, settings, what frozen weights are known by
                            manifest.json               size and SHA-256 of each file

Ranks that share a folder each write their part. On the same number of ranks a run goes on to the bit; on another,
weights, optimizer and data order are exact. Knows what is to be kept and when; state.py knows how to get it, files.py
how it lies on disk.
"""

import dataclasses
import errno
import shutil
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
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.weights.files import shortened
from ligermodels.weights.sharding import reshard
from ligermodels.weights.writing import write_error

FULL = (errno.ENOSPC, errno.EDQUOT)  # what less on the disk helps against

# One process is all there is to a run without torchrun; the library warns of it each time.
warnings.filterwarnings("ignore", "torch.distributed is disabled", module=r"torch\.distributed\.checkpoint")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is. step: updates made; rows: those taken from the data, its cursor; seconds: of training."""

    step: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Checkpoints:
    """The checkpoints in a folder. A context manager, within the process group's life; every rank makes it.

    keep: how many of the newest stay, at least 1. settings: of the run, as JSON values; kept in each checkpoint.
    The first save takes as much host memory, pinned for a GPU, as a rank holds of weights and optimizer state; the next
    ones use it again, and are faster.
    """

    def __init__(self, folder: Path, keep: int, settings: Mapping[str, Any]) -> None:
        self.folder, self.keep, self.settings = folder, keep, settings
        self.group = distributed.new_group(backend="gloo") if distributed.is_initialized() else None
        self.ranks: dict[str, Any] = {"process_group": self.group, "no_dist": self.group is None}
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.copies = state.HostCopies()
        self.thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self.running: futures.Future[None] | None = None
        self.frozen: dict[str, list[Any]] | None = None  # they do not change: known once, known for the run
        self.committed: Path | None = None
        if is_first():
            files.remove_unfinished(folder)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.thread.shutdown()  # also when the run fails: what has been copied is worth having
        if error is None:
            self.wait()

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the last save failed. Once another does too, `wait` raises on all."""
        return self.running is not None and self.running.done() and self.running.exception() is not None

    def wait(self) -> None:
        """Returns when the last save is committed. Every rank calls.

        Raises CheckpointError on all of them where it could not be written; the checkpoints before it are untouched.
        """
        running, self.running = self.running, None
        if running is not None:
            running.result()

    def save(self, model: nn.Module, optimizer: AdamW, progress: Progress) -> None:
        """Takes a copy of the run's state, to be written and committed in the background. Every rank calls.

        Waits for the save before it, and raises what that raised. A step that is committed already is left as it is.
        """
        self.wait()
        folder = files.step_folder(self.folder, progress.step)
        if folder == self.committed:
            return
        reshard(model)
        if self.frozen is None:
            self.frozen = state.frozen_weights(model)
        weights, optimizer_state = state.trained_weights(model), state.optimizer_state(model, optimizer)
        tensors = weights | optimizer_state | state.random_numbers(self.device)
        record = {
            "format": files.FORMAT,
            "progress": dataclasses.asdict(progress),
            "settings": dict(self.settings),
            "ranks": world_size(),
            "device": self.device.type,
            "optimizer": type(optimizer).__name__,
            "frozen": self.frozen,
        }
        copies = self.copies.of(tensors)
        self.running = self.thread.submit(self.write, files.Writer(folder, record, self.keep), tensors, copies)

    def write(self, writer: files.Writer, tensors: dict[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """In the thread."""
        try:
            try:
                self.write_once(writer, tensors, copies)
            except OSError as error:
                if not self.makes_room(error):
                    raise
                self.write_once(writer, tensors, copies)
        except OSError as error:
            raise self.not_saved(writer.folder, error) from error
        self.committed = writer.folder

    def write_once(self, writer: files.Writer, tensors: dict[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """Leaves nothing where it fails. The library sees to it that all ranks fail where one does, of the same."""
        try:
            dcp.save(tensors, storage_writer=writer, planner=files.CopiesPlanner(copies), **self.ranks)
        except CheckpointException as failure:
            if is_first():
                shutil.rmtree(writer.temporary, ignore_errors=True)
            raise cause(failure) from failure

    def makes_room(self, error: OSError) -> bool:
        """Where the disk is full, removes those that the one being saved takes the place of, but never the newest.
        Whether there were any."""
        if error.errno not in FULL:
            return False
        replaced = same_on_all(files.committed_steps, self.folder, group=self.group)[: -max(1, self.keep - 1)]
        same_on_all(self.remove, replaced, group=self.group)
        return bool(replaced)

    def remove(self, checkpoints: Iterable[Path]) -> None:
        if is_first():
            for checkpoint in checkpoints:
                files.remove(checkpoint)

    def not_saved(self, folder: Path, error: OSError) -> CheckpointError:
        """With what is left."""
        left = self.latest()
        resumed = f"then --resume goes on from {left.name}" if left else "and begin again: there is no other checkpoint"
        return write_error(folder, error, resumed)

    def latest(self) -> Path | None:
        """The newest checkpoint, if there is one."""
        return next(reversed(files.committed_steps(self.folder)), None)

    def saved_settings(self) -> dict[str, Any] | None:
        """The settings that the newest checkpoint was trained with. Raises CheckpointError where it is damaged."""
        latest = self.latest()
        return None if latest is None else files.read_record(latest)["settings"]

    def restore(self, model: nn.Module, optimizer: AdamW, say: Callable[[str], Any]) -> Progress | None:
        """The run's state of the newest checkpoint, and how far it was; None if there is none. Every rank calls.

        model: in memory, its frozen weights loaded. say: is told, in a line, what is not exact on other ranks.
        Raises CheckpointError on all ranks, before anything is changed, where a file is not the one that was written,
        the frozen weights are not those of the run, the optimizer is another, or names, shapes or dtypes differ.
        """
        checkpoint = same_on_all(self.latest, group=self.group)
        if checkpoint is None:
            return None
        reshard(model)
        same_on_all(files.verify, checkpoint, rank(), world_size(), group=self.group)
        record = files.read_record(checkpoint)
        self.frozen = state.frozen_weights(model)
        refuse_other_run(checkpoint, record, type(optimizer).__name__, self.frozen)
        tensors = state.trained_weights(model) | state.optimizer_state(model, optimizer)
        reader = HuggingFaceStorageReader(str(checkpoint))
        same_on_all(refuse_misfits, checkpoint, reader.read_metadata().state_dict_metadata, tensors, group=self.group)
        exact = record["ranks"] == world_size() and record["device"] == self.device.type
        random = state.random_numbers(self.device) if exact else {}
        try:
            dcp.load(tensors | random, storage_reader=reader, **self.ranks)
        except CheckpointException as failure:
            raise unreadable(checkpoint, cause(failure)) from failure
        if exact:
            state.set_random_numbers(random, self.device)
        else:
            say(
                f"{checkpoint.name} is of {record['ranks']} x {record['device']}: weights, optimizer and data order "
                f"are exact on {world_size()} x {self.device.type}, random numbers (dropout) begin anew"
            )
        self.committed = checkpoint
        return Progress(**record["progress"])


def cause(failure: CheckpointException) -> BaseException:
    """Why the first of the ranks that failed did."""
    error, _ = next(iter(failure.failures.values()))
    return error


def unreadable(checkpoint: Path, error: BaseException) -> BaseException:
    if not isinstance(error, OSError):
        return error
    return CheckpointError(f"{checkpoint}: cannot be read: {error.strerror or error}; {files.instead_of(checkpoint)}")


def refuse_other_run(checkpoint: Path, record: Mapping[str, Any], optimizer: str, frozen: Mapping[str, Any]) -> None:
    if optimizer != record["optimizer"]:
        raise CheckpointError(
            f"{checkpoint}: its optimizer is {record['optimizer']}, not {optimizer}; give the same --optimizer"
        )
    then = record["frozen"]
    different = sorted(name for name in then.keys() | frozen.keys() if then.get(name) != frozen.get(name))
    if different:
        raise CheckpointError(
            f"{checkpoint}: was trained over other frozen weights: {shortened(different)}; give the same --model, "
            "--revision, --dtype and --lora options"
        )


def refuse_misfits(checkpoint: Path, stored: Mapping[str, TensorStorageMetadata], wanted: Mapping[str, Tensor]) -> None:
    """wanted: the tensors of this run's model and optimizer."""
    there = {name: kept for name, kept in stored.items() if not name.startswith("rank-")}
    both = {name: (there[name], wanted[name]) for name in wanted if name in there}
    faults = {
        "missing": [name for name in wanted if name not in there],
        "unexpected": [name for name in there if name not in wanted],
        "misshapen": [
            f"{name} is {list(kept.size)} instead of {list(x.shape)}"
            for name, (kept, x) in both.items()
            if kept.size != x.shape
        ],
        "in another dtype": [
            f"{name} is {kept.properties.dtype} instead of {x.dtype}"
            for name, (kept, x) in both.items()
            if kept.properties.dtype != x.dtype
        ],
    }
    found = [f"{len(names)} {fault}: {shortened(names)}" for fault, names in faults.items() if names]
    if found:
        raise CheckpointError(
            f"{checkpoint}: does not fit this run: {'; '.join(found)}; give the settings it was saved with"
        )
