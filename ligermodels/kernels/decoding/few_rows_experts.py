"""Mixture of experts for few tokens, in two launches: a step of generation.

    p_tj = w_tj act(G_e x_t + c_e) * (U_e x_t + c'_e), e = index_tj;   y_t = Σ_j D_e p_tj + w_tj b_e
x [T, H], GU [E, 2 I, H] (gate rows first), D [E, H, I], their biases [c, c'] [E, 2 I] and b [E, H], both optional, in
one float dtype; index [T, k] int64 or int32; w [T, k] fp32. Forward only. The host never reads the index. Every (token,
expert) pair reads the weights of its expert for itself: no sort and no permutation, as in experts.py, but an expert
that two tokens share is read twice, from the L2 cache at best. Sums in fp32 in a fixed order; p is rounded to x's
dtype.
Moves 3 T k H I elements: bound by memory bandwidth.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import autocast, check_dtypes, refuse_gradients, register_op, runs_kernels
from ligermodels.kernels.launch import Launcher, cdiv, kernel
from ligermodels.kernels.moe.expert_product import expert_glu
from ligermodels.kernels.moe.experts import check_expert_inputs, experts_reference
from ligermodels.kernels.norms.norm_tiles import to_fp32
from ligermodels.kernels.pdl import launch_dependents, pdl_constants, wait_for_previous_kernel
from ligermodels.kernels.quant.quantised_weight import Weight, operand

FEW_TOKENS = 4  # up to so many, layers take these kernels instead of the grouped GEMM
EXPERT_STEP_BYTES = 1024  # of each row of weights that a program reads in one step
PRODUCT_COLUMNS, DOWN_COLUMNS = 4, 4  # of one program: rows of G and as many of U; rows of D
WARPS, STAGES = 4, 3


@kernel()
def _product_kernel(
    x_ptr, index_ptr, routing_ptr, weight_ptr, bias_ptr, product_ptr, INNER: tl.constexpr, HIDDEN: tl.constexpr,
    SLOTS: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes COLUMNS columns of p of one slot: a token and one of its SLOTS experts."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    tiles: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    slot, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.load(index_ptr + slot).to(tl.int64)
    x_ptr += slot // SLOTS * HIDDEN
    gate_ptr = weight_ptr + expert * (2 * INNER * HIDDEN) + column[:, None] * HIDDEN
    gate = tl.zeros([COLUMNS, STEP], tl.float32)
    up = tl.zeros([COLUMNS, STEP], tl.float32)
    for start in tl.range(0, HIDDEN, STEP, num_stages=STAGES):
        k = start + tl.arange(0, STEP)
        mask = (column < INNER)[:, None] & (k < HIDDEN)[None, :]
        x = tl.load(x_ptr + k, k < HIDDEN, other=0.0).to(tl.float32)[None, :]
        gate += to_fp32(tl.load(gate_ptr + k[None, :], mask, other=0.0)) * x
        up += to_fp32(tl.load(gate_ptr + INNER * HIDDEN + k[None, :], mask, other=0.0)) * x
    gate, up = tl.sum(gate, 1), tl.sum(up, 1)
    if BIAS:
        bias_ptr += expert * (2 * INNER) + column
        gate += tl.load(bias_ptr, column < INNER, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + INNER, column < INNER, other=0.0).to(tl.float32)
    activated, linear, _, _ = expert_glu(gate, up, ACTIVATION)
    product = tl.load(routing_ptr + slot) * activated * linear
    tl.store(product_ptr + slot * INNER + column, product.to(product_ptr.dtype.element_ty), column < INNER)


@kernel()
def _down_kernel(
    product_ptr, index_ptr, routing_ptr, weight_ptr, bias_ptr, y_ptr, INNER: tl.constexpr, HIDDEN: tl.constexpr,
    SLOTS: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program computes COLUMNS columns of one token's y, a sum over its SLOTS experts."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    tiles: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    steps: tl.constexpr = (INNER + STEP - 1) // STEP  # of each expert
    token, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    index_ptr += token * SLOTS
    product_ptr += token * (SLOTS * INNER)
    total = tl.zeros([COLUMNS, STEP], tl.float32)
    # An expert is looked up one step ahead: loads that wait for it in the same step would not be pipelined.
    expert = tl.load(index_ptr)
    for step in tl.range(0, SLOTS * steps, num_stages=STAGES):
        slot = step // steps
        k = step % steps * STEP + tl.arange(0, STEP)
        row = expert.to(tl.int64) * HIDDEN + column
        expert = tl.load(index_ptr + tl.minimum((step + 1) // steps, SLOTS - 1))
        mask = (column < HIDDEN)[:, None] & (k < INNER)[None, :]
        product = tl.load(product_ptr + slot * INNER + k, k < INNER, other=0.0).to(tl.float32)
        weight = to_fp32(tl.load(weight_ptr + row[:, None] * INNER + k[None, :], mask, other=0.0))
        total += weight * product[None, :]
    y = tl.sum(total, 1)
    if BIAS:
        for slot in tl.static_range(SLOTS):
            row = tl.load(index_ptr + slot).to(tl.int64) * HIDDEN + column
            bias = tl.load(bias_ptr + row, column < HIDDEN, other=0.0).to(tl.float32)
            y += tl.load(routing_ptr + token * SLOTS + slot) * bias
    tl.store(y_ptr + token * HIDDEN + column, y.to(y_ptr.dtype.element_ty), column < HIDDEN)


@functools.cache
def _launchers(
    inner: int, hidden: int, slots: int, itemsize: int, activation: str, gate_up_bias: bool, down_bias: bool,
    device: torch.device,
) -> tuple[Launcher, Launcher]:  # fmt: skip
    sizes = {"INNER": inner, "HIDDEN": hidden, "SLOTS": slots, "STEP": EXPERT_STEP_BYTES // itemsize, "STAGES": STAGES}
    constants = sizes | {"num_warps": WARPS} | pdl_constants(device)
    product = _product_kernel.bind(ACTIVATION=activation, BIAS=gate_up_bias, COLUMNS=PRODUCT_COLUMNS, **constants)
    return product, _down_kernel.bind(BIAS=down_bias, COLUMNS=DOWN_COLUMNS, **constants)


def _launch(
    x: Tensor, expert_index: Tensor, expert_weight: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    gate_up_bias: Tensor | None, down_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    y = x.new_empty(x.shape)
    (tokens, hidden), slots, inner = x.shape, expert_index.shape[1], down.shape[2]
    if not tokens:
        return y
    product = x.new_empty(tokens * slots, inner)
    x, expert_index, expert_weight = x.contiguous(), expert_index.contiguous(), expert_weight.contiguous()
    gate_up, down = gate_up.contiguous(), down.contiguous()
    launch_product, launch_down = _launchers(
        inner, hidden, slots, x.itemsize, activation, gate_up_bias is not None, down_bias is not None, x.device
    )
    gate_up_bias, down_bias = (x if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias))
    programs = tokens * slots * cdiv(inner, PRODUCT_COLUMNS)
    launch_product(programs, x, expert_index, expert_weight, gate_up, gate_up_bias, product)
    launch_down(tokens * cdiv(hidden, DOWN_COLUMNS), product, expert_index, expert_weight, down, down_bias, y)
    return y


_experts = register_op("few_rows_experts", _launch)


def of_experts(weight: Weight, index: Tensor) -> Tensor:
    """The matrices [n, N, K] of the experts `index` [n] of a weight."""
    return weight[index] if isinstance(weight, Tensor) else weight.layout.dequantize_experts(weight.data, index)


def few_rows_experts(
    x: Tensor, expert_index: Tensor, expert_weight: Tensor, gate_up: Weight, down: Weight, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`experts` of few tokens, without low-rank updates: arguments, result and errors as there.

    Right for any number of tokens, fast for few. Of quantised weights those of the chosen experts are dequantised, once
    for each time that they are chosen. Raises RuntimeError if a gradient is needed.
    """
    refuse_gradients(
        "few_rows_experts", x, expert_weight, operand(gate_up)[0], operand(down)[0], gate_up_bias, down_bias
    )
    check_expert_inputs(x, expert_index, expert_weight, gate_up, down, activation, None, None, gate_up_bias, down_bias)
    x, gate_up, down, gate_up_bias, down_bias = autocast(x, gate_up, down, gate_up_bias, down_bias)
    check_dtypes("few_rows_experts", x=x, gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias)
    if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor)):
        chosen = expert_index.flatten()
        gate_up, down = of_experts(gate_up, chosen), of_experts(down, chosen)
        gate_up_bias, down_bias = (None if bias is None else bias[chosen] for bias in (gate_up_bias, down_bias))
        expert_index = torch.arange(len(chosen), device=x.device).view_as(expert_index)
    if not runs_kernels(x):
        return experts_reference(
            x, expert_index, expert_weight, gate_up, down, activation, gate_up_bias=gate_up_bias, down_bias=down_bias
        )
    return _experts(x, expert_index, expert_weight, gate_up, down, activation, gate_up_bias, down_bias)
