"""Ops and their providers, each row of them checked and timed.

A row is one provider's pass of one op at one shape. Before it is timed its outputs and gradients are compared with the
op's reference in fp32: their relative error may be FACTOR times what the reference itself makes in bf16.
"""

import difflib
import gc
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import results, table, timing
from benchmarks.timing import Inputs, as_list
from ligermodels.errors import InputError

SCRIPTS = (
    "rms_norm", "layer_norm", "rope", "qk_norm_rope", "gated_activation", "cross_entropy", "linear_cross_entropy",
    "experts", "adamw",
)  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FACTOR = 4.0  # room for more roundings than the reference's one, none for another formula
FLOOR = torch.finfo(torch.bfloat16).eps / 4  # of the error allowed: one rounding
PER_MS = {timing.COPY: 1e6, timing.MATMUL: 1e9}  # bytes in a GB/s, operations in a TFLOP/s, of a millisecond

Shape = tuple[int, ...]
OPS: dict[str, "Op"] = {}


class Provider(NamedTuple):
    make: Callable[..., Callable]
    shapes: list[Shape]
    layout: Callable[..., Iterable[Tensor]]


@dataclass
class Op:
    """One op beside its peers, listed under its name.

    inputs(*shape) -> tensors, on the default device; those that require a gradient are differentiated.
    reference: callable on them, the definition.
    work(*shape) -> the fewest bytes or operations of each pass that is timed: "forward", "backward",
        "forward+backward"; only "forward" where nothing is differentiated.
    ceiling: what bounds it, timing.COPY or timing.MATMUL.
    alone(*shape) -> callable whose own time is the limit, in place of work at the ceiling.
    beyond_gradients: whether the peak of memory leaves out the inputs' gradients.
    """

    name: str
    shapes: list[Shape]
    inputs: Callable[..., list[Tensor]]
    reference: Callable
    work: Callable[..., dict[str, float]]
    ceiling: str = timing.COPY
    alone: Callable[..., Callable] | None = None
    beyond_gradients: bool = False
    providers: dict[str, Provider] = field(default_factory=dict)

    def __post_init__(self) -> None:
        OPS[self.name] = self

    def provider(self, name: str, shapes: list[Shape] | None = None, layout: Callable = lambda *inputs: inputs):
        """Registers a function of the shape that imports what it needs and returns a callable on the inputs.

        shapes: those to run, all if not given. layout: from the op's inputs to those this provider would find in a
        model; not timed.
        """

        def register(make: Callable[..., Callable]) -> Callable[..., Callable]:
            self.providers[name] = Provider(make, shapes or self.shapes, layout)
            return make

        return register

    def compiled(self, shapes: list[Shape]) -> None:
        """Registers torch.compile of the provider "pytorch"; each shape costs seconds of compilation."""
        make, _, layout = self.providers["pytorch"]

        @self.provider("torch.compile", shapes, layout)
        def compiled(*shape):
            torch._dynamo.reset()
            return torch.compile(make(*shape), dynamic=False)


def both(forward: float, backward: float) -> dict[str, float]:
    """The work of each pass, where one after the other can share nothing."""
    return {"forward": forward, "backward": backward, "forward+backward": forward + backward}


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    """A bf16 input that is differentiated."""
    return torch.randn(shape, dtype=torch.bfloat16).mul_(scale).requires_grad_()


def label(shape: Shape) -> str:
    return "x".join(map(str, shape))


# What is right.


