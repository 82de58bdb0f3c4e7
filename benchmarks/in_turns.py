"""Interleaved timing: the providers of an op take turns, a few calls each. Drift during the run (the GPU's clock under
its power cap, the load of the host) therefore affects all providers equally.

    python -m benchmarks.in_turns rms_norm swiglu
    python -m benchmarks.in_turns gated_linear --shape 16384x4096x14336

The default shape is the op's last one, whose time is bound by the host. Host time is reported as the median and as the
20th percentile, because other activity on the host can only increase it.
"""

import argparse
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from benchmarks import results, suite, timing
from benchmarks.ops import Provider, Shape
from ligermodels.errors import InputError

ROUNDS = 30
PASSES = ("forward", "forward+backward")
COLUMNS = "{:24} {:24} {:17} {:>9} {:>17} {:>8} {:>8}"

CallKey = tuple[str, str]  # provider and pass


def prepare_calls(case: suite.Case, provider: Provider) -> Iterator[dict]:
    """Yields one dict: the provider's calls by pass, warmed up; or the row of a wrong result."""
    function = provider.make(*case.shape)
    if reason := suite.reason_if_wrong(case.op, case.error_ratio(provider, function)):
        yield {"status": "wrong", "reason": reason}
        return
    sets = suite.make_input_sets(case, provider, function)
    calls = {kind: timing.make_call(function, sets, kind) for kind in PASSES if kind in case.op.work(*case.shape)}
    for call in (*calls.values(), *calls.values()):
        call(timing.HostEvent(), timing.HostEvent())
    yield calls


def time_in_turns(calls: dict[CallKey, Callable]) -> dict[CallKey, tuple[list[float], list[float]]]:
    """Device times and host times in milliseconds of each entry of `calls`, timing.CALLS_PER_BATCH calls per turn."""
    times: dict[CallKey, tuple[list[float], list[float]]] = {key: ([], []) for key in calls}
    for _ in range(ROUNDS):
        for key, call in calls.items():
            host = timing.host_times(call, timing.CALLS_PER_BATCH)
            sleep = min(2 + 2 * sum(host), timing.MAX_SLEEP_MS)
            times[key][0].extend(timing.device_times(call, timing.CALLS_PER_BATCH, sleep)[0])
            times[key][1].extend(host)
    return times


def run_shape(case: suite.Case, names: Iterable[str]) -> list[dict]:
    """One row per provider and pass. A provider that fails or is wrong has one row with the reason."""
    calls: dict[CallKey, Callable] = {}
    rows = []
    for name in (name for name in names if name in case.op.providers):
        (found,) = suite.rows_or_failure(functools.partial(prepare_calls, case, case.op.providers[name]))
        if "status" in found:
            rows.append({"shape": suite.shape_label(case.shape), "provider": name} | found)
        else:
            calls |= {(name, kind): call for kind, call in found.items()}
    gc.collect()
    gc.disable()
    times = time_in_turns(calls)
    gc.enable()
    for (name, kind), (device, host) in times.items():
        row = {"shape": suite.shape_label(case.shape), "provider": name, "status": "ok", "pass": kind}
        rows.append(suite.round_figures(row | time_fields(device, host)))
    return rows


def time_fields(device: list[float], host: list[float]) -> dict[str, float]:
    ms, ms_20, ms_80 = timing.median_and_spread(device)
    host_ms, host_ms_20, _ = timing.median_and_spread(host)
    return {"ms": ms, "ms_20": ms_20, "ms_80": ms_80, "host_us_20": 1e3 * host_ms_20, "host_us": 1e3 * host_ms}


def format_row(row: dict) -> str:
    if row["status"] != "ok":
        return f"{row['shape']:24} {row['provider']:24} {row['status']}: {row['reason']}"
    return COLUMNS.format(
        row["shape"], row["provider"], row["pass"], f"{row['ms']:.4f}", f"{row['ms_20']:.4f}-{row['ms_80']:.4f}",
        f"{row['host_us_20']:.1f}", f"{row['host_us']:.1f}",
    )  # fmt: skip


def parse_shape(text: str) -> Shape:
    return tuple(int(size) for size in text.split("x"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="+", help="names of ops")
    parser.add_argument("--shape", type=parse_shape, help="dimensions separated by x (default: the op's last shape)")
    parser.add_argument("--provider", nargs="+", help="names of providers (default: all)")
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    args = parser.parse_args()
    try:
        ops, providers = suite.select_ops_and_providers(args.op, args.provider or [])
    except InputError as error:
        parser.error(str(error))
    print(COLUMNS.format("shape", "provider", "pass", "ms", "20 to 80 %", "host 20 %", "host us"))
    found: dict[str, list[dict]] = {}
    for op in ops:
        found[op.name] = run_shape(suite.Case(op, args.shape or op.shapes[-1]), providers)
        torch.cuda.empty_cache()
        print(op.name, *map(format_row, found[op.name]), sep="\n", flush=True)
    print(results.save(args.output, "in-turns", results.environment() | {"rows_of": found}))


if __name__ == "__main__":
    main()
