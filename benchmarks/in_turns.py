"""Times of an op's providers in turns, a few calls each: what changes during a run, the device's clock under its power
cap or the host's load, changes for all of them alike.

    python -m benchmarks.in_turns rms_norm swiglu
    python -m benchmarks.in_turns gated_linear --shape 16384x4096x14336

Without a shape it is the op's last one, which the host bounds. Host time is given as the 20th percentile too: whatever
else the host does adds to it.
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

Name = tuple[str, str]  # provider and pass


def prepared(case: suite.Case, provider: Provider) -> Iterator[dict]:
    """The one dict of calls, warm, by pass; or what is wrong with the result."""
    function = provider.make(*case.shape)
    if wrong := suite.fault(case.error_of(provider, function)):
        yield {"status": "wrong", "reason": wrong}
        return
    sets = suite.timed_inputs(case, provider, function)
    calls = {kind: timing.caller(function, sets, kind) for kind in PASSES if kind in case.op.work(*case.shape)}
    for call in (*calls.values(), *calls.values()):
        call(timing.Stamp(), timing.Stamp())
    yield calls


def in_turns(calls: dict[Name, Callable]) -> dict[Name, tuple[list[float], list[float]]]:
    """Milliseconds on the device and on the host of each call, timing.BATCH at a time."""
    times: dict[Name, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            host = timing.host_times(call, timing.BATCH)
            sleep = min(2 + 2 * sum(host), timing.LONGEST_SLEEP)
            times[name][0].extend(timing.device_times(call, timing.BATCH, sleep)[0])
            times[name][1].extend(host)
    return times


def run_shape(case: suite.Case, names: Iterable[str]) -> list[dict]:
    """A row of each provider and pass, or what kept a provider from it."""
    calls: dict[Name, Callable] = {}
    rows = []
    for name in (name for name in names if name in case.op.providers):
        (found,) = suite.attempt(functools.partial(prepared, case, case.op.providers[name]))
        if "status" in found:
            rows.append({"shape": suite.label(case.shape), "provider": name} | found)
        else:
            calls |= {(name, kind): call for kind, call in found.items()}
    gc.collect()
    gc.disable()
    times = in_turns(calls)
    gc.enable()
    for (name, kind), (device, host) in times.items():
        row = {"shape": suite.label(case.shape), "provider": name, "status": "ok", "pass": kind}
        rows.append(suite.shortened(row | figures(device, host)))
    return rows


def figures(device: list[float], host: list[float]) -> dict[str, float]:
    ms, ms_20, ms_80 = timing.median_and_spread(device)
    host_ms, host_ms_20, _ = timing.median_and_spread(host)
    return {"ms": ms, "ms_20": ms_20, "ms_80": ms_80, "host_us_20": 1e3 * host_ms_20, "host_us": 1e3 * host_ms}


def line(row: dict) -> str:
    if row["status"] != "ok":
        return f"{row['shape']:24} {row['provider']:24} {row['status']}: {row['reason']}"
    return COLUMNS.format(
        row["shape"], row["provider"], row["pass"], f"{row['ms']:.4f}", f"{row['ms_20']:.4f}-{row['ms_80']:.4f}",
        f"{row['host_us_20']:.1f}", f"{row['host_us']:.1f}",
    )  # fmt: skip


def shape_of(text: str) -> Shape:
    return tuple(int(side) for side in text.split("x"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="+")
    parser.add_argument("--shape", type=shape_of, help="sides with x between them (default: the op's last one)")
    parser.add_argument("--provider", nargs="+", help="all of them where none is named")
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder of the dated JSON file")
    args = parser.parse_args()
    try:
        ops, providers = suite.asked_for(args.op, args.provider or [])
    except InputError as error:
        parser.error(str(error))
    print(COLUMNS.format("shape", "provider", "pass", "ms", "20 to 80 %", "host 20 %", "host us"))
    found: dict[str, list[dict]] = {}
    for op in ops:
        found[op.name] = run_shape(suite.Case(op, args.shape or op.shapes[-1]), providers)
        torch.cuda.empty_cache()
        print(op.name, *map(line, found[op.name]), sep="\n", flush=True)
    print(results.save(args.output, "in-turns", results.environment() | {"rows_of": found}))


if __name__ == "__main__":
    main()
