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

from ligermodels.kernels.dispatch import Node, is_last_use, promoted_dtype, register_op, runs_kernels, widen
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


@kernel()
def _forward_kernel(
    gate_up_ptr, y_ptr, gate_up_stride, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, GATE_MULTIPLIER: tl.constexpr,
    DOWN_MULTIPLIER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program computes TILE columns of one row."""
    row, column, mask = locate_tile(COLUMNS, TILE)
    gate_ptr = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(gate_ptr, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + COLUMNS, mask, other=0.0).to(tl.float32)
    activated, _ = activate(_scale(gate, GATE_MULTIPLIER), ACTIVATION)
    y = _scale(activated * up, DOWN_MULTIPLIER)
    tl.store(y_ptr + row * COLUMNS + column, y.to(y_ptr.dtype.element_ty), mask)


@kernel()
def _separate_forward_kernel(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr,
    GATE_MULTIPLIER: tl.constexpr, DOWN_MULTIPLIER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program computes TILE columns of one row."""
    row, column, mask = locate_tile(COLUMNS, TILE)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask, other=0.0).to(tl.float32)
    activated, _ = activate(_scale(gate, GATE_MULTIPLIER), ACTIVATION)
    y = _scale(activated * up, DOWN_MULTIPLIER)
    tl.store(y_ptr + row * COLUMNS + column, y.to(y_ptr.dtype.element_ty), mask)


@kernel()
def _backward_kernel(
    dy_ptr, gate_up_ptr, dgate_up_ptr, y_ptr, dy_stride, gate_up_stride,
    COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, GATE_MULTIPLIER: tl.constexpr, DOWN_MULTIPLIER: tl.constexpr,
    EMIT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes TILE columns of one row of dgate and dup and, if EMIT, of y."""
    wait_for_previous_kernel(PDL)
    row, column, mask = locate_tile(COLUMNS, TILE)
    gate_ptr = gate_up_ptr + row * gate_up_stride + column
    dgate_ptr = dgate_up_ptr + row * (2 * COLUMNS) + column
    gate = tl.load(gate_ptr, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + COLUMNS, mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask, other=0.0).to(tl.float32)
    dgate, dup, activated = _gradients(dy, gate, up, ACTIVATION, GATE_MULTIPLIER, DOWN_MULTIPLIER)
    tl.store(dgate_ptr, dgate.to(dgate_up_ptr.dtype.element_ty), mask)
    tl.store(dgate_ptr + COLUMNS, dup.to(dgate_up_ptr.dtype.element_ty), mask)
    if EMIT:
        y = _scale(activated * up, DOWN_MULTIPLIER)
        tl.store(y_ptr + row * COLUMNS + column, y.to(y_ptr.dtype.element_ty), mask)


@kernel()
def _separate_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, dy_stride, gate_stride, up_stride,
    COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, GATE_MULTIPLIER: tl.constexpr, DOWN_MULTIPLIER: tl.constexpr,
    GATE_GRAD: tl.constexpr, UP_GRAD: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes TILE columns of one row of dgate, dup or both."""
    wait_for_previous_kernel(PDL)
    row, column, mask = locate_tile(COLUMNS, TILE)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask, other=0.0).to(tl.float32)
    dgate, dup, _ = _gradients(dy, gate, up, ACTIVATION, GATE_MULTIPLIER, DOWN_MULTIPLIER)
    if GATE_GRAD:
        tl.store(dgate_ptr + row * COLUMNS + column, dgate.to(dgate_ptr.dtype.element_ty), mask)
    if UP_GRAD:
        tl.store(dup_ptr + row * COLUMNS + column, dup.to(dup_ptr.dtype.element_ty), mask)


class RowTiles(NamedTuple):
    """How a row is split between programs."""

    tiles: int
    tile_columns: int


@functools.cache
def split_row(columns: int) -> RowTiles:
    tile = min(MAX_TILE_COLUMNS, triton.next_power_of_2(columns))
    return RowTiles(cdiv(columns, tile), tile)


