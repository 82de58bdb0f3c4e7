"""Gated delta rule, causal convolution and gated norm of Qwen3.5's linear attention.

Shape of the rule: [batch, length, key heads, value heads], heads of 128: Qwen3.5-0.8B, 35B-A3B and 27B, as rows of 2048
tokens and as one of 32768. The bytes counted are the fewest: qkv, gates and o forward, and twice that and the gradients
backward; states are not counted.
The reference is the chunk form in plain PyTorch, because the recurrence of 32768 tokens does not fit in memory.
Peers: flash-linear-attention (`pip install flash-linear-attention`) and causal-conv1d, where they are installed.
`python -m benchmarks.gated_delta_tiles` compares our tiles.
"""

import torch
import torch.nn.functional as F

from benchmarks.ops import Op, random_input, work_per_pass
from ligermodels.kernels.linear_attention.causal_conv import causal_conv_reference
from ligermodels.kernels.norms.gated_rms_norm import gated_rms_norm_reference

SIZE, CHUNK, EPS = 128, 64, 1e-6
SHAPES = [
    (4, 2048, 16, 16),
    (4, 2048, 16, 32),
    (4, 2048, 16, 48),
    (1, 32768, 16, 32),
    (1, 32768, 16, 16),
    (1, 64, 2, 2),
]


def inputs(batch, length, key_heads, value_heads):
    """Gates as at initialization: A between 1 and 16, dt_bias 1."""
    gates = torch.randn(2, batch, length, value_heads)
    g = -torch.linspace(1.0, 16.0, value_heads) * F.softplus(gates[0] - 4.0)
    qkv = random_input(batch, length, SIZE * (2 * key_heads + value_heads))
    return [qkv, g.requires_grad_(), gates[1].sigmoid().requires_grad_()]


def work(batch, length, key_heads, value_heads):
    tokens = batch * length
    qkv, o, gates = 2 * SIZE * (2 * key_heads + value_heads), 2 * SIZE * value_heads, 8 * value_heads
    return work_per_pass(tokens * (qkv + o + gates), tokens * (2 * qkv + o + 2 * gates))


def separate(qkv, g, beta):
    """Queries, keys and values by head."""
    value_heads = g.shape[-1]
    keys = (qkv.shape[-1] - value_heads * SIZE) // 2
    return *(x.unflatten(-1, (-1, SIZE)) for x in qkv.split([keys, keys, value_heads * SIZE], -1)), g, beta


def chunked(qkv, g, beta):
    """The formulas of kernels/linear_attention/gated_delta_rule.py, all chunks at once but for the states."""
    q, k, v, *_ = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in separate(qkv, g, beta))
    group = v.shape[2] // k.shape[2]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q, k))
    q, k = (x.repeat_interleave(group, 2) for x in (q * SIZE**-0.5, k))
    q, k, v = (x.unflatten(1, (-1, CHUNK)).transpose(2, 3) for x in (q, k, v))  # [B, chunks, heads, CHUNK, SIZE]
    decay, beta = (x.unflatten(1, (-1, CHUNK)).transpose(2, 3) for x in (g, beta))
    decay = decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    pair = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    a = (beta[..., None] * (k @ k.mT) * pair).tril(-1)
    pairs, identity = (q @ k.mT) * pair, torch.eye(CHUNK, dtype=a.dtype, device=a.device)
    state, outputs = q.new_zeros(*v.shape[:1], v.shape[2], SIZE, SIZE), []
    for c in range(v.shape[1]):
        factor, last = decay[:, c].exp()[..., None], decay[:, c, :, -1:, None]
        residual = beta[:, c, :, :, None] * (v[:, c] - factor * (k[:, c] @ state))
        value = torch.linalg.solve_triangular(identity + a[:, c], residual, upper=False, unitriangular=True)
        outputs.append(factor * (q[:, c] @ state) + pairs[:, c] @ value)
        left = (last[..., 0] - decay[:, c]).exp()[..., None]
        state = last.exp() * state + k[:, c].mT @ (left * value)
    return torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2).to(qkv.dtype)


rule = Op("gated_delta_rule", SHAPES, inputs, chunked, work)


@rule.provider("pytorch")
def pytorch(*shape):
    return chunked


@rule.provider("flash-linear-attention", layout=separate)
def flash_linear_attention(*shape):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def call(q, k, v, g, beta):
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]

    return call


@rule.provider("ligermodels")
def ours(batch, length, key_heads, value_heads):
    from ligermodels.kernels.linear_attention.gated_delta_rule import gated_delta_rule

    return lambda qkv, g, beta: gated_delta_rule(qkv, g, beta, key_heads, SIZE)[0]


def conv_inputs(tokens, channels):
    return [random_input(1, tokens, channels), random_input(channels, 4)]


def conv_work(tokens, channels):
    return work_per_pass(4 * tokens * channels, 6 * tokens * channels)


conv = Op("causal_conv", [(8192, 8192), (32768, 10240), (64, 64)], conv_inputs, causal_conv_reference, conv_work)


@conv.provider("pytorch")
def conv_pytorch(*shape):
    return lambda x, w: F.silu(F.conv1d(F.pad(x.mT, (3, 0)), w[:, None], groups=w.shape[0])).mT


@conv.provider("causal-conv1d")
def conv_cuda(*shape):
    from causal_conv1d import causal_conv1d_fn

    return lambda x, w: causal_conv1d_fn(x.mT, w, activation="silu").mT


@conv.provider("flash-linear-attention")
def conv_fla(*shape):
    from fla.modules.convolution import causal_conv1d

    return lambda x, w: causal_conv1d(x, w, activation="silu")[0]


@conv.provider("ligermodels")
def conv_ours(*shape):
    from ligermodels.kernels.linear_attention.causal_conv import causal_conv

    return causal_conv


def norm_inputs(tokens, heads):
    return [random_input(tokens, heads, SIZE), random_input(tokens, heads, SIZE), random_input(SIZE)]


def norm_work(tokens, heads):
    return work_per_pass(6 * tokens * heads * SIZE, 10 * tokens * heads * SIZE)


norm = Op("gated_rms_norm", [(8192, 32), (32768, 48), (64, 2)], norm_inputs, gated_rms_norm_reference, norm_work)


@norm.provider("pytorch")
def norm_pytorch(*shape):
    return gated_rms_norm_reference


@norm.provider("flash-linear-attention")
def norm_fla(*shape):
    from fla.modules.fused_norm_gate import rms_norm_gated

    return lambda x, z, w: rms_norm_gated(x, z, w, None, activation="swish", eps=EPS)


@norm.provider("ligermodels")
def norm_ours(*shape):
    from ligermodels.kernels.norms.gated_rms_norm import gated_rms_norm

    return gated_rms_norm


norm.add_compiled([(8192, 32)])
