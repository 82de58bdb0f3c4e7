"""Parquet files as records, read by pyarrow, which is imported on first use. This module knows nothing about tokens.

They are decoded by a process of their own (`parquet_worker.py`), whose memory is limited.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError, first_line
from ligermodels.optional_packages import import_package
from ligermodels.training.data.formats.progress import ReadingProgress
from ligermodels.training.data.formats.record_formats import RecordFormats
from ligermodels.training.data.formats.records import BadLines, Record
from ligermodels.training.data.formats.streams import refuse_placeholder
from ligermodels.training.data.formats.tables import (
    TABLE_BATCH_ROWS,
    TableRows,
    bounded_rows,
    read_table,
    record_columns,
)
from ligermodels.weights.reading import refuse_irregular

WORKER = Path(__file__).with_name("parquet_worker.py")
WORKER_BYTES = 640 * 2**20  # beyond pyarrow itself; a batch is held by both processes
BATCH_BYTES = 2**27
INVALID_FILE = 1  # the worker's exit status


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
        columns = record_columns(metadata.schema.to_arrow_schema().names, f"{file}:", fields)
        done, rows, size = 0, metadata.num_rows, file.stat().st_size
        progress.follow(lambda: size * done // rows)
        for batch in decoded_batches(file, columns):
            for part in bounded_rows(batch, str(file), done):
                yield part
                done += len(part)
    except (OSError, pyarrow.ArrowException) as error:
        raise not_parquet(file, first_line(error)) from error


def not_parquet(file: Path, reason: str) -> InputError:
    return InputError(f"{file}: not a parquet file that pyarrow can read: {reason}")


def decoded_batches(file: Path, columns: list[str]) -> Iterator[Any]:
    """The Arrow batches of a file. From where the memory is too small for TABLE_BATCH_ROWS on, they have one row.

    Raises InputError, which names the row, if it is too small for that too.
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
        """The batches that the process decodes until it ends, however it ends."""
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
