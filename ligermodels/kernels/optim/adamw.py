"""AdamW in place on one parameter: p -= lr (wd p + m̂ / (√v̂ + ε)), with

    m += (1 - β₁)(g - m)     m̂ = m / (1 - β₁ᵗ)
    v += (1 - β₂)(g² - v)    v̂ = v / (1 - β₂ᵗ)
p, g, m, v are param, grad, exp_avg, exp_avg_sq: equal shapes, fp32, bf16 or fp16 each. Computed in fp32, one rounding
to each destination. A bf16 p may have 16 more bits, which make it a fp32 parameter (param_rounding.py). The step count
t, the gradient scale and the flag that skips the update are scalars on the device: the host does not synchronize to
read them. Reads four tensors and writes three, 14 bytes an element in bf16, 18 with those bits: bound by memory
bandwidth.
Maths: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101, in the form of torch.optim.AdamW.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import check_floats, check_one_of, check_shape, register_op, runs_kernels, widen
from ligermodels.kernels.launch import cdiv, kernel
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

ADAMW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that the kernel supports
ADAMW_TILE, ADAMW_WARPS = 1024, 4  # elements and warps of one program: a thread loads 16 bytes of each bf16 tensor


def adamw_reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    step: Tensor, grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    low_bits: Tensor | None = None, seed: int | None = None, stream: int = 0, first: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns the updated (param, exp_avg, exp_avg_sq), and low_bits if there is one; arguments as in `adamw_`."""
    old = [x for x in (param, exp_avg, exp_avg_sq, low_bits) if x is not None]
    p, g, m, v = master_reference(param, low_bits), *(widen(x) for x in (grad, exp_avg, exp_avg_sq))
    if grad_scale is not None:
        g = g / grad_scale
    count = step.double()
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g.square()
    denominator = v.sqrt() / (1 - beta2**count).sqrt() + eps
    p = p - lr * weight_decay * p - lr / (1 - beta1**count) * m / denominator
    p, low = round_param_reference(p, param.dtype, step, low_bits, seed, stream, first)
    new = [x for x in (p, m.to(exp_avg.dtype), v.to(exp_avg_sq.dtype), low) if x is not None]
    if found_inf is not None:
        new = [torch.where(found_inf == 1, *pair) for pair in zip(old, new, strict=True)]
    return tuple(new)


@triton.jit
def bias_correction(log_beta, step):
    """1 - beta^step = -expm1(log_beta * step), exact to fp32: by Taylor series where the difference would cancel."""
    x = log_beta * step
    series = 1.0
    for k in tl.static_range(9, 1, -1):
        series = 1.0 + x * (1.0 / k) * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@kernel(do_not_specialize=["seed", "stream", "group"])