@functools.cache
def _forward_launcher(
    width: int, activation: str, gate_multiplier: float, down_multiplier: float
) -> tuple[Launcher, int, int]:
    """(launcher, columns of y, tiles per row) for a gate_up that is `width` wide."""
    tiles, tile = split_row(width // 2)
    launch = _forward_kernel.bind(
        COLUMNS=width // 2, ACTIVATION=activation, GATE_MULTIPLIER=gate_multiplier, DOWN_MULTIPLIER=down_multiplier,
        TILE=tile,
    )  # fmt: skip
    return launch, width // 2, tiles


def _launch_forward(
    gate_up: Tensor, activation: str, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    *batch, width = gate_up.shape
    launch, columns, tiles = _forward_launcher(width, activation, gate_multiplier, down_multiplier)
    y = gate_up.new_empty(*batch, columns)
    if size := y.numel():
        gate_up, stride = as_rows_with_stride(gate_up, width)
        launch(size // columns * tiles, gate_up, y, stride)
    return y


@functools.cache
def _separate_forward_launcher(
    columns: int, activation: str, gate_multiplier: float, down_multiplier: float
) -> tuple[Launcher, int]:
    """(launcher, tiles per row)."""
    tiles, tile = split_row(columns)
    launch = _separate_forward_kernel.bind(
        COLUMNS=columns, ACTIVATION=activation, GATE_MULTIPLIER=gate_multiplier, DOWN_MULTIPLIER=down_multiplier,
        TILE=tile,
    )  # fmt: skip
    return launch, tiles


def _launch_separate_forward(
    gate: Tensor, up: Tensor, activation: str, gate_multiplier: float, down_multiplier: float
) -> Tensor:
    y = gate.new_empty(*gate.shape, dtype=promoted_dtype(gate, up))
    if size := y.numel():
        columns = gate.shape[-1]
        launch, tiles = _separate_forward_launcher(columns, activation, gate_multiplier, down_multiplier)
        (gate, gate_stride), (up, up_stride) = as_rows_with_stride(gate, columns), as_rows_with_stride(up, columns)
        launch(size // columns * tiles, gate, up, y, gate_stride, up_stride)
    return y


@functools.cache
def _backward_launcher(
    columns: int, activation: str, gate_multiplier: float, down_multiplier: float, emit: bool, device: torch.device
) -> tuple[Launcher, int]:
    """(launcher, tiles per row)."""
    tiles, tile = split_row(columns)
    launch = _backward_kernel.bind(
        COLUMNS=columns, ACTIVATION=activation, GATE_MULTIPLIER=gate_multiplier, DOWN_MULTIPLIER=down_multiplier,
        EMIT=emit, TILE=tile, **pdl_constants(device),
    )  # fmt: skip
    return launch, tiles


def _launch_backward(
    dy: Tensor, gate_up: Tensor, activation: str, emit: bool, gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0, inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """inplace: dgate_up overwrites gate_up and y overwrites dy. Both must be contiguous. This is safe because each
    program reads its tile before it writes it."""
    dgate_up = gate_up.detach() if inplace else gate_up.new_empty(*gate_up.shape)
    y = (dy if inplace else gate_up.new_empty(*dy.shape)) if emit else None
    if size := dy.numel():
        columns = dy.shape[-1]
        launch, tiles = _backward_launcher(columns, activation, gate_multiplier, down_multiplier, emit, dy.device)
        (dy, dy_stride), (gate_up, stride) = as_rows_with_stride(dy, columns), as_rows_with_stride(gate_up, 2 * columns)
        launch(size // columns * tiles, dy, gate_up, dgate_up, dgate_up if y is None else y, dy_stride, stride)
    return dgate_up, y


@functools.cache
def _separate_backward_launcher(
    columns: int, activation: str, gate_multiplier: float, down_multiplier: float, gate_grad: bool, up_grad: bool,
    device: torch.device,
) -> tuple[Launcher, int]:  # fmt: skip
    """(launcher, tiles per row)."""
    tiles, tile = split_row(columns)
    launch = _separate_backward_kernel.bind(
        COLUMNS=columns, ACTIVATION=activation, GATE_MULTIPLIER=gate_multiplier, DOWN_MULTIPLIER=down_multiplier,
        GATE_GRAD=gate_grad, UP_GRAD=up_grad, TILE=tile, **pdl_constants(device),
    )  # fmt: skip
    return launch, tiles


def _launch_separate_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, gate_multiplier: float, down_multiplier: float,
    gate_grad: bool, up_grad: bool, inplace: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """(dgate, dup), each None where it is not needed. inplace: they overwrite gate and up, which must be contiguous."""
    dgate, dup = (
        (x.detach() if inplace else x.new_empty(*x.shape)) if needed else None
        for x, needed in ((gate, gate_grad), (up, up_grad))
    )
    if size := dy.numel():
        columns = dy.shape[-1]
        launch, tiles = _separate_backward_launcher(
            columns, activation, gate_multiplier, down_multiplier, gate_grad, up_grad, dy.device
        )
        dy, dy_stride = as_rows_with_stride(dy, columns)
        (gate, gate_stride), (up, up_stride) = as_rows_with_stride(gate, columns), as_rows_with_stride(up, columns)
        launch(
            size // columns * tiles, dy, gate, up, gate if dgate is None else dgate, up if dup is None else dup,
            dy_stride, gate_stride, up_stride,
        )  # fmt: skip
    return dgate, dup


def _fake_forward(gate_up, activation, gate_multiplier=1.0, down_multiplier=1.0):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _fake_backward(dy, gate_up, activation, emit, gate_multiplier=1.0, down_multiplier=1.0):
    return gate_up.new_empty(gate_up.shape), gate_up.new_empty(dy.shape) if emit else None


def _fake_separate_forward(gate, up, activation, gate_multiplier, down_multiplier):
    return gate.new_empty(gate.shape, dtype=promoted_dtype(gate, up))


def _fake_separate_backward(dy, gate, up, activation, gate_multiplier, down_multiplier, gate_grad, up_grad):
    return gate.new_empty(gate.shape) if gate_grad else None, up.new_empty(up.shape) if up_grad else None


PACKED_SHARDING = RowSharding({"gate_up": 0, "y": 0, "dy": 0, "dgate_up": 0})
SEPARATE_SHARDING = RowSharding({"gate": 0, "up": 0, "y": 0, "dy": 0, "dgate": 0, "dup": 0}, columns=True)
gated_activation_forward = register_op(
    "gated_activation(Tensor gate_up, str activation, float gate_multiplier=1.0, float down_multiplier=1.0)"
    " -> (Tensor y)",
    _launch_forward,
    _fake_forward,
    PACKED_SHARDING,
)
gated_activation_backward = register_op(
    "gated_activation_backward(Tensor dy, Tensor gate_up, str activation, int emit, float gate_multiplier=1.0,"
    " float down_multiplier=1.0) -> (Tensor dgate_up, Tensor y)",
    _launch_backward,
    _fake_backward,
    PACKED_SHARDING,
)
separate_gated_activation_forward = register_op(
    "separate_gated_activation(Tensor gate, Tensor up, str activation, float gate_multiplier, float down_multiplier)"
    " -> (Tensor y)",
    _launch_separate_forward,
    _fake_separate_forward,
    SEPARATE_SHARDING,
)
separate_gated_activation_backward = register_op(
    "separate_gated_activation_backward(Tensor dy, Tensor gate, Tensor up, str activation, float gate_multiplier,"
    " float down_multiplier, int gate_grad, int up_grad) -> (Tensor dgate, Tensor dup)",
    _launch_separate_backward,
    _fake_separate_backward,
    SEPARATE_SHARDING,
)


def backward_from_saved(
    dy: Tensor, gate_up: Tensor, activation: str, emit: bool, gate_multiplier: float, down_multiplier: float,
    inplace: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """gated_activation_backward for a node that saved gate_up and, with `emit`, computed dy itself (contiguous).

    inplace: dgate_up takes the memory of gate_up and y that of dy, if this is their last use.
    """
    if not (inplace and gate_up.is_contiguous() and is_last_use(gate_up, dy)):
        return gated_activation_backward(dy, gate_up, activation, emit, gate_multiplier, down_multiplier)
    gradients = _launch_backward(dy, gate_up, activation, emit, gate_multiplier, down_multiplier, inplace=True)
    torch.autograd.graph.increment_version(gate_up)  # so that autograd raises if another node saved it
    return gradients


def _are_apart(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors of the same shape have no memory in common."""
    return abs(a.data_ptr() - b.data_ptr()) >= max(a.nbytes, b.nbytes)


class _GatedActivation(Node):
    @staticmethod
    def forward(ctx, gate_up, activation, gate_multiplier, down_multiplier, inplace):
        ctx.save_for_backward(gate_up)
        ctx.options = activation, False, gate_multiplier, down_multiplier, inplace
        return gated_activation_forward(gate_up, activation, gate_multiplier, down_multiplier)

    @staticmethod
    def backward(ctx, dy):
        dgate_up, _ = backward_from_saved(dy, *ctx.saved_tensors, *ctx.options)
        return dgate_up, None, None, None, None


class _SeparateGatedActivation(Node):
    @staticmethod
    def forward(ctx, gate, up, activation, gate_multiplier, down_multiplier, inplace):
        ctx.save_for_backward(gate, up)
        ctx.options = activation, gate_multiplier, down_multiplier
        ctx.inplace = inplace
        return separate_gated_activation_forward(gate, up, activation, gate_multiplier, down_multiplier)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        needed = gate_grad, up_grad = ctx.needs_input_grad[:2]
        inplace = ctx.inplace and is_last_use(gate, up, dy) and gate.is_contiguous() and up.is_contiguous()
        if inplace and _are_apart(gate, up):
            dgate, dup = _launch_separate_backward(dy, gate, up, *ctx.options, *needed, inplace=True)
            written = [x for x, gradient in ((gate, dgate), (up, dup)) if gradient is not None]
            torch.autograd.graph.increment_version(written)
        else:
            dgate, dup = separate_gated_activation_backward(dy, gate, up, *ctx.options, *needed)
        return dgate if gate_grad else None, dup if up_grad else None, None, None, None, None


def check_gate_up(gate_up: Tensor, activation: str, up: Tensor | None = None) -> None:
    """Raises ValueError for an unknown activation, an odd width, and a gate and up that do not fit each other."""
    if activation not in ACTIVATION_FUNCTIONS:
        supported = ", ".join(ACTIVATION_FUNCTIONS)
        raise ValueError(f"gated activation: unknown activation {activation!r}; supported: {supported}")
    if up is None:
        if gate_up.shape[-1] % 2:
            raise ValueError(f"gated activation: gate_up has {gate_up.shape[-1]} columns; an even width is required")
    elif gate_up.shape != up.shape:
        raise ValueError(
            f"gated activation: gate has shape {list(gate_up.shape)}, up {list(up.shape)}; they must be equal"
        )


def gated_activation(
    gate_up: Tensor,
    activation: str = "silu",
    up: Tensor | None = None,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    inplace: bool = False,
) -> Tensor:
    """down_multiplier * activation(gate_multiplier * gate) * up.

    gate_up [..., 2 I] float, the gate in the first half of its columns and up in the second; or the gate alone [..., I]
    beside `up` of the same shape, any strides -> [..., I] in the same dtype. activation: "silu", "gelu_tanh" or "gelu".
    The multipliers (Falcon-H1, muP) are constants of a model: each value compiles kernels of its own.
    inplace: backward overwrites gate_up, or gate and up, with the gradient, unless the graph is retained for another
    backward or is being traced. Their values are then lost.
    Raises ValueError for any other activation, an odd width of gate_up, and a gate and up that differ.
    """
    check_gate_up(gate_up, activation, up)
    if not runs_kernels(gate_up):
        return gated_activation_reference(gate_up, activation, up, gate_multiplier, down_multiplier)
    if up is None:
        return _GatedActivation.apply(gate_up, activation, gate_multiplier, down_multiplier, inplace)
    return _SeparateGatedActivation.apply(gate_up, up, activation, gate_multiplier, down_multiplier, inplace)


def swiglu(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up: gate_up [..., 2 I], or gate and up [..., I] as two tensors -> [..., I]."""
    return gated_activation(gate_up, "silu", up)


def geglu(gate_up: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """gelu(gate) * up: gate_up [..., 2 I], or gate and up [..., I] as two tensors -> [..., I].

    approximate: "none" or "tanh", as in F.gelu.
    """
    return gated_activation(gate_up, "gelu" if approximate == "none" else f"gelu_{approximate}", up)
