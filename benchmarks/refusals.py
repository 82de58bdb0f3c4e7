"""Time and memory that it takes to refuse hostile files of the largest sizes: at most 10 s and 1 GiB each.

    python -m benchmarks.refusals

The tests check the same refusals with small files and without a clock. Each case runs in a process of its own. Its time
is processor time, with that of the processes that it starts. Its memory is what the process takes beyond what it had
before the file was opened.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.errors import InputError
from ligermodels.lazy_imports import import_package
from ligermodels.tokenizer.chat_template import ChatTemplate, render_chat
from ligermodels.tokenizer.files import read_tokenizer
from ligermodels.training.data.formats.records import BadLines
from ligermodels.training.data.formats.sources import read_records
from ligermodels.training.data.formats.streams import ReadingProgress
from ligermodels.training.data.rows.token_files import open_tokens
from ligermodels.weights.config_file import read_config
from ligermodels.weights.files import open_checkpoint

SECONDS, MIB = 10.0, 1024.0
SIZE = 90_000_000  # characters; files of more than 100 MB are refused by their size
NESTED = "[" * 150 + "]" * 150
USER = {"role": "user", "content": "a"}
VOCABULARY: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0}},
}


class Case(NamedTuple):
    """write: makes the file in a folder, of about so many characters. read: opens it, and must raise InputError."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], object]


class Row(NamedTuple):
    seconds: float
    mib: float
    message: str


def text_file(name: str, content: Callable[[int], str]) -> Callable[[Path, int], object]:
    return lambda folder, size: (folder / name).write_text(content(size))


def compressed(name: str, start: bytes) -> Callable[[Path, int], object]:
    return lambda folder, size: (folder / name).write_bytes(gzip.compress(start + b" " * size))


def arrow_stream(folder: Path, size: int) -> None:
    pyarrow = import_package("pyarrow", "this case")
    batch = pyarrow.record_batch({"text": ["a" * size]})
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_stream(str(folder / "a.arrow"), batch.schema, options=options) as stream:
        stream.write_batch(batch)


def header(folder: Path, size: int) -> None:
    text = nested(size).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def nested(size: int) -> str:
    return f'{{"a": "{"x" * size}", "b": {NESTED}}}'


def vocabulary(size: int) -> str:
    entries = ",".join(f'"{number:x}":{number}' for number in range(size // 18))
    return json.dumps(VOCABULARY).replace('"a": 0', f'"a":0,{entries}')


def replacement(size: int) -> str:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * size}
    return json.dumps(VOCABULARY | {"normalizer": replace})


def records(name: str) -> Callable[[Path], object]:
    return lambda folder: list(read_records(str(folder / name), BadLines(0), ReadingProgress("", None)))


def render(folder: Path) -> object:
    return render_chat(
        ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}" + "{% endfor %}" * 2, ""), [USER]
    )


CASES = {
    "config.json nested behind a text": Case(text_file("config.json", nested), read_config),
    "escaped quotes": Case(
        text_file("config.json", lambda n: nested(0).replace('""', '"' + '\\"' * (n // 2) + '"')), read_config
    ),
    "safetensors header": Case(header, open_checkpoint),
    "tokenizer_config.json": Case(text_file("tokenizer_config.json", nested), read_tokenizer),
    "vocabulary": Case(text_file("tokenizer.json", vocabulary), read_tokenizer),
    "replacement": Case(text_file("tokenizer.json", replacement), read_tokenizer),
    "endless template": Case(lambda folder, size: None, render),
    "spaces without a line end": Case(compressed("a.jsonl.gz", b""), records("a.jsonl.gz")),
    "spaces in an array": Case(compressed("a.json.gz", b"[{"), records("a.json.gz")),
    "lists in a line": Case(
        text_file("a.jsonl", lambda n: f'{{"text": "a", "b": [{"[]," * (n // 5)}0]}}'), records("a.jsonl")
    ),
    "quote without an end in CSV": Case(compressed("a.csv.gz", b'text\n"'), records("a.csv.gz")),
    "cells in a CSV row": Case(text_file("a.csv", lambda n: "text\n" + "ab," * (n // 3)), records("a.csv")),
    "columns in a CSV header": Case(text_file("a.csv", lambda n: "ab," * (n // 3)), records("a.csv")),
    "compressed Arrow batch": Case(arrow_stream, records("a.arrow")),
    ".npy header": Case(
        lambda folder, size: (folder / "a.npy").write_bytes(b"\x93NUMPY\2\0" + b"\xff" * 4 + bytes(size)),
        lambda folder: open_tokens(folder / "a.npy"),
    ),
}


def measure(name: str, size: int) -> Row:
    """Runs a case in this process."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        CASES[name].write(folder, size)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, started, message = memory("VmRSS"), sum(os.times()[:4]), "not refused"
        try:
            CASES[name].read(folder)
        except InputError as error:
            message = str(error).replace(f"{folder}/", "")
        return Row(sum(os.times()[:4]) - started, memory("VmHWM") - before, message)


def memory(field: str) -> float:
    """A field of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=SIZE, help="characters of each file")
    size = parser.parse_args().size
    within = True
    for name in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, mib, message = pool.apply(measure, (name, size))
        within &= seconds <= SECONDS and mib <= MIB and message != "not refused"
        print(f"{name:34} {seconds:6.2f} s {mib:7.0f} MiB  {message[:80]}", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
