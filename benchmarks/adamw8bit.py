"""One in-place step of AdamW with moments in 8 bits on one bf16 parameter. Shape: [rows, columns].

`python -m benchmarks.optimizer_step` measures it over all parameters of a model.
"""

import torch

from benchmarks.adamw import HYPERPARAMETERS
from benchmarks.ops import Op, random_input
from ligermodels.kernels.optim.adamw8bit import adamw8bit_reference, encode_reference, map_and_thresholds

SHAPES = [(16384, 4096), (128256, 4096), (64, 1024)]
BLOCK = 256


def inputs(rows, columns):
    param, grad, exp_avg, exp_avg_sq = (random_input(rows, columns).detach() for _ in range(4))
    states = []
    for moment, signed in ((exp_avg, True), (exp_avg_sq.square_(), False)):
        codes, scale = encode_reference(moment.float().view(-1, BLOCK), signed)
        states += [codes.view(rows, columns), scale.view(rows, -1)]
    return [param, grad, *states, torch.tensor(3.0)]


def without_codes(param, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale):
    """The results that are compared: a moment at a threshold may have either of two codes."""
    return param, exp_avg_scale, exp_avg_sq_scale


def reference(*inputs):
    *tensors, step = inputs
    return without_codes(*adamw8bit_reference(*tensors, *HYPERPARAMETERS, step))


adamw8bit = Op(
    "adamw8bit", SHAPES, inputs, reference,
    work=lambda rows, columns: {"forward": rows * columns * (10 + 16 / BLOCK)},
)  # fmt: skip


@adamw8bit.provider("pytorch")
def pytorch(*shape):
    return reference


@adamw8bit.provider("torchao")
def torchao(*shape):
    """torchao's own update of one parameter, compiled as its optimizer compiles it."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    lr, beta1, beta2, eps, weight_decay = HYPERPARAMETERS
    update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
    values, _ = map_and_thresholds(torch.get_default_device())

    def step(param, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, count):
        m = OptimState8bit(exp_avg, exp_avg_scale.view(-1), values[0], True)
        v = OptimState8bit(exp_avg_sq, exp_avg_sq_scale.view(-1), values[1], False)
        update(
            param, grad, count, m, v, None, torch.full_like(count, lr), beta1, beta2, weight_decay, eps, True, False
        )  # fmt: skip
        return param, exp_avg_scale, exp_avg_sq_scale

    return step


@adamw8bit.provider("ligermodels")
def ours(*shape):
    from ligermodels.kernels.optim.adamw8bit import adamw8bit_

    def step(param, grad, *states_and_step):
        *states, count = states_and_step
        adamw8bit_(param, grad, *states, *HYPERPARAMETERS, count)
        return without_codes(param, *states)

    return step
