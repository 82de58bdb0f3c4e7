"""Activations of MLPs."""

from dataclasses import replace
from functools import partial

import torch

from ligermodels.kernels.activations.gated_activation import gated_activation, gated_activation_reference
from ligermodels.kernels.activations.plain_activation import plain_activation, plain_activation_reference
from tests.kernels.ops.base import Case, Op, normal

MULTIPLIERS = {"gate_multiplier": 0.75, "down_multiplier": -1.25}


def gated_case(batch, length, inner, activation="silu") -> Case:
    ours, reference = (partial(f, activation=activation) for f in (gated_activation, gated_activation_reference))
    return Case(ours, reference, [normal(batch, length, 2 * inner)], [])


def gated_in_place_case(batch, length, inner, activation) -> Case:
    def ours(gate_up):
        consumed = gate_up.clone(memory_format=torch.contiguous_format)
        return gated_activation(consumed, activation, inplace=True)

    return replace(gated_case(batch, length, inner, activation), ours=ours)


def gate_and_up_case(batch, length, inner) -> Case:
    def gated(function, gate, up, **options):
        return function(gate, "silu", up, **options)

    ours, reference = (partial(gated, f) for f in (gated_activation, gated_activation_reference))
    return Case(ours, reference, [normal(batch, length, inner), normal(batch, length, inner)], [])


def gate_and_up_in_place_case(batch, length, inner, **multipliers) -> Case:
    case = gate_and_up_case(batch, length, inner)

    def ours(gate, up):
        consumed = (x.clone(memory_format=torch.contiguous_format) for x in (gate, up))
        return case.ours(*consumed, inplace=True, **multipliers)

    return replace(case, ours=ours, reference=partial(case.reference, **multipliers))


def plain_case(batch, length, inner, activation="quick_gelu") -> Case:
    ours, reference = (partial(f, activation=activation) for f in (plain_activation, plain_activation_reference))
    return Case(ours, reference, [normal(batch, length, inner)], [])


OPS = {
    "swiglu": Op(
        draw=gated_case, small=(33,), real=((1024,), (2880,), (8192,), (14336,), (28672,)), huge=(2**16 + 1, 2**14)
    ),
    "geglu": Op(draw=partial(gated_case, activation="gelu"), small=(33,), real=((8192,), (14336,))),
    "geglu with tanh, in place": Op(
        draw=partial(gated_in_place_case, activation="gelu_tanh"), small=(33,), real=((8192,), (14336,))
    ),
    "swiglu of gate and up": Op(
        draw=gate_and_up_case, small=(33,), real=((2880,), (14336,)), huge=(2**17 + 1, 2**14)
    ),
    "swiglu of gate and up, with multipliers, in place": Op(
        draw=partial(gate_and_up_in_place_case, **MULTIPLIERS), small=(33,), real=((14336,),)
    ),
    "plain_activation": Op(draw=plain_case, small=(33,), real=((5120,),), huge=(2**17 + 1, 2**14)),
    "plain_activation of gelu": Op(draw=partial(plain_case, activation="gelu"), small=(33,)),
}  # fmt: skip
