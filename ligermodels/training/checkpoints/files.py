"""The files of a checkpoint: one safetensors file per rank, training.json, and manifest.json with the hash of each.

They are written and read through torch.distributed.checkpoint in its Hugging Face format: safetensors files whose
headers record the offset of each shard. A checkpoint can therefore be read on any number of ranks, and nothing is
pickled. A checkpoint is written atomically: its folder gets its final name after all files are synced to the disk.
Knows files and tensors by name.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageWriter
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, SUFFIX
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ligermodels.errors import CheckpointError
from ligermodels.weights.files import read_header
from ligermodels.weights.reading import DOWNLOAD_AGAIN, open_for_reading, read_json, safe_file
from ligermodels.weights.writing import Entry, commit, remove_path, sync, write_json, write_safetensors

MANIFEST, RECORD = "manifest.json", "training.json"
FORMAT = 1
TRAINING_FIELDS = {"progress": dict, "settings": dict, "ranks": int, "device": str, "optimizer": str, "frozen": dict}
TEMPORARY = ".tmp"
STEP = re.compile(r"step-(\d{6,})")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def committed_steps(folder: Path) -> list[Path]:
    """Returns the folders of the complete checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if STEP.fullmatch(path.name)]
    return sorted(found, key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def superseded(folder: Path, keep: int, protected: int | None) -> list[Path]:
    """Returns the complete checkpoints that are neither among the newest `keep` nor that of the step `protected`."""
    return [path for path in committed_steps(folder)[:-keep] if checkpoint_step(path) != protected]


def remove_checkpoint(checkpoint: Path) -> None:
    """Renames a checkpoint to a temporary name, then removes it: a partly removed one never has a final name."""
    temporary = checkpoint.with_name(checkpoint.name + TEMPORARY)
    checkpoint.rename(temporary)
    remove_path(temporary)


def remove_unfinished(folder: Path) -> None:
    """Removes the temporary folders that killed runs have left, and whatever else has such a name."""
    for path in folder.glob(f"step-*{TEMPORARY}"):
        remove_path(path)


class HostCopyPlanner(DefaultSavePlanner):
    """Plans a save from the model's tensors, and reads their values from copies in host memory."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.copies[index.fqn]


class CheckpointWriter(HuggingFaceStorageWriter):
    """Writes a checkpoint to a temporary folder. When all ranks have written, rank 0 renames it to its final name.

    The base class would copy the tensors twice in memory, which blocks the training thread for about one second per
    GiB. This class writes them to the file without a copy.
    keep, protected: `finish` removes the checkpoints that are `superseded` then.
    """

    def __init__(self, folder: Path, record: Mapping[str, Any], keep: int, protected: int | None = None) -> None:
        self.folder, self.record, self.keep, self.protected = folder, record, keep, protected
        self.temporary = folder.with_name(folder.name + TEMPORARY)
        super().__init__(str(self.temporary), save_distributed=True)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        step = checkpoint_step(self.folder)
        newer = [path for path in committed_steps(self.folder.parent) if checkpoint_step(path) >= step]
        if is_coordinator and newer:
            raise CheckpointError(
                f"{newer[-1]}: belongs to another run; continue that run with --resume, or choose another --output"
            )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file = self.temporary / f"rank-{plan.storage_data['shard_index'] - 1:05d}{SUFFIX}"
        chunks = {item.index.fqn: item.tensor_data.chunk for item in plan.items if item.tensor_data}
        tensors = cast(list[Tensor], [planner.resolve_data(item) for item in plan.items])
        entries = [Entry(name, x.dtype, tuple(x.shape)) for name, x in zip(chunks, tensors, strict=True)]
        offsets = {name: {SAVED_OFFSETS_KEY: list(chunk.offsets)} for name, chunk in chunks.items()}
        write_safetensors(file, entries, ([x] for x in tensors), {CUSTOM_METADATA_KEY: json.dumps(offsets)})
        sync(file)
        written = WriteResult(MetadataIndex(file.name), file.stat().st_size, manifest_entry(file))
        future: Future[list[WriteResult]] = Future()
        future.set_result([written])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {written.index.fqn: written.storage_data for result in results for written in result}
        absent = [name for name in files if not (self.temporary / name).exists()]
        if absent:
            raise CheckpointError(
                f"{self.folder}: rank 0 cannot see {', '.join(absent)}; choose a folder that all hosts share"
            )
        write_json(self.temporary / RECORD, self.record)
        write_json(self.temporary / MANIFEST, {"files": files | {RECORD: manifest_entry(self.temporary / RECORD)}})
        commit(self.temporary, self.folder)
        for old in superseded(self.folder.parent, self.keep, self.protected):
            remove_checkpoint(old)


def manifest_entry(file: Path) -> dict[str, Any]:
    """Returns the size and the SHA-256 of a file, as the manifest stores them."""
    with open_for_reading(file) as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Returns the size and the hash of every file of a checkpoint.

    Raises CheckpointError if the manifest is unreadable, a file is missing, or the folder has a file that the manifest
    does not list.
    """
    file = checkpoint / MANIFEST
    try:
        files = read_json(safe_file(checkpoint, MANIFEST)).get("files")
    except CheckpointError as error:
        fault = str(error).removesuffix(f"; {DOWNLOAD_AGAIN}")
        raise CheckpointError(f"{fault}; {fallback_hint(checkpoint)}") from error
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise CheckpointError(f"{file}: files is not an object of objects; {fallback_hint(checkpoint)}")
    present = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
    for name in sorted(present ^ files.keys()):
        fault = "is not in the manifest" if name in present else "is missing"
        raise CheckpointError(f"{checkpoint / name}: {fault}; {fallback_hint(checkpoint)}")
    return files


def verify_files(checkpoint: Path, rank: int, ranks: int) -> None:
    """Checks the names of all files against the manifest, and the hashes of this rank's part of the files.

    Raises CheckpointError, which names the file.
    """
    manifest = read_manifest(checkpoint)
    for name in sorted(manifest)[rank::ranks]:
        file = verified_file(checkpoint, name, manifest)
        if file.suffix == SUFFIX:
            read_header(file)


def verified_file(checkpoint: Path, name: str, manifest: Mapping[str, Any]) -> Path:
    """Returns the path of a file. Raises CheckpointError if its size or its hash differs from the manifest."""
    file = safe_file(checkpoint, name)
    if manifest_entry(file) != manifest.get(name):
        raise CheckpointError(f"{file}: damaged: its bytes are not those written; {fallback_hint(checkpoint)}")
    return file


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Returns training.json: progress, settings, format version. Raises CheckpointError, also for a missing field."""
    file = verified_file(checkpoint, RECORD, read_manifest(checkpoint))
    record = read_json(file)
    if record.get("format") != FORMAT:
        raise CheckpointError(
            f"{file}: format is {record.get('format')!r}, but this version reads {FORMAT}; use that which wrote it"
        )
    for name, kind in TRAINING_FIELDS.items():
        if type(record.get(name)) is not kind:
            raise damaged_field(file, name, record.get(name))
    return record


def damaged_field(file: Path, name: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{file}: field {name} is {value!r}, which no run writes; {fallback_hint(file.parent)}")


def fallback_hint(checkpoint: Path) -> str:
    """Says how to continue without a checkpoint that cannot be used."""
    step = checkpoint_step(checkpoint)
    older = [path for path in committed_steps(checkpoint.parent) if checkpoint_step(path) < step]
    return f"remove {checkpoint} to resume from {older[-1].name if older else 'the beginning'}"
