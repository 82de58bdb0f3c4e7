"""The header of a GGUF file: what is read of a good one, and the one line about a damaged one."""

import random
import re
import resource
import struct
from pathlib import Path

import pytest

from ligermodels.errors import CheckpointError, InputError
from ligermodels.weights.gguf.header import read_gguf_header
from ligermodels.weights.gguf.names import gguf_files
from tests.gguf.files import ARRAY, FLOAT32, STRING, UINT32, entry, string, tensor, whole_file

HUGE = 2**60
ENTRIES = [
    entry("general.architecture", STRING, string("llama")),
    entry("llama.block_count", UINT32, struct.pack("<I", 3)),
    entry("llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-5)),
    entry("words", ARRAY, struct.pack("<IQ", STRING, 2) + string("a") + string("é")),
    entry("numbers", ARRAY, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
]
TENSORS = [tensor("a", (4, 2)), tensor("b", (64, 3), kind=8, offset=32)]
DATA = bytes(32 + 3 * 2 * 34)


def read(tmp_path, content: bytes):
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    return read_gguf_header([file])


def test_a_good_file_gives_metadata_and_places(tmp_path):
    content = whole_file(ENTRIES, TENSORS, DATA)
    header = read(tmp_path, content)
    numbers = header.metadata["numbers"]
    assert dict(header.metadata) | {"numbers": numbers.tolist()} == {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "llama.attention.layer_norm_rms_epsilon": 1e-05,  # the shortest number that has these 32 bits
        "words": ["a", "é"],
        "numbers": [1, -2, 3],
    }
    start = len(content) - len(DATA)
    found = {name: (info.shape, info.type, info.begin - start, info.nbytes) for name, info in header.tensors.items()}
    assert found == {"a": ((2, 4), 0, 0, 32), "b": ((3, 64), 8, 32, 204)}


def array(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)


DAMAGED = {
    "an empty file": (b"", "the magic number needs 4 bytes, but the header has 0 left"),
    "another magic": (whole_file([], [], magic=b"GGML"), "begins with b'GGML', not b'GGUF'"),
    "a page": (b"<!doctype html><html>", "is a web page in place of the file"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    "an old version": (whole_file([], [], version=1), "has version 1; little-endian GGUF of version 2 or 3 is read"),
    "a big-endian file": (whole_file([], [], version=3 << 24), "is big-endian"),
    "2^60 tensors": (whole_file([], [], counts=(HUGE, 0)), f"claims {HUGE} tensors, more than 0"),
    "2^60 entries": (whole_file([], [], counts=(0, HUGE)), f"claims {HUGE} metadata entries, more than 0"),
    "more entries than bytes": (whole_file(ENTRIES, [], counts=(0, 99)), "claims 99 metadata entries"),
    "a key of 2^60 bytes": (whole_file([struct.pack("<Q", HUGE) + bytes(64)], []), f"a key has {HUGE} bytes"),
    "a string of 2^60 bytes": (
        whole_file([entry("key", STRING, struct.pack("<Q", HUGE))], []), f"key has {HUGE} bytes, more than"
    ),
    "a string beyond the file": (
        whole_file([entry("key", STRING, struct.pack("<Q", 5000))], []), "key needs 5000 bytes, but the header has"
    ),
    "an array of 2^60 strings": (
        whole_file([entry("key", ARRAY, array(STRING, HUGE))], []), f"claims {HUGE} strings in key, more than"
    ),
    "an array of 2^60 numbers": (
        whole_file([entry("key", ARRAY, array(UINT32, HUGE))], []), f"claims {HUGE} numbers in key, more than"
    ),
    "an array of arrays": (
        whole_file([entry("key", ARRAY, array(ARRAY, 1))], []), "key is an array of the type 9, which is not supported"
    ),
    "an unknown type": (whole_file([entry("key", 77, bytes(16))], []), "metadata key has the unknown type 77"),
    "a key that is given twice": (whole_file([ENTRIES[1]] * 2, []), "metadata llama.block_count is given twice"),
    "bytes that are no text": (
        whole_file([entry("key", STRING, string(b"\xff\xfe"))], []), "key is not UTF-8 text: 'utf-8' codec"
    ),
    "an alignment of 7": (
        whole_file([entry("general.alignment", UINT32, struct.pack("<I", 7))], []), "general.alignment is 7, no power"
    ),
    "an alignment of 2^30": (
        whole_file([entry("general.alignment", UINT32, struct.pack("<I", 2**30))], []), "is 1073741824, no power of two"
    ),
    "a tensor without dimensions": (whole_file([], [tensor("a", ())], bytes(32)), "tensor a has 0 dimensions, not 1"),
    "2^31 dimensions": (
        whole_file([], [string("a") + struct.pack("<I", 2**31) + bytes(99)]), "has 2147483648 dimensions, not 1 to 4"
    ),
    "a dimension of 0": (whole_file([], [tensor("a", (4, 0))]), "has the shape [0, 4], which cannot be"),
    "a product beyond 64 bits": (
        whole_file([], [tensor("a", (2**40, 2**40))], bytes(64)), "truncated: tensor a ends at byte"
    ),
    "a product of 0 in 64 bits": (whole_file([], [tensor("a", (2**32, 2**32))]), "truncated: tensor a ends at byte"),
    "a row that is no blocks": (whole_file([], [tensor("a", (33, 2), 8)], bytes(99)), "cannot be in blocks of 32"),
    "an unknown encoding": (whole_file([], [tensor("a", (32,), 999)], bytes(99)), "has the type 999, which the inst"),
    "an offset of 2^63": (whole_file([], [tensor("a", (8,), offset=2**63)], DATA), "truncated: tensor a ends at byte"),
    "an odd offset": (whole_file([], [tensor("a", (8,), offset=7)], DATA), "has the offset 7, no multiple of 32"),
    "overlapping tensors": (
        whole_file([], [tensor("a", (16,)), tensor("b", (16,), offset=32)], DATA), "tensor b overlaps the previous one"
    ),
    "a tensor that is described twice": (whole_file([], [TENSORS[0]] * 2, DATA), "tensor a is described twice"),
    "missing data": (whole_file(ENTRIES, TENSORS, DATA[:-1]), "truncated: tensor b ends at byte"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(tmp_path, name):
    content, words = DAMAGED[name]
    with pytest.raises(CheckpointError, match=re.escape(words)) as error:
        read(tmp_path, content)
    assert str(error.value).startswith(f"{tmp_path / 'x.gguf'}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("seed", range(4))
def test_a_file_with_changed_bytes_is_read_or_refused(tmp_path, seed):
    """Without another kind of error, and without memory for what the bytes claim: that would not fit the limit."""
    good, generator = whole_file(ENTRIES, TENSORS, DATA), random.Random(seed)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    used = 1024 * int(status.split("VmData:")[1].split()[0])
    refused = 0
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (used + 2**28, limits[1]))
        for _ in range(400):
            content = bytearray(good)
            for _ in range(generator.randint(1, 4)):
                place = generator.randrange(len(content) - len(DATA))
                content[place] = generator.choice([0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)])
            if generator.random() < 0.2:
                del content[generator.randrange(len(content)) :]
            try:
                read(tmp_path, bytes(content))
            except InputError:
                refused += 1
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert refused > 200


def test_the_parts_of_a_split_model_are_one(tmp_path):
    for number in (1, 2):
        content = whole_file(ENTRIES if number == 1 else [], [tensor(f"t{number}", (8,))], bytes(32))
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(content)
    files = gguf_files(tmp_path)
    header = read_gguf_header(files)
    assert [file.name for file in files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert {name: info.file for name, info in header.tensors.items()} == dict(zip(("t1", "t2"), files, strict=True))
    assert header.metadata["llama.block_count"] == 3
    files[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002.gguf: is missing, a part of the model of m-00001"):
        gguf_files(tmp_path)


def test_a_folder_with_two_models_names_both(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(whole_file([], []))
    with pytest.raises(CheckpointError, match=r"has several GGUF models, a.gguf, b.gguf: pass the path of one"):
        gguf_files(tmp_path)
