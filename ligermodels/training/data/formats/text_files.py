"""Text files as records: plain text, JSON lines and JSON arrays, CSV and TSV.

No file is read into memory as a whole. A text file is one document; a long one is split into pieces.

Of a JSON array, no more is held than its longest element needs. A line that is not JSON is one bad line; in an array,
everything after such an error is lost, so it ends reading.

A CSV file has a header of column names, then one record per row; all cells are text. Python's csv module reads them, in
its strict mode: a quote that is not closed or is followed by text is an error, which ends reading, because nothing
shows where the next row begins. A row that has not as many cells as the header is one bad line. An empty cell is null;
a row without any text is skipped like an empty line.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

from ligermodels.errors import InputError, first_line
from ligermodels.training.data.formats.record_formats import Reading, RecordFormats, parse_record
from ligermodels.training.data.formats.records import MAX_RECORD_BYTES, MAX_RECORD_VALUES, Record, Text
from ligermodels.training.data.formats.streams import (
    ReadingProgress,
    describe_invalid_utf8,
    open_stream,
    open_text_stream,
    refuse_placeholder,
)
from ligermodels.training.data.formats.tables import record_columns
from ligermodels.units import counted
from ligermodels.weights.reading import has_more_values

PIECE_CHARACTERS = 2**18  # of one piece of a long text
CONTEXT_CHARACTERS = 64  # of the text before a piece; more than a token or two
CHUNK_CHARACTERS = 2**16
MAX_BLANK_LINES = 10**6  # in a row: a compressed file of kilobytes may have billions
DECODER = json.JSONDecoder()
JSON_WHITESPACE = re.compile(r"[ \t\n\r]*")
SURROGATE_ESCAPE, SURROGATE = re.compile(r"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")
JSON_LAYOUTS = "the file must have one object per line, or be one array of objects"
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab"}  # of CSV, in the order in which they are tried
CSV_RULES = 'a cell with a delimiter, a line break or a quote must be in quotes, with each quote in it written as ""'


def read_text_file(file: Path, reading: Reading) -> Iterator[Record]:
    """Yields the pieces of one document. Bytes that are not UTF-8 are always an error, never a bad line."""
    line = 1
    with open_text_stream(file, reading.progress) as stream:
        for piece in text_pieces(stream):
            yield piece._replace(place=f"{file}:{line}")
            line += piece.text.count("\n")


def text_pieces(stream: TextIO) -> Iterator[Text]:
    """Splits one document into pieces, if possible at line starts. Their `place` is left empty."""
    before, text = "", stream.read(PIECE_CHARACTERS)
    while following := stream.read(PIECE_CHARACTERS):
        end = last_split_point(text)
        yield Text(text[:end], "", before, last=False)
        before = (before + text[:end])[-CONTEXT_CHARACTERS:]
        text = text[end:] + following
    yield Text(text, "", before)


def last_split_point(text: str) -> int:
    """Returns the last place that is certainly between two tokens.

    This is the first character of a line, unless that character is whitespace; if there is none, the last space.
    """
    place = len(text) - 1
    while (place := text.rfind("\n", 0, place)) >= 0:
        if not text[place + 1].isspace():
            return place + 1
    space = text.rfind(" ")
    return space if space > 0 else len(text)


def read_json_file(file: Path, reading: Reading) -> Iterator[Record]:
    """Returns the records of a JSON file, which is an array if its first character is "[", and JSON lines otherwise."""
    with open_stream(file, reading.progress) as stream:
        refuse_placeholder(file, stream)
        is_array = stream.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if is_array:
        return reading.bad_lines.usable(parse_json_record, json_elements(file, reading))
    lines = numbered_lines(file, reading.progress)
    return reading.bad_lines.usable(parse_json_line, ((line, f"{file}:{n}", reading.formats) for n, line in lines))


def numbered_lines(file: Path, progress: ReadingProgress) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their line numbers, which start at 1."""
    with open_stream(file, progress) as stream:
        yield from stream_lines(stream, str(file))


