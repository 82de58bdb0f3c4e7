"""Layers with states in place of keys: gated delta rule, Mamba-2, causal convolution; scans and steps."""

from functools import partial

import torch
import torch.nn.functional as F

from ligermodels.kernels.dispatch import widen
from ligermodels.kernels.linear_attention.causal_conv import (
    causal_conv,
    causal_conv_reference,
    causal_conv_step_,
    causal_conv_step_reference,
)
from ligermodels.kernels.linear_attention.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_reference,
    gated_delta_step_,
    gated_delta_step_reference,
)
from ligermodels.kernels.linear_attention.mamba2_scan import (
    mamba2_scan,
    mamba2_scan_reference,
    mamba2_step_,
    mamba2_step_reference,
)
from tests.conftest import DEVICE
from tests.kernels.ops.base import Case, Op, normal


def gated_delta_rule_case(batch, length, key_heads, key_size, value_heads, value_size, states=True) -> Case:
    """With states, the initial state is a leaf and the final state an output."""

    def rule(function, qkv, g, beta, initial_state=None):
        o, final = function(qkv, -F.softplus(widen(g)), widen(beta).sigmoid(), key_heads, key_size, initial_state)
        return (o, final.to(qkv.dtype)) if states else o

    columns = 2 * key_heads * key_size + value_heads * value_size
    leaves = [normal(batch, length, columns), normal(batch, length, value_heads), normal(batch, length, value_heads)]
    if states:
        leaves.append(normal(batch, value_heads, key_size, value_size))
    return Case(partial(rule, gated_delta_rule), partial(rule, gated_delta_rule_reference), leaves, [])


def gated_delta_step_case(batch, length, key_heads, key_size, value_heads, value_size) -> Case:
    """As many rows as tokens, in another order."""

    @torch.no_grad()
    def move(function, qkv, g, beta, pool, row):
        qkv, g, beta, row = (x.flatten(0, 1) for x in (qkv, g, beta, row))
        states = widen(pool).flatten(0, 1).clone(memory_format=torch.contiguous_format)
        outputs = function(qkv, -widen(g).square(), widen(beta).sigmoid(), key_heads, key_size, states, row)
        o, moved = (outputs, states) if function is gated_delta_step_ else outputs
        return o, moved.to(pool.dtype)

    rule = gated_delta_rule_case(batch, length, key_heads, key_size, value_heads, value_size, states=False)
    leaves = [*rule.leaves, normal(batch, length, value_heads, key_size, value_size)]
    row = torch.randperm(batch * length, device=DEVICE).view(batch, length)
    return Case(partial(move, gated_delta_step_), partial(move, gated_delta_step_reference), leaves, [row])


def mamba2_scan_case(batch, length, heads, head_size, groups, state_size, states=True) -> Case:
    """With states, the initial state is a leaf and the final state an output."""

    def scan(function, xbc, delta, a, d, initial_state=None):
        y, final = function(xbc, F.softplus(widen(delta)), -widen(a).square(), d, groups, state_size, initial_state)
        return (y, final.to(xbc.dtype)) if states else y

    columns = heads * head_size + 2 * groups * state_size
    leaves = [normal(batch, length, columns), normal(batch, length, heads), normal(heads), normal(heads)]
    if states:
        leaves.append(normal(batch, heads, state_size, head_size))
    return Case(partial(scan, mamba2_scan), partial(scan, mamba2_scan_reference), leaves, [])


def mamba2_step_case(batch, length, heads, head_size, groups, state_size) -> Case:
    """As many rows as tokens, in another order."""

    @torch.no_grad()
    def move(function, xbc, delta, a, d, pool, row):
        xbc, delta, row = (x.flatten(0, 1) for x in (xbc, delta, row))
        states = widen(pool).flatten(0, 1).clone(memory_format=torch.contiguous_format)
        delta, a = F.softplus(widen(delta)), -widen(a).square()
        outputs = function(xbc, delta, a, d, groups, state_size, states, row)
        y, moved = (outputs, states) if function is mamba2_step_ else outputs
        return y, moved.to(pool.dtype)

    leaves = mamba2_scan_case(batch, length, heads, head_size, groups, state_size, states=False).leaves
    row = torch.randperm(batch * length, device=DEVICE).view(batch, length)
    pool = normal(batch, length, heads, state_size, head_size)
    return Case(partial(move, mamba2_step_), partial(move, mamba2_step_reference), [*leaves, pool], [row])


def causal_conv_case(batch, length, channels, taps) -> Case:
    """The number of taps is no dimension of a leaf: it equals one of the lengths of test_contracts.py."""

    def convolve(function, x, weight, bias, initial_state):
        return function(x, weight.reshape(-1, taps), bias, "silu", initial_state.unflatten(1, (taps - 1, -1)))

    leaves = [normal(batch, length, channels), normal(channels * taps), normal(channels)]
    leaves.append(normal(batch, (taps - 1) * channels))
    return Case(partial(convolve, causal_conv), partial(convolve, causal_conv_reference), leaves, [])


def causal_conv_step_case(batch, length, channels, taps) -> Case:
    @torch.no_grad()
    def move(function, x, weight, pool, row):
        states = (
            pool.to(x.dtype).flatten(0, 1).unflatten(1, (taps - 1, -1)).clone(memory_format=torch.contiguous_format)
        )
        outputs = function(x.flatten(0, 1), weight.reshape(-1, taps), None, "silu", states, row.flatten())
        return (outputs, states) if function is causal_conv_step_ else outputs

    leaves = [normal(batch, length, channels), normal(channels * taps), normal(batch, length, (taps - 1) * channels)]
    row = torch.randperm(batch * length, device=DEVICE).view(batch, length)
    return Case(partial(move, causal_conv_step_), partial(move, causal_conv_step_reference), leaves, [row])


OPS = {
    "gated_delta_rule": Op(
        draw=gated_delta_rule_case, small=(2, 20, 6, 12), real=((16, 128, 32, 128), (16, 128, 48, 128)),
        more_variants=((1, 16), (3, 16)),  # programs of one document leave multiprocessors idle
    ),
    # So few programs that outputs have a kernel of their own.
    "gated_delta_rule of one head": Op(
        draw=partial(gated_delta_rule_case, states=False), small=(1, 20, 1, 12), real=((1, 128, 1, 64),)
    ),
    "gated_delta_step": Op(
        draw=gated_delta_step_case, small=(2, 20, 6, 12), real=((16, 128, 48, 128),), has_gradients=False
    ),
    "mamba2_scan": Op(
        draw=mamba2_scan_case, small=(6, 12, 3, 20), real=((48, 64, 1, 128), (128, 64, 1, 128)),
        more_variants=((1, 16),),
    ),
    "mamba2_scan of one head": Op(
        draw=partial(mamba2_scan_case, states=False), small=(1, 12, 1, 20), real=((1, 64, 1, 128),)
    ),
    "mamba2_step": Op(
        draw=mamba2_step_case, small=(6, 12, 3, 20), real=((128, 64, 1, 128),), has_gradients=False
    ),
    "causal_conv": Op(draw=causal_conv_case, small=(37, 4), real=((8192, 4), (10240, 4))),
    "causal_conv_step": Op(draw=causal_conv_step_case, small=(37, 4), real=((10240, 4),), has_gradients=False),
}  # fmt: skip
