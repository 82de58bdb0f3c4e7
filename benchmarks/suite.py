"""Runs ops and providers: each row checked, timed, printed and written to a dated file.

A row is one provider's pass of one op at one shape.
"""

import difflib
import functools
import gc
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import results, table, timing
from benchmarks.checks import DEVICE, FACTOR, Truth, after, evaluate, fresh_inputs, upstream_of
from benchmarks.ops import OPS, Op, Provider, Shape
from benchmarks.timing import Inputs, as_list
from ligermodels.errors import InputError

SCRIPTS = (
    "rms_norm", "layer_norm", "rope", "qk_norm_rope", "gated_activation", "cross_entropy", "linear_cross_entropy",
    "fused_linear", "experts", "adamw",
)  # fmt: skip
PER_MS = {timing.COPY: 1e6, timing.MATMUL: 1e9}  # bytes in a GB/s, operations in a TFLOP/s, of a millisecond


@dataclass
class Case:
    """One op at one shape, and what all its providers are held against."""

    op: Op
    shape: Shape

    @functools.cached_property
    def truth(self) -> Truth:
        return Truth(self.op, self.shape)

    @functools.cached_property
    def limits(self) -> dict[str, float]:
        """The least milliseconds of each pass, from what was measured in this run."""
        op, work = self.op, self.op.work(*self.shape)
        if op.alone is None:
            return {kind: least / timing.ceilings()[op.ceiling] / PER_MS[op.ceiling] for kind, least in work.items()}
        with torch.device(DEVICE):
            alone = op.alone(*self.shape)
        return dict.fromkeys(work, timing.median_time(alone, timing.BATCH))

    def error_of(self, provider: Provider, function: Callable) -> float:
        """Of what the provider made, times that of plain bf16."""
        return self.truth.error_of(evaluate(after(provider.layout, function), fresh_inputs(self.op, self.shape)))


def rows_of(case: Case, provider: Provider) -> Iterator[dict]:
    """One row a pass, the last with the peak of memory; a single one where the result is wrong."""
    op, shape = case.op, case.shape
    function = provider.make(*shape)
    error = case.error_of(provider, function)
    if wrong := fault(error):
        yield {"status": "wrong", "reason": wrong}
        return
    work, limits = op.work(*shape), case.limits
    sets = timed_inputs(case, provider, function)
    timings, peak = timing.measure(function, sets, list(work))
    if op.beyond_gradients:
        peak -= sum(x.nbytes for x in sets[0].leaves)
    for kind, measured in timings.items():
        row = {"status": "ok", "pass": kind, "error": error} | figures(op, work[kind], limits[kind], measured)
        yield row | ({"peak_mib": peak / 2**20} if kind == list(work)[-1] else {})


def fault(error: float) -> str:
    """What is wrong with a result of such an error; nothing where it is right."""
    return "" if error <= FACTOR else f"error {error:.3g} times plain bf16's, {FACTOR:g} allowed"


def timed_inputs(case: Case, provider: Provider, function: Callable) -> list[Inputs]:
    """Sets to rotate, with upstream gradients."""

    def one(seed: int) -> Inputs:
        laid_out = provider.layout(*fresh_inputs(case.op, case.shape, seed))
        arguments = [x.detach().requires_grad_(x.requires_grad) for x in laid_out]
        kept = [x.detach().clone() for x in arguments] if case.op.overwritten else []
        leaves = [x for x in arguments if x.requires_grad]
        upstream = upstream_of(as_list(function(*arguments))) if leaves else []
        return Inputs(arguments, leaves, upstream, kept)

    first = one(0)
    size = sum(x.nbytes for x in [*first.arguments, *first.upstream])
    return [first, *map(one, range(1, timing.sets_beyond_cache(size)))]


def figures(op: Op, work: float, limit_ms: float, measured: timing.Timing) -> dict:
    row: dict[str, Any] = {
        "ms": measured.ms,
        "ms_20": measured.ms_20,
        "ms_80": measured.ms_80,
        "rate": work / measured.ms / PER_MS[op.ceiling],
        "share": limit_ms / measured.ms,
        "host_us": measured.host_us,
    }
    if op.alone:
        row["ratio"] = measured.ms / limit_ms
    if not measured.ahead:
        row["reason"] = "the host waits for the device: its gaps are in the times"
    return row


def attempt(rows: Callable[[], Iterable[dict]]) -> list[dict]:
    """The rows, or one that says in a line why there are none. What it held on the device is free afterwards."""
    try:
        return list(rows())
    except ModuleNotFoundError as error:
        return [{"status": "not installed", "reason": str(error)}]
    except Exception as error:  # whatever a provider raises: the others go on
        message = str(error).strip().partition("\n")[0]
        return [{"status": "failed", "reason": f"{type(error).__name__}: {message}"[:200]}]
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def label(shape: Shape) -> str:
    return "x".join(map(str, shape))


def run_shape(op: Op, shape: Shape, names: Iterable[str]) -> Iterator[dict]:
    """All rows of one shape."""
    case = Case(op, shape)
    for name, provider in op.providers.items():
        if name in names and shape in provider.shapes:
            for row in attempt(functools.partial(rows_of, case, provider)):
                yield {"shape": label(shape), "provider": name} | shortened(row)


def shortened(row: dict) -> dict:
    """With five digits of every figure."""
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}


def run_op(op: Op, names: Iterable[str]) -> dict:
    """The report of one op, printed as it grows."""
    print(table.header(op.name, op.ceiling))
    rows = []
    for shape in op.shapes:
        for row in run_shape(op, shape, names):
            print(table.line(row), flush=True)
            rows.append(row)
    return results.environment() | {"ceilings": timing.ceilings(), "op": op.name, "rows": rows}


# What was asked for.


def selected(names: list[str], known: Iterable[str], what: str) -> list[str]:
    """`names`, or all that are known. Raises InputError for an unknown one."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0)[0]
            raise InputError(f"no {what} {name!r}; the nearest is {near!r} of {', '.join(known)}")
    return names or known


def import_ops() -> None:
    """Fills OPS."""
    for script in SCRIPTS:
        importlib.import_module(f"benchmarks.{script}")


def asked_for(op_names: list[str], provider_names: list[str]) -> tuple[list[Op], list[str]]:
    """The named ops and providers, or all.

    Raises InputError for a name that is not known, and where there is no GPU.
    """
    import_ops()
    ops = [OPS[name] for name in selected(op_names, OPS, "op")]
    known = dict.fromkeys(name for op in ops for name in op.providers)  # in their order
    providers = selected(provider_names, known, "provider")
    if not torch.cuda.is_available():
        raise InputError("a GPU is needed, and torch finds none")
    return ops, providers


def run(op_names: list[str], provider_names: list[str], folder: Path) -> None:
    """Times the named ops and providers, or all; leaves a dated file an op in `folder`. Raises as `asked_for`."""
    ops, providers = asked_for(op_names, provider_names)
    print(table.title(results.environment() | {"ceilings": timing.ceilings()}))
    for op in ops:
        report = run_op(op, providers)
        print(results.save(folder, op.name, report), flush=True)
