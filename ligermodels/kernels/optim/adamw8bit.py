"""AdamW in place on one parameter whose moments have 8 bits: adamw.py's update, with m and v as codes and scales.

A block of 64, 128 or 256 neighbouring elements has one scale, its largest absolute value (at least 1e-12). An element
is scale · map[code], code the nearest of 256: seven decades, of which each has twice the values of the one below it, at
equal distances; 0; and 1. Signed for m, unsigned for v, which has twice the values in a decade. But no v is rounded to
0: where the next gradients are small, m / (0 + eps) would be a step of hundreds of learning rates.
param, grad: fp32, bf16 or fp16 each; exp_avg, exp_avg_sq: uint8, in the same shape; their scales: fp32, one a block.
Computed in fp32. Reads four tensors and writes three, 10 bytes an element in bf16, 14 with low_bits, and 16 of scales a
block: bound by memory bandwidth. A code is decoded by a lookup, and encoded without one: lookups and logarithms would
take longer than memory does.
Method: Dettmers et al. 2021, https://arxiv.org/abs/2110.02861; map and blocks as in torchao.optim.AdamW8bit.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import check_floats, check_one_of, check_shape, register_op, runs_kernels, widen
from ligermodels.kernels.launch import cdiv, kernel, multiprocessors
from ligermodels.kernels.optim.adamw import ADAMW_DTYPES, bias_correction, check_scalars, log_of_beta
from ligermodels.kernels.optim.param_rounding import (
    EXACT,
    STOCHASTIC,
    check_rounding,
    join_master,
    master_reference,
    mode_of,
    random_words,
    round_param_reference,
    round_stochastically,
    split_master,
)

DECADES = 7  # from 1e-7 to 1
BLOCKS_OF_KERNEL = (64, 128, 256)  # elements of a block
NEIGHBOURS = 8  # neighbouring elements that a thread has: 16 bytes of a bf16 tensor
TILE, WARPS = 2048, 8  # elements and warps of one program
TILE_PROGRAMS = 16  # of a multiprocessor: four times as many as run at a time, so that all end together
SMALLEST_SCALE = 1e-12
CODES = tl.constexpr(256)


def dynamic_map(signed: bool) -> list[float]:
    """The values of the 256 codes, ascending: the means of equal parts of [0.1, 1], times powers of ten; 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        bounds = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        means = (10.0 ** (decade - DECADES + 1) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        values += [*means, *(-x for x in means)] if signed else means
    return sorted(values)


@functools.cache
def map_and_thresholds(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of the codes, and the smallest number that each stands for: fp32 [2, 256], signed and unsigned."""
    values = torch.tensor([dynamic_map(signed) for signed in (True, False)], dtype=torch.float64).float().double()
    thresholds = torch.cat((torch.full((2, 1), -torch.inf), (values[:, 1:] + values[:, :-1]) / 2), 1)
    return values.float().to(device), thresholds.float().to(device)


def decode_reference(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """codes: uint8 [blocks, elements]; scale: fp32 [blocks, 1]. Returns fp32 [blocks, elements]."""
    values, _ = map_and_thresholds(codes.device)
    return values[int(not signed)][codes.int()] * scale


def encode_reference(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """x [blocks, elements] as (codes, scale)."""
    _, thresholds = map_and_thresholds(x.device)
    scale = x.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_SCALE)
    codes = torch.bucketize(x / scale, thresholds[int(not signed)].to(x.dtype), right=True) - 1
    return codes.clamp_min(int(not signed)).to(torch.uint8), scale.float()


def adamw8bit_reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_scale: Tensor, exp_avg_sq: Tensor, exp_avg_sq_scale: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    step: Tensor, grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    low_bits: Tensor | None = None, seed: int | None = None, stream: int = 0, first: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns the updated (param, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale), and low_bits if there are."""
    tensors = param, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, low_bits
    old = tuple(x for x in tensors if x is not None)
    blocks = exp_avg_scale.numel()
    if not blocks:
        return tuple(x.clone() for x in old)
    p, g = (x.reshape(blocks, -1) for x in (master_reference(param, low_bits), widen(grad)))
    if grad_scale is not None:
        g = g / grad_scale
    m = decode_reference(exp_avg.reshape(blocks, -1), exp_avg_scale.reshape(-1, 1), True).to(g.dtype).lerp(g, 1 - beta1)
    v = decode_reference(exp_avg_sq.reshape(blocks, -1), exp_avg_sq_scale.reshape(-1, 1), False).to(g.dtype)
    v = v.lerp(g.square(), 1 - beta2)
    count = step.double()
    corrections = [(1 - beta**count).to(p.dtype) for beta in (beta1, beta2)]
    p = p - lr * weight_decay * p - lr * (m / corrections[0]) / (v.sqrt() / corrections[1].sqrt() + eps)
    p, low = round_param_reference(p.view(param.shape), param.dtype, step, low_bits, seed, stream, first)
    updated = p, *encode_reference(m, signed=True), *encode_reference(v, signed=False), low
    new = [x for x in updated if x is not None]
    shaped = tuple(x.reshape(before.shape).to(before.dtype) for x, before in zip(new, old, strict=True))
    if found_inf is not None:
        shaped = tuple(torch.where(found_inf == 1, *pair) for pair in zip(old, shaped, strict=True))
    return shaped


@triton.constexpr_function
def _slope(decade, step):
    if decade:
        return 2**decade * 10.0 ** (6 - decade) / 0.9
    # Through the middle of the decade, and the place 1 + 0.2 step half-way between 0 and the lowest value.
    return 1e6 * (0.5 - 0.2 * step) / (0.5 - 0.225 * step)


@triton.constexpr_function
def _start(decade, step):
    return 2**decade * 8 / 9 if decade else 1.5 - 0.55e-6 * _slope(0, step)


@triton.constexpr_function
def _unit(step):
    """What x is multiplied by. The value 1 is the nearest from 1 - 0.225 step / 64 on: there x becomes its place."""
    return 128 / (1 - 0.225 / 64 * step)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _line(x, DECADE: tl.constexpr, STEP: tl.constexpr):
    return _bits(x * (_slope(DECADE, STEP) / _unit(STEP)) + _start(DECADE, STEP))


@triton.jit
def _lowest(a, b, c):
    return tl.minimum(tl.minimum(a, b), c)  # one instruction, if a GPU has capability 90 and these are integers


@triton.jit
def _place(x, low, STEP: tl.constexpr):
    """The place of the nearest of the values that are not negative, in ascending order, once rounded down to STEP.

    x: [0, 1], times `_unit`. NaN has any place. low: what the place is at least: x, which is its place at the value 1,
    or a negative number where there is no value 1.
    STEP: from one place to the next. For m it is 1: 0 has place 0, a decade has those from 2^decade to twice that, the
    value 1 has 128. For v it is 0.5, and 0 has place 0.5.
    The place is a linear function of x within a decade. The line of the decade below is five times as steep, and meets
    it at 2^decade: the place is on the lowest of all lines. But half-way to the value below, where the nearest value
    changes, the line is 0.2 steps higher: up to there, the place is the last one of the decade below.
    Bits are compared, which for numbers that are not negative is the same.
    """
    place = _lowest(
        _lowest(_line(x, 0, STEP), _line(x, 1, STEP), _line(x, 2, STEP)),
        _lowest(_line(x, 3, STEP), _line(x, 4, STEP), _line(x, 5, STEP)),
        _line(x, 6, STEP),
    )
    last = _bits(place.to(tl.float32, bitcast=True) - 0.2 * STEP) | 0x7FFFFF  # the last below the next power of two
    return tl.maximum(tl.minimum(place, last), _bits(low)).to(tl.float32, bitcast=True)


@triton.jit
def _for_elements(x, NEIGHBOURS: tl.constexpr):
    """The number that each group has, for each of its elements."""
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], NEIGHBOURS]), [x.shape[0] * NEIGHBOURS])


