"""Parquet files as records, read by pyarrow in batches whose memory is bounded.

A small file may stand for gigabytes: a dictionary stores a long string once for all rows that have it. Dictionaries
therefore stay encoded until a few rows at a time become Python objects. pyarrow is imported on first use. This module
knows nothing about tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError, first_line
from ligermodels.training.data.formats import TABLE_BATCH_ROWS, read_table, record_columns
from ligermodels.training.data.progress import ReadingProgress
from ligermodels.training.data.records import RECORD_FIELDS, BadLines, Record
from ligermodels.training.data.streams import refuse_placeholder
from ligermodels.training.packages import import_package
from ligermodels.weights.reading import refuse_irregular

MAX_BATCH_BYTES = 2**26
OBJECT_BYTES = 64  # of a small Python object


def read_parquet(file: Path, bad_lines: BadLines, progress: ReadingProgress) -> Iterator[Record]:
    return read_table(parquet_batches(file, progress), str(file), bad_lines)


def parquet_batches(file: Path, progress: ReadingProgress) -> Iterator[list[dict[str, Any]]]:
    pyarrow = import_package("pyarrow", str(file))
    parquet = import_package("pyarrow.parquet", str(file))
    refuse_irregular(file)
    try:
        with file.open("rb") as stream:
            refuse_placeholder(file, stream)
        metadata = parquet.read_metadata(file)
        encoded = dictionary_columns(metadata)
        # pre_buffer would keep everything that was read until the end.
        table = parquet.ParquetFile(file, metadata=metadata, pre_buffer=False, read_dictionary=encoded)
        columns = record_columns(table.schema_arrow.names, str(file))
        done, rows, size = 0, metadata.num_rows, file.stat().st_size
        progress.follow(lambda: size * done // rows)
        for batch in table.iter_batches(TABLE_BATCH_ROWS, columns=columns):
            for part in split_large_batch(batch, file, done):
                yield part.to_pylist()
                done += part.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{file}: not a parquet file that pyarrow can read: {first_line(error)}") from error


def dictionary_columns(metadata: Any) -> list[str]:
    """The columns of strings of a parquet file that have a dictionary: one long string may stand for many rows.

    Without columns within lists and objects, for which pyarrow cannot keep it.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(metadata.num_columns))
    strings = {c.path_in_schema for c in chunks if c.has_dictionary_page and c.physical_type == "BYTE_ARRAY"}
    return sorted(strings & set(RECORD_FIELDS))


def split_large_batch(batch: Any, file: Path, first: int) -> Iterator[Any]:
    """The rows of an Arrow batch in batches of at most MAX_BATCH_BYTES, decoded. first: the number of its first row.

    Raises InputError for a row that has more.
    """
    if decoded_bytes(batch.to_struct_array(), str(file)) <= MAX_BATCH_BYTES:
        yield batch
    elif batch.num_rows == 1:
        size = f"more than {MAX_BATCH_BYTES:,} bytes"
        raise InputError(f"{file}: row {first + 1}: has {size}; split it into several rows")
    else:
        half = batch.num_rows // 2
        yield from split_large_batch(batch.slice(0, half), file, first)
        yield from split_large_batch(batch.slice(half), file, first + half)


def decoded_bytes(array: Any, needed_for: str) -> int:
    """The bytes of an Arrow array as Python objects, roughly. A string of a dictionary counts wherever it is used."""
    types = import_package("pyarrow", needed_for).types
    compute = import_package("pyarrow.compute", needed_for)
    objects = OBJECT_BYTES * len(array)
    if types.is_dictionary(array.type):
        return objects + (compute.sum(compute.binary_length(array.dictionary).take(array.indices)).as_py() or 0)
    if types.is_struct(array.type):
        return objects + sum(decoded_bytes(field, needed_for) for field in array.flatten())
    if types.is_list(array.type) or types.is_large_list(array.type):
        return objects + decoded_bytes(array.flatten(), needed_for)
    return objects + array.nbytes
