"""Folders that `datasets` writes with save_to_disk, and their Arrow files, as records.

A folder has state.json, which names its Arrow files, or dataset_dict.json, which names its splits, each such a folder.
pyarrow reads the files, memory-mapped and one batch at a time, because any of them may be hostile: nothing else in the
folder is used. Compressed batches, which `datasets` does not write, are refused: a small one may stand for gigabytes.
pyarrow is imported on first use. This module knows nothing about tokens.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError, first_line
from ligermodels.optional_packages import import_package
from ligermodels.training.data.formats.progress import ReadingProgress
from ligermodels.training.data.formats.record_formats import RecordFormats
from ligermodels.training.data.formats.records import BadLines, Record
from ligermodels.training.data.formats.streams import refuse_placeholder
from ligermodels.training.data.formats.tables import TableRows, bounded_rows, is_json, read_table, record_columns
from ligermodels.weights.reading import read_json, refuse_irregular, safe_file

SPLITS_FILE, STATE_FILE, INFO_FILE = "dataset_dict.json", "state.json", "dataset_info.json"
DEFAULT_SPLIT = "train"
SAVE_AGAIN = "save it again with save_to_disk"
# The numbers of fields in the flatbuffers of an Arrow message.
MESSAGE_HEADER, DICTIONARY_DATA, BATCH_COMPRESSION = 2, 1, 3


def saved_dataset_files(name: str) -> list[Path] | None:
    """The Arrow files of FOLDER or FOLDER:SPLIT in order; None if there is no such folder of save_to_disk.

    The default split is train. Raises InputError naming the folder or its file.
    """
    folder, split = Path(name), ""
    if not is_saved_dataset(folder):
        before, _, split = name.rpartition(":")
        folder = Path(before)
        if not before or not is_saved_dataset(folder):
            return None
    if not (folder / SPLITS_FILE).is_file():
        if split:
            raise InputError(f"--data {name}: {folder} is a data set without splits; leave out :{split}")
        return arrow_files(folder)
    splits = read_json(folder / SPLITS_FILE).get("splits")
    if not isinstance(splits, list) or (split or DEFAULT_SPLIT) not in splits:
        listed = ", ".join(map(str, splits)) if isinstance(splits, list) else "none"
        remedy = f"give one as {folder}:SPLIT"
        raise InputError(f"--data {name}: has no split {split or DEFAULT_SPLIT}; its splits are {listed}; {remedy}")
    return arrow_files(folder / (split or DEFAULT_SPLIT))


def is_saved_dataset(folder: Path) -> bool:
    return (folder / SPLITS_FILE).is_file() or all((folder / name).is_file() for name in (STATE_FILE, INFO_FILE))


def arrow_files(folder: Path) -> list[Path]:
    """Only these, because `datasets` leaves files of its cache in the same folder."""
    state = read_json(folder / STATE_FILE)
    if state.get("_indices_data_files"):
        raise InputError(f"{folder / STATE_FILE}: an old version of datasets wrote indices of rows; {SAVE_AGAIN}")
    files = state.get("_data_files")
    given = [file.get("filename") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    names = [name for name in given if isinstance(name, str) and name.endswith(".arrow")]
    if not names or len(names) < len(given):
        raise InputError(f"{folder / STATE_FILE}: field _data_files must name .arrow files; {SAVE_AGAIN}")
    return [safe_file(folder, name) for name in names]


def read_arrow(file: Path, fields: RecordFormats, bad_lines: BadLines, progress: ReadingProgress) -> Iterator[Record]:
    return read_table(arrow_batches(file, fields, progress), str(file), fields, bad_lines)


def arrow_batches(file: Path, fields: RecordFormats, progress: ReadingProgress) -> Iterator[TableRows]:
    pyarrow = import_package("pyarrow", str(file))
    refuse_irregular(file)
    try:
        with file.open("rb") as stream:
            refuse_placeholder(file, stream)
        with pyarrow.memory_map(str(file)) as source:
            refuse_compressed(source, file)
            source.seek(0)
            progress.follow(source.tell)
            batches, done = pyarrow.ipc.open_stream(source), 0
            names = batches.schema.names
            columns = [names.index(name) for name in record_columns(names, f"{file}:", fields)]
            for column in columns:
                refuse_type(batches.schema.types[column], f"{file}: column {names[column]}")
            for batch in batches:
                selected = batch.select(columns)
                selected.validate(full=True)  # pyarrow follows offsets in a file wherever they lead
                for part in bounded_rows(selected, str(file), done):
                    yield part
                    done += len(part)
    except (OSError, pyarrow.ArrowException) as error:
        problem = "not an Arrow stream, as save_to_disk writes it, that pyarrow can read"
        raise InputError(f"{file}: {problem}: {first_line(error)}") from error


def refuse_type(kind: Any, place: str) -> None:
    """Raises InputError for an Arrow type whose values may take far more memory than `decoded_bytes` counts."""
    types = import_package("pyarrow", place).types
    plain = (
        types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_string, types.is_large_string,
        types.is_binary, types.is_large_binary,
    )  # fmt: skip
    if types.is_struct(kind):
        for field in kind:
            refuse_type(field.type, f"{place}.{field.name}")
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_dictionary(kind):
        refuse_type(kind.value_type, place)
    elif not (is_json(kind) or any(is_plain(kind) for is_plain in plain)):
        raise InputError(f"{place}: has the Arrow type {kind}; must be text or bytes, or lists or objects of them")


def refuse_compressed(source: Any, file: Path) -> None:
    """Raises InputError if a batch is compressed. source: the open file."""
    ipc = import_package("pyarrow", str(file)).ipc
    for number, message in enumerate(ipc.MessageReader.open_stream(source)):
        if message.type != "schema" and is_compressed(message.metadata.to_pybytes(), message.type):
            raise InputError(f"{file}: message {number} is compressed, which datasets does not write; {SAVE_AGAIN}")


def is_compressed(metadata: bytes, kind: str) -> bool:
    """Whether a message with batches has compressed buffers. metadata: its flatbuffer, which pyarrow has verified."""

    def number(code: str, place: int) -> int:
        return struct.unpack_from(code, metadata, place)[0]

    def field(table: int, index: int) -> int:
        """The place of a field in a table; 0 if the table does not have it."""
        layout = table - number("<i", table)
        entry = 4 + 2 * index
        offset = number("<H", layout + entry) if entry < number("<H", layout) else 0
        return table + offset if offset else 0

    def child(table: int, index: int) -> int:
        place = field(table, index)
        return place + number("<I", place)

    batch = child(number("<I", 0), MESSAGE_HEADER)
    if kind == "dictionary":
        batch = child(batch, DICTIONARY_DATA)
    return bool(field(batch, BATCH_COMPRESSION))
