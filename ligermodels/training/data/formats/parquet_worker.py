"""The worker process that decodes a parquet file. `parquet.py` starts it; it imports nothing of the package.

A small file may stand for gigabytes: a page of zeros, or one row with a list of 10⁸ elements. Only decoding shows it,
and pyarrow has no limit of its memory. The operating system limits the address space of this process.

The argument is JSON: file, columns, batch_rows, first (rows before it are skipped), memory (bytes, beyond what the
process has at its start), batch_bytes. Batches are written to stdout as an Arrow stream. The exit status is 0 if all
were; 1 if the file is invalid, with the reason on stderr; any other if memory ran out.
"""

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet


def limit_memory(memory: int) -> None:
    """Limits the address space to `memory` bytes more than it has now."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def write_batches(request: dict[str, Any]) -> None:
    table = parquet.ParquetFile(request["file"], pre_buffer=False)  # it would keep all that was read until the end
    schema = pyarrow.schema([field for field in table.schema_arrow if field.name in request["columns"]])
    batches = table.iter_batches(request["batch_rows"], columns=schema.names, use_threads=False)
    first = request["first"]
    with open(1, "wb", buffering=0) as stdout, pyarrow.ipc.new_stream(stdout, without_dictionaries(schema)) as stream:
        for batch in batches:
            wanted = batch.slice(min(first, batch.num_rows))
            first -= batch.num_rows - wanted.num_rows
            plain = wanted.cast(without_dictionaries(schema))
            if plain.nbytes > request["batch_bytes"]:
                raise MemoryError
            stream.write_batch(plain)


def without_dictionaries(schema: pyarrow.Schema) -> pyarrow.Schema:
    """A stream would repeat a column's dictionary, which may be long, with every batch."""
    types = [kind.value_type if pyarrow.types.is_dictionary(kind) else kind for kind in schema.types]
    return pyarrow.schema(list(zip(schema.names, types, strict=True)))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    request = json.loads(sys.argv[1])
    limit_memory(request["memory"])
    try:
        write_batches(request)
    except MemoryError:
        sys.exit(2)
    except Exception as error:
        sys.exit(str(error) or type(error).__name__)


if __name__ == "__main__":
    main()
