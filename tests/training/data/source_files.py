"""Data files for tests, their records, and a function that reads them."""

import gzip
import json

import pyarrow

from ligermodels.training.data.formats import sources
from ligermodels.training.data.formats.record_formats import FieldNames
from ligermodels.training.data.formats.records import BadLines
from ligermodels.training.data.formats.streams import ReadingProgress

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
PART = {"type": "text", "text": "2 + "}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 2}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "add"}}
TERSE = {"role": "system", "content": "Be terse."}
TURNS = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
COMPRESS = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]),
    ".zst": lambda data: b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in (data[:9], data[9:])),
}


def write(file, *lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return str(file)


def read(name, allowed=0, **fields):
    """fields: the names of FieldNames, as text="body"."""
    return read_counting(name, BadLines(allowed), **fields)


def read_counting(name, bad_lines, **fields):
    return list(sources.read_records(str(name), bad_lines, ReadingProgress("", None), FieldNames(**fields)))


def messages(*given, **fields):
    return {"messages": list(given), **fields}
