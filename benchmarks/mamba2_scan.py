"""The Mamba-2 scan, and the gated norm behind it.

Shape of the scan: [batch, length, heads], heads of 64, one group, states of 128: Granite 4.0 H-Tiny and H-Small, as
rows of 2048 tokens and as one of 32768. The bytes counted are the fewest: xbc, step sizes and y forward, and twice that
and the gradients backward; states are not counted.
The reference is the chunk form in plain PyTorch, because the recurrence of 32768 tokens does not fit in memory.
Peer: mamba-ssm, where it is installed.
"""

import torch
import torch.nn.functional as F

from benchmarks.ops import Op, random_input, work_per_pass
from ligermodels.kernels.norms.gated_rms_norm import gated_rms_norm_reference

SIZE, STATE, CHUNK, EPS = 64, 128, 64, 1e-5
SHAPES = [(4, 2048, 48), (4, 2048, 128), (1, 32768, 48), (1, 32768, 128), (1, 64, 2)]


def inputs(batch, length, heads):
    """Decays as at initialization: A from 1 to the number of heads; step sizes as of trained models, below 0.1."""
    a = -torch.arange(1.0, heads + 1)
    delta = F.softplus(torch.randn(batch, length, heads) - 4.0)
    xbc = random_input(batch, length, heads * SIZE + 2 * STATE)
    return [xbc, delta.requires_grad_(), a.requires_grad_(), torch.ones(heads, requires_grad=True)]


def work(batch, length, heads):
    tokens = batch * length
    xbc, y, steps = 2 * (heads * SIZE + 2 * STATE), 2 * heads * SIZE, 4 * heads
    return work_per_pass(tokens * (xbc + y + steps), tokens * (2 * xbc + y + 2 * steps))


def separate(xbc, delta, a, d):
    """x by head, B and C by group."""
    x, b, c = xbc.split([a.shape[0] * SIZE, STATE, STATE], -1)
    return x.unflatten(-1, (-1, SIZE)), delta, a, b[:, :, None], c[:, :, None], d


def chunked(xbc, delta, a, d):
    """The formulas of kernels/linear_attention/mamba2_scan.py, all chunks at once but for the states."""
    wide = [y.to(torch.promote_types(y.dtype, torch.float32)) for y in (xbc, delta, a, d)]
    x, delta, a, b, c, d = separate(*wide)
    skip = d[:, None] * x
    x, b, c, delta = (y.unflatten(1, (-1, CHUNK)).transpose(2, 3) for y in (x, b, c, delta[..., None]))
    decay = (a[:, None, None] * delta)[..., 0].cumsum(-1)  # [B, chunks, heads, CHUNK]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
    pairs = (c @ b.mT) * (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    state, outputs = x.new_zeros(*x.shape[:1], x.shape[2], STATE, SIZE), []
    for i in range(x.shape[1]):
        factor, last = decay[:, i].exp()[..., None], decay[:, i, :, -1:]
        value = delta[:, i] * x[:, i]
        outputs.append(factor * (c[:, i] @ state) + pairs[:, i] @ value)
        left = (last - decay[:, i]).exp()[..., None]
        state = last.exp()[..., None] * state + b[:, i].mT @ (left * value)
    return (torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2) + skip).to(xbc.dtype)


scan = Op("mamba2_scan", SHAPES, inputs, chunked, work)


@scan.provider("pytorch")
def pytorch(*shape):
    return chunked


@scan.provider("mamba-ssm", layout=separate)
def mamba_ssm(*shape):
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def call(x, delta, a, b, c, d):
        return mamba_chunk_scan_combined(x, delta, a, b, c, chunk_size=256, D=d)

    return call


@scan.provider("ligermodels")
def ours(*shape):
    from ligermodels.kernels.linear_attention.mamba2_scan import mamba2_scan

    return lambda xbc, delta, a, d: mamba2_scan(xbc, delta, a, d, 1, STATE)[0]


def gate_first(x, z, weight):
    return gated_rms_norm_reference(x, z, weight, EPS, gate_first=True)


def norm_inputs(tokens, columns):
    return [random_input(tokens, columns), random_input(tokens, columns), random_input(columns)]


def norm_work(tokens, columns):
    return work_per_pass(6 * tokens * columns, 10 * tokens * columns)


norm = Op("gate_first_rms_norm", [(8192, 3072), (8192, 8192), (64, 256)], norm_inputs, gate_first, norm_work)


@norm.provider("pytorch")
def norm_pytorch(*shape):
    return gate_first


@norm.provider("mamba-ssm")
def norm_mamba(*shape):
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

    return lambda x, z, weight: rmsnorm_fn(x, weight, None, z=z, eps=EPS, norm_before_gate=False)


@norm.provider("ligermodels")
def norm_ours(*shape):
    from ligermodels.kernels.norms.gated_rms_norm import gated_rms_norm

    return lambda x, z, weight: gated_rms_norm(x, z, weight, EPS, gate_first=True)


norm.add_compiled([(8192, 3072)])
