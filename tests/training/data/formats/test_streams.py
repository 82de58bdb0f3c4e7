"""Files as streams: decompressed, decoded, never held in memory as a whole, and refused if damaged."""

import json
import os
import random
import re
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

from ligermodels.errors import InputError
from ligermodels.training.data.formats import sources, streams, text_files
from ligermodels.training.data.formats.record_formats import KNOWN_FIELDS, Reading
from ligermodels.training.data.formats.records import BadLines, Text
from ligermodels.training.data.formats.streams import ReadingProgress
from ligermodels.training.data.rows import token_files
from tests.training.data.source_files import COMPRESS, read, write


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_compressed_text_file_is_decompressed(tmp_path, compression):
    name = write(tmp_path / f"a.txt{compression}", COMPRESS[compression](b"\xef\xbb\xbfone\r\ntwo \xc3\xa4"))
    assert read(name) == [Text("one\ntwo ä", f"{name}:1")]


@pytest.mark.parametrize("file", ["a.jsonl.gz", "a.json.gz", "a.txt.gz", "a.jsonl.zst", "a.json.zst", "a.txt.zst"])
def test_the_error_for_a_damaged_archive_names_the_file(tmp_path, file):
    kind = "." + file.rpartition(".")[2]
    whole = COMPRESS[kind](b"[" + b'{"text": "' + bytes(range(97, 123)) * 900 + b'"}]')
    for damaged in (whole[:-9], whole[:40], b"no archive", whole + b"x"):
        with pytest.raises(InputError, match=rf"{file}: damaged or truncated: .+; provide a complete file$"):
            read(write(tmp_path / file, damaged), allowed=9)


@pytest.mark.parametrize("file", ["a.jsonl", "a.json.gz", "a.txt.zst", "a.parquet"])
def test_a_git_lfs_pointer_is_reported_as_one(tmp_path, file):
    name = write(tmp_path / file, b"version https://git-lfs.github.com/spec/v1", b"oid sha256:0")
    with pytest.raises(InputError, match=rf"{file}: is a Git LFS pointer"):
        read(name, allowed=9)


def test_the_error_for_invalid_utf8_names_line_and_column_in_any_piece_of_a_text_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", 8)
    name = write(tmp_path / "a.txt", b"line", *[b"some line"] * 2000, "äö".encode() + b"\xe4 x", b"end")
    with pytest.raises(InputError, match=r"a\.txt:2002:3: byte 0xe4 is not UTF-8 \(invalid continuation byte\)"):
        read(name, allowed=9)


@pytest.mark.parametrize("block", [1, 2, 5, 2**20])
@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"\xff", "1:1: byte 0xff"),
        (b"\xef\xbb\xbfa\xff", "1:3: byte 0xff"),
        ("ä\nö".encode() + b"\xc3", "2:2: byte 0xc3"),
        ("a\n\n日本".encode() + b"\xe6\x97 b\n", "3:3: byte 0xe6"),
    ],
)
def test_the_place_of_invalid_utf8_does_not_depend_on_the_blocks(tmp_path, monkeypatch, content, place, block):
    monkeypatch.setattr(streams, "REREAD_BYTES", block)
    with pytest.raises(InputError, match=rf"a\.txt:{place} is not UTF-8"):
        read(write(tmp_path / "a.txt", content))


def test_a_line_without_end_is_not_held_in_memory_to_find_its_invalid_byte(tmp_path):
    name = write(tmp_path / "a.txt.gz", COMPRESS[".gz"](b" " * 20_000_000 + b"\xff"))
    tracemalloc.start()
    with pytest.raises(InputError, match=r"a\.txt\.gz:1:20000001: byte 0xff is not UTF-8"):
        for record in sources.read_records(name, BadLines(0), ReadingProgress("", None)):
            assert record
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize("suffix", [".jsonl", ".txt.gz", ".csv", ".parquet", ".arrow", ".npy", ".bin"])
def test_a_pipe_is_not_opened(tmp_path, suffix):
    os.mkfifo(tmp_path / f"a{suffix}")
    reader = token_files.open_tokens if suffix in sources.TOKEN_SUFFIXES else read_one
    with pytest.raises(InputError, match=rf"a{re.escape(suffix)}: is not a regular file"):
        reader(tmp_path / f"a{suffix}")
    with pytest.raises(InputError, match="no file, folder or glob pattern matches"):
        read(tmp_path / f"a{suffix}")


