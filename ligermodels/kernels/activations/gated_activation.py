"""SwiGLU and GeGLU: y = d act(m gate) * up. Every activation has the form act(g) = g S(g):

    silu       S(g) = σ(g)
    gelu_tanh  S(g) = σ(z), z = √(8/π) (g + 0.044715 g³)      GELU's tanh form: (1 + tanh(z/2)) / 2 = σ(z)
    gelu       S(g) = Φ(g) = (1 + erf(g/√2)) / 2
Backward: dgate = d m dy * up * act'(m gate), dup = d dy * act(m gate), act'(g) = S(g) + g S'(g). With `emit` it also
recomputes y, for the weight gradient of the following linear.
Gate and up [..., I] are the halves of gate_up [..., 2 I], gate first, or two tensors; any float dtype; y [..., I]. The
multipliers m (of the gate) and d (of the down projection's input) are 1 in most models; each value of them compiles
kernels of its own. Computed in fp32, rounded once. M tokens move 3 M I elements forward and 5 M I backward, 6 M I with
`emit`: bound by memory bandwidth.
Maths: Shazeer 2020, https://arxiv.org/abs/2002.05202; Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import (
    Node,
    check_floats,
    is_last_use,
    promoted_dtype,
    register_op,
    runs_kernels,
    shape_of,
    widen,
)
from ligermodels.kernels.launch import Launcher, as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel
from ligermodels.kernels.row_sharding import RowSharding

MAX_TILE_COLUMNS = 1024  # of one program, which has four warps

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


def gated_activation_reference(
    gate_up: Tensor,
    activation: str = "silu",
    up: Tensor | None = None,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> Tensor:
    gate, wide_up = widen(gate_up).chunk(2, -1) if up is None else (widen(gate_up), widen(up))
    if gate_multiplier != 1.0:
        gate = gate_multiplier * gate
    y = ACTIVATION_FUNCTIONS[activation](gate) * wide_up
    dtype = gate_up.dtype if up is None else promoted_dtype(gate_up, up)
    return (y if down_multiplier == 1.0 else down_multiplier * y).to(dtype)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """The activation and its derivative at `gate`."""
    if ACTIVATION == "gelu":
        # Φ(-|g|) = exp(-g²/2) t P(t), t = 1 / (1 + 0.32 |g|), with a fitted polynomial P. The error is below
        # 4e-8 (Φ + 0.001), less than that of (1 + erf) / 2 in fp32, which cancels below 0. Forward computed with erf
        # takes so many instructions that it is no longer memory-bound.
        bell = tl.exp(-0.5 * gate * gate)
        t = 1.0 / (1.0 + 0.32 * tl.abs(gate))
        p = 0.21375779807567596 + t * (
            -0.15716803073883057 + t * (0.39856231212615967 + t * (-0.2353157252073288 + t * 0.044500768184661865))
        )
        tail = bell * (t * (0.1296568214893341 + t * (0.10600603371858597 + t * p)))
        sigmoid = tl.where(gate >= 0.0, 1.0 - tail, tail)
        density = 0.3989422804014327 * bell
    else:
        if ACTIVATION == "silu":
            z = gate
            slope = 1.0
        else:
            z = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
            slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        # Computed from σ(-|z|): exp cannot overflow, and σ' = σ(|z|) σ(-|z|) does not cancel.
        decay = tl.exp(-tl.abs(z))
        head = 1.0 / (1.0 + decay)
        tail = decay * head
        sigmoid = tl.where(z >= 0.0, 1.0 - tail, tail)
        density = slope * (head * tail)
    return gate * sigmoid, sigmoid + gate * density


@triton.jit
def locate_tile(COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Row, columns and column mask of this program. Consecutive programs share a row, for locality in memory."""
    tiles: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    column = tile * TILE + tl.arange(0, TILE)
    return row.to(tl.int64), column, column < COLUMNS


@triton.jit
def _scale(x, MULTIPLIER: tl.constexpr):
    return x * MULTIPLIER if MULTIPLIER != 1.0 else x


