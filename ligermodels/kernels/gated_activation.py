"""SwiGLU and GeGLU: y = act(gate) * up, where [gate, up] = gate_up. Every activation has the form act(g) = g S(g):

    silu       S(g) = σ(g)
    gelu_tanh  S(g) = σ(z), z = √(8/π) (g + 0.044715 g³)      GELU's tanh form: (1 + tanh(z/2)) / 2 = σ(z)
    gelu       S(g) = Φ(g) = (1 + erf(g/√2)) / 2
Backward: dgate = dy * up * act'(gate), dup = dy * act(gate), act'(g) = S(g) + g S'(g). With `emit` it also recomputes
y, for the weight gradient of the following linear.
gate_up [..., 2 I] any float dtype, gate first; y [..., I]. Computed in fp32, rounded once. M tokens move 3 M I elements
forward and 5 M I backward, 6 M I with `emit`: bound by memory bandwidth.
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

from ligermodels.kernels.dispatch import Node, is_last_use, register, runs_kernels, widen
from ligermodels.kernels.launch import Launcher, as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel

MAX_TILE_COLUMNS = 1024  # of one program, which has four warps

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


def gated_activation_reference(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = widen(gate_up).chunk(2, -1)
    return (ACTIVATION_FUNCTIONS[activation](gate) * up).to(gate_up.dtype)


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
def _locate_tile(COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Row, columns and column mask of this program. Consecutive programs share a row, for locality in memory."""
    tiles: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    column = tile * TILE + tl.arange(0, TILE)
    return row.to(tl.int64), column, column < COLUMNS


@kernel()
def _forward_kernel(
    gate_up_ptr, y_ptr, gate_up_stride, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr
):
    """One program computes TILE columns of one row."""
    row, column, mask = _locate_tile(COLUMNS, TILE)
    gate_ptr = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(gate_ptr, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + COLUMNS, mask, other=0.0).to(tl.float32)
    activated, _ = activate(gate, ACTIVATION)
    tl.store(y_ptr + row * COLUMNS + column, (activated * up).to(y_ptr.dtype.element_ty), mask)


