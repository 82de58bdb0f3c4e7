"""FSDP2 sharding of a decoder, with mixed precision and hybrid sharding (HSDP), and the gradient norm.

One function shards every decoder. Every function also works in a single process without torchrun. Parameters have a
parameter dtype and a compute dtype: they are all-gathered in the compute dtype, and their gradients are reduced in the
wider of the two. The loss is divided by the global token count before backward, so gradients are summed over ranks, not
averaged. Knows the blocks, the embedding and the head of a model.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.gemma import LayerInputDecoder
from ligermodels.memory.model import decoder_blocks, lora_parameters
from ligermodels.training.parallel.activation_checkpointing import SHARDS_INTEGERS
from ligermodels.training.parallel.expert_parallel import distribute_experts
from ligermodels.weights.sharding import reshard


def shard(
    model: CausalLM, world: World, dtype: torch.dtype, *, dp_replicate: int = 1, reshard_after_forward: bool = True,
    expert_parallel: int = 1, replicate_quantised: bool = False,
) -> None:  # fmt: skip
    """Applies `fully_shard` to every block, the embeddings, the head and the model, in place.

    model: on the meta device, or with equal values on every rank. dtype: the compute dtype; parameters keep their own
    dtype. If the two differ, a single process uses FSDP2 too, for its mixed precision; not if only low-rank updates
    differ, which are rounded to the compute dtype where they are multiplied.
    dp_replicate: model replicas (HSDP). Each is sharded over world.size / dp_replicate neighbouring ranks.
    expert_parallel: the number of ranks of which each has a part of the routed experts, which are then not gathered.
    replicate_quantised: whether every rank has the bytes of all quantised weights, which are then not gathered; so it
    is in any case where FSDP2 does not shard integers.
    reshard_after_forward: whether blocks free their unsharded weights after forward and all-gather them again in
    backward. False saves the second all-gather. It also lets NCCL allocate its own communication memory, if gradients
    are reduced in `dtype`.
    Raises InputError if a parameter is shared between two units, or dp_replicate does not divide the number of ranks.
    """
    updates = lora_parameters(model)
    if world.size == 1 and all(p.dtype == dtype or p in updates for p in sharded_parameters(model)):
        return
    check_no_ties_between_units(model)
    policy = mixed_precision(model, dtype)
    mesh = make_mesh(world, dp_replicate)
    replicated = set(model.replicated_parameters(replicate_quantised or not SHARDS_INTEGERS))
    ignored = distribute_experts(model, world, expert_parallel) | replicated

    def unit(module: nn.Module, reshards: bool) -> FSDPModule:
        module.reshards_after_forward = reshards  # type: ignore[assignment]  # for `gathered` to restore
        return fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored, reshard_after_forward=reshards)

    # NCCL communicates from memory that it allocates itself without a copy to its buffers, but never frees that memory.
    same_dtype = policy.reduce_dtype == dtype
    use_nccl_memory = not reshard_after_forward and same_dtype and dp_shard_size(world, dp_replicate) > 1
    *others, last = blocks = model.blocks
    for block in others:
        unit(block, reshard_after_forward)
    unit(last, False)  # backward needs it first
    embedding, head = model.model.embed_tokens, model.head
    if embedding.weight is not head.weight:
        unit(embedding, True).set_unshard_in_backward(False)
        unit(head, False)
    if isinstance(model.model, LayerInputDecoder):
        unit(model.model.embed_tokens_per_layer, True).set_unshard_in_backward(False)
    root = unit(model, False)
    root.set_modules_to_forward_prefetch([*fsdp_modules(embedding), cast(FSDPModule, blocks[0])])
    for each in fsdp_modules(model):
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # gloo does not support a premultiplied sum
        each.set_allocate_memory_from_process_group_for_comm(use_nccl_memory)


def shard_frozen(model: CausalLM, world: World, dtype: torch.dtype, *, dp_replicate: int = 1) -> None:
    """`shard` for a model beside the trained one that gets no gradient, such as a teacher, in place.

    Every unit frees its unsharded weights after its forward. `final_hidden` and `gathered_head` read the model.
    """
    if world.size == 1:
        return
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
    mesh, ignored = make_mesh(world, dp_replicate), set(model.fp32_parameters())
    unit = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    for block in decoder_blocks(model):
        unit(block)
    if model.model.embed_tokens.weight is not model.head.weight:
        unit(model.head)
    if isinstance(model.model, LayerInputDecoder):
        unit(model.model.embed_tokens_per_layer)
    unit(model)
    register_fsdp_forward_method(model, "final_hidden")


@contextmanager
def gathered_head(model: CausalLM) -> Iterator[Tensor]:
    """The whole weight of a frozen model's head, as long as the context lasts."""
    unit = model.head if isinstance(model.head, FSDPModule) else model
    if not isinstance(unit, FSDPModule):
        yield model.head.weight
        return
    unit.unshard()
    try:
        yield model.head.weight
    finally:
        unit.reshard()


