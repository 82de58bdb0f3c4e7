"""The files of a checkpoint: one of tensors a rank, training.json, and manifest.json with the hash of each.

Written and read through torch.distributed.checkpoint in its Hugging Face format, which is safetensors with the place of
each part in the header: any number of ranks reads what any other wrote, and nothing is ever pickled. A folder has its
final name only when all of it is on the disk. Knows files and tensors by name; no model.
"""

import hashlib
import json
import re
import shutil
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
from ligermodels.weights.files import DOWNLOAD_AGAIN, open_for_reading, read_header, read_json, safe_file
from ligermodels.weights.writing import Entry, commit, sync, write_json, write_safetensors

MANIFEST, RECORD = "manifest.json", "training.json"
FORMAT = 1
TEMPORARY = ".tmp"
STEP = re.compile(r"step-(\d{6,})")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def committed_steps(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if STEP.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def remove(checkpoint: Path) -> None:
    """A checkpoint, renamed before, so that none is ever there in part."""
    temporary = checkpoint.with_name(checkpoint.name + TEMPORARY)
    checkpoint.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """What runs that were killed have left behind."""
    for path in folder.glob(f"step-*{TEMPORARY}"):
        shutil.rmtree(path, ignore_errors=True)


class CopiesPlanner(DefaultSavePlanner):
    """Plans by the tensors of the model, and takes their values from copies on the host."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.copies[index.fqn]


class Writer(HuggingFaceStorageWriter):
    """Writes a checkpoint beside its final name; the last step of rank 0, which sees what all ranks wrote, commits it.

    What the library would do with the tensors instead is to copy them twice in memory, which holds up the thread that
    trains for about a second a GiB; here they go to the file from where they are.
    """

    def __init__(self, folder: Path, record: Mapping[str, Any], keep: int) -> None:
        self.folder, self.record, self.keep = folder, record, keep
        self.temporary = folder.with_name(folder.name + TEMPORARY)
        super().__init__(str(self.temporary), save_distributed=True)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        newer = [path for path in committed_steps(self.folder.parent) if step_of(path) >= step_of(self.folder)]
        if is_coordinator and newer:
            raise CheckpointError(
                f"{newer[-1]}: is of another run; go on from it by --resume, or choose another --output"
            )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file = self.temporary / f"rank-{plan.storage_data['shard_index'] - 1:05d}{SUFFIX}"
        chunks = {item.index.fqn: item.tensor_data.chunk for item in plan.items if item.tensor_data}
        tensors = cast(list[Tensor], [planner.resolve_data(item) for item in plan.items])
        entries = [Entry(name, x.dtype, tuple(x.shape)) for name, x in zip(chunks, tensors, strict=True)]
        offsets = {name: {SAVED_OFFSETS_KEY: list(chunk.offsets)} for name, chunk in chunks.items()}
        write_safetensors(file, entries, ([x] for x in tensors), {CUSTOM_METADATA_KEY: json.dumps(offsets)})
        sync(file)
        written = WriteResult(MetadataIndex(file.name), file.stat().st_size, described(file))
        future: Future[list[WriteResult]] = Future()
        future.set_result([written])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {written.index.fqn: written.storage_data for result in results for written in result}
        absent = [name for name in files if not (self.temporary / name).exists()]
        if absent:
            raise CheckpointError(
                f"{self.folder}: rank 0 does not see {', '.join(absent)}; choose a folder that all hosts share"
            )
        write_json(self.temporary / RECORD, self.record)
        write_json(self.temporary / MANIFEST, {"files": files | {RECORD: described(self.temporary / RECORD)}})
        commit(self.temporary, self.folder)
        for old in committed_steps(self.folder.parent)[: -self.keep]:
            remove(old)


def described(file: Path) -> dict[str, Any]:
    """A file as the manifest has it."""
    with open_for_reading(file) as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """The files of a checkpoint with their sizes and hashes; all are there, and no other. Raises CheckpointError."""
    file = checkpoint / MANIFEST
    try:
        files = read_json(safe_file(checkpoint, MANIFEST)).get("files")
    except CheckpointError as error:
        fault = str(error).removesuffix(f"; {DOWNLOAD_AGAIN}")
        raise CheckpointError(f"{fault}; {instead_of(checkpoint)}") from error
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise CheckpointError(f"{file}: files is not an object of objects; {instead_of(checkpoint)}")
    there = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
    for name in sorted(there ^ files.keys()):
        fault = "is not in its manifest" if name in there else "is missing"
        raise CheckpointError(f"{checkpoint / name}: {fault}; {instead_of(checkpoint)}")
    return files


def verify(checkpoint: Path, share: int, shares: int) -> None:
    """Compares every so many-th file with its hash, and the names of all. Raises CheckpointError naming the file."""
    manifest = read_manifest(checkpoint)
    for name in sorted(manifest)[share::shares]:
        file = verified(checkpoint, name, manifest)
        if file.suffix == SUFFIX:
            read_header(file)


def verified(checkpoint: Path, name: str, manifest: Mapping[str, Any]) -> Path:
    file = safe_file(checkpoint, name)
    if described(file) != manifest.get(name):
        raise CheckpointError(f"{file}: damaged: not the bytes that were written; {instead_of(checkpoint)}")
    return file


def read_record(checkpoint: Path) -> dict[str, Any]:
    """What is known of a checkpoint besides its tensors. Raises CheckpointError."""
    file = verified(checkpoint, RECORD, read_manifest(checkpoint))
    record = read_json(file)
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{file}: format is {record.get('format')!r}, this version reads {FORMAT}; use that one")
    return record


def instead_of(checkpoint: Path) -> str:
    """The remedy for a checkpoint that cannot be used."""
    older = [path for path in committed_steps(checkpoint.parent) if step_of(path) < step_of(checkpoint)]
    return f"remove {checkpoint} to go on from {older[-1].name if older else 'the beginning'}"
