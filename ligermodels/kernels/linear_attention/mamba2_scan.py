"""Mamba-2 scan: a state-space layer whose state forgets at a rate that depends on the token (state-space duality, SSD).

Per head, with S [N, P] fp32, a < 0 and δ >= 0; head h reads B and C of group h // (H / G):
    S_t = exp(a δ_t) S_{t-1} + B_t (δ_t x_t)ᵀ;  y_t = S_tᵀ C_t + D x_t
Backward, over t in reverse, with dS the gradient of S and v = δ x:
    dS += C dyᵀ;  dC = S dy;  dB = dS v;  dv = dSᵀ B;  dx = δ dv + D dy;  dδ = x·dv + a dg;  dg = exp(g) <S_{t-1}, dS>
    da = Σ δ dg;  dD = Σ dy·x;  dS <- exp(g) dS,  g = a δ_t
The kernels compute chunks of 64 tokens. In a chunk, with G = cumsum(a δ), Γ_ij = exp(G_i - G_j) for i >= j, S the state
at its start and X, B, C its rows:
    Y = e^G∘(C S) + ((C Bᵀ)∘Γ) (δ∘X) + D X        S <- e^{G_end} S + Bᵀ(r∘δ∘X), r = exp(G_end - G)
mamba2_chunks.py passes states forward and gradients back, mamba2_outputs.py has the rest of the gradients; each has its
formulas. δ, G, S and all sums are in fp32; operands of products are in the dtype of xbc.
Moves, forward, xbc and y once for each tile of a head's columns. Where documents and heads are too few to fill the
device, states are stored as well and outputs follow in a kernel of their own. Kept for backward: the inputs; states are
computed again.
One token of each row, for decoding, updates the state in place in a kernel of its own, all in fp32: it reads and writes
S once, 8 N P bytes a row and head, and is bound by memory bandwidth.
Dao & Gu 2024, https://arxiv.org/abs/2405.21060.
"""

from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import (
    Node,
    as_factor,
    autocast,
    check_floats,
    check_shape,
    register_op,
    runs_kernels,
    shape_of,
    wide_dtype,
    widen,
)
from ligermodels.kernels.launch import as_rows_with_stride, cdiv, empty_where, kernel
from ligermodels.kernels.linear_attention.document_chunks import (
    check_pool,
    count_documents,
    each_document,
    tile_columns,
)
from ligermodels.kernels.linear_attention.mamba2_chunks import (
    ScanInputs,
    ScanShape,
    fuses_scan_output,
    scan_shape,
    scan_state_gradients,
    scan_states,
)
from ligermodels.kernels.linear_attention.mamba2_outputs import compute_scan_gradients, compute_scan_outputs