@kernel()
def _backward_kernel(
    dy_ptr, gate_up_ptr, dgate_up_ptr, y_ptr, dy_stride, gate_up_stride,
    COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, EMIT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes TILE columns of one row of dgate and dup and, if EMIT, of y."""
    wait_for_previous_kernel(PDL)
    row, column, mask = _locate_tile(COLUMNS, TILE)
    gate_ptr = gate_up_ptr + row * gate_up_stride + column
    dgate_ptr = dgate_up_ptr + row * (2 * COLUMNS) + column
    gate = tl.load(gate_ptr, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + COLUMNS, mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask, other=0.0).to(tl.float32)
    activated, slope = activate(gate, ACTIVATION)
    tl.store(dgate_ptr, (dy * up * slope).to(dgate_up_ptr.dtype.element_ty), mask)
    tl.store(dgate_ptr + COLUMNS, (dy * activated).to(dgate_up_ptr.dtype.element_ty), mask)
    if EMIT:
        tl.store(y_ptr + row * COLUMNS + column, (activated * up).to(y_ptr.dtype.element_ty), mask)


class RowTiles(NamedTuple):
    """How a row is split between programs."""

    tiles: int
    tile_columns: int


@functools.cache
def split_row(columns: int) -> RowTiles:
    tile = min(MAX_TILE_COLUMNS, triton.next_power_of_2(columns))
    return RowTiles(cdiv(columns, tile), tile)


@functools.cache
def _forward_launcher(width: int, activation: str) -> tuple[Launcher, int, int]:
    """(launcher, columns of y, tiles per row) for a gate_up that is `width` wide."""
    tiles, tile = split_row(width // 2)
    return _forward_kernel.bind(COLUMNS=width // 2, ACTIVATION=activation, TILE=tile), width // 2, tiles


def _launch_forward(gate_up: Tensor, activation: str) -> Tensor:
    *batch, width = gate_up.shape
    launch, columns, tiles = _forward_launcher(width, activation)
    y = gate_up.new_empty(*batch, columns)
    if size := y.numel():
        gate_up, stride = as_rows_with_stride(gate_up, width)
        launch(size // columns * tiles, gate_up, y, stride)
    return y


@functools.cache
def _backward_launcher(columns: int, activation: str, emit: bool, device: torch.device) -> tuple[Launcher, int]:
    """(launcher, tiles per row)."""
    tiles, tile = split_row(columns)
    launch = _backward_kernel.bind(
        COLUMNS=columns, ACTIVATION=activation, EMIT=emit, TILE=tile, **pdl_constants(device)
    )
    return launch, tiles


def _launch_backward(
    dy: Tensor, gate_up: Tensor, activation: str, emit: bool, inplace: bool = False
) -> tuple[Tensor, Tensor | None]:
    """inplace: dgate_up overwrites gate_up and y overwrites dy. Both must be contiguous. This is safe because each
    program reads its tile before it writes it."""
    dgate_up = gate_up.detach() if inplace else gate_up.new_empty(*gate_up.shape)
    y = (dy if inplace else gate_up.new_empty(*dy.shape)) if emit else None
    if size := dy.numel():
        columns = dy.shape[-1]
        launch, tiles = _backward_launcher(columns, activation, emit, dy.device)
        (dy, dy_stride), (gate_up, stride) = as_rows_with_stride(dy, columns), as_rows_with_stride(gate_up, 2 * columns)
        launch(size // columns * tiles, dy, gate_up, dgate_up, dgate_up if y is None else y, dy_stride, stride)
    return dgate_up, y


def _fake_forward(gate_up, activation):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _fake_backward(dy, gate_up, activation, emit):
    return gate_up.new_empty(gate_up.shape), gate_up.new_empty(dy.shape) if emit else None


gated_activation_forward = register(
    "gated_activation(Tensor gate_up, str activation) -> Tensor", _launch_forward, _fake_forward
)
gated_activation_backward = register(
    "gated_activation_backward(Tensor dy, Tensor gate_up, str activation, bool emit) -> (Tensor dgate_up, Tensor y)",
    _launch_backward,
    _fake_backward,
)


def backward_from_saved(
    dy: Tensor, gate_up: Tensor, activation: str, emit: bool, inplace: bool
) -> tuple[Tensor, Tensor | None]:
    """gated_activation_backward for a node that saved gate_up and, with `emit`, computed dy itself (contiguous).

    inplace: dgate_up takes the memory of gate_up and y that of dy, if this is their last use.
    """
    if not (inplace and gate_up.is_contiguous() and is_last_use(gate_up, dy)):
        return gated_activation_backward(dy, gate_up, activation, emit)
    gradients = _launch_backward(dy, gate_up, activation, emit, inplace=True)
    torch.autograd.graph.increment_version(gate_up)  # so that autograd raises if another node saved it
    return gradients


class _GatedActivation(Node):
    @staticmethod
    def forward(ctx, gate_up, activation, inplace):
        ctx.save_for_backward(gate_up)
        ctx.options = activation, False, inplace
        return gated_activation_forward(gate_up, activation)

    @staticmethod
    def backward(ctx, dy):
        dgate_up, _ = backward_from_saved(dy, *ctx.saved_tensors, *ctx.options)
        return dgate_up, None, None


def check_gate_up(gate_up: Tensor, activation: str) -> None:
    if activation not in ACTIVATION_FUNCTIONS:
        supported = ", ".join(ACTIVATION_FUNCTIONS)
        raise ValueError(f"gated activation: unknown activation {activation!r}; supported: {supported}")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gated activation: gate_up has {gate_up.shape[-1]} columns; an even width is required")


def gated_activation(gate_up: Tensor, activation: str = "silu", *, inplace: bool = False) -> Tensor:
    """activation(gate) * up, where gate is the first half of gate_up's columns and up the second half.

    gate_up [..., 2 I] float, activation "silu", "gelu_tanh" or "gelu" -> [..., I] in gate_up's dtype.
    inplace: backward overwrites gate_up with its gradient, unless the graph is retained for another backward or is
    being traced. The values of gate_up are then lost.
    Raises ValueError for any other activation and for an odd width.
    """
    check_gate_up(gate_up, activation)
    if not runs_kernels(gate_up):
        return gated_activation_reference(gate_up, activation)
    return _GatedActivation.apply(gate_up, activation, inplace)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: gate_up [..., 2 I] -> [..., I]."""
    return gated_activation(gate_up, "silu")


def geglu(gate_up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up: gate_up [..., 2 I] -> [..., I]; approximate "none" or "tanh", as in F.gelu."""
    return gated_activation(gate_up, "gelu" if approximate == "none" else f"gelu_{approximate}")
