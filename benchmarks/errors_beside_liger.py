"""Errors of the ops beside PyTorch's and Liger-Kernel's, against float64 on the same inputs, as a table in Markdown.

    python -m benchmarks.errors_beside_liger
    python -m benchmarks.errors_beside_liger rms_norm swiglu

An error is the largest of those of the outputs, or that of one gradient: |result - exact| / |exact| in the Frobenius
norm. All three libraries get equal inputs, rounded to the dtype, and equal upstream gradients. The exact values are
PyTorch's formula in float64. An implementation that fails has the reason in its place. Takes a minute on one GPU; on a
CPU the ops are their reference implementations.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.checks import DEVICE
from benchmarks.suite import select_names
from benchmarks.timing import as_list
from ligermodels import ops
from ligermodels.errors import InputError

EPS = 1e-6
DTYPES = torch.float32, torch.bfloat16
NORM_SHAPES = (4096, 1024), (4096, 4096), (1000, 5120)
GATED_SHAPES = (4096, 1024), (2048, 14336)
ROPE_SHAPES = (2, 1024, 32, 8, 128), (1, 1000, 8, 2, 64)
LOSS_SHAPES = (4096, 32000), (512, 128256)
HEAD_SHAPES = (4096, 1024, 32000), (512, 2048, 128256)
EXPERT_SHAPES = (512, 256, 384, 8, 2), (1024, 512, 256, 32, 4)


@dataclass(frozen=True)
class Comparison:
    """An op of three libraries.

    draw(*shape) -> the differentiated inputs by name, and the other arguments; pytorch, liger and ours take both.
    liger: returns the function, because it imports the library.
    """

    shapes: Sequence[tuple[int, ...]]
    draw: Callable[..., tuple[dict[str, Tensor], list[Tensor]]]
    pytorch: Callable
    liger: Callable[[], Callable]
    ours: Callable


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.float64, device=DEVICE)


def draw_norm(*names: str) -> Callable:
    """x and residual [rows, columns]; weight and bias [columns]."""

    def draw(rows, columns):
        of_rows = ("x", "residual")
        return {name: normal(rows, columns) if name in of_rows else normal(columns) for name in names}, []

    return draw


def draw_gated(rows, columns):
    return {"gate": normal(rows, columns), "up": normal(rows, columns)}, []


def draw_rope(batch, length, heads, kv_heads, size):
    """In the layout of Hugging Face, whose cos and sin hold each angle twice and have the dtype of the model."""
    phases = torch.arange(length)[:, None] * 10000.0 ** -(torch.arange(0, size, 2) / size)
    tables = [torch.cat((x, x), -1)[None].to(DEVICE, torch.float64) for x in (phases.cos(), phases.sin())]
    return {"q": normal(batch, heads, length, size), "k": normal(batch, kv_heads, length, size)}, tables


def draw_loss(rows, vocabulary):
    return {"logits": normal(rows, vocabulary)}, [torch.randint(vocabulary, (rows,), device=DEVICE)]


def draw_head(rows, hidden, vocabulary):
    leaves = {"hidden": normal(rows, hidden), "weight": normal(vocabulary, hidden, scale=hidden**-0.5)}
    return leaves, [torch.randint(vocabulary, (rows,), device=DEVICE)]


def draw_experts(tokens, hidden, inner, num_experts, k):
    weight, index = torch.softmax(normal(tokens, num_experts), -1).topk(k)
    gate_up, down = normal(num_experts, 2 * inner, hidden, scale=0.05), normal(num_experts, hidden, inner, scale=0.05)
    return {"x": normal(tokens, hidden), "weight": weight, "gate_up": gate_up, "down": down}, [index.int()]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def pytorch_experts(x, weight, gate_up, down, index):
    y = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, slot = torch.where(index == expert)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, -1)
        y = y.index_add(0, token, (F.silu(gate) * up) @ down[expert].T * weight[token, slot, None])
    return y


def rms_norm_by_pytorch(x, weight=None):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def add_rms_norm_by_pytorch(x, residual, weight):
    return rms_norm_by_pytorch(x + residual, weight), x + residual


def liger_function(name: str, *options) -> Callable[[], Callable]:
    """A function of liger_kernel.transformers.functional, with options after its tensors."""

    def load():
        from liger_kernel.transformers import functional

        return lambda *inputs: getattr(functional, name)(*inputs, *options)

    return load


def liger_gated_with_multipliers():
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate, up: LigerSiLUMulFunction.apply(gate, up, 0.75, 1.5)


def liger_linear_cross_entropy():
    from liger_kernel.transformers import functional

    return lambda hidden, weight, targets: functional.liger_fused_linear_cross_entropy(hidden, weight, targets)


def liger_experts():
    from liger_kernel.ops import LigerFusedMoEFunction

    return lambda x, weight, gate_up, down, index: LigerFusedMoEFunction.apply(x, gate_up, down, index, weight)


COMPARISONS = {
    "rms_norm": Comparison(
        NORM_SHAPES, draw_norm("x", "weight"), rms_norm_by_pytorch, liger_function("liger_rms_norm", EPS),
        lambda x, weight: ops.rms_norm(x, weight, EPS),
    ),
    "rms_norm, offset 1": Comparison(
        NORM_SHAPES, draw_norm("x", "weight"), lambda x, weight: rms_norm_by_pytorch(x, weight + 1),
        liger_function("liger_rms_norm", EPS, 1.0, "gemma"), lambda x, weight: ops.rms_norm(x, weight, EPS, 1.0),
    ),
    "rms_norm without weight": Comparison(
        NORM_SHAPES, draw_norm("x"), rms_norm_by_pytorch, liger_function("liger_rms_norm", None, EPS),
        lambda x: ops.rms_norm(x, None, EPS),
    ),
    "add_rms_norm": Comparison(
        NORM_SHAPES, draw_norm("x", "residual", "weight"), add_rms_norm_by_pytorch,
        liger_function("liger_fused_add_rms_norm", EPS),
        lambda x, residual, weight: ops.add_rms_norm(x, residual, weight, EPS),
    ),
    "layer_norm": Comparison(
        NORM_SHAPES, draw_norm("x", "weight", "bias"),
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
        liger_function("liger_layer_norm", EPS), lambda x, weight, bias: ops.layer_norm(x, weight, bias, EPS),
    ),
    "swiglu": Comparison(
        GATED_SHAPES, draw_gated, lambda gate, up: F.silu(gate) * up, liger_function("liger_swiglu"), ops.swiglu
    ),
    "swiglu with multipliers": Comparison(
        GATED_SHAPES, draw_gated, lambda gate, up: F.silu(0.75 * gate) * up * 1.5, liger_gated_with_multipliers,
        lambda gate, up: ops.gated_activation(gate, "silu", up, gate_multiplier=0.75, down_multiplier=1.5),
    ),
    "geglu": Comparison(
        GATED_SHAPES, draw_gated, lambda gate, up: F.gelu(gate, approximate="tanh") * up, liger_function("liger_geglu"),
        lambda gate, up: ops.geglu(gate, up, approximate="tanh"),
    ),
    "rope": Comparison(
        ROPE_SHAPES, draw_rope, lambda q, k, *tables: (rotate(q, *tables), rotate(k, *tables)),
        liger_function("liger_rope"), ops.apply_rotary_pos_emb,
    ),
    "cross_entropy": Comparison(
        LOSS_SHAPES, draw_loss, F.cross_entropy, liger_function("liger_cross_entropy"), ops.cross_entropy
    ),
    "linear_cross_entropy": Comparison(
        HEAD_SHAPES, draw_head, lambda hidden, weight, targets: F.cross_entropy(hidden @ weight.T, targets),
        liger_linear_cross_entropy, ops.linear_cross_entropy,
    ),
    "experts": Comparison(
        EXPERT_SHAPES, draw_experts, pytorch_experts, liger_experts,
        lambda x, weight, gate_up, down, index: ops.experts(x, index, weight.float(), gate_up, down),
    ),
}  # fmt: skip


def evaluate(function: Callable, inputs: Sequence[Tensor], others: Sequence[Tensor], dtype: torch.dtype) -> list:
    """The outputs as one list, then each gradient. Every call has copies of its own, which it may overwrite."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    # A copy of each: functions that write into their inputs cannot write into leaves.
    arguments = [x.clone() for x in leaves]
    outputs = as_list(function(*arguments, *(x.to(dtype) if x.is_floating_point() else x for x in others)))
    torch.manual_seed(1)
    upstream = [torch.randn(y.shape, device=DEVICE).to(DTYPES[-1]).to(y.dtype) for y in outputs]
    values = [y.detach().double() for y in outputs]
    return [values, *([x.double()] for x in torch.autograd.grad(outputs, leaves, upstream))]


