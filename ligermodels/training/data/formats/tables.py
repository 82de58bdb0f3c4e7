"""Tables (parquet and Arrow files, data sets of the Hub): their columns, and their rows as records in bounded batches.

A small file may stand for gigabytes: a dictionary stores a long string once for all rows that have it. Dictionaries
therefore stay encoded until a few rows at a time become Python objects. pyarrow is imported on first use. This module
knows nothing about file formats or tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from ligermodels.errors import InputError
from ligermodels.optional_packages import import_package
from ligermodels.training.data.formats.messages import parse_json_string
from ligermodels.training.data.formats.record_formats import RecordFormats, parse_record
from ligermodels.training.data.formats.records import BadLines, Record

TABLE_BATCH_ROWS = 64  # a row may have megabytes
MAX_BATCH_BYTES = 2**26
OBJECT_BYTES = 64  # of a small Python object
JSON_OBJECT_BYTES = 24  # of parsed JSON, at most, for each byte of its text: "[]," is an empty list
JSON_EXTENSION = "arrow.json"

TableRows: TypeAlias = list[dict[str, Any]]


def record_columns(names: Sequence[str], subject: str, fields: RecordFormats) -> list[str]:
    """The columns that records are made of. Raises InputError, which begins with `subject`, if they are not enough."""
    try:
        fields.refuse_missing(names, "column")
    except InputError as error:
        raise InputError(f"{subject} {error}") from None
    return fields.columns(names)


def read_table(
    batches: Iterator[TableRows], place: str, fields: RecordFormats, bad_lines: BadLines
) -> Iterator[Record]:
    number = 0
    for rows in batches:
        for row in rows:
            number += 1
            record = bad_lines.attempt(parse_record, drop_inner_nulls(row), f"{place}: row {number}", fields)
            if record is not None:
                yield record


def drop_inner_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Removes null fields within the columns: in a column of objects, every object has the fields of all."""
    return {name: drop_nulls(value) for name, value in row.items()}


def drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: drop_nulls(field) for name, field in value.items() if field is not None}
    return [drop_nulls(entry) for entry in value] if isinstance(value, list) else value


def bounded_rows(batch: Any, place: str, first: int) -> Iterator[TableRows]:
    """The rows of an Arrow batch, a few at a time: at most MAX_BATCH_BYTES as Python objects.

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
    """The rows of an Arrow batch in batches of at most MAX_BATCH_BYTES, decoded."""
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
    if is_json(array.type):
        return objects + JSON_OBJECT_BYTES * array.storage.nbytes
    return objects + array.nbytes


def is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", None) == JSON_EXTENSION
