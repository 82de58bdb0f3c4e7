"""Expert parallelism of a run: which ranks have which routed experts, and what cannot be distributed.

FSDP2 shards everything else over all ranks, LoRA of the experts too, and leaves the experts alone: their gradients are
whole where they are computed, of all tokens of the ranks that share them.
"""

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.moe import Experts, LoRAExperts, MoE, QuantisedExperts
from ligermodels.training.settings.config import TrainConfig


def routed_experts_of(model: nn.Module) -> Iterator[nn.Module]:
    """The routed experts of each layer that has some, without their LoRA."""
    layers = (module.experts for module in model.modules() if isinstance(module, MoE))
    return (experts.base_layer if isinstance(experts, LoRAExperts) else experts for experts in layers)


def distribute_experts(model: CausalLM, world: World, ranks: int) -> set[nn.Parameter]:
    """Gives each of `ranks` neighbouring ranks its part of the routed experts, in place; returns their parameters.

    model: on the meta device, or with equal values on every rank. Every rank must call it.
    """
    if ranks == 1:
        return set()
    sizes = world.size // ranks, ranks
    mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=("expert_replicas", "experts"))
    distributed = set()
    for experts in routed_experts_of(model):
        assert isinstance(experts, Experts)
        experts.distribute(mesh)
        distributed |= set(experts.parameters())
    return distributed


def refuse_unfit_experts(model: CausalLM, config: TrainConfig, world: World) -> None:
    """Raises InputError for experts that cannot be distributed. model: on the meta device, with its LoRA."""
    ranks = config.expert_parallel
    if ranks == 1:
        return
    given = f"--expert-parallel {ranks}"
    if world.size % ranks:
        raise InputError(
            f"{given} does not divide the number of ranks, {world.size}: lower it, or start a multiple of {ranks} "
            f"ranks, such as torchrun --nproc-per-node {ranks}"
        )
    layers = list(routed_experts_of(model))
    if not layers:
        raise InputError(f"{given}: the model has no routed experts; leave it out")
    if config.compile:
        raise InputError(
            f"{given}: the host reads how many tokens are exchanged, but not under --compile: leave one out"
        )
    for experts in layers:
        if isinstance(experts, QuantisedExperts):
            raise InputError(
                f"{given}: routed experts in few bits are not distributed: leave it out, or use a base in 16 bits"
            )
        if not isinstance(experts, Experts):
            raise InputError(f"{given}: {type(experts).__name__} cannot be distributed; leave it out")
        if (number := experts.down_proj.shape[0]) % ranks:
            raise InputError(f"{given} does not divide the model's {number} experts: give a number that does")
