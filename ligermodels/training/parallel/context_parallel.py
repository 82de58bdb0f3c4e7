"""Context parallelism of a run: which ranks share rows of tokens, and what cannot be shared.

FSDP2 shards over all ranks, also over those that share rows: each has a share of the loss, and gradients are summed.
"""

from dataclasses import replace

from torch.distributed.device_mesh import init_device_mesh

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.kernels.linear_attention.causal_conv import MAX_TAPS
from ligermodels.layers.context_parallel import ContextGroup
from ligermodels.layers.decoder import CausalLM
from ligermodels.training.settings.config import RunConfig, TrainConfig
from ligermodels.vision.tiled_model import TiledVisionLanguageModel


def share_rows(world: World, config: TrainConfig) -> World:
    """The world in which `config.context_parallel` neighbouring ranks share each row. Raises InputError."""
    ranks = config.context_parallel
    if world.size % ranks:
        raise InputError(
            f"--context-parallel {ranks} does not divide the number of ranks, {world.size}: lower it, or start a "
            f"multiple of {ranks} ranks, such as torchrun --nproc-per-node {ranks}"
        )
    if ranks > 1 and not config.packing:
        raise InputError(f"--context-parallel {ranks} divides packed rows: leave out --packing off")
    return replace(world, context=ranks)


def context_group(world: World) -> ContextGroup | None:
    """This rank's group of the ranks that share its rows; None if it has them alone. Every rank must call it."""
    if world.context == 1:
        return None
    sizes = world.data_size, world.context
    mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=("data", "context"))
    return ContextGroup(mesh.get_group("context"))


def refuse_unfit_model(model: CausalLM, ranks: int) -> None:
    """Raises InputError for a model whose rows ranks cannot share. model: on the meta device."""
    if ranks == 1:
        return
    if isinstance(model, TiledVisionLanguageModel):
        raise InputError(
            f"--context-parallel {ranks}: rows whose images are read by cross-attention cannot be divided over ranks; "
            "leave it out"
        )


def refuse_unfit_length(config: RunConfig) -> None:
    """Raises InputError for rows that cannot be divided equally, or into parts that a convolution reads beyond."""
    ranks, length = config.context_parallel, config.sequence_length
    least = ranks * (MAX_TAPS - 1)
    if ranks > 1 and length < least:
        raise InputError(
            f"--sequence-length {length}: --context-parallel {ranks} needs rows of at least {least} tokens"
        )
    if length % ranks:
        raise InputError(
            f"--context-parallel {ranks} does not divide --sequence-length {length}: give {-(-length // ranks) * ranks}"
        )
