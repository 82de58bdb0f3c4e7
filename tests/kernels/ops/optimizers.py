"""Steps of optimizers."""

from functools import partial
from itertools import product

import torch

from ligermodels.kernels.optim.adamw import adamw_, adamw_reference
from ligermodels.kernels.optim.adamw8bit import adamw8bit_, adamw8bit_reference, encode_reference
from tests.conftest import DEVICE
from tests.kernels.ops.base import Case, Op, normal


def rounded_adamw_case(batch, length, width, exact, eight_bits=False) -> Case:
    """Rounding of the same updated bf16 parameter; test_param_rounding.py compares it with the references."""
    hyperparameters = 1e-2, 0.9, 0.999, 1e-8, 0.1

    @torch.no_grad()
    def update(param, grad, step):
        tensors = [x.contiguous().to(torch.bfloat16, copy=True) for x in (param, grad)]
        low_bits = torch.zeros_like(tensors[0], dtype=torch.int16) if exact else None
        if eight_bits:
            codes, scale = (
                torch.zeros_like(tensors[0], dtype=torch.uint8),
                step.new_zeros(*param.shape[:2], width // 64),
            )
            tensors += [codes, scale, codes.clone(), scale.clone()]
            adamw8bit_(*tensors, *hyperparameters, step, None, None, low_bits, None if exact else 3)
        else:
            tensors += [torch.zeros_like(tensors[0]) for _ in range(2)]
            adamw_(*tensors, *hyperparameters, step, None, None, low_bits, None if exact else 3)
        return tensors[0].to(param.dtype)

    return Case(update, update, [normal(batch, length, width) for _ in range(2)], [torch.tensor(3.0, device=DEVICE)])


def adamw_case(batch, length, width) -> Case:
    hyperparameters = 1e-2, 0.9, 0.999, 1e-8, 0.1

    @torch.no_grad()
    def ours(param, grad, exp_avg, exp_avg_sq, step):
        updated = param.clone(), exp_avg.clone(), exp_avg_sq.clone()
        adamw_(updated[0], grad, *updated[1:], *hyperparameters, step)
        return updated

    @torch.no_grad()
    def reference(param, grad, exp_avg, exp_avg_sq, step):
        return adamw_reference(param, grad, exp_avg, exp_avg_sq, *hyperparameters, step)

    tensors = [normal(batch, length, width) for _ in range(4)]
    tensors[3] = tensors[3].square() + 0.1
    return Case(ours, reference, tensors, [torch.tensor(3.0, device=DEVICE)])


def adamw8bit_case(batch, length, width) -> Case:
    """The moments are constants; of the results the codes are left to test_adamw8bit.py."""
    hyperparameters = 1e-2, 0.9, 0.999, 1e-8, 0.1

    @torch.no_grad()
    def ours(param, grad, *states_and_step):
        param, *states = (x.clone() for x in (param, *states_and_step[:-1]))
        adamw8bit_(param, grad, *states, *hyperparameters, states_and_step[-1])
        return param, states[1].to(param.dtype), states[3].to(param.dtype)

    @torch.no_grad()
    def reference(param, grad, *states_and_step):
        *states, step = states_and_step
        param, _, scale, _, scale_sq = adamw8bit_reference(param, grad, *states, *hyperparameters, step)
        return param, scale.to(param.dtype), scale_sq.to(param.dtype)

    shape, states = (batch, length, width), []
    for x, signed in ((normal(*shape), True), (normal(*shape).square(), False)):
        codes, scale = encode_reference(x.view(-1, 64), signed)
        states += [codes.view(shape), scale.view(batch, length, width // 64)]
    return Case(ours, reference, [normal(*shape), normal(*shape)], [*states, torch.tensor(3.0, device=DEVICE)])


OPS = {
    "adamw": Op(draw=adamw_case, small=(33,), real=((4096,),), huge=(2**17 + 1, 2**14), has_gradients=False),
    "adamw8bit": Op(
        draw=adamw8bit_case, small=(192,), real=((4096,),), huge=(2**17 + 1, 2**14), has_gradients=False
    ),
    **{
        f"adamw{'8bit' * eight_bits}, {'exact' if exact else 'stochastic'}": Op(
            draw=partial(rounded_adamw_case, exact=exact, eight_bits=eight_bits), small=(192,),
            real=((4096,),), has_gradients=False,
        )
        for exact, eight_bits in product((False, True), repeat=2)
    },
}  # fmt: skip