def stream_lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a stream that are not blank, with their numbers. name: stands for the stream in errors."""
    number = last = 0
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            raise InputError(f"{name}:{number}: has more than {MAX_RECORD_BYTES:,} bytes; {JSON_LAYOUTS}")
        line = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).rstrip()
        if line:
            last = number
            yield number, line
        elif number - last > MAX_BLANK_LINES:
            raise InputError(f"{name}:{last + 1}: more than {MAX_BLANK_LINES:,} blank lines in a row; remove them")


def parse_json_line(line: bytes, place: str, fields: RecordFormats) -> Record:
    return parse_record(decode_json_line(line, place), place, fields)


def decode_json_line(line: bytes, place: str) -> Any:
    """Returns the JSON value of a line. Raises InputError naming the place."""
    refuse_many_values(line, place)
    try:
        text = line.decode()
        value = json.loads(text)
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode()) + 1
        raise InputError(describe_invalid_utf8(f"{place}:{column}", error)) from None
    except json.JSONDecodeError as error:
        raise InputError(f"{place}:{error.colno}: not JSON: {error.msg}; {JSON_LAYOUTS}") from None
    except (ValueError, RecursionError) as error:
        raise unsupported_json(place, error) from None
    refuse_half_characters(value, text, place)
    return value


def json_elements(file: Path, reading: Reading) -> Iterator[tuple[Any, str, str, RecordFormats]]:
    """Yields the arguments of `parse_json_record` for each element of an array."""
    with open_text_stream(file, reading.progress) as stream:
        scanner = JSONScanner(stream)
        scanner.take()  # the [
        delimiter = scanner.take() if scanner.peek() == "]" else ","
        number = 0
        while delimiter == ",":
            number += 1
            place = f"{file}: element {number}"
            yield *scanner.take_value(place), place, reading.formats
            delimiter = scanner.take()
        if delimiter != "]":
            problem = f"followed by {delimiter!r} instead of , or ]" if delimiter else "the last, and the ] is missing"
            raise InputError(f"{file}: element {number} is {problem}; the file is damaged or truncated")
        if scanner.peek():
            raise InputError(f"{file}: has {scanner.peek()!r} after the end of the array; {JSON_LAYOUTS}")


class JSONScanner:
    """Takes characters and JSON values from a text stream. Holds only the text that is not taken yet."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.buffer, self.position = stream, "", 0

    def read_more(self) -> bool:
        """Reads a chunk, at least as long as the text not taken yet; returns False at the end of the stream."""
        chunk = self.stream.read(max(CHUNK_CHARACTERS, len(self.buffer) - self.position))
        if chunk:
            self.buffer, self.position = self.buffer[self.position :] + chunk, 0
        return bool(chunk)

    def peek(self) -> str:
        """Returns the next character that is not whitespace; empty at the end of the stream."""
        while True:
            self.position = JSON_WHITESPACE.match(self.buffer, self.position).end()  # type: ignore[union-attr]
            if self.position < len(self.buffer) or not self.read_more():
                return self.buffer[self.position : self.position + 1]

    def take(self) -> str:
        character = self.peek()
        self.position += len(character)
        return character

    def take_value(self, place: str) -> tuple[Any, str]:
        """Returns the next JSON value, and its text. Raises InputError naming the place.

        Reads on while the text is not valid JSON, because it may be incomplete. A value must also be followed by a
        character: the digits of a number may continue in the next chunk.
        """
        self.peek()
        while True:
            error, value, end = try_decode(self.buffer, self.position, place)
            if error is None and end < len(self.buffer):
                break
            if len(self.buffer) - self.position > MAX_RECORD_BYTES:
                raise InputError(f"{place}: has more than {MAX_RECORD_BYTES:,} characters; {JSON_LAYOUTS}")
            if not self.read_more():
                break
            if len(self.buffer) - self.position > MAX_RECORD_VALUES:  # a shorter text has fewer values
                refuse_many_values(self.buffer[self.position :].encode("utf-8", "surrogatepass"), place)
        if error:
            column = error.pos - self.position + 1
            raise InputError(f"{place}: not JSON at character {column}: {error.msg}; the rest of the file is not read")
        text, self.position = self.buffer[self.position : end], end
        return value, text


