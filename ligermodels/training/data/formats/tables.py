"""Tables as records in bounded batches: parquet files, Arrow files of save_to_disk, data sets of the Hub.

A small file may stand for gigabytes: a dictionary stores a long string once for all rows that have it. Dictionaries
therefore stay encoded until a few rows at a time become Python objects. A process of its own (`parquet_worker.py`),
whose memory is limited, decodes a parquet file. Arrow files are memory-mapped and read one batch at a time, because
any of them may be hostile. Compressed batches, which `datasets` does not write, are refused: a small one may stand for
gigabytes. pyarrow and `datasets` are imported on first use.
"""

import itertools
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ligermodels.errors import InputError, at_place, first_line
from ligermodels.lazy_imports import import_package
from ligermodels.training.data.formats.record_formats import Reading, RecordFormats, parse_record
from ligermodels.training.data.formats.records import Record, parse_json_string
from ligermodels.training.data.formats.streams import refuse_placeholder
from ligermodels.weights.reading import refuse_irregular

TABLE_BATCH_ROWS = 64  # a row may have megabytes
MAX_BATCH_BYTES = 2**26
OBJECT_BYTES = 64  # of a small Python object
JSON_OBJECT_BYTES = 24  # of parsed JSON, at most, for each byte of its text: "[]," is an empty list
JSON_EXTENSION = "arrow.json"

TableRows: TypeAlias = list[dict[str, Any]]
WORKER = Path(__file__).with_name("parquet_worker.py")
WORKER_BYTES = 640 * 2**20  # beyond pyarrow itself; a batch is held by both processes
BATCH_BYTES = 2**27
INVALID_FILE = 1  # the worker's exit status
SAVE_AGAIN = "save it again with save_to_disk"
# The numbers of fields in the flatbuffers of an Arrow message.
MESSAGE_HEADER, DICTIONARY_DATA, BATCH_COMPRESSION = 2, 1, 3
HUB_PREFIX = "hub:"
COLON_OUTSIDE_BRACKETS = re.compile(r":(?![^\[]*\])")


def record_columns(names: Sequence[str], subject: str, fields: RecordFormats) -> list[str]:
    """Returns the columns that records are made of.

    Raises InputError, which begins with `subject`, if they are not enough.
    """
    with at_place(subject):
        fields.refuse_missing(names, "column")
    return fields.columns(names)


def read_table(batches: Iterator[TableRows], place: str, reading: Reading) -> Iterator[Record]:
    calls = (
        ({name: drop_nulls(value) for name, value in row.items()}, f"{place}: row {number}", reading.formats)
        for number, row in enumerate(itertools.chain.from_iterable(batches), 1)
    )
    return reading.bad_lines.usable(parse_record, calls)


def drop_nulls(value: Any) -> Any:
    """Removes null fields within a column: in a column of objects, every object has the fields of all."""
    if isinstance(value, dict):
        return {name: drop_nulls(field) for name, field in value.items() if field is not None}
    return [drop_nulls(entry) for entry in value] if isinstance(value, list) else value


def bounded_rows(batch: Any, place: str, first: int) -> Iterator[TableRows]:
    """Yields the rows of an Arrow batch, a few at a time: at most MAX_BATCH_BYTES as Python objects.

    first: the number of its first row. Raises InputError for a row that has more.
    """
    json_columns = {field.name: field.type for field in batch.schema if JSON_EXTENSION in str(field.type)}
    for start in range(0, batch.num_rows, TABLE_BATCH_ROWS):
        for part in split_large_batch(batch.slice(start, TABLE_BATCH_ROWS), place, first + start):
            rows = part.to_pylist()
            for name, kind in json_columns.items():
                for row in rows:
                    row[name] = decode_json(row[name], kind, f"{place}: column {name}")
            yield rows


def decode_json(value: Any, kind: Any, place: str) -> Any:
    """Decodes the JSON texts, in which `datasets` stores objects of different fields, in a value of an Arrow type."""
    if value is None:
        return None
    if is_json(kind):
        return parse_json_string(value, place)
    if isinstance(value, dict):
        return {field.name: decode_json(value[field.name], field.type, place) for field in kind}
    return [decode_json(item, kind.value_type, place) for item in value] if isinstance(value, list) else value


def split_large_batch(batch: Any, place: str, first: int) -> Iterator[Any]:
    """Yields the rows of an Arrow batch in batches of at most MAX_BATCH_BYTES, decoded."""
    if decoded_bytes(batch.to_struct_array(), place) <= MAX_BATCH_BYTES:
        yield batch
    elif batch.num_rows == 1:
        size = f"more than {MAX_BATCH_BYTES:,} bytes"
        raise InputError(f"{place}: row {first + 1}: has {size}; split it into several rows")
    else:
        half = batch.num_rows // 2
        yield from split_large_batch(batch.slice(0, half), place, first)
        yield from split_large_batch(batch.slice(half), place, first + half)


def decoded_bytes(array: Any, needed_for: str) -> int:
    """Returns the bytes of an Arrow array as Python objects, roughly.

    A string of a dictionary counts wherever it is used.
    """
    types = import_package("pyarrow", needed_for).types
    compute = import_package("pyarrow.compute", needed_for)
    objects = OBJECT_BYTES * len(array)
    if types.is_dictionary(array.type):
        return objects + (compute.sum(compute.binary_length(array.dictionary).take(array.indices)).as_py() or 0)
    if types.is_struct(array.type):
        return objects + sum(decoded_bytes(field, needed_for) for field in array.flatten())
    if types.is_list(array.type) or types.is_large_list(array.type):
        return objects + decoded_bytes(array.flatten(), needed_for)
    if is_json(array.type):
        return objects + JSON_OBJECT_BYTES * array.storage.nbytes
    return objects + array.nbytes


