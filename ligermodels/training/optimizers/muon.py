"""Muon: momentum whose matrices are orthogonalised, for the matrices inside blocks; AdamW for everything else.

    B += (1 - μ)(G - B)        O = NS((1 - μ) G + μ B)        W -= lr (wd W + 0.2 √max(m, n) O)
NS is the Newton-Schulz iteration, in bf16, that makes a matrix [m, n] all but orthogonal. The factor gives O the size
of AdamW's usual update, so that AdamW's learning rate and weight decay hold. For a single whole matrix this is
torch.optim.Muon with adjust_lr_fn="match_rms_adamw", which takes nothing else. Here each matrix is orthogonalised by
itself however it is stored: queries, keys and values, gate and up, every expert, both factors of a low-rank update.
Embeddings, head, norms, biases and routers are AdamW's.

A sharded matrix is needed whole. Ranks take turns: each gets one whole matrix, orthogonalises it, and gives every rank
its rows back. Nothing is computed twice, and the result is that of one process to the bit.
Maths: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the factor: Liu et al. 2025 (Moonlight),
https://arxiv.org/abs/2502.16982.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ligermodels.errors import InputError
from ligermodels.layers.attention import Attention
from ligermodels.layers.lora import GroupedUpdate, LoRALinear
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.moe import Experts
from ligermodels.training.optimizers.adamw import AdamW, fused, keep, local

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
LEAST_NORM = 1e-7
RMS_OF_ADAMW = 0.2
# What a parameter is made of, as views of it: [m, n], or [experts, m, n] of one shape.
Views = Callable[[Tensor], Sequence[Tensor]]


class Muon(AdamW):
    """Muon for the parameters in `matrices`, whose state is momentum_buffer; AdamW for all others.

    matrices: how to see the matrices in each. Raises InputError where one is sharded along another dimension than its
    first.
    """

    def __init__(self, params: Any, matrices: Mapping[nn.Parameter, Views], **options: Any) -> None:
        super().__init__(params, **options)
        self.matrices = matrices
        for p in matrices:
            if isinstance(p, DTensor) and not all(isinstance(x, Replicate) or x == Shard(0) for x in p.placements):
                raise InputError(f"Muon needs matrices sharded by rows; one {list(p.shape)} is {p.placements}")

    def new_state(self, p: nn.Parameter) -> dict[str, Tensor]:
        if p not in self.matrices:
            return super().new_state(p)
        return {"momentum_buffer": torch.zeros_like(p, dtype=self.states)}

    def update(self, params: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        super().update([p for p in params if p not in self.matrices], group)
        for turn, ranks in turns(p for p in params if p in self.matrices):
            updates = [self.advance(p) for p in turn]
            views = [self.matrices[p] for p in turn]
            directions = [direction(updates[0], views[0])] if ranks is None else in_turn(turn, updates, views, ranks)
            for p, step in zip(turn, directions, strict=True):
                lr = torch.full((), group["lr"], device=p.device)  # a number would be a constant of what is compiled
                descend = fused(descended, p.device)
                descend(local(p).view(-1), step.view(-1), lr, group["weight_decay"], self.found_inf)

    def advance(self, p: nn.Parameter) -> Tensor:
        """Moves the momentum, and returns this rank's part of what is to be orthogonalised, bf16."""
        assert p.grad is not None
        gradient, buffer = local(p.grad), local(self.state_of(p)["momentum_buffer"])
        update = fused(advanced, p.device)(gradient.reshape(-1), buffer.view(-1), self.grad_scale, self.found_inf)
        return update.view(gradient.shape)