def try_decode(text: str, start: int, place: str) -> tuple[json.JSONDecodeError | None, Any, int]:
    """Returns (error, None, start) if there is no JSON value at text[start:], or (None, value, end of the value)."""
    try:
        return None, *DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return error, None, start
    except (ValueError, RecursionError) as error:
        raise unsupported_json(place, error) from None


def refuse_many_values(text: bytes, place: str) -> None:
    """Raises InputError, before it is parsed, for a JSON text whose values would take gigabytes."""
    if has_more_values(text, MAX_RECORD_VALUES):
        raise InputError(f"{place}: has more than {MAX_RECORD_VALUES:,} JSON values; {JSON_LAYOUTS}")


def unsupported_json(place: str, error: Exception) -> InputError:
    """Returns the error for valid JSON that Python does not decode: very long numbers, and very deep nesting."""
    return InputError(f"{place}: JSON that cannot be decoded: {first_line(error)}")


def parse_json_record(value: Any, text: str, place: str, fields: RecordFormats) -> Record:
    """Returns the record of a JSON value. text: the JSON text of the value."""
    refuse_half_characters(value, text, place)
    return parse_record(value, place, fields)


def refuse_half_characters(value: Any, text: str, place: str) -> None:
    """Raises InputError for strings that are not Unicode. text: the JSON text of the value."""
    try:
        halved = SURROGATE_ESCAPE.search(text) and SURROGATE.search(json.dumps(value, ensure_ascii=False))
    except RecursionError as error:
        raise unsupported_json(place, error) from None
    if halved:
        raise InputError(f"{place}: has half of a surrogate pair, such as \\ud83d alone, which is not a character")


def read_csv(file: Path, reading: Reading, delimiters: Sequence[str] = tuple(DELIMITERS)) -> Iterator[Record]:
    with open_stream(file, reading.progress) as stream:
        refuse_placeholder(file, stream)
    delimiter, header = find_header(file, delimiters, reading)
    rows = csv_rows(file, delimiter, reading.progress, strict=True)
    next(rows)  # the header
    calls = ((row, header, delimiter, f"{file}:{line}", reading.formats) for line, row in rows)
    yield from reading.bad_lines.usable(parse_row, calls)


def find_header(file: Path, delimiters: Sequence[str], reading: Reading) -> tuple[str, list[str]]:
    """Returns the first delimiter with which the header has the columns of a record, and the names of all columns.

    Raises InputError if there is none, or if such a column is there twice.
    """
    headers = {delimiter: read_column_names(file, delimiter, reading.progress) for delimiter in delimiters}
    fitting = (delimiter for delimiter in delimiters if reading.formats.has_record(headers[delimiter]))
    chosen = next(fitting, max(delimiters, key=lambda delimiter: len(headers[delimiter])))
    header = headers[chosen]
    for name in record_columns(header, f"{file}:1: the header", reading.formats):
        if header.count(name) > 1:
            raise InputError(f"{file}:1: the header has the column {name} more than once; rename the others")
    return chosen, header


def read_column_names(file: Path, delimiter: str, progress: ReadingProgress) -> list[str]:
    """Returns the names in the first row; not strict, because the delimiter may be another."""
    _, row = next(csv_rows(file, delimiter, progress, strict=False), (0, []))
    return [name.strip() for name in row]


def csv_rows(file: Path, delimiter: str, progress: ReadingProgress, *, strict: bool) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows that are not empty, each with the number of its first line.

    Raises InputError for what is not CSV.
    """
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
