"""CSV and TSV: cells, delimiters, the header, bad rows, and bounds on what a row may hold."""

import csv

import pytest

from ligermodels.errors import InputError
from ligermodels.training.data.formats import text_files
from ligermodels.training.data.formats.records import BadLines, Completion, Conversation, Text
from tests.training.data.source_files import COMPRESS, read, read_counting


def write_csv(file, text):
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


def turn(question, answer, place):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(messages, None, place)


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".csv", ";"), (".CSV", "\t"), (".tsv", "\t")])
def test_cells_are_read_as_pythons_csv_module_writes_them(tmp_path, suffix, delimiter, compression):
    """With a byte order mark, quotes, delimiters and line breaks in cells, and blank lines."""
    name = tmp_path / f"a{suffix}{compression}"
    with (tmp_path / "plain").open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.writer(file, delimiter=delimiter)
        table.writerows(
            [[" question ", "id", "answer"], ['a, "b"; \tä', "", "1\r\n2\n\n3"], ["", "", ""], ["c", "", "4"]]
        )
    name.write_bytes(COMPRESS[compression]((tmp_path / "plain").read_bytes() + b"\r\n"))
    assert read(name) == [turn('a, "b"; \tä', "1\r\n2\n\n3", f"{name}:2"), turn("c", "4", f"{name}:7")]


def test_lines_may_end_with_a_carriage_return_alone_and_the_last_without_any(tmp_path):
    name = write_csv(tmp_path / "a.csv", "question,answer\rone,1\rtwo,2")
    assert read(name) == [turn("one", "1", f"{name}:2"), turn("two", "2", f"{name}:3")]


def test_the_delimiter_is_the_one_with_which_the_header_names_a_known_format(tmp_path):
    name = write_csv(tmp_path / "a.csv", "id,x;text;y,z\n1,2;a, b;3\n")
    assert read(name) == [Text("a, b", f"{name}:2")]
    assert read(name, text="y,z") == [Text("3", f"{name}:2")]
    assert read(write_csv(tmp_path / "a.csv", "id,x;text;y,z,text\n1,2;a\tb;c,3,d\n")) == [Text("d", f"{name}:2")]
    assert read(write_csv(tmp_path / "a.tsv", "text\na, b; c\n"))[0].text == "a, b; c"


@pytest.mark.parametrize(
    ("header", "fields", "complaint"),
    [
        (
            "Hello,you\n",
            {},
            r"a\.csv:1: the header has no column messages.* or content; its columns are Hello, you; name",
        ),
        (
            "a,b;title;body\n",
            {},
            "its columns are a,b, title, body; name one with --text-field, or two with --prompt-fi",
        ),
        ("Question,x,Answer\n", {}, "; name them with --prompt-field Question --completion-field Answer$"),
        ("text;body\n", {"text": "bdy"}, "has no column bdy, which --text-field names; its columns are text, body$"),
        (
            "q,a\n",
            {"prompt": "q", "completion": "b"},
            "has no column b, which --completion-field names; its columns are q",
        ),
        ("text,id,text\n", {}, r"a\.csv:1: the header has the column text more than once; rename the others"),
        ("", {}, r"a\.csv:1: the header has no column .*; its columns are none$"),
    ],
)
def test_the_error_for_a_header_without_the_columns_names_those_that_it_has(tmp_path, header, fields, complaint):
    with pytest.raises(InputError, match=complaint):
        read(write_csv(tmp_path / "a.csv", header and header + "a,b,c\n"), allowed=9, **fields)


def test_a_row_that_does_not_fit_the_header_is_a_bad_line(tmp_path):
    name = write_csv(tmp_path / "a.csv", 'prompt,completion\na,1\nb\n"c\nc",3\nd,4,5\n,5\ne,6\n')
    bad = BadLines(3)
    assert read_counting(name, bad) == [
        Completion("a", "1", f"{name}:2"),
        Completion("c\nc", "3", f"{name}:4"),
        Completion("e", "6", f"{name}:8"),
    ]
    assert bad.skipped == 3
    for allowed, complaint in enumerate(
        [
            "3: has 1 cell with the delimiter comma, but the header has 2; a cell with a delimiter, a line break or",
            "6: has 3 cells with the delimiter comma, but the header has 2; ",
            "7: field prompt is null; must be a string",
        ]
    ):
        with pytest.raises(InputError, match=rf"a\.csv:{complaint}"):
            read(name, allowed)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (
            b'a\n"b\nc\n',
            r"a\.csv:3: not CSV with the delimiter comma: unexpected end of data; a cell with a delimiter, ",
        ),
        (b'a\n"b" c\nd\n', r"a\.csv:3: not CSV with the delimiter comma: ',' expected after '\"'; a cell with "),
        (b"a\n\xe4\n", r"a\.csv:3:1: byte 0xe4 is not UTF-8 .*; convert the file to UTF-8$"),
    ],
)
def test_what_hides_where_a_row_ends_is_no_bad_line_but_ends_reading(tmp_path, rows, complaint):
    with pytest.raises(InputError, match=complaint):
        read(write_csv(tmp_path / "a.csv", b"text\n" + rows), allowed=9)


def test_a_web_page_in_place_of_the_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"a\.csv: is a web page in place of the file"):
        read(write_csv(tmp_path / "a.csv", "<!DOCTYPE html>"))


@pytest.mark.parametrize("row", ['"' + "ab\n" * 40, "ab" * 40, '"' + "\n" * 30, "," * 30])
def test_a_row_that_is_too_large_is_refused_before_it_is_read_as_a_whole(tmp_path, monkeypatch, row):
    monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 60)
    monkeypatch.setattr(text_files, "MAX_RECORD_VALUES", 20)
    name = write_csv(tmp_path / "a.csv", "text\n" + f"{'x' * 50}\n" * 9 + row)
    with pytest.raises(
        InputError, match=r"a\.csv:11: a row of more than (60 characters|20 delimiters and line breaks); "
    ):
        read(name, allowed=9)
    with pytest.raises(InputError, match=r"b\.csv:1: a row of more than "):
        read(write_csv(tmp_path / "b.csv", row), allowed=9)