def relative_error(result: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(result, exact, strict=True))


def errors(function: Callable[[], Callable], exact: list, *arguments) -> list[str]:
    """One cell for the outputs and each gradient; the reason in all of them if the call fails."""
    try:
        results = evaluate(function(), *arguments)
        return [f"{relative_error(result, value):.2e}" for result, value in zip(results, exact, strict=True)]
    except ModuleNotFoundError:
        return ["not installed"] * len(exact)
    except Exception as error:  # of one library: the others still have their row
        message = str(error).strip().partition("\n")[0].replace("|", "/")
        return [f"{type(error).__name__}: {message}"[:80]] * len(exact)


def rows(name: str, comparison: Comparison, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
    torch.manual_seed(0)
    drawn, others = comparison.draw(*shape)
    rounded = [x.to(dtype).double() for x in drawn.values()]
    others = [x.to(dtype).double() if x.is_floating_point() else x for x in others]
    exact = evaluate(comparison.pytorch, rounded, others, torch.float64)
    functions = lambda: comparison.pytorch, comparison.liger, lambda: comparison.ours
    columns = [errors(function, exact, rounded, others, dtype) for function in functions]
    for tensor, *cells in zip(["output", *(f"d{name}" for name in drawn)], *columns, strict=True):
        label = "x".join(map(str, shape)), str(dtype).removeprefix("torch."), tensor
        yield f"| {' | '.join((name, *label, *cells))} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.errors_beside_liger", description=__doc__)
    parser.add_argument("op", nargs="*", help="ops to compare; all if none is given")
    try:
        names = select_names(parser.parse_args(arguments).op, COMPARISONS, "op")
    except InputError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    print("| op | shape | dtype | tensor | PyTorch | Liger | ligermodels |\n|---|---|---|---|---|---|---|")
    for name in names:
        comparison = COMPARISONS[name]
        for shape in comparison.shapes:
            for dtype in DTYPES:
                print(*rows(name, comparison, shape, dtype), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