def is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", None) == JSON_EXTENSION


def read_parquet(file: Path, reading: Reading) -> Iterator[Record]:
    return read_table(parquet_batches(file, reading), str(file), reading)


def parquet_batches(file: Path, reading: Reading) -> Iterator[TableRows]:
    pyarrow = import_package("pyarrow", str(file))
    parquet = import_package("pyarrow.parquet", str(file))
    refuse_irregular(file)
    try:
        with file.open("rb") as stream:
            refuse_placeholder(file, stream)
        metadata = parquet.read_metadata(file)
        columns = record_columns(metadata.schema.to_arrow_schema().names, f"{file}:", reading.formats)
        done, rows, size = 0, metadata.num_rows, file.stat().st_size
        reading.progress.follow(lambda: size * done // rows)
        for batch in decoded_batches(file, columns):
            for part in bounded_rows(batch, str(file), done):
                yield part
                done += len(part)
    except (OSError, pyarrow.ArrowException) as error:
        raise not_parquet(file, first_line(error)) from error


def not_parquet(file: Path, reason: str) -> InputError:
    return InputError(f"{file}: not a parquet file that pyarrow can read: {reason}")


def decoded_batches(file: Path, columns: list[str]) -> Iterator[Any]:
    """Yields the Arrow batches of a file.

    They have one row from where the memory is too small for TABLE_BATCH_ROWS on. Raises InputError, which names the
    row, if it is too small for that too.
    """
    done = 0
    for rows in (TABLE_BATCH_ROWS, 1):
        worker = Worker(file, columns, rows, done)
        for batch in worker.batches():
            yield batch
            done += batch.num_rows
        if worker.status == 0:
            return
        if worker.status == INVALID_FILE:
            raise not_parquet(file, first_line(worker.reason))
    limit = f"{WORKER_BYTES >> 20} MiB of memory"
    raise InputError(f"{file}: row {done + 1}: needs more than {limit}; split it, and write smaller pages")


class Worker:
    """The process that decodes a file. status: its exit status when it has ended; reason: why a file is invalid."""

    def __init__(self, file: Path, columns: list[str], batch_rows: int, first: int) -> None:
        request = {"file": str(file), "columns": columns, "batch_rows": batch_rows, "first": first}
        limits = {"memory": WORKER_BYTES, "batch_bytes": BATCH_BYTES}
        # -P: do not search the script's folder for imports; it has modules with common names.
        self.command = [sys.executable, "-P", str(WORKER), json.dumps(request | limits)]
        self.ipc = import_package("pyarrow", str(file)).ipc
        self.status, self.reason = 0, ""

    def batches(self) -> Iterator[Any]:
        """Yields the batches that the process decodes until it ends, however it ends."""
        # Other allocators and further arenas reserve address space that nothing uses.
        environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            try:
                yield from self.ipc.open_stream(process.stdout)
            except (OSError, ValueError):
                pass  # the process has ended within a batch; its status says why
            except GeneratorExit:
                process.kill()
                raise
            self.reason = process.stderr.read().decode(errors="replace")
            self.status = process.wait()


def read_arrow(file: Path, reading: Reading) -> Iterator[Record]:
    return read_table(arrow_batches(file, reading), str(file), reading)


def arrow_batches(file: Path, reading: Reading) -> Iterator[TableRows]:
    pyarrow = import_package("pyarrow", str(file))
    refuse_irregular(file)
    try:
        with file.open("rb") as stream:
            refuse_placeholder(file, stream)
        with pyarrow.memory_map(str(file)) as source:
            refuse_compressed(source, file)
            source.seek(0)
            reading.progress.follow(source.tell)
            batches, done = pyarrow.ipc.open_stream(source), 0
            names = batches.schema.names
            columns = [names.index(name) for name in record_columns(names, f"{file}:", reading.formats)]
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
    """Returns whether a message with batches has compressed buffers.

    metadata: its flatbuffer, which pyarrow has verified.
    """

    def number(code: str, place: int) -> int:
        return struct.unpack_from(code, metadata, place)[0]

    def field(table: int, index: int) -> int:
        """Returns the place of a field in a table; 0 if the table does not have it."""
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


def read_hub_dataset(name: str, reading: Reading) -> Iterator[Record]:
    return read_table(hub_batches(name, reading), name, reading)


def hub_batches(name: str, reading: Reading) -> Iterator[TableRows]:
    dataset = load_hub_dataset(name)
    columns = record_columns(dataset.column_names, f"{name}:", reading.formats)
    done, rows, size = 0, len(dataset), reading.progress.total or 0
    reading.progress.follow(lambda: size * done // rows)
    for batch in dataset.select_columns(columns).iter(TABLE_BATCH_ROWS):  # a list of values for each column
        yield [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        done += TABLE_BATCH_ROWS


def hub_cache_files(name: str) -> list[Path]:
    """Returns the local files that hold a Hub dataset."""
    return [Path(file["filename"]) for file in load_hub_dataset(name).cache_files]


def load_hub_dataset(name: str) -> Any:
    """Loads hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIGURATION:SPLIT.

    The default split is train. A split may be a slice, such as train[:10%]. Raises InputError naming the dataset.
    """
    path, *options = COLON_OUTSIDE_BRACKETS.split(name.removeprefix(HUB_PREFIX))
    if not path or len(options) > 2:
        raise InputError(f"--data {name}: must be hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIGURATION:SPLIT")
    split = options.pop() if options else "train"
    datasets = import_package("datasets", name)
    from ligermodels.hub.download import check_answers  # huggingface_hub, which files do not need

    check_answers()
    try:
        return datasets.load_dataset(path, *options, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"--data {name}: {first_line(error)}") from error
