"""Data sets of the Hub as records, read by `datasets`, which is imported on first use. This module knows nothing about
tokens."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError, first_line
from ligermodels.optional_packages import import_package
from ligermodels.training.data.formats.progress import ReadingProgress
from ligermodels.training.data.formats.record_formats import RecordFormats
from ligermodels.training.data.formats.records import BadLines, Record
from ligermodels.training.data.formats.tables import TABLE_BATCH_ROWS, TableRows, read_table, record_columns

HUB_PREFIX = "hub:"
COLON_OUTSIDE_BRACKETS = re.compile(r":(?![^\[]*\])")


def read_hub_dataset(
    name: str, fields: RecordFormats, bad_lines: BadLines, progress: ReadingProgress
) -> Iterator[Record]:
    return read_table(hub_batches(name, fields, progress), name, fields, bad_lines)


def hub_batches(name: str, fields: RecordFormats, progress: ReadingProgress) -> Iterator[TableRows]:
    dataset = load_hub_dataset(name)
    columns = record_columns(dataset.column_names, f"{name}:", fields)
    done, rows, size = 0, len(dataset), progress.total or 0
    progress.follow(lambda: size * done // rows)
    for batch in dataset.select_columns(columns).iter(TABLE_BATCH_ROWS):  # a list of values for each column
        yield [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        done += TABLE_BATCH_ROWS


def hub_cache_files(name: str) -> list[Path]:
    """The local files that hold a Hub dataset."""
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
    try:
        return datasets.load_dataset(path, *options, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"--data {name}: {first_line(error)}") from error
