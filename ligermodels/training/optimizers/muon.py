"""Muon: momentum with orthogonalised updates for the matrices inside blocks; AdamW for all other parameters.

    B += (1 - μ)(G - B)        O = NS((1 - μ) G + μ B)        W -= lr (wd W + 0.2 √max(m, n) O)
NS is the Newton-Schulz iteration in bf16, on a CPU in fp32, which approximately orthogonalises a matrix [m, n]. The
factor gives O the RMS of a typical AdamW update, so that AdamW's learning rate and weight decay can be used. For a
single unsharded matrix this equals torch.optim.Muon with adjust_lr_fn="match_rms_adamw". torch's class does not handle
packed or sharded parameters. This one orthogonalises each matrix separately, however it is stored: query, key and
value, gate and up, every expert, and both factors of a low-rank update.
The blocks of a vision tower count as those of the decoder. All else is updated by AdamW: embeddings, head, the
projector of images, norms, biases, routers, and the kernels of convolutions.

Orthogonalisation needs the whole matrix, but FSDP2 shards it by rows. An all-to-all collects one whole matrix on each
rank; the rank orthogonalises it, and a second all-to-all returns the rows to their ranks. Nothing is computed twice,
and the result is bit-identical to that of a single process.
Maths: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the factor: Liu et al. 2025 (Moonlight),
https://arxiv.org/abs/2502.16982.
Knows the layers that hold matrices.
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
from ligermodels.kernels.optim.param_rounding import master_reference, split_reference
from ligermodels.layers.attention import Attention
from ligermodels.layers.gated_delta import GatedDeltaNet
from ligermodels.layers.gemma import LayerInputLayer, NormedHeadsAttention, ReadingAttention
from ligermodels.layers.latent_attention import LatentAttention
from ligermodels.layers.lora import GroupedUpdate, LoRALinear
from ligermodels.layers.mamba2 import Mamba2
from ligermodels.layers.mlp import MLP, GatedMLP
from ligermodels.layers.moe import Experts
from ligermodels.layers.states import ShortConv
from ligermodels.training.optimizers.adamw import AdamW, compiled_on_gpu, local_view, write_if_finite
from ligermodels.vision.mllama import CrossAttention

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
MIN_NORM = 1e-7
ADAMW_UPDATE_RMS = 0.2
# Splits a parameter into views, one per matrix: [m, n], or [experts, m, n] for matrices of one shape.
SplitIntoViews = Callable[[Tensor], Sequence[Tensor]]


class Muon(AdamW):
    """Muon for the parameters in `matrices`, whose state is momentum_buffer; AdamW for all others.

    matrices: for each parameter, the function that splits it into its matrices. param_rounding: "exact" or "nearest",
    as in `AdamW`. Raises InputError if a parameter is sharded along another dimension than the first.
    """

    def __init__(self, params: Any, matrices: Mapping[nn.Parameter, SplitIntoViews], **options: Any) -> None:
        super().__init__(params, **options)
        self.matrices = matrices
        for p in matrices:
            if isinstance(p, DTensor) and not all(isinstance(x, Replicate) or x == Shard(0) for x in p.placements):
                raise InputError(f"Muon needs matrices sharded by rows; one of shape {list(p.shape)} is {p.placements}")

    def new_state(self, p: nn.Parameter) -> dict[str, Tensor]:
        if p not in self.matrices:
            return super().new_state(p)
        return {"momentum_buffer": torch.zeros_like(p, dtype=self.state_dtype)} | self.new_low_bits(p)

    def update(self, params: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        super().update([p for p in params if p not in self.matrices], group)
        for batch, ranks in batches_to_orthogonalize(p for p in params if p in self.matrices):
            updates = [self.update_momentum(p) for p in batch]
            splits = [self.matrices[p] for p in batch]
            if ranks is None:
                directions = [orthogonal_update(updates[0], splits[0])]
            else:
                directions = orthogonal_updates_of_shards(batch, updates, splits, ranks)
            for p, direction in zip(batch, directions, strict=True):
                lr = torch.full((), group["lr"], device=p.device)  # a Python float would be compiled in as a constant
                descend = compiled_on_gpu(descent_step, p.device)
                if self.check is not None and p in self.check.runs:
                    self.expect_descent(p, direction, group)
                low_bits = self.rounding(p).get("low_bits")
                low_bits = None if low_bits is None else low_bits.view(-1)
                descend(local_view(p).view(-1), low_bits, direction.view(-1), lr, group["weight_decay"], self.found_inf)

    def expect_update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        if p not in self.matrices:  # those whose direction is not known yet: `update` calls `expect_descent`
            super().expect_update(p, group)

    def expect_descent(self, p: nn.Parameter, direction: Tensor, group: dict[str, Any]) -> None:
        assert self.check is not None
        exact, direction = self.check.before[p].clone(), self.sampled(p, direction).double()
        descent_step(exact, None, direction, group["lr"], group["weight_decay"], self.found_inf)
        self.check.expect(p, exact)

    def update_momentum(self, p: nn.Parameter) -> Tensor:
        """Updates the momentum. Returns this rank's shard of the matrix to orthogonalise, bf16."""
        assert p.grad is not None
        gradient, buffer = local_view(p.grad), local_view(self.state_of(p)["momentum_buffer"])
        nesterov = compiled_on_gpu(nesterov_momentum, p.device)
        return nesterov(gradient.reshape(-1), buffer.view(-1), self.grad_scale, self.found_inf).view(gradient.shape)