@triton.jit
def _scale(x, NEIGHBOURS: tl.constexpr, GROUPS: tl.constexpr):
    """The largest of a block's numbers, which are not negative, for each of its groups. NaN is left out.

    Threads exchange bits: a warp finds the largest integer by one instruction.
    """
    of_group = tl.maximum(tl.max(tl.reshape(x, [x.shape[0] // NEIGHBOURS, NEIGHBOURS]), 1), 1e-12)
    of_block = tl.max(tl.reshape(_bits(of_group), [of_group.shape[0] // GROUPS, GROUPS]), 1, keep_dims=True)
    of_block = tl.broadcast_to(of_block, [of_block.shape[0], GROUPS])
    return tl.reshape(of_block, of_group.shape).to(tl.float32, bitcast=True)


@kernel(do_not_specialize=["seed", "stream", "group"])
def _update_kernel(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_scale_ptr, exp_avg_sq_ptr, exp_avg_sq_scale_ptr, values_ptr, step_ptr,
    grad_scale_ptr, found_inf_ptr, low_bits_ptr,
    blocks, lr, decay, rate1, rate2, log_beta1, log_beta2, eps, seed, stream, group,
    SCALED: tl.constexpr, GUARDED: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Persistent kernel: each program loops over tiles, so that it computes the scalars once.

    A skipped update masks its stores only, so that no load waits for the flag. Tiles have one dimension, and scales an
    element for each group of NEIGHBOURS elements: with others, Triton exchanges elements between threads.
    """
    element, first_of_group = tl.arange(0, TILE), tl.arange(0, TILE // NEIGHBOURS) * NEIGHBOURS
    step = tl.load(step_ptr)
    step_size = lr / bias_correction(log_beta1, step)
    root_scale = tl.rsqrt(bias_correction(log_beta2, step))
    if SCALED:
        grad_factor = 1.0 / tl.load(grad_scale_ptr)
    if GUARDED:
        written = tl.load(found_inf_ptr) != 1.0
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(blocks, TILE // BLOCK), tl.num_programs(0)):
        start = tile * TILE
        offset, block = start + element, (start + first_of_group) // BLOCK
        mask, exists = offset // BLOCK < blocks, block < blocks
        param = tl.load(param_ptr + offset, mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offset, mask, other=0.0).to(tl.float32)
        codes1 = tl.load(exp_avg_ptr + offset, mask, other=0).to(tl.int32)
        codes2 = tl.load(exp_avg_sq_ptr + offset, mask, other=0).to(tl.int32)
        scale1 = tl.load(exp_avg_scale_ptr + block, exists, other=0.0)
        scale2 = tl.load(exp_avg_sq_scale_ptr + block, exists, other=0.0)
        if ROUNDING == EXACT:
            param = join_master(param, tl.load(low_bits_ptr + offset, mask, other=0))
        if SCALED:
            grad *= grad_factor
        exists &= first_of_group % BLOCK == 0
        if GUARDED:
            mask &= written
            exists &= written
        exp_avg = tl.load(values_ptr + codes1) * _for_elements(scale1, NEIGHBOURS)
        exp_avg_sq = tl.load(values_ptr + CODES + codes2) * _for_elements(scale2, NEIGHBOURS)
        exp_avg += rate1 * (grad - exp_avg)
        exp_avg_sq += rate2 * (grad * grad - exp_avg_sq)
        # A division takes six instructions more than this square: it checks its range.
        root = tl.rsqrt(tl.sqrt(exp_avg_sq) * root_scale + eps)
        param = param - decay * param - step_size * exp_avg * (root * root)
        if ROUNDING == STOCHASTIC:
            groups = group + start // 4 + tl.arange(0, TILE // 4).to(tl.int64)
            param = round_stochastically(param, tl.reshape(random_words(seed, groups, step, stream), [TILE]))
        elif ROUNDING == EXACT:
            param, low_bits = split_master(param)
            tl.store(low_bits_ptr + offset, low_bits, mask)
        tl.store(param_ptr + offset, param.to(param_ptr.dtype.element_ty), mask)
        scale1 = _scale(tl.abs(exp_avg), NEIGHBOURS, BLOCK // NEIGHBOURS)
        scale2 = _scale(exp_avg_sq, NEIGHBOURS, BLOCK // NEIGHBOURS)
        # The sums' last bits are worth a step, so that their last bytes are the codes.
        unit = _for_elements(_unit(1.0) / scale1, NEIGHBOURS)
        place = _bits(_place(tl.abs(exp_avg) * unit, exp_avg * unit, 1.0) - 0.5) | (_bits(exp_avg) & -(2**31))
        codes1 = _bits(place.to(tl.float32, bitcast=True) + (2.0**23 + 256 + 127))
        exp_avg_sq *= _for_elements(_unit(0.5) / scale2, NEIGHBOURS)
        low = tl.maximum(exp_avg_sq, 1.25)  # between 1 and 1.5, the places of the lowest value above 0
        codes2 = _bits(_place(exp_avg_sq, low, 0.5) + (2.0**22 - 0.5 - 0.25))
        tl.store(exp_avg_ptr + offset, codes1.to(tl.uint8), mask)
        tl.store(exp_avg_sq_ptr + offset, codes2.to(tl.uint8), mask)
        tl.store(exp_avg_scale_ptr + block, scale1, exists)
        tl.store(exp_avg_sq_scale_ptr + block, scale2, exists)


def _launch_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_scale: Tensor, exp_avg_sq: Tensor, exp_avg_sq_scale: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    step: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None,
    low_bits: Tensor | None, seed: int | None, stream: int, first: int,
) -> None:  # fmt: skip
    blocks = exp_avg_scale.numel()
    if blocks:
        block = param.numel() // blocks
        launch = _update_kernel.bind(
            SCALED=grad_scale is not None, GUARDED=found_inf is not None, ROUNDING=mode_of(low_bits, seed),
            BLOCK=block, NEIGHBOURS=NEIGHBOURS, TILE=TILE, num_warps=WARPS,
        )  # fmt: skip
        programs = TILE_PROGRAMS * multiprocessors(param.device)
        launch(
            min(cdiv(blocks, TILE // block), programs),
            param, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale,
            map_and_thresholds(param.device)[0], step, step if grad_scale is None else grad_scale,
            step if found_inf is None else found_inf,
            param if low_bits is None else low_bits, blocks,
            float(lr), float(lr * weight_decay), 1.0 - beta1, 1.0 - beta2, log_of_beta(beta1), log_of_beta(beta2),
            float(eps), seed or 0, stream, first // 4,
        )  # fmt: skip


adamw8bit_update_ = register_op(
    "adamw8bit_",
    _launch_,
    writes=("param", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "low_bits"),
)


def adamw8bit_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_scale: Tensor, exp_avg_sq: Tensor, exp_avg_sq_scale: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    step: Tensor, grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    low_bits: Tensor | None = None, seed: int | None = None, stream: int = 0, first: int = 0,
) -> None:  # fmt: skip
    """One step of AdamW with moments in 8 bits, in place; call it under torch.no_grad.

    param, grad, exp_avg, exp_avg_sq: equal shapes; the moments are uint8 codes, with scales of 0 at the beginning.
    exp_avg_scale, exp_avg_sq_scale: fp32, one element a block, blocks in the order of the flattened parameter. The
    kernel runs if all are contiguous, param and grad no wider than fp32, and blocks have 64, 128 or 256 elements; the
    reference otherwise. step, grad_scale, found_inf, low_bits, seed, stream and first as in `adamw_`; first is a
    multiple of 4.
    Raises ValueError if shapes or dtypes disagree, or the scales do not divide the parameter into blocks.
    """
    for name, x in {"grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}.items():
        check_shape("adamw8bit_", name, x, *param.shape)
    check_shape("adamw8bit_", "exp_avg_sq_scale", exp_avg_sq_scale, *exp_avg_scale.shape)
    check_floats("adamw8bit_", param=param, grad=grad)
    check_one_of("adamw8bit_", (torch.uint8,), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    check_one_of("adamw8bit_", (torch.float32,), exp_avg_scale=exp_avg_scale, exp_avg_sq_scale=exp_avg_sq_scale)
    check_scalars("adamw8bit_", step=step, grad_scale=grad_scale, found_inf=found_inf)
    numel, blocks = param.numel(), exp_avg_scale.numel()
    if numel % max(blocks, 1) or (numel and not blocks):
        raise ValueError(
            f"adamw8bit_: exp_avg_scale has {blocks} elements, which do not divide the {numel} of param into equal"
            " blocks"
        )
    if not numel:
        return
    check_rounding("adamw8bit_", param, low_bits, seed)
    arguments = (
        param, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, lr, beta1, beta2, eps, weight_decay, step,
        grad_scale, found_inf, low_bits, seed, stream, first,
    )  # fmt: skip
    written = [x for x in (param, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, low_bits) if x is not None]
    fits = all(x.is_contiguous() for x in (grad, *written)) and {param.dtype, grad.dtype} <= {*ADAMW_DTYPES}
    if runs_kernels(param) and fits and numel // blocks in BLOCKS_OF_KERNEL:
        adamw8bit_update_(*arguments)
        torch.autograd.graph.increment_version(written)  # autograd does not see what the kernel writes
    else:
        for old, new in zip(written, adamw8bit_reference(*arguments), strict=True):
            old.copy_(new)
