"""One process or many: process group, FSDP2 sharding, sums over ranks, gradient norm.

Every function also works on a single process without torchrun, where there is nothing to shard or sum. Weights are
stored in one dtype and computed with in another or the same: gathered in the latter, their gradients summed over ranks
in the wider of both. The loss is divided by the global token count before backward, so gradients are summed, never
averaged. Knows of a model its blocks, its embedding and its head.
"""

import functools
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ligermodels.distributed import World, backend_of
from ligermodels.errors import InputError
from ligermodels.layers.block import Block
from ligermodels.layers.decoder import CausalLM


def shard(model: CausalLM, world: World, dtype: torch.dtype, *, replicas: int = 1, keep_gathered: bool = False) -> None:
    """Splits every parameter over the ranks, in place: a unit a block, the embedding and the head.

    model: on the meta device, or with equal values on every rank. Its parameters keep the dtype they have; `dtype` is
    that of the computation. Where the two differ, a single process computes by the same path, as one of one.
    replicas: copies of the model; world.size / replicas ranks share one, neighbours first.
    keep_gathered: whether there is room for blocks to keep gathered weights from forward to backward, which saves
    gathering them twice, and for memory of NCCL's own, if gradients are summed in `dtype`.
    Raises InputError where one parameter is used in two units or the replicas do not divide the ranks.
    """
    if world.size == 1 and all(p.dtype == dtype for p in model.parameters() if p.requires_grad):
        return
    refuse_ties_between_units(model)
    policy = precision(model, dtype)
    unit = functools.partial(fully_shard, mesh=mesh_of(world, replicas), mp_policy=policy)
    # Where NCCL reads and writes without buffers between. What it once took, gradients among it, it never gives back.
    in_memory_of_nccl = keep_gathered and policy.reduce_dtype == dtype and shards_of(world, replicas) > 1
    *others, last = layers = blocks(model)
    for block in others:
        unit(block, reshard_after_forward=not keep_gathered)
    unit(last, reshard_after_forward=False)  # backward begins with it
    embedding, head = model.model.embed_tokens, model.lm_head
    if embedding.weight is not head.weight:
        unit(embedding).set_unshard_in_backward(False)
        unit(head, reshard_after_forward=False)
        register_fsdp_forward_method(head, "loss")
    root = unit(model, reshard_after_forward=False)
    root.set_modules_to_forward_prefetch([*units(embedding), cast(FSDPModule, layers[0])])
    for each in units(model):
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        each.set_allocate_memory_from_process_group_for_comm(in_memory_of_nccl)


def precision(model: nn.Module, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Weights are gathered and computed with in `dtype`. Their gradients come in it, and are kept in the dtype of the
    weights that are trained: they are summed over ranks in the wider of the two.

    So fp32 weights get sums in fp32, and those in bf16 sums in bf16, for half the traffic. Of two ranks these have the
    bits of an fp32 sum, rounded. Of N ranks NCCL's ring rounds N - 1 times: where gradients are independent, for an
    error about √(N / 2) times that of rounding once, which of 8 is 0.37 % of a sum instead of 0.17 %.
    """
    stored = next(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)
    reduced = torch.promote_types(stored, dtype)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)


def mesh_of(world: World, replicas: int) -> DeviceMesh:
    """[ranks], or [replicas, ranks of one copy]."""
    shards = shards_of(world, replicas)
    if not dist.is_initialized():
        dist.init_process_group(backend_of(world.device), store=dist.HashStore(), rank=0, world_size=1)
    if replicas == 1:
        return init_device_mesh(world.device.type, (world.size,))
    return init_device_mesh(world.device.type, (replicas, shards), mesh_dim_names=("replicas", "shards"))


def shards_of(world: World, replicas: int) -> int:
    """How many ranks share a copy of the model."""
    if world.size % replicas:
        raise InputError(
            f"--dp-replicate {replicas} does not divide the number of ranks, {world.size}: lower it, or start "
            f"{replicas} or a multiple of them, as by torchrun --nproc-per-node {replicas}"
        )
    return world.size // replicas


def blocks(model: CausalLM) -> list[Block]:
    return [cast(Block, block) for block in model.model.layers]


def units(module: nn.Module) -> list[FSDPModule]:
    """Those in a module, itself among them."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def refuse_ties_between_units(model: CausalLM) -> None:
    """torch 2.11 shards such a parameter twice and silently trains two copies."""
    owner: dict[int, tuple[int | None, str]] = {}
    inside = {id(module): number for number, block in enumerate(blocks(model)) for module in block.modules()}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            unit, full_name = inside.get(id(module)), f"{module_name}.{name}"
            other, other_name = owner.setdefault(id(parameter), (unit, full_name))
            if other != unit:
                raise InputError(
                    f"{full_name} is tied to {other_name}: sharding cannot tie weights across decoder blocks"
                )


def reduce_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward sums gradients over the copies of a model; with accumulation only the last one must.

    Within a copy every backward sums them, into each rank's share: all of them would need the memory of a whole model.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


def gradient_norm(model: nn.Module) -> Tensor:
    """The joint norm of all gradients, over all ranks: a device scalar, fp32.

    As of torch's get_total_norm, which however rounds the norm of bf16 gradients to bf16.
    """
    norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None], 2.0, torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