@triton.jit
def _gradients(dy, gate, up, ACTIVATION: tl.constexpr, GATE_MULTIPLIER: tl.constexpr, DOWN_MULTIPLIER: tl.constexpr):
    """dgate, dup and, for y, the activated gate; the compiler removes what is not stored."""
    dy = _scale(dy, DOWN_MULTIPLIER)
    activated, slope = activate(_scale(gate, GATE_MULTIPLIER), ACTIVATION)
    return _scale(dy * up * slope, GATE_MULTIPLIER), dy * activated, activated


@triton.jit
def _point_at_tile(
    gate_ptr, up_ptr, gate_stride, up_stride, row, column, COLUMNS: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Pointers to the gates and the ups at `column`. PACKED: a row of gate_ptr has both, the gates first."""
    gate_ptr = gate_ptr + row * gate_stride + column
    up_ptr = gate_ptr + COLUMNS if PACKED else up_ptr + row * up_stride + column
    return gate_ptr, up_ptr


@kernel()
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, COLUMNS: tl.constexpr, PACKED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_MULTIPLIER: tl.constexpr, DOWN_MULTIPLIER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program computes TILE columns of one row."""
    row, column, mask = locate_tile(COLUMNS, TILE)
    gate_ptr, up_ptr = _point_at_tile(gate_ptr, up_ptr, gate_stride, up_stride, row, column, COLUMNS, PACKED)
    gate = tl.load(gate_ptr, mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr, mask, other=0.0).to(tl.float32)
    activated, _ = activate(_scale(gate, GATE_MULTIPLIER), ACTIVATION)
    y = _scale(activated * up, DOWN_MULTIPLIER)
    tl.store(y_ptr + row * COLUMNS + column, y.to(y_ptr.dtype.element_ty), mask)


@kernel()
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, dy_stride, gate_stride, up_stride,
    COLUMNS: tl.constexpr, PACKED: tl.constexpr, ACTIVATION: tl.constexpr, GATE_MULTIPLIER: tl.constexpr,
    DOWN_MULTIPLIER: tl.constexpr, GATE_GRAD: tl.constexpr, UP_GRAD: tl.constexpr, EMIT: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes TILE columns of one row of what is needed of dgate, dup and, if EMIT, y."""
    wait_for_previous_kernel(PDL)
    row, column, mask = locate_tile(COLUMNS, TILE)
    gate_ptr, up_ptr = _point_at_tile(gate_ptr, up_ptr, gate_stride, up_stride, row, column, COLUMNS, PACKED)
    WIDTH: tl.constexpr = 2 * COLUMNS if PACKED else COLUMNS
    dgate_ptr, dup_ptr = _point_at_tile(dgate_ptr, dup_ptr, WIDTH, WIDTH, row, column, COLUMNS, PACKED)
    gate = tl.load(gate_ptr, mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr, mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask, other=0.0).to(tl.float32)
    dgate, dup, activated = _gradients(dy, gate, up, ACTIVATION, GATE_MULTIPLIER, DOWN_MULTIPLIER)
    if GATE_GRAD:
        tl.store(dgate_ptr, dgate.to(dgate_ptr.dtype.element_ty), mask)
    if UP_GRAD:
        tl.store(dup_ptr, dup.to(dup_ptr.dtype.element_ty), mask)
    if EMIT:
        y = _scale(activated * up, DOWN_MULTIPLIER)
        tl.store(y_ptr + row * COLUMNS + column, y.to(y_ptr.dtype.element_ty), mask)


class RowTiles(NamedTuple):
    """How a row is split between programs."""

    tiles: int
    tile_columns: int


@functools.cache
def split_row(columns: int) -> RowTiles:
    tile = min(MAX_TILE_COLUMNS, triton.next_power_of_2(columns))
    return RowTiles(cdiv(columns, tile), tile)


@functools.cache
def _forward(
    width: int, packed: bool, activation: str, gate_multiplier: float, down_multiplier: float
) -> tuple[Launcher, int, int]:
    """(launcher, columns of y, tiles per row) for a gate, or a gate_up, that is `width` wide."""
    columns = width // 2 if packed else width
    tiles, tile = split_row(columns)
    launch = _forward_kernel.bind(
        COLUMNS=columns, PACKED=packed, ACTIVATION=activation, GATE_MULTIPLIER=gate_multiplier,
        DOWN_MULTIPLIER=down_multiplier, TILE=tile,
    )  # fmt: skip
    return launch, columns, tiles


def _launch_forward(
    gate: Tensor, activation: str, gate_multiplier: float = 1.0, down_multiplier: float = 1.0, up: Tensor | None = None
) -> Tensor:
    """Without `up`, gate is gate_up."""
    *batch, width = gate.shape
    packed = up is None
    launch, columns, tiles = _forward(width, packed, activation, gate_multiplier, down_multiplier)
    y = gate.new_empty(*batch, columns, dtype=gate.dtype if up is None else promoted_dtype(gate, up))
    if size := y.numel():
        gate, gate_stride = as_rows_with_stride(gate, width)
        up, up_stride = (gate, gate_stride) if up is None else as_rows_with_stride(up, width)
        launch(size // columns * tiles, gate, up, y, gate_stride, up_stride)
    return y


@functools.cache
def _backward(
    columns: int, packed: bool, activation: str, gate_multiplier: float, down_multiplier: float, gate_grad: bool,
    up_grad: bool, emit: bool, device: torch.device,
) -> tuple[Launcher, int]:  # fmt: skip
    """(launcher, tiles per row)."""
    tiles, tile = split_row(columns)
    launch = _backward_kernel.bind(
        COLUMNS=columns, PACKED=packed, ACTIVATION=activation, GATE_MULTIPLIER=gate_multiplier,
        DOWN_MULTIPLIER=down_multiplier, GATE_GRAD=gate_grad, UP_GRAD=up_grad or packed, EMIT=emit, TILE=tile,
        **pdl_constants(device),
    )  # fmt: skip
    return launch, tiles


def _launch_backward(
    dy: Tensor, gate: Tensor, activation: str, emit: int, gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
    up: Tensor | None = None, gate_grad: int = 1, up_grad: int = 0, *, inplace: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dgate, y, dup), each None where it is not needed. Without `up`, gate is gate_up and dgate its gradient.

    inplace: dgate overwrites gate, dup overwrites up and y overwrites dy. All must be contiguous. This is safe because
    each program reads its tile before it writes it.
    """
    dgate = (gate.detach() if inplace else gate.new_empty(*gate.shape)) if gate_grad else None
    dup = (up.detach() if inplace else up.new_empty(*up.shape)) if up_grad and up is not None else None
    y = (dy if inplace else gate.new_empty(*dy.shape)) if emit else None
    if size := dy.numel():
        columns, width, packed = dy.shape[-1], gate.shape[-1], up is None
        launch, tiles = _backward(
            columns, packed, activation, gate_multiplier, down_multiplier, gate_grad, up_grad, emit, dy.device
        )
        (dy, dy_stride), (gate, gate_stride) = as_rows_with_stride(dy, columns), as_rows_with_stride(gate, width)
        up, up_stride = (gate, gate_stride) if up is None else as_rows_with_stride(up, columns)
        launch(
            size // columns * tiles, dy, gate, up, gate if dgate is None else dgate, up if dup is None else dup,
            dy if y is None else y, dy_stride, gate_stride, up_stride,
        )  # fmt: skip
    return dgate, y, dup


def _fake_forward(gate, activation, gate_multiplier=1.0, down_multiplier=1.0, up=None):
    if up is None:
        return gate.new_empty(*gate.shape[:-1], gate.shape[-1] // 2)
    return gate.new_empty(gate.shape, dtype=promoted_dtype(gate, up))


def _fake_backward(
    dy, gate, activation, emit, gate_multiplier=1.0, down_multiplier=1.0, up=None, gate_grad=True, up_grad=False
):
    dgate, y = gate.new_empty(gate.shape) if gate_grad else None, gate.new_empty(dy.shape) if emit else None
    return dgate, y, up.new_empty(up.shape) if up_grad else None


GATED_SHARDING = RowSharding(dict.fromkeys(("gate", "up", "y", "dy", "dgate", "dup"), 0), columns="up")
gated_activation_forward = register_op(
    "gated_activation", _launch_forward, _fake_forward, GATED_SHARDING, outputs=("y",)
)
gated_activation_backward = register_op(
    "gated_activation_backward", _launch_backward, _fake_backward, GATED_SHARDING, outputs=("dgate", "y", "dup")
)


def backward_from_saved(
    dy: Tensor, gate: Tensor, activation: str, emit: bool, gate_multiplier: float, down_multiplier: float,
    inplace: bool, up: Tensor | None = None, gate_grad: bool = True, up_grad: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """gated_activation_backward for a node that saved gate and up and, with `emit`, computed dy itself (contiguous).

    inplace: dgate takes the memory of gate, dup that of up and y that of dy, if this is their last use.
    """
    arguments = dy, gate, activation, emit, gate_multiplier, down_multiplier, up, gate_grad, up_grad
    if not (inplace and gate.is_contiguous() and is_last_use(gate, dy, up) and _are_apart(gate, up)):
        return gated_activation_backward(*arguments)
    gradients = dgate, _, dup = _launch_backward(*arguments, inplace=True)
    written = [x for x, gradient in ((gate, dgate), (up, dup)) if x is not None and gradient is not None]
    torch.autograd.graph.increment_version(written)  # so that autograd raises if another node saved one
    return gradients


def _are_apart(gate: Tensor, up: Tensor | None) -> bool:
    """Whether the contiguous gate and `up`, if it is given, are both contiguous and have no memory in common."""
    if up is None:
        return True
    return up.is_contiguous() and abs(gate.data_ptr() - up.data_ptr()) >= max(gate.nbytes, up.nbytes)


class _GatedActivation(Node):
    @staticmethod
    def forward(ctx, gate, up, activation, gate_multiplier, down_multiplier, inplace):
        ctx.save_for_backward(gate, up)
        ctx.options = activation, False, gate_multiplier, down_multiplier, inplace
        return gated_activation_forward(gate, activation, gate_multiplier, down_multiplier, up)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        gate_grad, up_grad, *_ = ctx.needs_input_grad
        dgate, _, dup = backward_from_saved(dy, gate, *ctx.options, up, gate_grad, up_grad)
        return dgate if gate_grad else None, dup if up_grad else None, None, None, None, None


def check_gate_up(op: str, gate_up: Tensor, activation: str, up: Tensor | None = None) -> None:
    """Raises ValueError for an unknown activation, an odd width, a gate and up that differ, and other than floats."""
    if activation not in ACTIVATION_FUNCTIONS:
        supported = ", ".join(ACTIVATION_FUNCTIONS)
        raise ValueError(f"{op}: unknown activation {activation!r}; supported: {supported}")
    check_floats(op, gate_up=gate_up, up=up)
    columns = shape_of(op, "gate_up", gate_up)[-1]
    if up is None:
        if columns % 2:
            raise ValueError(f"{op}: gate_up has {columns} columns; an even width is required")
    elif up.shape != gate_up.shape:
        raise ValueError(f"{op}: gate_up, the gate, is {list(gate_up.shape)}, up {list(up.shape)}; they must be equal")


def gated_activation(
    gate_up: Tensor, activation: str = "silu", up: Tensor | None = None, *, gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0, inplace: bool = False,
) -> Tensor:  # fmt: skip
    """down_multiplier * activation(gate_multiplier * gate) * up.

    gate_up [..., 2 I] float, the gate in the first half of its columns and up in the second; or the gate alone [..., I]
    beside `up` of the same shape, any strides -> [..., I] in the same dtype. activation: "silu", "gelu_tanh" or "gelu".
    The multipliers (Falcon-H1, muP) are constants of a model: each value compiles kernels of its own.
    inplace: backward overwrites gate_up, or gate and up, with the gradient, unless the graph is retained for another
    backward or is being traced. Their values are then lost.
    Raises ValueError for any other activation, an odd width of gate_up, and a gate and up that differ.
    """
    check_gate_up("gated_activation", gate_up, activation, up)
    if not runs_kernels(gate_up):
        return gated_activation_reference(gate_up, activation, up, gate_multiplier, down_multiplier)
    return _GatedActivation.apply(gate_up, up, activation, gate_multiplier, down_multiplier, inplace)


def swiglu(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up: gate_up [..., 2 I], or gate and up [..., I] as two tensors -> [..., I]."""
    return gated_activation(gate_up, "silu", up)


def geglu(gate_up: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """gelu(gate) * up: gate_up [..., 2 I], or gate and up [..., I] as two tensors -> [..., I].

    approximate: "none" or "tanh", as in F.gelu.
    """
    return gated_activation(gate_up, "gelu" if approximate == "none" else f"gelu_{approximate}", up)