def fresh_inputs(op: Op, shape: Shape, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        return op.inputs(*shape)


def in_single(x: Tensor) -> Tensor:
    return x.detach().float().requires_grad_(x.requires_grad) if x.dtype == torch.bfloat16 else x


def upstream_of(outputs: list[Tensor]) -> list[Tensor]:
    """1 for a loss, random bf16 values for everything else."""
    like = {"dtype": torch.bfloat16, "device": DEVICE}
    return [(torch.randn(y.shape, **like) if y.dim() else torch.ones((), **like)).to(y.dtype) for y in outputs]


def evaluate(function: Callable, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, then the gradient of each input that requires one."""
    outputs = as_list(function(*inputs))
    leaves = [x for x in inputs if x.requires_grad]
    values = [y.detach().clone() for y in outputs]  # some backwards write where they read
    torch.manual_seed(1)
    return values + (list(torch.autograd.grad(outputs, leaves, upstream_of(outputs))) if leaves else [])


def after(layout: Callable, function: Callable) -> Callable:
    """What a provider computes of the op's own inputs."""
    return lambda *inputs: function(*layout(*inputs))


def relative_errors(results: list[Tensor], oracle: list[Tensor]) -> list[float]:
    pairs = zip(results, oracle, strict=True)
    return [((got.float() - expected).norm() / expected.norm().clamp_min(1e-30)).item() for got, expected in pairs]


class Truth:
    """What the reference gives at one shape in fp32, and the errors that it makes in bf16."""

    def __init__(self, op: Op, shape: Shape) -> None:
        self.oracle = evaluate(op.reference, [in_single(x) for x in fresh_inputs(op, shape)])
        self.plain = relative_errors(evaluate(op.reference, fresh_inputs(op, shape)), self.oracle)

    def error_of(self, results: list[Tensor]) -> float:
        """The worst of all tensors' errors, as a multiple of plain bf16's. Not finite where a result is not."""
        errors = relative_errors(results, self.oracle)
        worst = [error / max(plain, FLOOR) for error, plain in zip(errors, self.plain, strict=True)]
        return max(worst, key=lambda x: float("inf") if x != x else x)


# Rows.


def timed_inputs(op: Op, provider: Provider, function: Callable, shape: Shape) -> list[Inputs]:
    """Sets to rotate, with upstream gradients."""

    def one(seed: int) -> Inputs:
        laid_out = list(provider.layout(*fresh_inputs(op, shape, seed)))
        arguments = [x.detach().requires_grad_(x.requires_grad) for x in laid_out]
        leaves = [x for x in arguments if x.requires_grad]
        upstream = upstream_of(as_list(function(*arguments))) if leaves else []
        return Inputs(arguments, leaves, upstream)

    first = one(0)
    size = sum(x.nbytes for x in [*first.arguments, *first.upstream])
    return [first, *map(one, range(1, timing.sets_beyond_cache(size)))]


def rows_of(op: Op, shape: Shape, provider: Provider, truth: Truth, limits: dict[str, float]) -> Iterator[dict]:
    """One row a pass, the last with the peak of memory; a single one where the result is wrong."""
    function = provider.make(*shape)
    error = truth.error_of(evaluate(after(provider.layout, function), fresh_inputs(op, shape)))
    if not error <= FACTOR:
        yield {"status": "wrong", "reason": f"error {error:.3g} times plain bf16's, {FACTOR:g} allowed"}
        return
    work = op.work(*shape)
    sets = timed_inputs(op, provider, function, shape)
    timings, peak = timing.measure(function, sets, list(work))
    if op.beyond_gradients:
        peak -= sum(x.nbytes for x in sets[0].leaves)
    for kind, measured in timings.items():
        row = {"status": "ok", "pass": kind, "error": error} | figures(op, work[kind], limits[kind], measured)
        yield row | ({"peak_mib": peak / 2**20} if kind == list(work)[-1] else {})


def figures(op: Op, work: float, limit_ms: float, measured: timing.Timing) -> dict:
    row = {
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


def limits_of(op: Op, shape: Shape) -> dict[str, float]:
    """The least milliseconds of each pass, from what was measured in this run."""
    work = op.work(*shape)
    if op.alone is None:
        return {kind: least / timing.ceilings()[op.ceiling] / PER_MS[op.ceiling] for kind, least in work.items()}
    with torch.device(DEVICE):
        alone = op.alone(*shape)
    return dict.fromkeys(work, timing.median_time(alone, timing.FEWEST_CALLS))


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


def run_shape(op: Op, shape: Shape, names: Iterable[str]) -> Iterator[dict]:
    """All rows of one shape."""
    shared: list = []
    problem = attempt(lambda: shared.extend((Truth(op, shape), limits_of(op, shape))) or [])
    for name in names:
        provider = op.providers[name]
        rows = problem or attempt(lambda provider=provider: rows_of(op, shape, provider, *shared))
        for row in rows if shape in provider.shapes else []:
            yield {"shape": label(shape), "provider": name} | row


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
            raise InputError(f"bench: no {what} {name!r}; the nearest is {near!r} of {', '.join(known)}")
    return names or known


def run(op_names: list[str], provider_names: list[str], folder: Path) -> None:
    """Times the named ops and providers, or all; leaves a dated file an op in `folder`.

    Raises InputError for a name that is not known, and where there is no GPU.
    """
    for script in SCRIPTS:
        importlib.import_module(f"benchmarks.{script}")
    ops = [OPS[name] for name in selected(op_names, OPS, "op")]
    known = dict.fromkeys(name for op in ops for name in op.providers)
    providers = selected(provider_names, known, "provider")
    if not torch.cuda.is_available():
        raise InputError("bench: needs a GPU, and torch sees none")
    print(table.title(results.environment() | {"ceilings": timing.ceilings()}))
    for op in ops:
        report = run_op(op, [name for name in op.providers if name in providers])
        print(results.save(folder, op.name, report), flush=True)
