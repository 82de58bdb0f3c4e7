"""One in-place AdamW step on one bf16 parameter with bf16 optimizer states. Shape: [rows, columns]."""

import torch

from benchmarks.ops import Op, random_input
from ligermodels.kernels.optim.adamw import adamw_reference

SHAPES = [(16384, 4096), (128256, 4096), (64, 1024)]
LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.999), 1e-8, 0.1
HYPERPARAMETERS = LR, *BETAS, EPS, WEIGHT_DECAY


def inputs(rows, columns):
    param, grad, exp_avg, exp_avg_sq = (random_input(rows, columns).detach() for _ in range(4))
    return [param, grad, exp_avg, exp_avg_sq.square_(), torch.tensor(3.0)]


adamw = Op(
    "adamw", SHAPES, inputs, lambda p, g, m, v, step: adamw_reference(p, g, m, v, *HYPERPARAMETERS, step),
    work=lambda rows, columns: {"forward": 7 * 2 * rows * columns},
)  # fmt: skip


def previous_step(*inputs):
    """The inputs with the previous step count: torch increments the count itself."""
    *tensors, step = inputs
    return *tensors, step - 1


def pytorch_step(**implementation):
    from torch.optim.adamw import adamw as torch_adamw

    def step(param, grad, exp_avg, exp_avg_sq, count):
        torch_adamw(
            [param], [grad], [exp_avg], [exp_avg_sq], [], [count], amsgrad=False, beta1=BETAS[0], beta2=BETAS[1], lr=LR,
            weight_decay=WEIGHT_DECAY, eps=EPS, maximize=False, **implementation,
        )  # fmt: skip
        return param, exp_avg, exp_avg_sq

    return step


@adamw.provider("pytorch", layout=previous_step)
def pytorch(*shape):
    return pytorch_step(foreach=True)


@adamw.provider("pytorch, fused", layout=previous_step)
def pytorch_fused(*shape):
    return pytorch_step(fused=True)


@adamw.provider("ligermodels")
def ours(*shape):
    from ligermodels.kernels.optim.adamw import adamw_

    def step(param, grad, exp_avg, exp_avg_sq, count):
        adamw_(param, grad, exp_avg, exp_avg_sq, *HYPERPARAMETERS, count)
        return param, exp_avg, exp_avg_sq

    return step
