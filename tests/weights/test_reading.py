"""Files are read within their bounds. Damaged and hostile folders are tested in tests/test_faults.py."""

import tracemalloc

import pytest

from ligermodels.errors import CheckpointError
from ligermodels.weights.reading import MAX_JSON_DEPTH, parse_json, read_bytes, safe_file

DEEP = b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1)
SIZE = 1_000_000
TEXTS = {
    "letters": b"x" * SIZE,
    "brackets": b"[{" * 4000 + b"x" * SIZE,
    "closing brackets": b"]}" * (SIZE // 2),
    "escaped quotes": rb"\"" * (SIZE // 2),
    "escaped backslashes": rb"\\" * (SIZE // 2),
    "an escaped backslash at its end": b"[" * 200 + rb"\\",
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_depth_of_brackets_behind_a_long_text_is_measured_in_little_memory(tmp_path, text):
    data = b'{"text": "' + TEXTS[text] + b'", "list": {"inner": ' + DEEP + b"}}"
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match='field "list" is nested too deeply'):
            parse_json(data, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(data) + 2**20
    finally:
        tracemalloc.stop()


def test_brackets_within_strings_are_not_nesting(tmp_path):
    value = parse_json(b'{"text": "' + b"[" * 500 + rb"\"[" + b'", "list": [1]}', tmp_path)
    assert value == {"text": "[" * 500 + '"[', "list": [1]}


def test_the_name_of_a_field_is_composed_only_for_the_error(tmp_path):
    """Otherwise a long name would be copied once for each number below it."""
    data = b'{"' + b"n" * 100_000 + b'": {"list": [1, ' + b"1e999, " * 2_000 + b"1]}}"
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"nnn.*\.list\[1\] is not a finite number"):
            parse_json(data, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(data)
    finally:
        tracemalloc.stop()


def test_numbers_may_be_huge_where_that_is_allowed_and_nowhere_below(tmp_path):
    assert parse_json(b'{"a": 1e999, "b": 3}', tmp_path, may_be_huge=("a",)) == {"a": float("inf"), "b": 3}
    with pytest.raises(CheckpointError, match=r"field a\[1\] is not a finite number"):
        parse_json(b'{"a": [0, 1e999]}', tmp_path, may_be_huge=("a",))
    with pytest.raises(CheckpointError, match=r"field b\.c is not a finite number"):
        parse_json(b'{"a": 1e999, "b": {"c": -1e999}}', tmp_path, may_be_huge=("a",))


def test_a_file_of_more_bytes_than_allowed_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(5))
    assert read_bytes(file, at_most=5) == bytes(5)
    with pytest.raises(CheckpointError, match="file: has more than 4 bytes, the most that are read"):
        read_bytes(file, at_most=4)


def test_a_file_in_a_subfolder_may_be_a_link_only_into_the_hub_cache(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0a", tmp_path / "models--a--b" / "blobs"
    (snapshot / "templates").mkdir(parents=True)
    blobs.mkdir()
    for name, place in {"own.jinja": blobs, "stolen.jinja": tmp_path}.items():
        (place / "blob").write_text("x")
        (snapshot / "templates" / name).symlink_to(place / "blob")
    assert safe_file(snapshot, "templates/own.jinja").read_text() == "x"
    with pytest.raises(CheckpointError, match=r"templates/stolen\.jinja: is a link that leads out of the folder"):
        safe_file(snapshot, "templates/stolen.jinja")
    (snapshot / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="is a link that leads out"):
        safe_file(snapshot, "elsewhere/blob")
