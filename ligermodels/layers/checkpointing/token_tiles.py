"""A layer that computes each token by itself, over tiles of tokens: forward and backward take the memory of one tile.

For feed-forward layers of checkpointed blocks, where rows are long. One node keeps the layer's input, and in backward
computes tile after tile again. It keeps the input before it computes: if nothing behind it in the block keeps anything,
the recomputation of the block stops there, and no product is computed more often than without tiles. A tile's gradient
of a parameter is rounded to the parameter's dtype; the sum over tiles is in fp32, rounded once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import Node

TILE_TOKENS = 2**14  # with so many, matrix products run at full speed

TokenLayer = Callable[[Tensor], tuple[Tensor, Tensor]]  # [tokens, H] -> output [tokens, N], residual stream [tokens, H]


def tile_count(tokens: int) -> int:
    """In how many tiles a row of so many tokens is computed: as many as have TILE_TOKENS tokens or more."""
    return max(1, tokens // TILE_TOKENS)


def run_in_tiles(
    layer: TokenLayer, layer_for_backward: TokenLayer, x: Tensor, parameters: Sequence[Tensor], tiles: int
) -> tuple[Tensor, Tensor]:
    """x [..., H] -> output [..., N], residual stream [..., H].

    layer: its residual stream is its input. layer_for_backward: the same, but the values of the output are not read.
    parameters: those of the layer that are trained.
    """
    rows = x.flatten(0, -2)
    saved = _Saved.apply(rows, x.new_empty(0, requires_grad=bool(parameters)))
    out, residual = _Tiles.apply(layer, layer_for_backward, tiles, rows.requires_grad, saved, *parameters)
    return out.view(*x.shape[:-1], -1), residual.view(x.shape)


class _Saved(Node):
    """x, which it keeps for the node that reads it. Backward runs after that node's and frees x.

    leaf: requires gradients where the other node's parameters do, so that this is a node whether or not x does.
    """

    @staticmethod
    def forward(ctx, x, leaf):
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, None


class _Tiles(Node):
    @staticmethod
    def forward(ctx, layer, layer_for_backward, tiles, needs_dx, x, *parameters):
        kind = x.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.layer, ctx.tiles, ctx.needs_dx, ctx.parameters = layer_for_backward, tiles, needs_dx, parameters
        ctx.saved = x.grad_fn
        ctx.set_materialize_grads(False)
        return torch.cat([layer(tile)[0] for tile in x.detach().tensor_split(tiles)]), x.view_as(x)

    @staticmethod
    def backward(ctx, dout, dresidual):
        (x,) = ctx.saved.saved_tensors
        dx = torch.empty_like(x) if ctx.needs_dx else None
        sums = [None] * len(ctx.parameters)
        for tile, *gradients in zip(*(split_rows(rows, ctx.tiles) for rows in (x, dx, dout, dresidual)), strict=True):
            add_gradients(sums, tile_backward(ctx.layer, ctx.autocast, ctx.parameters, tile, *gradients))
        of_parameters = (s if s is None else s.to(p.dtype) for s, p in zip(sums, ctx.parameters, strict=True))
        return None, None, None, None, dx, *of_parameters


def split_rows(x: Tensor | None, tiles: int) -> Sequence[Tensor | None]:
    """The tiles of x [tokens, ...], as views; as many None for None."""
    return [None] * tiles if x is None else x.tensor_split(tiles)


def tile_backward(
    layer: TokenLayer, autocast: tuple[str, torch.dtype, bool], parameters: Sequence[Tensor], x: Tensor,
    dx: Tensor | None, dout: Tensor | None, dresidual: Tensor | None,
) -> Sequence[Tensor | None]:  # fmt: skip
    """The gradients of the parameters by one tile. Writes the gradient of its x to dx, None if it is not needed."""
    with torch.enable_grad(), torch.autocast(*autocast):
        x = x.detach().requires_grad_(dx is not None)
        outputs = zip(layer(x.view_as(x)), (dout, dresidual), strict=True)  # FLOP counters need an input with a node
    differentiated = [(y, dy) for y, dy in outputs if dy is not None and y.requires_grad]
    ys, dys = zip(*differentiated, strict=True)
    leaves = parameters if dx is None else (x, *parameters)
    gradients = torch.autograd.grad(ys, leaves, dys, allow_unused=True)
    if dx is None:
        return gradients
    dx.copy_(gradients[0])
    return gradients[1:]


def add_gradients(sums: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Adds the gradients to the sums, which are in fp32 or a wider dtype, in place; None stands for zero."""
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if (total := sums[index]) is None:
            sums[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        else:
            total += gradient
