"""Parquet files as records, read by pyarrow, which is imported on first use. This module knows nothing about tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError, first_line
from ligermodels.training.data.progress import ReadingProgress
from ligermodels.training.data.record_formats import RecordFormats
from ligermodels.training.data.records import BadLines, Record
from ligermodels.training.data.streams import refuse_placeholder
from ligermodels.training.data.tables import TABLE_BATCH_ROWS, TableRows, bounded_rows, read_table, record_columns
from ligermodels.training.packages import import_package
from ligermodels.weights.reading import refuse_irregular


def read_parquet(file: Path, fields: RecordFormats, bad_lines: BadLines, progress: ReadingProgress) -> Iterator[Record]:
    return read_table(parquet_batches(file, fields, progress), str(file), fields, bad_lines)


def parquet_batches(file: Path, fields: RecordFormats, progress: ReadingProgress) -> Iterator[TableRows]:
    pyarrow = import_package("pyarrow", str(file))
    parquet = import_package("pyarrow.parquet", str(file))
    refuse_irregular(file)
    try:
        with file.open("rb") as stream:
            refuse_placeholder(file, stream)
        metadata = parquet.read_metadata(file)
        encoded = dictionary_columns(metadata, fields)
        # pre_buffer would keep everything that was read until the end.
        table = parquet.ParquetFile(file, metadata=metadata, pre_buffer=False, read_dictionary=encoded)
        columns = record_columns(table.schema_arrow.names, f"{file}:", fields)
        done, rows, size = 0, metadata.num_rows, file.stat().st_size
        progress.follow(lambda: size * done // rows)
        for batch in table.iter_batches(TABLE_BATCH_ROWS, columns=columns):
            for part in bounded_rows(batch, str(file), done):
                yield part
                done += len(part)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{file}: not a parquet file that pyarrow can read: {first_line(error)}") from error


def dictionary_columns(metadata: Any, fields: RecordFormats) -> list[str]:
    """The columns of strings of a parquet file that have a dictionary: one long string may stand for many rows.

    Without columns within lists and objects, for which pyarrow cannot keep it.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(metadata.num_columns))
    strings = {c.path_in_schema for c in chunks if c.has_dictionary_page and c.physical_type == "BYTE_ARRAY"}
    return sorted(fields.columns(strings))
