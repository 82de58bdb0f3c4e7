"""Runs ops with their providers: checks each result, times it, prints a row and writes a dated file per op.

A row holds the measurements of one pass of one provider of one op at one shape.
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
from benchmarks.checks import DEVICE, ReferenceResult, evaluate, fresh_inputs, upstream_gradients, with_layout
from benchmarks.ops import OPS, Op, Provider, Shape
from benchmarks.timing import Inputs, as_list
from ligermodels.errors import InputError

SCRIPTS = (
    "rms_norm", "layer_norm", "rope", "qk_norm_rope", "gated_activation", "cross_entropy", "linear_cross_entropy",
    "linear_logprobs", "dpo_loss", "linear_divergence", "chunked_losses", "fused_linear", "frozen_linear", "attention",
    "attention_gate", "shared_keys", "experts", "gated_delta_rule", "mamba2_scan", "adamw", "adamw8bit",
)  # fmt: skip
# Work done in one millisecond at 1 GB/s (in bytes) and at 1 TFLOP/s (in operations).
WORK_PER_MS = {timing.COPY: 1e6, timing.MATMUL: 1e9}


@dataclass
class Case:
    """One op at one shape, with the reference result and the limits shared by all its providers."""

    op: Op
    shape: Shape

    @functools.cached_property
    def reference_result(self) -> ReferenceResult:
        return ReferenceResult(self.op, self.shape)

    @functools.cached_property
    def limits(self) -> dict[str, float]:
        """The lower bound in milliseconds of each pass, from rates or times measured in this run."""
        op, work = self.op, self.op.work(*self.shape)
        if op.limit_function is None:
            return {
                kind: least / timing.ceilings()[op.ceiling] / WORK_PER_MS[op.ceiling] for kind, least in work.items()
            }
        with torch.device(DEVICE):
            limit_function = op.limit_function(*self.shape)
        return dict.fromkeys(work, timing.median_time(limit_function, timing.CALLS_PER_BATCH))

    def error_ratio(self, provider: Provider, function: Callable) -> float:
        """The error of the provider's result as a multiple of the reference's bf16 error."""
        inputs = fresh_inputs(self.op, self.shape)
        return self.reference_result.error_ratio(evaluate(with_layout(provider.layout, function), inputs))


def provider_rows(case: Case, provider: Provider) -> Iterator[dict]:
    """One row per pass, the last with the peak memory. A single row if the result is wrong."""
    op, shape = case.op, case.shape
    function = provider.make(*shape)
    error = case.error_ratio(provider, function)
    if reason := reason_if_wrong(op, error):
        yield {"status": "wrong", "reason": reason}
        return
    work, limits = op.work(*shape), case.limits
    sets = make_input_sets(case, provider, function)
    timings, peak = timing.measure(function, sets, list(work))
    if op.exclude_gradients:
        peak -= sum(x.nbytes for x in sets[0].leaves)
    for kind, measured in timings.items():
        row = {"status": "ok", "pass": kind, "error": error} | timing_fields(op, work[kind], limits[kind], measured)
        yield row | ({"peak_mib": peak / 2**20} if kind == list(work)[-1] else {})


def reason_if_wrong(op: Op, error: float) -> str:
    """The reason why a result of the op with this error ratio is wrong; empty if it is correct."""
    if error <= op.max_error_ratio:
        return ""
    return f"error is {error:.3g} times the reference's bf16 error, at most {op.max_error_ratio:g} allowed"


def make_input_sets(case: Case, provider: Provider, function: Callable) -> list[Inputs]:
    """The input sets to rotate, with upstream gradients."""

    def build(seed: int) -> Inputs:
        converted = provider.layout(*fresh_inputs(case.op, case.shape, seed))
        arguments = [x.detach().requires_grad_(x.requires_grad) for x in converted]
        saved_values = [x.detach().clone() for x in arguments] if case.op.restore_inputs else []
        leaves = [x for x in arguments if x.requires_grad]
        upstream = upstream_gradients(as_list(function(*arguments))) if leaves else []
        return Inputs(arguments, leaves, upstream, saved_values)

    first = build(0)
    size = sum(x.nbytes for x in [*first.arguments, *first.upstream])
    return [first, *map(build, range(1, timing.num_input_sets(size)))]


def timing_fields(op: Op, work: float, limit_ms: float, measured: timing.Timing) -> dict:
    row: dict[str, Any] = {
        "ms": measured.ms,
        "ms_20": measured.ms_20,
        "ms_80": measured.ms_80,
        "rate": work / measured.ms / WORK_PER_MS[op.ceiling],
        "share": limit_ms / measured.ms,
        "host_us": measured.host_us,
    }
    if op.limit_function:
        row["ratio"] = measured.ms / limit_ms
    if not measured.host_ahead:
        row["reason"] = "the host waits for the device: the times include idle gaps"
    return row


def rows_or_failure(rows: Callable[[], Iterable[dict]]) -> list[dict]:
    """The rows, or a single row with the reason for the failure in one line. Frees the GPU memory afterwards."""
    try:
        return list(rows())
    except ModuleNotFoundError as error:
        return [{"status": "not installed", "reason": str(error)}]
    except Exception as error:  # any exception of a provider: the other providers still run
        message = str(error).strip().partition("\n")[0]
        return [{"status": "failed", "reason": f"{type(error).__name__}: {message}"[:200]}]
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def shape_label(shape: Shape) -> str:
    return "x".join(map(str, shape))


def run_shape(op: Op, shape: Shape, names: Iterable[str]) -> Iterator[dict]:
    """All rows of one shape, for the providers in `names`."""
    case = Case(op, shape)
    for name, provider in op.providers.items():
        if name in names and shape in provider.shapes:
            for row in rows_or_failure(functools.partial(provider_rows, case, provider)):
                yield {"shape": shape_label(shape), "provider": name} | round_figures(row)


def round_figures(row: dict) -> dict:
    """The row with its floats rounded to five significant digits."""
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}


def run_op(op: Op, names: Iterable[str]) -> dict:
    """The report of one op. Prints each row as soon as it is measured."""
    print(table.header(op.name, op.ceiling))
    rows = []
    for shape in op.shapes:
        for row in run_shape(op, shape, names):
            print(table.format_row(row), flush=True)
            rows.append(row)
    return results.environment() | {"ceilings": timing.ceilings(), "op": op.name, "rows": rows}


def select_names(names: list[str], known: Iterable[str], what: str) -> list[str]:
    """`names`, or all known names if it is empty. Raises InputError for an unknown name."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0)[0]
            raise InputError(f"no {what} {name!r}; the nearest is {near!r} of {', '.join(known)}")
    return names or known


def import_ops() -> None:
    """Imports all scripts, which adds their ops to OPS."""
    for script in SCRIPTS:
        importlib.import_module(f"benchmarks.{script}")


def select_ops_and_providers(op_names: list[str], provider_names: list[str]) -> tuple[list[Op], list[str]]:
    """The named ops and providers; an empty list means all.

    Raises InputError for an unknown name, and if torch finds no GPU.
    """
    import_ops()
    ops = [OPS[name] for name in select_names(op_names, OPS, "op")]
    known = dict.fromkeys(name for op in ops for name in op.providers)  # without duplicates, in order of registration
    providers = select_names(provider_names, known, "provider")
    if not torch.cuda.is_available():
        raise InputError("a GPU is needed, and torch finds none")
    return ops, providers


def run(op_names: list[str], provider_names: list[str], folder: Path) -> None:
    """Measures the named ops and providers (empty: all) and writes a dated file per op to `folder`.

    Raises the errors of `select_ops_and_providers`.
    """
    ops, providers = select_ops_and_providers(op_names, provider_names)
    print(table.title(results.environment() | {"ceilings": timing.ceilings()}))
    for op in ops:
        report = run_op(op, providers)
        print(results.save(folder, op.name, report), flush=True)