def mamba2_scan_reference(
    xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int, state_size: int,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Token by token. As in a matrix product, factors are in the dtype of xbc and sums in fp32; the state is fp32."""
    (xbc,) = autocast(xbc)
    shape = scan_shape(xbc, delta, groups, state_size)
    if cu_seqlens is not None:
        alone = partial(mamba2_scan_reference, a=a, d=d, groups=groups, state_size=state_size)
        return each_document(
            lambda x, y, state: alone(x, y, initial_state=state), (xbc, delta), initial_state, cu_seqlens
        )
    x, b, c = (widen(y) for y in split_xbc(xbc, shape))
    b, c = (y.repeat_interleave(shape.heads // groups, 2) for y in (b, c))  # [B, T, H, N]
    delta, a, d = widen(delta), widen(a), widen(d)
    decay, value = (a * delta).exp(), as_factor(delta[..., None] * x, xbc)
    state = decay.new_zeros(xbc.shape[0], shape.heads, state_size, shape.head_size)
    state = state if initial_state is None else state + widen(initial_state)
    outputs = []
    for t in range(xbc.shape[1]):
        state = state * decay[:, t, :, None, None] + b[:, t, :, :, None] * value[:, t, :, None]
        outputs.append((as_factor(state, xbc) * c[:, t, :, :, None]).sum(2))
    y = d[:, None] * x + (torch.stack(outputs, 1) if outputs else 0)
    return y.to(xbc.dtype), state


def split_xbc(xbc: Tensor, shape: ScanShape) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., H, P], B and C [..., G, N] of a packed xbc."""
    size = shape.groups * shape.state_size
    x, b, c = xbc.split([shape.values, size, size], -1)
    return x.unflatten(-1, (shape.heads, -1)), *(y.unflatten(-1, (shape.groups, -1)) for y in (b, c))


def _launch_forward(
    xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int, state_size: int, initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, final_state)."""
    y, final = _fake_forward(xbc, delta, a, d, groups, state_size, initial_state, cu_seqlens)
    if not delta.numel():
        return y, final.zero_() if initial_state is None else final.copy_(initial_state)
    inputs = ScanInputs.of(xbc, delta, a, d, groups, state_size, cu_seqlens)
    initial_state = None if initial_state is None else initial_state.contiguous()
    fused = fuses_scan_output(inputs)
    states = scan_states(inputs, initial_state, y if fused else None, final, not fused)
    if not fused:
        compute_scan_outputs(inputs, states, y)
    return y, final


def _launch_backward(
    dy: Tensor, dfinal: Tensor | None, xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int,
    state_size: int, initial_state: Tensor | None, cu_seqlens: Tensor | None, xbc_grad: bool, delta_grad: bool,
    a_grad: bool, d_grad: bool, initial_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dxbc, ddelta, da, dd, dinitial), each None where it is not needed."""
    needed = xbc_grad, delta_grad, a_grad, d_grad, initial_grad
    gradients = empty_where(needed, xbc, delta, a, d, initial_state)
    *of_chunks, dinitial = gradients
    if not delta.numel():
        for gradient in gradients[2:4]:
            if gradient is not None:
                gradient.zero_()
        if dinitial is not None:
            dinitial.zero_() if dfinal is None else dinitial.copy_(dfinal)
        return gradients
    inputs, dy = ScanInputs.of(xbc, delta, a, d, groups, state_size, cu_seqlens), dy.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    initial_state = None if initial_state is None else initial_state.contiguous()
    states = dstates = inputs.xbc
    scans = xbc_grad or delta_grad or a_grad
    if scans or initial_grad:
        dstates = scan_state_gradients(inputs, dy, dfinal, dinitial, scans)
    if scans:
        states = scan_states(inputs, initial_state, None, None, True)
    if scans or d_grad:
        compute_scan_gradients(inputs, dy, (states, dstates), *of_chunks)
    return gradients


def _fake_forward(xbc, delta, a, d, groups, state_size, initial_state, cu_seqlens):
    shape = scan_shape(xbc, delta, groups, state_size)
    documents = xbc.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = xbc.new_empty(*delta.shape, shape.head_size)
    return y, xbc.new_empty(documents, shape.heads, state_size, shape.head_size, dtype=torch.float32)


def _fake_backward(dy, dfinal, xbc, delta, a, d, groups, state_size, initial_state, cu_seqlens, *needed):
    return empty_where(needed, xbc, delta, a, d, initial_state)


_forward = register_op("mamba2_scan", _launch_forward, _fake_forward)
_backward = register_op("mamba2_scan_backward", _launch_backward, _fake_backward)


class _Mamba2Scan(Node):
    @staticmethod
    def forward(ctx, xbc, delta, a, d, groups, state_size, initial_state, cu_seqlens):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(xbc, delta, a, d, initial_state, cu_seqlens)
        ctx.sizes = groups, state_size
        return _forward(xbc, delta, a, d, groups, state_size, initial_state, cu_seqlens)

    @staticmethod
    def backward(ctx, dy, dfinal):
        xbc, delta, a, d, initial_state, cu_seqlens = ctx.saved_tensors
        needed = *ctx.needs_input_grad[:4], ctx.needs_input_grad[6]
        if dy is None:  # only the state was used
            dy = xbc.new_zeros(*delta.shape, scan_shape(xbc, delta, *ctx.sizes).head_size)
        gradients = _backward(dy, dfinal, xbc, delta, a, d, *ctx.sizes, initial_state, cu_seqlens, *needed)
        *of_inputs, dinitial = (x if need else None for x, need in zip(gradients, needed, strict=True))
        return *of_inputs, None, None, dinitial, None


def mamba2_scan(
    xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int, state_size: int,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mamba-2's scan over whole sequences: (y, final_state).

    xbc [B, T, H P + 2 G N] float: x head by head, then B and C group by group, as `causal_conv` returns them.
    delta [B, T, H] float, at least 0: step sizes, softplus(dt + dt_bias). a [H] float, at most 0: -exp(A_log). Both are
    read in fp32 and should be fp32. d [H] float: the weight of x in the output. groups: G, of which H is a multiple;
    state_size: N <= 256. initial_state [documents, H, N, P] float, zeros if None. cu_seqlens int32 [documents + 1]:
    offsets of the documents packed into one row (B = 1), the first 0, the last T; each document starts from its own
    initial state. Without it each row is a document.
    -> y [B, T, H, P] in the dtype of xbc, final_state [documents, H, N, P] fp32: the state after each document's last
    token. Where delta is 0 a token leaves the state as it is.

    Differentiable in xbc, delta, a, d and initial_state, by y and by final_state. Under torch.autocast xbc is cast.
    Raises ValueError where shapes or dtypes disagree. `mamba2_step_` computes one token of each of many rows.
    """
    (xbc,) = autocast(xbc)
    check_scan(xbc, delta, a, d, groups, state_size, initial_state, cu_seqlens)
    if not runs_kernels(xbc):
        return mamba2_scan_reference(xbc, delta, a, d, groups, state_size, initial_state, cu_seqlens)
    return _Mamba2Scan.apply(xbc, delta, a, d, groups, state_size, initial_state, cu_seqlens)


def check_scan(xbc, delta, a, d, groups, state_size, initial_state, cu_seqlens) -> None:
    """Raises ValueError where shapes or dtypes disagree."""
    op = "mamba2_scan"
    batch, tokens, _ = shape_of(op, "xbc", xbc, "B, T, columns")
    check_shape(op, "delta", delta, batch, tokens, shape_of(op, "delta", delta)[-1])
    shape = scan_shape(xbc, delta, groups, state_size)
    check_shape(op, "a", a, shape.heads)
    check_shape(op, "d", d, shape.heads)
    documents = count_documents(op, batch, cu_seqlens)
    check_shape(op, "initial_state", initial_state, documents, shape.heads, state_size, shape.head_size)
    check_floats(op, xbc=xbc, delta=delta, a=a, d=d, initial_state=initial_state)


COLUMNS, WARPS = 32, 4  # of a state, of one program. To be measured


@kernel()
def _step_kernel(
    xbc_ptr, delta_ptr, a_ptr, d_ptr, row_ptr, pool_ptr, y_ptr, stride,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr,
    STATE_TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of one head's state in one row."""
    TILES: tl.constexpr = (HEAD_SIZE + COLUMNS - 1) // COLUMNS
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % HEADS
    index = (tl.program_id(0) // (TILES * HEADS)).to(tl.int64)
    row, column = tl.arange(0, STATE_TILE), tile * COLUMNS + tl.arange(0, COLUMNS)
    in_state, in_value = row < STATE_SIZE, column < HEAD_SIZE
    xbc_ptr += index * stride
    x = tl.load(xbc_ptr + head * HEAD_SIZE + column, in_value, other=0.0).to(tl.float32)
    b_ptr = xbc_ptr + HEADS * HEAD_SIZE + head // (HEADS // GROUPS) * STATE_SIZE + row
    b = tl.load(b_ptr, in_state, other=0.0).to(tl.float32)
    c = tl.load(b_ptr + GROUPS * STATE_SIZE, in_state, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + index * HEADS + head).to(tl.float32)
    decay = tl.exp(tl.load(a_ptr + head).to(tl.float32) * delta)
    place = tl.load(row_ptr + index).to(tl.int64) * HEADS + head
    state_ptr = pool_ptr + place * (STATE_SIZE * HEAD_SIZE) + row[:, None] * HEAD_SIZE + column[None, :]
    mask = in_state[:, None] & in_value[None, :]
    state = decay * tl.load(state_ptr, mask, other=0.0) + b[:, None] * (delta * x)[None, :]
    tl.store(state_ptr, state, mask)
    y = tl.sum(state * c[:, None], 0) + tl.load(d_ptr + head).to(tl.float32) * x
    tl.store(y_ptr + (index * HEADS + head) * HEAD_SIZE + column, y.to(y_ptr.dtype.element_ty), in_value)


def _launch_step(
    xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int, state_size: int, pool: Tensor, row: Tensor
) -> Tensor:
    shape = scan_shape(xbc, delta, groups, state_size)
    y = _fake_step(xbc, delta, a, d, groups, state_size, pool, row)
    if y.numel():
        xbc, stride = as_rows_with_stride(xbc, shape.columns)
        columns = tile_columns(COLUMNS, shape.head_size)
        launch = _step_kernel.bind(**shape.constants(), COLUMNS=columns, num_warps=WARPS)
        launch(
            delta.numel() * cdiv(shape.head_size, columns),
            xbc, delta.contiguous(), a.contiguous(), d.contiguous(), row.contiguous(), pool, y, stride,
        )  # fmt: skip
    return y


def _fake_step(xbc, delta, a, d, groups, state_size, pool, row):
    return xbc.new_empty(*delta.shape, pool.shape[3])


_step = register_op("mamba2_step", _launch_step, _fake_step, writes=("pool",))


def mamba2_step_reference(
    xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int, state_size: int, pool: Tensor, row: Tensor
) -> tuple[Tensor, Tensor]:
    """The output, and the pool afterwards."""
    before = pool[row.long()]
    y, states = mamba2_scan_reference(xbc[:, None], delta[:, None], a, d, groups, state_size, before)
    return y[:, 0], pool.index_copy(0, row.long(), states.to(pool.dtype))


@torch.no_grad()
def mamba2_step_(
    xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int, state_size: int, pool: Tensor, row: Tensor
) -> Tensor:
    """One token of each of B rows of the Mamba-2 scan, whose states it moves on in place.

    xbc [B, H P + 2 G N], delta [B, H], a, d [H], groups, state_size: as in `mamba2_scan`, without the length.
    pool fp32 [R, H, N, P] contiguous, fp64 if xbc is: states. row int32 or int64 [B]: the state of each token, no two
    the same -> y [B, H, P] in the dtype of xbc. Shapes are static and nothing waits for the device: a CUDA graph can
    hold it. Not differentiable. Raises ValueError where shapes or dtypes disagree.
    """
    op = "mamba2_step_"
    rows, _ = shape_of(op, "xbc", xbc, "B, columns")
    check_shape(op, "delta", delta, rows, shape_of(op, "delta", delta)[-1])
    check_floats(op, xbc=xbc, delta=delta, a=a, d=d)
    shape = scan_shape(xbc, delta, groups, state_size, op)
    check_shape(op, "a", a, shape.heads)
    check_shape(op, "d", d, shape.heads)
    check_pool(op, pool, row, rows, wide_dtype(xbc), shape.heads, state_size, shape.head_size)
    if runs_kernels(xbc):
        return _step(xbc, delta, a, d, groups, state_size, pool, row)
    y, moved = mamba2_step_reference(xbc, delta, a, d, groups, state_size, pool, row)
    pool.copy_(moved)
    return y
