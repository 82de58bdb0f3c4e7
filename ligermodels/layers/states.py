"""Layers whose memory of earlier tokens is a state: their sequences, the ops on them, gated short convolutions.

Such a layer numbers its states from 0. Without a cache a state is zero where a row or packed document starts.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ligermodels.configs.hybrid import ShortConvConfig
from ligermodels.generation.cache import LayerStates, PerRow, StateCall, StateStep
from ligermodels.kernels.linear_attention.causal_conv import causal_conv, causal_conv_state, causal_conv_step_
from ligermodels.kernels.linear_attention.delta_chunks import delta_shape
from ligermodels.kernels.linear_attention.document_chunks import row_offsets
from ligermodels.kernels.linear_attention.gated_delta_rule import gated_delta_rule, gated_delta_step_, split_qkv
from ligermodels.kernels.linear_attention.mamba2_chunks import scan_shape
from ligermodels.kernels.linear_attention.mamba2_scan import mamba2_scan, mamba2_step_, split_xbc
from ligermodels.layers.attention import QKNormAttention
from ligermodels.layers.context_parallel import ContextGroup, heads_of_rank
from ligermodels.layers.fused import apply_linear, norm_then_linear
from ligermodels.layers.inputs import Positions
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.norm import PreNorm


class Uncached(NamedTuple):
    """A call without a cache. cu_seqlens: int32 [documents + 1], offsets of packed documents; None for whole rows.
    context: the ranks that share the row, whose offsets these are; None for one."""

    cu_seqlens: Tensor | None
    context: ContextGroup | None

    def before(self, number: int) -> None:
        """No state precedes."""

    def store(self, number: int, state: Tensor) -> None:
        """No state is kept."""

    def inputs_before(self, x: Tensor, taps: int) -> tuple[Tensor | None, Tensor | None]:
        """(the taps - 1 inputs before each document's part of x [documents, taps - 1, C], offsets of these parts).

        Raises ValueError where a part of a row is shorter than what a convolution reads of it.
        """
        if self.context is None:
            return None, self.cu_seqlens
        tokens, past = x.shape[1], taps - 1
        if tokens < past:
            raise ValueError(f"forward: a convolution reads {past} earlier tokens, but each rank has {tokens} of a row")
        offsets = row_offsets(x) * self.context.size if self.cu_seqlens is None else self.cu_seqlens
        offsets = offsets - self.context.rank * tokens
        begins_before = offsets[:-1, None] <= torch.arange(-past, 0, device=x.device)
        continues = begins_before & (offsets[1:, None] > 0)  # [documents, taps - 1]
        inputs = self.context.from_previous_rank(x[0, tokens - past :])
        return inputs.where(continues[:, :, None], 0), offsets.clamp(0, tokens)


Call = StateStep | StateCall | Uncached


def begin(x: Tensor, positions: Positions, cache: LayerStates | None) -> Call:
    """What a call on x [B, T, ...] does with the states of a layer.

    Raises ValueError for documents that share prefixes: each one needs the state at the end of its prefix.
    """
    sequences = positions.sequences
    if sequences.shared_keys is not None:
        raise ValueError("forward: layers with states cannot share the keys of prefixes; give each document its own")
    if cache is None:
        return Uncached(sequences.cu_seqlens, sequences.context)
    return cache.begin((x.shape[0], x.shape[1]), sequences.padding)


class CausalConv(nn.Module):
    """Causal depthwise convolution. weight [C, 1, n], as on the Hub; bias [C].

    activation: "silu" or None. number: of its state, the last n - 1 inputs.
    """

    bias: nn.Parameter | None

    def __init__(self, channels: int, taps: int, number: int, *, activation: str | None, bias: bool = False) -> None:
        super().__init__()
        self.activation, self.number = activation, number
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        nn.init.normal_(self.weight, 0.0, taps**-0.5)
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Tensor, call: Call) -> Tensor:
        """x [B, T, C] -> the same shape and dtype."""
        options = self.weight.squeeze(1), self.bias, self.activation
        if isinstance(call, StateStep):
            return causal_conv_step_(x[:, 0], *options, call.pools[self.number], call.rows)[:, None]
        rows = x if call.cu_seqlens is None else x.flatten(0, 1)[None]
        if isinstance(call, Uncached):
            return causal_conv(rows, *options, *call.inputs_before(rows, self.weight.shape[2])).view(x.shape)
        before = call.before(self.number)
        call.store(self.number, causal_conv_state(rows, self.weight.shape[2], before, call.cu_seqlens))
        return causal_conv(rows, *options, before, call.cu_seqlens).view(x.shape)

    def extra_repr(self) -> str:
        channels, _, taps = self.weight.shape
        return f"{channels}, taps={taps}, activation={self.activation}"


def delta_rule(qkv: Tensor, g: Tensor, beta: Tensor, key_heads: int, key_size: int, call: Call, number: int) -> Tensor:
    """The gated delta rule over the sequences of a call: arguments as those of `gated_delta_rule`.

    number: of the state [Hv, hk, hv]. Returns [B, T, Hv, hv].
    """
    if isinstance(call, StateStep):
        pool, rows = call.pools[number], call.rows
        return gated_delta_step_(qkv[:, 0], g[:, 0], beta[:, 0], key_heads, key_size, pool, rows)[:, None]
    shape, context = g.shape, call.context if isinstance(call, Uncached) else None
    if call.cu_seqlens is not None:
        qkv, g, beta = (x.flatten(0, 1)[None] for x in (qkv, g, beta))
    if context is not None:
        qkv = context.pack_heads(*split_qkv(qkv, delta_shape(qkv, g, key_heads, key_size)))
        g, beta = (x.squeeze(3) for x in context.take_heads(g[..., None], beta[..., None]))
        key_heads = heads_of_rank(key_heads, context.size)
    o, after = gated_delta_rule(qkv, g, beta, key_heads, key_size, call.before(number), call.cu_seqlens)
    call.store(number, after)
    return o.view(*shape, -1) if context is None else context.take_tokens(o, shape[2])


def state_space(
    xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int, state_size: int, call: Call, number: int
) -> Tensor:
    """The Mamba-2 scan over the sequences of a call: arguments as those of `mamba2_scan`.

    number: of the state [H, N, P]. Returns [B, T, H, P].
    """
    if isinstance(call, StateStep):
        pool, rows = call.pools[number], call.rows
        return mamba2_step_(xbc[:, 0], delta[:, 0], a, d, groups, state_size, pool, rows)[:, None]
    shape, context = delta.shape, call.context if isinstance(call, Uncached) else None
    if call.cu_seqlens is not None:
        xbc, delta = (x.flatten(0, 1)[None] for x in (xbc, delta))
    if context is not None:
        xbc = context.pack_heads(*split_xbc(xbc, scan_shape(xbc, delta, groups, state_size)))
        delta, a, d = (
            context.take_heads(delta[..., None])[0].squeeze(3),
            context.of_own_heads(a),
            context.of_own_heads(d),
        )
        groups = heads_of_rank(groups, context.size)
    y, after = mamba2_scan(xbc, delta, a, d, groups, state_size, call.before(number), call.cu_seqlens)
    call.store(number, after)
    return y.view(*shape, -1) if context is None else context.take_tokens(y, shape[2])


class ShortConv(Mixer):
    """Weights: in_proj [3 H, H], the rows of B, C, u; conv over H channels; out_proj [H, H]; biases in all or none."""

    name_in_block = "conv"

    def __init__(self, config: ShortConvConfig) -> None:
        super().__init__()
        self.hidden_size = hidden = config.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=config.conv_bias)
        self.conv = CausalConv(hidden, config.conv_L_cache, 0, activation=None, bias=config.conv_bias)
        self.out_proj = nn.Linear(hidden, hidden, bias=config.conv_bias)

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerStates | None
    ) -> tuple[Tensor, Tensor]:
        projected, residual = norm_then_linear(norm, self.in_proj, x, residual)
        b, c, u = projected.chunk(3, -1)
        return apply_linear(self.out_proj, c * self.conv(b * u, begin(x, positions, cache))), residual

    def kept(self) -> PerRow:
        return PerRow(self.hidden_size * (self.conv.weight.shape[2] - 1))

    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        return "short convolution"


def conv_or_attention(config: ShortConvConfig, index: int) -> Mixer:
    """What mixes the tokens of block `index`."""
    return ShortConv(config) if config.is_conv(index) else QKNormAttention(config)
