"""Reads and writes checkpoint files as raw bytes and JSON, without any checks, so that tests can damage them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file. header: a JSON value, or the header's raw bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def header_and_data(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def change_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    header, data = header_and_data(file)
    change(header)
    file.write_bytes(safetensors_bytes(header, data))


def change_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