def _update_kernel(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, step_ptr, grad_scale_ptr, found_inf_ptr, low_bits_ptr,
    numel, lr, decay, rate1, rate2, log_beta1, log_beta2, eps, seed, stream, group, shift,
    SCALED: tl.constexpr, GUARDED: tl.constexpr, ROUNDING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program updates TILE elements. A skipped update masks its stores only, so that no load waits for the flag.

    group: of the first weight's random words, of which it has word `shift`.
    """
    offset = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE) - shift
    mask = (offset >= 0) & (offset < numel)
    param = tl.load(param_ptr + offset, mask).to(tl.float32)
    grad = tl.load(grad_ptr + offset, mask).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + offset, mask).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offset, mask).to(tl.float32)
    step = tl.load(step_ptr)
    if ROUNDING == EXACT:
        param = join_master(param, tl.load(low_bits_ptr + offset, mask))
    if SCALED:
        grad *= 1.0 / tl.load(grad_scale_ptr)
    if GUARDED:
        mask = tl.where(tl.load(found_inf_ptr) == 1.0, False, mask)
    step_size = lr / bias_correction(log_beta1, step)
    root_scale = tl.rsqrt(bias_correction(log_beta2, step))
    exp_avg += rate1 * (grad - exp_avg)
    exp_avg_sq += rate2 * (grad * grad - exp_avg_sq)
    param -= decay * param + step_size * exp_avg / (tl.sqrt(exp_avg_sq) * root_scale + eps)
    if ROUNDING == STOCHASTIC:
        groups = group + tl.program_id(0).to(tl.int64) * (TILE // 4) + tl.arange(0, TILE // 4)
        param = round_stochastically(param, tl.reshape(random_words(seed, groups, step, stream), [TILE]))
    elif ROUNDING == EXACT:
        param, low_bits = split_master(param)
        tl.store(low_bits_ptr + offset, low_bits, mask)
    tl.store(param_ptr + offset, param.to(param_ptr.dtype.element_ty), mask)
    tl.store(exp_avg_ptr + offset, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask)
    tl.store(exp_avg_sq_ptr + offset, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask)


def _launch_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    step: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None,
    low_bits: Tensor | None, seed: int | None, stream: int, first: int,
) -> None:  # fmt: skip
    numel = param.numel()
    if numel:
        group, shift = divmod(first, 4) if seed is not None else (0, 0)
        launch = _update_kernel.bind(
            SCALED=grad_scale is not None,
            GUARDED=found_inf is not None,
            ROUNDING=mode_of(low_bits, seed),
            TILE=ADAMW_TILE,
            num_warps=ADAMW_WARPS,
        )
        # 1 - beta is computed here, in fp64: in fp32 only four digits of 1 - 0.999 are right.
        launch(
            cdiv(numel + shift, ADAMW_TILE), param, grad, exp_avg, exp_avg_sq, step,
            step if grad_scale is None else grad_scale, step if found_inf is None else found_inf,
            param if low_bits is None else low_bits,
            numel, float(lr), float(lr * weight_decay), 1.0 - beta1, 1.0 - beta2, log_of_beta(beta1),
            log_of_beta(beta2), float(eps), seed or 0, stream, group, shift,
        )  # fmt: skip


def log_of_beta(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


adamw_update_ = register_op("adamw_", _launch_, writes=("param", "exp_avg", "exp_avg_sq", "low_bits"))


def check_scalars(op: str, **scalars: Tensor | None) -> None:
    """Raises ValueError unless what the device knows of a step is fp32 scalars."""
    for name, x in scalars.items():
        check_shape(op, name, x)
    check_one_of(op, (torch.float32,), **scalars)


def adamw_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    step: Tensor, grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    low_bits: Tensor | None = None, seed: int | None = None, stream: int = 0, first: int = 0,
) -> None:  # fmt: skip
    """One step of AdamW on param, exp_avg and exp_avg_sq, in place; call it under torch.no_grad.

    param, grad, exp_avg, exp_avg_sq: equal shapes, any float dtype each. The kernel runs if all are contiguous and no
    wider than fp32, the reference otherwise. step, grad_scale and found_inf are fp32 scalars on the same device: step
    counts this step too, gradients are divided by grad_scale, and nothing is written if found_inf is 1.
    A bf16 param is rounded to nearest; with low_bits, int16 in its shape, the two are a fp32 parameter and are updated
    as one; with a seed it is rounded stochastically, by the random words of the weights from number `first` on in
    stream `stream` (param_rounding.py).
    Raises ValueError if shapes or dtypes disagree, or for low_bits or seed with another param.
    """
    tensors = (param, grad, exp_avg, exp_avg_sq)
    for name, x in {"grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}.items():
        check_shape("adamw_", name, x, *param.shape)
    check_floats("adamw_", param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    check_scalars("adamw_", step=step, grad_scale=grad_scale, found_inf=found_inf)
    check_rounding("adamw_", param, low_bits, seed)
    arguments = (
        param, grad, exp_avg, exp_avg_sq, lr, beta1, beta2, eps, weight_decay, step, grad_scale, found_inf,
        low_bits, seed, stream, first,
    )  # fmt: skip
    written = [x for x in (param, exp_avg, exp_avg_sq, low_bits) if x is not None]
    fits = all(x.is_contiguous() for x in (grad, *written)) and {x.dtype for x in tensors} <= {*ADAMW_DTYPES}
    if runs_kernels(param) and fits:
        adamw_update_(*arguments)
        torch.autograd.graph.increment_version(written)  # autograd does not see what the kernel writes
    else:
        for old, new in zip(written, adamw_reference(*arguments), strict=True):
            old.copy_(new)
