"""Rows of a benchmark, each measured in its own process on the first GPU: libraries patch classes in place, and a
process that ends leaves no memory behind."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

MOST_SECONDS = 600.0  # of a row, unless a benchmark has its own limit


def measured_rows(
    module: str, arguments: Sequence[str], keys: Sequence[tuple[str, ...]], seconds: float = MOST_SECONDS
) -> Iterator[dict[str, Any]]:
    """One dict for each of `keys`, the values of the module's `--row`: the last line that its process prints, as JSON,
    or the error of one that fails or takes longer than `seconds`."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    for key in keys:
        command = [sys.executable, "-m", module, *arguments, "--row", *key]
        yield row_of(command, environment, seconds)


def print_rows_of_providers(module: str, providers: Sequence[str], modes: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a benchmark with `--row PROVIDER CHECKPOINTING`, by mode of activation checkpointing."""
    keys, rows = [(provider, mode) for mode in modes for provider in providers], []
    for (provider, mode), row in zip(keys, measured_rows(module, sys.argv[1:], keys), strict=True):
        rows.append({"provider": provider, "recompute": mode} | row)
        print(rows[-1], flush=True)
    return rows


def row_of(command: Sequence[str], environment: dict[str, str], seconds: float) -> dict[str, Any]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {seconds:g} s"}
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"]
    return json.loads(lines[-1]) if done.returncode == 0 else {"error": lines[-1][:200]}