def sharded_parameters(model: CausalLM) -> list[nn.Parameter]:
    """The trained parameters that FSDP2 shards."""
    replicated = set(model.replicated_parameters())
    return [p for p in model.parameters() if p.requires_grad and p not in replicated]


def mixed_precision(model: CausalLM, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Returns the policy: all-gather and compute in `dtype`; reduce gradients in the wider of `dtype` and the dtype of
    the trained parameters, of which a reference has none.

    Gradients of fp32 parameters are reduced in fp32, those of bf16 parameters in bf16, at half the traffic. On two
    ranks a bf16 reduction gives the bits of an fp32 reduction rounded to bf16. On N ranks NCCL's ring rounds N - 1
    times. If gradients are independent, its error is about √(N / 2) times that of one rounding: on 8 ranks 0.37 % of a
    sum instead of 0.17 %.
    """
    param_dtype = next((parameter.dtype for parameter in sharded_parameters(model)), dtype)
    reduced = torch.promote_types(param_dtype, dtype)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)


def make_mesh(world: World, dp_replicate: int) -> DeviceMesh:
    """Returns the device mesh [ranks], or [dp_replicate, dp_shard] for HSDP."""
    dp_shard = dp_shard_size(world, dp_replicate)
    distributed.start_alone(world.device)
    if dp_replicate == 1:
        return init_device_mesh(world.device.type, (world.size,))
    names = ("dp_replicate", "dp_shard")
    return init_device_mesh(world.device.type, (dp_replicate, dp_shard), mesh_dim_names=names)


def dp_shard_size(world: World, dp_replicate: int) -> int:
    """Returns the number of ranks over which a replica of the model is sharded.

    Raises InputError if dp_replicate does not divide the number of ranks.
    """
    if world.size % dp_replicate:
        raise InputError(
            f"--dp-replicate {dp_replicate} does not divide the number of ranks, {world.size}: lower it, or start "
            f"a multiple of {dp_replicate} ranks, such as torchrun --nproc-per-node {dp_replicate}"
        )
    return world.size // dp_replicate


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Returns the FSDP2 units in a module, including the module itself if it is one."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gathers all weights once, and keeps them: forward passes in the block communicate nothing.

    For generation, in which ranks take different numbers of steps. Every rank must call it. A model that is not sharded
    is left as it is.
    """
    units = fsdp_modules(model)
    resharding = [unit for unit in units if getattr(unit, "reshards_after_forward", False)]
    for unit in resharding:
        unit.set_reshard_after_forward(False, recurse=False)
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in resharding:
            unit.set_reshard_after_forward(True, recurse=False)
        reshard(model)


def check_no_ties_between_units(model: CausalLM) -> None:
    """Raises InputError if two units share a parameter.

    torch 2.11 would shard such a parameter twice and silently train two copies of it.
    """
    owner: dict[int, tuple[int | None, str]] = {}
    inside = {id(module): number for number, block in enumerate(model.blocks) for module in block.modules()}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            unit, full_name = inside.get(id(module)), f"{module_name}.{name}"
            other, other_name = owner.setdefault(id(parameter), (unit, full_name))
            if other != unit:
                raise InputError(
                    f"{full_name} is tied to {other_name}: sharding cannot tie weights across decoder blocks"
                )


def set_gradient_all_reduce(model: nn.Module, enabled: bool) -> None:
    """Sets whether the next backward all-reduces gradients over the model replicas (HSDP).

    With gradient accumulation only the last micro-batch needs it. Within a replica every backward reduce-scatters the
    gradients, because unsharded gradients would take the memory of a whole model.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(enabled)


def sum_replicated_gradients(model: CausalLM) -> None:
    """Sums the gradients of replicated parameters over all ranks, as FSDP2 has summed those of the others.

    To be called once, after the last micro-batch. Every rank must call it.
    """
    gradients = [p.grad for p in model.replicated_parameters() if p.grad is not None]
    if not gradients:
        return
    total = distributed.total(torch.cat([gradient.flatten() for gradient in gradients]))
    sizes = [gradient.numel() for gradient in gradients]
    torch._foreach_copy_(gradients, [x.view_as(g) for x, g in zip(total.split(sizes), gradients, strict=True)])


def gradient_norm(model: nn.Module) -> Tensor:
    """Returns the global gradient norm over all parameters and ranks: a device scalar, fp32.

    torch's get_total_norm would round the norm of bf16 gradients to bf16.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}  # routed experts may be on another than the rest
    for gradient in (p.grad for p in model.parameters() if p.grad is not None):
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        by_mesh.setdefault(mesh, []).append(gradient)
    norms = []
    for gradients in by_mesh.values():
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, torch.float32)))
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