def read_one(file):
    return list(
        sources.READERS[sources.suffix_of(file)](file, Reading(KNOWN_FIELDS, BadLines(0), ReadingProgress("", None)))
    )


def test_a_pipe_beside_a_token_file_is_not_opened(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(4))
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"a\.json: is not a regular file"):
        token_files.open_tokens(tmp_path / "a.bin")


def npy(header, version=1):
    size = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header


SHAPE = b"{'descr': '<u2', 'fortran_order': False, 'shape': (%b)}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (npy(SHAPE % (b"(" * 200 + b"1" + b",)" * 200)), "cannot be read as tokens: "),
        (npy(SHAPE % (b"-" * 3000 + b"1,")), "cannot be read as tokens: "),
        (npy(SHAPE % (b"9" * 5000 + b",")), "cannot be read as tokens: "),
        (npy(SHAPE % b"9999999999999999999,"), "cannot be read as tokens: "),
        (npy(SHAPE % b"9,"), "cannot be read as tokens: "),
        (npy(b"\0" * 50), "cannot be read as tokens: "),
        (b"PK\3\4" + bytes(100), "cannot be read as tokens: the magic string is not correct"),
        (b"", "cannot be read as tokens: "),
        (npy(b" " * 10_001), "has a header of 10001 bytes, more than 10000"),
        (npy(b"", 2)[:8] + b"\xff" * 4, "has a header of 4294967295 bytes, more than 10000"),
    ],
)
def test_the_header_of_a_npy_file_is_bounded_and_may_be_anything(tmp_path, content, reason):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.npy: {reason}"):
        token_files.open_tokens(tmp_path / "a.npy")


@pytest.mark.parametrize("file", ["a.txt", "a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst"])
def test_large_files_are_not_held_in_memory(tmp_path, file):
    line = json.dumps({"text": "word " * 2000}).encode()
    lines = b"[" + b",\n".join([line] * 1600) + b"]" if file == "a.json" else b"\n".join([line] * 1600)  # 16 MB
    name = write(tmp_path / file, COMPRESS[(tmp_path / file).suffix if file.count(".") > 1 else ""](lines))
    tracemalloc.start()
    count = sum(len(record.text) for record in sources.read_records(name, BadLines(0), ReadingProgress("", None)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1600 * len(line) + 1599 if file == "a.txt" else count == 16_000_000
    assert peak < 3_000_000


@pytest.mark.parametrize("file", ["a.txt", "a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_progress_follows_the_bytes_of_a_file_to_its_end(tmp_path, file, monkeypatch):
    monkeypatch.setattr(streams, "POLL_SECONDS", 0)
    draw = random.Random(0)
    texts = [{"text": draw.randbytes(500).hex()} for _ in range(4000)]
    path = tmp_path / file
    if file == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts), path)
    else:
        lines = [json.dumps(text).encode() for text in texts]
        content = b"[" + b",".join(lines) + b"]" if file == "a.json" else b"\n".join(lines)
        path.write_bytes(COMPRESS[path.suffix if file.count(".") > 1 else ""](content))
    seen, size = [], path.stat().st_size
    meter = ReadingProgress("", size)
    meter.show = seen.append
    for _ in meter.track(sources.read_records(str(path), BadLines(0), meter)):
        pass
    assert seen == sorted(seen) and seen[-1] <= size == meter.finished_bytes
    assert any(0.3 * size < done < 0.7 * size for done in seen) and seen[-1] > 0.7 * size
