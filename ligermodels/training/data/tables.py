"""Records from tables of columns: parquet files, by pyarrow, and data sets of the Hub, by `datasets`.

Either package is imported when it is needed first. Knows no tokens.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError, first_line
from ligermodels.training.data.progress import Progress
from ligermodels.training.data.records import ACCEPTED, FIELDS, FORMS, BadLines, Record, record_of
from ligermodels.training.data.streams import refuse_no_data
from ligermodels.training.packages import import_package

HUB = "hub:"
COLON = re.compile(r":(?![^\[]*\])")  # but those within brackets
ROWS = 1024  # read at a time


def parquet(file: Path, bad: BadLines, progress: Progress) -> Iterator[Record]:
    return table(parquet_batches(file, progress), str(file), bad)


def parquet_batches(file: Path, progress: Progress) -> Iterator[list[dict[str, Any]]]:
    pyarrow = import_package("pyarrow", str(file))
    reader = import_package("pyarrow.parquet", str(file))
    try:
        with file.open("rb") as stream:
            refuse_no_data(file, stream)
        opened = reader.ParquetFile(file, pre_buffer=False)  # else all that was read is held to the end
        columns = columns_of(opened.schema_arrow.names, str(file))
        done, rows, size = 0, opened.metadata.num_rows, file.stat().st_size
        progress.follow(lambda: size * done // rows)
        for batch in opened.iter_batches(ROWS, columns=columns):
            yield batch.to_pylist()
            done += batch.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{file}: not a parquet file that pyarrow reads: {first_line(error)}") from error


def hub_dataset(name: str, bad: BadLines, progress: Progress) -> Iterator[Record]:
    return table(hub_batches(name, progress), name, bad)


def hub_batches(name: str, progress: Progress) -> Iterator[list[dict[str, Any]]]:
    loaded = hub_table(name)
    columns = columns_of(loaded.column_names, name)
    done, rows, size = 0, len(loaded), progress.total or 0
    progress.follow(lambda: size * done // rows)
    for batch in loaded.select_columns(columns).iter(ROWS):  # a list for each column
        yield [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        done += ROWS


def hub_files(name: str) -> list[Path]:
    """The files that hold the data set on this machine."""
    return [Path(file["filename"]) for file in hub_table(name).cache_files]


def hub_table(name: str) -> Any:
    """hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIGURATION:SPLIT; the split is train where none is given, and may be a
    part of one, as train[:10%]."""
    dataset, *options = COLON.split(name.removeprefix(HUB))
    if not dataset or len(options) > 2:
        raise InputError(f"--data {name}: must be {HUB}NAME, {HUB}NAME:SPLIT or {HUB}NAME:CONFIGURATION:SPLIT")
    split = options.pop() if options else "train"
    datasets = import_package("datasets", name)
    try:
        return datasets.load_dataset(dataset, *options, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"--data {name}: {first_line(error)}") from error


def columns_of(names: list[str], place: str) -> list[str]:
    columns = [name for name in FIELDS if name in names]
    if not any(set(form) <= set(columns) for form in (*FORMS, ("text",))):
        raise InputError(f"{place}: has no column {ACCEPTED}, but {', '.join(names) or 'none'}")
    return columns


def table(batches: Iterator[list[dict[str, Any]]], place: str, bad: BadLines) -> Iterator[Record]:
    number = 0
    for rows in batches:
        for row in rows:
            number += 1
            record = bad.attempt(record_of, without_nulls(row), f"{place}: row {number}")
            if record is not None:
                yield record


def without_nulls(value: Any) -> Any:
    """A column of objects gives each of them the fields of all: one that is null was not there."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value