def nesterov_momentum(gradient: Tensor, buffer: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor:
    """Updates the momentum buffer in place. Returns the Nesterov momentum, bf16."""
    gradient = gradient.float()
    if grad_scale is not None:
        gradient = gradient / grad_scale
    momentum = buffer.float().lerp(gradient, 1 - MOMENTUM)
    write_if_finite(buffer, momentum, found_inf)
    return gradient.lerp(momentum, MOMENTUM).bfloat16()


def descent_step(
    weight: Tensor, low_bits: Tensor | None, direction: Tensor, lr: Tensor | float, weight_decay: float,
    found_inf: Tensor | None,
) -> None:  # fmt: skip
    """Applies weight decay and the update to the weight, in place; with low_bits, to the fp32 weight that both are."""
    new = master_reference(weight, low_bits) * (1 - lr * weight_decay) - lr * direction
    if low_bits is not None:
        new, new_low_bits = split_reference(new)
        write_if_finite(low_bits, new_low_bits, found_inf)
    write_if_finite(weight, new, found_inf)


def orthogonal_update(update: Tensor, split: SplitIntoViews) -> Tensor:
    """Orthogonalises each matrix of a parameter, and scales it to the RMS of AdamW's update: bf16 -> fp32."""
    result = torch.empty_like(update, dtype=torch.float32)
    if update.numel():
        for matrix, place in zip(split(update), split(result), strict=True):
            place.copy_(newton_schulz(matrix)).mul_(ADAMW_UPDATE_RMS * math.sqrt(max(matrix.shape[-2:])))
    return result


def newton_schulz(matrix: Tensor) -> Tensor:
    """Newton-Schulz iteration x <- a x + (b G + c G²) x, G = x xᵀ, which moves all singular values close to 1.

    matrix: [m, n] or [experts, m, n] bf16; the result has the same shape and dtype, on a CPU in fp32: without bf16
    instructions products in bf16 take ten times as long.
    """
    a, b, c = COEFFICIENTS
    plus_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix  # transposed so that G is the smaller of the two Gram matrices
    x = x.float() if x.device.type == "cpu" else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(MIN_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = plus_product(x, plus_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def matrix_views(model: nn.Module) -> dict[nn.Parameter, SplitIntoViews]:
    """Returns the parameters that Muon updates, each with the function that splits it into its matrices.

    These are all matrices inside the blocks, of the vision tower too, except the routers and the convolutions' kernels.
    """
    return dict(itertools.chain.from_iterable(map(matrices_in, model.modules())))


def matrices_in(module: nn.Module) -> Iterator[tuple[nn.Parameter, SplitIntoViews]]:
    """Yields the matrix parameters of a module itself and of its projections."""
    if isinstance(module, Attention | NormedHeadsAttention):
        yield split_by_ratio(weight_of(module.qkv_proj), *module.packed_heads)
        yield split_by_ratio(weight_of(module.o_proj), 1)
    elif isinstance(module, ReadingAttention):
        yield split_by_ratio(weight_of(module.q_proj), 1)
        yield split_by_ratio(weight_of(module.o_proj), 1)
    elif isinstance(module, CrossAttention):
        yield split_by_ratio(weight_of(module.q_proj), 1)
        yield split_by_ratio(weight_of(module.kv_proj), 1, 1)
        yield split_by_ratio(weight_of(module.o_proj), 1)
    elif isinstance(module, LayerInputLayer) and module.has_layer_input:
        yield split_by_ratio(weight_of(module.per_layer_input_gate), 1)
        yield split_by_ratio(weight_of(module.per_layer_projection), 1)
    elif isinstance(module, LatentAttention):
        q, kv = module.query_input_size, module.latent_size + module.rope_size
        yield weight_of(module.qkv_a_proj), split_by_rows([q, kv])
        for projection in (module.q_b_proj, module.kv_b_proj, module.o_proj):
            if projection is not None:
                yield split_by_ratio(weight_of(projection), 1)
    elif isinstance(module, GatedDeltaNet | Mamba2):
        yield weight_of(module.in_proj), split_by_rows(module.projection_rows)
        yield split_by_ratio(weight_of(module.out_proj), 1)
    elif isinstance(module, ShortConv):
        yield split_by_ratio(weight_of(module.in_proj), 1)
        yield split_by_ratio(weight_of(module.out_proj), 1)
    elif isinstance(module, GatedMLP):
        yield split_by_ratio(weight_of(module.gate_up_proj), 1, 1)
        yield split_by_ratio(weight_of(module.down_proj), 1)
    elif isinstance(module, MLP):
        yield split_by_ratio(weight_of(module.up_proj), 1)
        yield split_by_ratio(weight_of(module.down_proj), 1)
    elif isinstance(module, Experts):
        yield split_by_ratio(module.gate_up_proj, 1, 1)
        yield split_by_ratio(module.down_proj, 1)
    elif isinstance(module, LoRALinear):
        yield split_by_ratio(module.lora_A, *(1 for _ in module.columns))
        yield module.lora_B, split_by_rows([stop - start for start, stop in module.columns])
    elif isinstance(module, GroupedUpdate):
        groups, rank = module.groups, module.rank
        yield module.lora_A, lambda x: [x.unflatten(0, (groups, rank))]
        yield module.lora_B, lambda x: [x.unflatten(1, (rank, groups)).permute(2, 0, 1)]


def weight_of(projection: nn.Module) -> Any:
    """Returns the weight of a linear; under LoRA, the weight of its base layer."""
    return projection.base_layer.weight if isinstance(projection, LoRALinear) else projection.weight


def split_by_ratio(parameter: nn.Parameter, *ratio: int) -> tuple[nn.Parameter, SplitIntoViews]:
    """Returns the parameter and the function that splits its rows in the given ratio."""
    unit = parameter.shape[-2] // sum(ratio)
    return parameter, split_by_rows([part * unit for part in ratio])


def split_by_rows(rows: Sequence[int]) -> SplitIntoViews:
    """Returns the function that splits a parameter into matrices with these numbers of rows."""
    return lambda x: x.split(tuple(rows), -2)


def batches_to_orthogonalize(
    params: Iterable[nn.Parameter],
) -> Iterator[tuple[list[nn.Parameter], dist.ProcessGroup | None]]:
    """Yields the parameters to orthogonalise together, and the ranks that share them.

    A batch is one unsharded parameter and None, or at most one sharded parameter for each rank of a group.
    """
    sharded: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
    for p in params:
        ranks = shard_group(p)
        if ranks is None:
            yield [p], None
        else:
            sharded.setdefault(ranks, []).append(p)
    for ranks, shared in sharded.items():
        by_shape = sorted(shared, key=lambda p: tuple(p.shape))  # equal shapes together, to balance work across ranks
        for start in range(0, len(by_shape), ranks.size()):
            yield by_shape[start : start + ranks.size()], ranks


def shard_group(p: Tensor) -> dist.ProcessGroup | None:
    """Returns the ranks that share the rows of a parameter; None if this rank has whole matrices.

    Stacked experts are sharded along the expert dimension, so that each rank has whole matrices.
    """
    if not isinstance(p, DTensor) or p.ndim > 2 or Shard(0) not in p.placements:
        return None
    ranks = p.device_mesh.get_group(p.placements.index(Shard(0)))
    return ranks if ranks.size() > 1 else None


def orthogonal_updates_of_shards(
    params: list[nn.Parameter], updates: list[Tensor], splits: list[SplitIntoViews], ranks: dist.ProcessGroup
) -> list[Tensor]:
    """Orthogonalises one parameter per rank. Takes and returns this rank's rows of each parameter."""
    shapes = [p.shape for p in params]
    whole = gather_owned(updates, shapes, ranks)
    owned = None if whole is None else orthogonal_update(whole, splits[ranks.rank()])
    return scatter_owned(owned, updates, shapes, ranks)


def gather_owned(parts: list[Tensor], shapes: list[torch.Size], ranks: dist.ProcessGroup) -> Tensor | None:
    """Sends this rank's rows of each parameter to its owner, and returns all rows of the parameter this rank owns.

    Rank i owns parameter i. Returns None if this rank owns none.
    """
    sent, received = exchange_sizes(shapes, ranks)
    whole = parts[0].new_empty(sum(received))
    dist.all_to_all_single(whole, torch.cat([part.flatten() for part in parts]), received, sent, group=ranks)
    return whole.view(shapes[ranks.rank()]) if ranks.rank() < len(shapes) else None


def scatter_owned(
    owned: Tensor | None, parts: list[Tensor], shapes: list[torch.Size], ranks: dist.ProcessGroup
) -> list[Tensor]:
    """The inverse of `gather_owned`, in fp32. parts: tensors in the shapes of this rank's rows."""
    sent, received = exchange_sizes(shapes, ranks)
    rows = parts[0].new_empty(sum(sent), dtype=torch.float32)
    source = rows.new_empty(0) if owned is None else owned.flatten()
    dist.all_to_all_single(rows, source, sent, received, group=ranks)
    pieces = rows.split(sent)
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=False)]


def exchange_sizes(shapes: list[torch.Size], ranks: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Returns the number of elements that `gather_owned` sends to each rank, and receives from each rank."""
    this_rank, size = ranks.rank(), ranks.size()
    without_parameter = size - len(shapes)
    sent = [rows_of_rank(shape[0], this_rank, size) * shape[1] for shape in shapes] + [0] * without_parameter
    if this_rank >= len(shapes):
        return sent, [0] * size
    rows, columns = shapes[this_rank]
    return sent, [rows_of_rank(rows, rank, size) * columns for rank in range(size)]


def rows_of_rank(rows: int, rank: int, ranks: int) -> int:
    """Returns how many rows FSDP2 gives a rank: as torch.chunk, equal parts, the last ones smaller or empty."""
    part = -(-rows // ranks)
    return max(0, min(part, rows - rank * part))
