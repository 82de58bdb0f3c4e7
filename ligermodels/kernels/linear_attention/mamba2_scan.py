"""Mamba-2 scan: a state-space layer whose state forgets at a rate that depends on the token (state-space duality, SSD).

Per head, with S [N, P] fp32, a < 0 and δ >= 0; head h reads B and C of group h // (H / G):
    S_t = exp(a δ_t) S_{t-1} + B_t (δ_t x_t)ᵀ;  y_t = S_tᵀ C_t + D x_t
Backward, over t in reverse, with dS the gradient of S and v = δ x:
    dS += C dyᵀ;  dC = S dy;  dB = dS v;  dv = dSᵀ B;  dx = δ dv + D dy;  dδ = x·dv + a dg;  dg = exp(g) <S_{t-1}, dS>
    da = Σ δ dg;  dD = Σ dy·x;  dS <- exp(g) dS,  g = a δ_t
The kernels compute chunks of 64 tokens. In a chunk, with G = cumsum(a δ), Γ_ij = exp(G_i - G_j) for i >= j, S the state
at its start and X, B, C its rows:
    Y = e^G∘(C S) + ((C Bᵀ)∘Γ) (δ∘X) + D X        S <- e^{G_end} S + Bᵀ(r∘δ∘X), r = exp(G_end - G)
mamba2_states.py passes states forward and gradients back, mamba2_outputs.py has the rest of the gradients; each has its
formulas. δ, G, S and all sums are in fp32; operands of products are in the dtype of xbc.
Moves, forward, xbc and y once for each tile of a head's columns. Where documents and heads are too few to fill the
device, states are stored as well and outputs follow in a kernel of their own. Kept for backward: the inputs; states are
computed again.
Dao & Gu 2024, https://arxiv.org/abs/2405.21060.
"""

from functools import partial

import torch
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
    widen,
)
from ligermodels.kernels.linear_attention.document_chunks import count_documents, each_document
from ligermodels.kernels.linear_attention.mamba2_chunks import ScanInputs, ScanShape, scan_shape
from ligermodels.kernels.linear_attention.mamba2_outputs import compute_scan_gradients, compute_scan_outputs
from ligermodels.kernels.linear_attention.mamba2_states import fuses_scan_output, scan_state_gradients, scan_states


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
    gradients = _fake_backward(dy, dfinal, xbc, delta, a, d, groups, state_size, initial_state, cu_seqlens, *needed)
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


def _fake_backward(
    dy, dfinal, xbc, delta, a, d, groups, state_size, initial_state, cu_seqlens, xbc_grad, delta_grad, a_grad, d_grad,
    initial_grad,
):  # fmt: skip
    return (
        xbc.new_empty(xbc.shape) if xbc_grad else None,
        delta.new_empty(delta.shape) if delta_grad else None,
        a.new_empty(a.shape) if a_grad else None,
        d.new_empty(d.shape) if d_grad else None,
        initial_state.new_empty(initial_state.shape) if initial_grad else None,
    )


_forward = register_op(
    "mamba2_scan(Tensor xbc, Tensor delta, Tensor a, Tensor d, int groups, int state_size, Tensor? initial_state,"
    " Tensor? cu_seqlens) -> (Tensor y, Tensor final_state)",
    _launch_forward,
    _fake_forward,
)
_backward = register_op(
    "mamba2_scan_backward(Tensor dy, Tensor? dfinal, Tensor xbc, Tensor delta, Tensor a, Tensor d, int groups,"
    " int state_size, Tensor? initial_state, Tensor? cu_seqlens, bool xbc_grad, bool delta_grad, bool a_grad,"
    " bool d_grad, bool initial_grad)"
    " -> (Tensor dxbc, Tensor ddelta, Tensor da, Tensor dd, Tensor dinitial)",
    _launch_backward,
    _fake_backward,
)


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