def advanced(gradient: Tensor, buffer: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor:
    """Moves the momentum in place; returns it looking ahead, as Nesterov does, in bf16."""
    gradient = gradient.float()
    if grad_scale is not None:
        gradient = gradient / grad_scale
    momentum = buffer.float().lerp(gradient, 1 - MOMENTUM)
    keep(buffer, momentum, found_inf)
    return gradient.lerp(momentum, MOMENTUM).bfloat16()


def descended(weight: Tensor, step: Tensor, lr: Tensor, weight_decay: float, found_inf: Tensor | None) -> None:
    keep(weight, weight.float() * (1 - lr * weight_decay) - lr * step, found_inf)


def direction(update: Tensor, views: Views) -> Tensor:
    """bf16 -> fp32, of a parameter's shape: each of its matrices orthogonal, and of the size of AdamW's update."""
    result = torch.empty_like(update, dtype=torch.float32)
    if update.numel():
        for matrix, place in zip(views(update), views(result), strict=True):
            place.copy_(newton_schulz(matrix)).mul_(RMS_OF_ADAMW * math.sqrt(max(matrix.shape[-2:])))
    return result


def newton_schulz(matrix: Tensor) -> Tensor:
    """[m, n] or [experts, m, n] bf16 -> the same, its singular values near 1: x <- a x + (b G + c G²) x, G = x xᵀ."""
    a, b, c = COEFFICIENTS
    plus_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix  # the smaller G
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = plus_product(x, plus_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def matrices_of(model: nn.Module) -> dict[nn.Parameter, Views]:
    """The parameters inside a model's blocks that are matrices, but the routers', and how to see the matrices."""
    return dict(itertools.chain.from_iterable(map(matrices_in, model.modules())))


def matrices_in(module: nn.Module) -> Iterator[tuple[nn.Parameter, Views]]:
    """Those that a module holds itself, or its linears do."""
    if isinstance(module, Attention):
        query, key = module.num_heads, module.num_key_value_heads
        yield packed(weight_of(module.qkv_proj), query, key, key)
        yield packed(weight_of(module.o_proj), 1)
    elif isinstance(module, GatedMLP):
        yield packed(weight_of(module.gate_up_proj), 1, 1)
        yield packed(weight_of(module.down_proj), 1)
    elif isinstance(module, Experts):
        yield packed(module.gate_up_proj, 1, 1)
        yield packed(module.down_proj, 1)
    elif isinstance(module, LoRALinear):
        yield packed(module.lora_A, *(1 for _ in module.columns))
        yield module.lora_B, split([stop - start for start, stop in module.columns])
    elif isinstance(module, GroupedUpdate):
        groups, rank = module.groups, module.rank
        yield module.lora_A, lambda x: [x.unflatten(0, (groups, rank))]
        yield module.lora_B, lambda x: [x.unflatten(1, (rank, groups)).permute(2, 0, 1)]


def weight_of(linear: nn.Module) -> Any:
    return linear.base_layer.weight if isinstance(linear, LoRALinear) else linear.weight


def packed(parameter: nn.Parameter, *shares: int) -> tuple[nn.Parameter, Views]:
    """shares: what each matrix has of the rows, in proportion."""
    unit = parameter.shape[-2] // sum(shares)
    return parameter, split([share * unit for share in shares])


def split(rows: Sequence[int]) -> Views:
    return lambda x: x.split(tuple(rows), -2)


def turns(params: Iterable[nn.Parameter]) -> Iterator[tuple[list[nn.Parameter], dist.ProcessGroup | None]]:
    """What to orthogonalise at a time: a parameter that a rank can do alone, or one for each rank of a group."""
    sharded: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
    for p in params:
        ranks = ranks_that_share(p)
        if ranks is None:
            yield [p], None
        else:
            sharded.setdefault(ranks, []).append(p)
    for ranks, shared in sharded.items():
        alike = sorted(shared, key=lambda p: tuple(p.shape))  # so that no rank has more to do than another
        for start in range(0, len(alike), ranks.size()):
            yield alike[start : start + ranks.size()], ranks


def ranks_that_share(p: Tensor) -> dist.ProcessGroup | None:
    """Those with the other rows of a matrix; None where this rank has whole matrices, as of experts it always has."""
    if not isinstance(p, DTensor) or p.ndim > 2 or Shard(0) not in p.placements:
        return None
    ranks = p.device_mesh.get_group(p.placements.index(Shard(0)))
    return ranks if ranks.size() > 1 else None


def in_turn(
    params: list[nn.Parameter], updates: list[Tensor], views: list[Views], ranks: dist.ProcessGroup
) -> list[Tensor]:
    """The directions of one parameter for each rank, of which this rank has its rows: each rank finds one of them."""
    shapes = [p.shape for p in params]
    mine = to_owners(updates, shapes, ranks)
    found = None if mine is None else direction(mine, views[ranks.rank()])
    return from_owners(found, updates, shapes, ranks)


def to_owners(parts: list[Tensor], shapes: list[torch.Size], ranks: dist.ProcessGroup) -> Tensor | None:
    """This rank's rows of each matrix -> all rows of the one it owns: matrix i is rank i's; None for ranks beyond."""
    given, taken = exchanged(shapes, ranks)
    whole = parts[0].new_empty(sum(taken))
    dist.all_to_all_single(whole, torch.cat([part.flatten() for part in parts]), taken, given, group=ranks)
    return whole.view(shapes[ranks.rank()]) if ranks.rank() < len(shapes) else None


def from_owners(
    whole: Tensor | None, parts: list[Tensor], shapes: list[torch.Size], ranks: dist.ProcessGroup
) -> list[Tensor]:
    """The way back, in fp32. parts: shaped as the rows that this rank has."""
    given, taken = exchanged(shapes, ranks)
    rows = parts[0].new_empty(sum(given), dtype=torch.float32)
    sent = rows.new_empty(0) if whole is None else whole.flatten()
    dist.all_to_all_single(rows, sent, given, taken, group=ranks)
    pieces = rows.split(given)
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=False)]


def exchanged(shapes: list[torch.Size], ranks: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Elements that this rank has for each rank's matrix, and that each rank has of this rank's."""
    here, size = ranks.rank(), ranks.size()
    absent = size - len(shapes)
    given = [rows_of_rank(shape[0], here, size) * shape[1] for shape in shapes] + [0] * absent
    if here >= len(shapes):
        return given, [0] * size
    rows, columns = shapes[here]
    return given, [rows_of_rank(rows, rank, size) * columns for rank in range(size)]


def rows_of_rank(rows: int, rank: int, ranks: int) -> int:
    """FSDP2 shards as torch.chunk does: equal parts, the last ones smaller or empty."""
    part = -(-rows // ranks)
    return max(0, min(part, rows - rank * part))
