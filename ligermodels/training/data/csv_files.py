"""CSV and TSV files as records: a header of column names, then one record per row. All cells are text.

Python's csv module reads them, in its strict mode: a quote that is not closed or is followed by text is an error, which
ends reading, because nothing shows where the next row begins. A row that has not as many cells as the header is one bad
line. An empty cell is null; a row without any text is skipped like an empty line. This module knows nothing about
tokens.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Self, TextIO

from ligermodels.errors import InputError
from ligermodels.training.data.record_formats import RecordFormats, parse_record
from ligermodels.training.data.records import MAX_RECORD_BYTES, MAX_RECORD_VALUES, BadLines, Record
from ligermodels.training.data.streams import ReadingProgress, open_stream, open_text_stream, refuse_placeholder
from ligermodels.training.data.tables import record_columns
from ligermodels.units import counted

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab"}  # of CSV, in the order in which they are tried
CSV_RULES = 'a cell with a delimiter, a line break or a quote must be in quotes, with each quote in it written as ""'


def read_csv(file: Path, fields: RecordFormats, bad_lines: BadLines, progress: ReadingProgress) -> Iterator[Record]:
    return read_delimited(file, tuple(DELIMITERS), fields, bad_lines, progress)


def read_tsv(file: Path, fields: RecordFormats, bad_lines: BadLines, progress: ReadingProgress) -> Iterator[Record]:
    return read_delimited(file, ("\t",), fields, bad_lines, progress)


def read_delimited(
    file: Path, delimiters: tuple[str, ...], fields: RecordFormats, bad_lines: BadLines, progress: ReadingProgress
) -> Iterator[Record]:
    with open_stream(file, progress) as stream:
        refuse_placeholder(file, stream)
    delimiter, header = find_header(file, delimiters, fields, progress)
    rows = csv_rows(file, delimiter, progress, strict=True)
    next(rows)  # the header
    for line, row in rows:
        record = bad_lines.attempt(parse_row, row, header, delimiter, f"{file}:{line}", fields)
        if record is not None:
            yield record


def find_header(
    file: Path, delimiters: tuple[str, ...], fields: RecordFormats, progress: ReadingProgress
) -> tuple[str, list[str]]:
    """The first delimiter with which the header has the columns of a record, and the names of all columns.

    Raises InputError if there is none, or if such a column is there twice.
    """
    headers = {delimiter: read_column_names(file, delimiter, progress) for delimiter in delimiters}
    most_columns = max(delimiters, key=lambda delimiter: len(headers[delimiter]))
    chosen = next((delimiter for delimiter in delimiters if fields.has_record(headers[delimiter])), most_columns)
    header = headers[chosen]
    for name in record_columns(header, f"{file}:1: the header", fields):
        if header.count(name) > 1:
            raise InputError(f"{file}:1: the header has the column {name} more than once; rename the others")
    return chosen, header


def read_column_names(file: Path, delimiter: str, progress: ReadingProgress) -> list[str]:
    """The names in the first row; not strict, because the delimiter may be another."""
    _, row = next(csv_rows(file, delimiter, progress, strict=False), (0, []))
    return [name.strip() for name in row]


def csv_rows(file: Path, delimiter: str, progress: ReadingProgress, *, strict: bool) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, each with the number of its first line. Raises InputError for what is not CSV."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_BYTES))  # of the process; the default is 131,072
    with open_text_stream(file, progress, newline="") as stream:
        lines = CSVLines(stream, str(file), delimiter)
        rows = csv.reader(lines, delimiter=delimiter, strict=strict)
        while True:
            lines.begin_row()
            try:
                row = next(rows, None)
            except csv.Error as error:
                problem = f"not CSV with the delimiter {DELIMITERS[delimiter]}: {error}"
                raise InputError(f"{lines.place}: {problem}; {CSV_RULES}") from error
            if row is None:
                return
            if any(row):
                yield lines.first, row


class CSVLines:
    """An iterator over the lines of a text stream. Raises InputError if those of one row are too long.

    first: the number of the row's first line. place: the same with the file.
    """

    def __init__(self, stream: TextIO, file: str, delimiter: str) -> None:
        self.stream, self.file, self.delimiter, self.number = stream, file, delimiter, 0
        self.begin_row()

    def begin_row(self) -> None:
        self.first, self.characters, self.breaks = self.number + 1, 0, 0

    @property
    def place(self) -> str:
        return f"{self.file}:{self.first}"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = self.stream.readline(MAX_RECORD_BYTES - self.characters + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.characters += len(line)
        self.breaks += 1 + line.count(self.delimiter)
        if self.characters > MAX_RECORD_BYTES:
            raise InputError(f"{self.place}: a row of more than {MAX_RECORD_BYTES:,} characters; {CSV_RULES}")
        if self.breaks > MAX_RECORD_VALUES:
            found = f"{MAX_RECORD_VALUES:,} delimiters and line breaks"
            raise InputError(f"{self.place}: a row of more than {found}; {CSV_RULES}")
        return line


def parse_row(row: list[str], header: list[str], delimiter: str, place: str, fields: RecordFormats) -> Record:
    if len(row) != len(header):
        found = f"has {counted(len(row), 'cell')} with the delimiter {DELIMITERS[delimiter]}"
        raise InputError(f"{place}: {found}, but the header has {len(header)}; {CSV_RULES}")
    return parse_record({name: cell or None for name, cell in zip(header, row, strict=True)}, place, fields)
