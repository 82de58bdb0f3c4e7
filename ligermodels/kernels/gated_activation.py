"""SwiGLU and GeGLU: y = act(gate) * up, where [gate, up] = gate_up. All are act(g) = g S(g):

    silu       S(g) = σ(g)
    gelu_tanh  S(g) = σ(z), z = √(8/π) (g + 0.044715 g³)      GELU's tanh form: (1 + tanh(z/2)) / 2 = σ(z)
    gelu       S(g) = Φ(g) = (1 + erf(g/√2)) / 2
Backward: dgate = dy * up * act'(gate), dup = dy * act(gate), act'(g) = S(g) + g S'(g); it can emit y again, for the
weight gradient of the linear that follows.
gate_up [..., 2 I] any float dtype, gate first; y [..., I]. Computed in fp32, one rounding. M tokens move 3 M I elements
forward, 5 M I backward, 6 M I when it emits: bound by memory bandwidth.
Maths: Shazeer 2020, https://arxiv.org/abs/2002.05202; Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import Node, is_last_use, register, runs_kernels, widen
from ligermodels.kernels.launch import Launcher, as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel

MAX_TILE = 1024  # columns of one program of four warps

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


def gated_activation_reference(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = widen(gate_up).chunk(2, -1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """The activation and its derivative at `gate`."""
    if ACTIVATION == "gelu":
        # From Φ(-|g|) = exp(-g²/2) t P(t), t = 1 / (1 + 0.32 |g|), with P fitted: off by less than 4e-8 (Φ + 0.001), so
        # closer than (1 + erf) / 2 in fp32, which cancels below 0. With erf's instructions forward is not memory-bound.
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
        # From σ(-|z|), which never overflows and where σ' = σ(|z|) σ(-|z|) does not cancel.
        decay = tl.exp(-tl.abs(z))
        head = 1.0 / (1.0 + decay)
        tail = decay * head
        sigmoid = tl.where(z >= 0.0, 1.0 - tail, tail)
        density = slope * (head * tail)
    return gate * sigmoid, sigmoid + gate * density


@triton.jit
def _place(COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """This program's row, its columns and which of them there are. Neighbours share a row: memory likes them close."""
    tiles: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    column = tile * TILE + tl.arange(0, TILE)
    return row.to(tl.int64), column, column < COLUMNS


@kernel()
def _forward_kernel(
    gate_up_ptr, y_ptr, gate_up_stride, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr
):
    """One program computes TILE columns of one row."""
    row, column, mask = _place(COLUMNS, TILE)
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
    """One program computes TILE columns of one row's dgate and dup, and of y again where it is asked to."""
    wait_for_previous_kernel(PDL)
    row, column, mask = _place(COLUMNS, TILE)
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


@functools.cache
def tiles_of(columns: int) -> tuple[int, int]:
    """How many tiles cover a row, and the columns of one."""
    tile = min(MAX_TILE, triton.next_power_of_2(columns))
    return cdiv(columns, tile), tile


@functools.cache
def _forward(width: int, activation: str) -> tuple[Launcher, int, int]:
    """What launches forward on rows of `width` gates and ups, the columns of y, and how many tiles cover them."""
    tiles, tile = tiles_of(width // 2)
    return _forward_kernel.bind(COLUMNS=width // 2, ACTIVATION=activation, TILE=tile), width // 2, tiles


def _launch_forward(gate_up: Tensor, activation: str) -> Tensor:
    *batch, width = gate_up.shape
    launch, columns, tiles = _forward(width, activation)
    y = gate_up.new_empty(*batch, columns)
    if size := y.numel():
        gate_up, stride = as_rows_with_stride(gate_up, width)
        launch(size // columns * tiles, gate_up, y, stride)
    return y


@functools.cache
def _backward(columns: int, activation: str, emit: bool, device: torch.device) -> tuple[Launcher, int]:
    """What launches backward, and how many tiles cover a row."""
    tiles, tile = tiles_of(columns)
    launch = _backward_kernel.bind(
        COLUMNS=columns, ACTIVATION=activation, EMIT=emit, TILE=tile, **pdl_constants(device)
    )
    return launch, tiles


def _launch_backward(
    dy: Tensor, gate_up: Tensor, activation: str, emit: bool, inplace: bool = False
) -> tuple[Tensor, Tensor | None]:
    """inplace: dgate_up over gate_up and y over dy, both contiguous: a program reads its tile before it writes."""
    dgate_up = gate_up.detach() if inplace else gate_up.new_empty(*gate_up.shape)
    y = (dy if inplace else gate_up.new_empty(*dy.shape)) if emit else None
    if size := dy.numel():
        columns = dy.shape[-1]
        launch, tiles = _backward(columns, activation, emit, dy.device)
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


def backward_of_saved(
    dy: Tensor, gate_up: Tensor, activation: str, emit: bool, inplace: bool
) -> tuple[Tensor, Tensor | None]:
    """As gated_activation_backward, of a node's own gate_up and, where it emits, its own dy, which is contiguous.

    inplace: dgate_up into gate_up's memory and y into dy's, where this is their last use.
    """
    if not (inplace and gate_up.is_contiguous() and is_last_use(gate_up, dy)):
        return gated_activation_backward(dy, gate_up, activation, emit)
    gradients = _launch_backward(dy, gate_up, activation, emit, inplace=True)
    torch.autograd.graph.increment_version(gate_up)  # so that autograd objects if another node saved it
    return gradients


class _GatedActivation(Node):
    @staticmethod
    def forward(ctx, gate_up, activation, inplace):
        ctx.save_for_backward(gate_up)
        ctx.options = activation, False, inplace
        return gated_activation_forward(gate_up, activation)

    @staticmethod
    def backward(ctx, dy):
        dgate_up, _ = backward_of_saved(dy, *ctx.saved_tensors, *ctx.options)
        return dgate_up, None, None


def check_gated(gate_up: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated activation: no activation {activation!r}; there are {', '.join(ACTIVATIONS)}")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gated activation: gate_up is {gate_up.shape[-1]} wide; gate and up need an even width")


def gated_activation(gate_up: Tensor, activation: str, *, inplace: bool = False) -> Tensor:
    """activation(gate) * up, where gate is the first half of the columns of gate_up and up the second.

    gate_up [..., 2 I] float, activation "silu", "gelu_tanh" or "gelu" -> [..., I] in gate_up's dtype.
    inplace: backward writes gate_up's gradient over it (its values are lost), unless the graph is kept for another
    backward or something traces. Raises ValueError for any other activation and for an odd width.
    """
    check_gated(gate_up, activation)
    if not runs_kernels(gate_up):
        return gated_activation_reference(gate_up, activation)
    return _GatedActivation.apply(gate_up, activation, inplace)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: gate_up [..., 2 I] -> [..., I]."""
    return gated_activation(gate_up, "silu")


def geglu(gate_up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up: gate_up [..., 2 I] -> [..., I]; approximate "none" or "tanh", as in torch's gelu."""
    return gated_activation(gate_up, "gelu" if approximate == "none" else f"gelu_{approximate}")
