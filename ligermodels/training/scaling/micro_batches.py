"""The micro-batch size of a run that gives none: as many sequences at once as are useful and fit into memory.

It depends on the kind of the devices alone, not on their free memory: a run that resumes on the same devices takes the
same, and is bit-exact. Must not know the data.
"""

from functools import partial

import torch

from ligermodels.distributed import World
from ligermodels.training.config import SUPERVISED, RunConfig
from ligermodels.training.data.batches import split_global_batch
from ligermodels.training.scaling.activation_checkpointing import MemoryEstimator, usable_share

MOST_TOKENS = {"cuda": 2**14, "cpu": 2**12}  # of a micro-batch; more are not faster
FEWEST_TOKENS = 2**12  # a GPU is slower with fewer, more than by activation checkpointing


def micro_batch_size_of(config: RunConfig, world: World, blocks: int, estimate: MemoryEstimator) -> int:
    """The given micro-batch size, or the largest that divides a rank's share of the global batch and fits into memory.

    Of groups, a micro-batch is one packed row. On a GPU, a size with which no block needs activation checkpointing
    comes first, unless it is small. With an optimizer step in the backward pass there is one micro-batch. blocks: of
    the model. Raises InputError if ranks cannot share the global batch equally.
    """
    if config.objective not in SUPERVISED:
        return 1
    share = split_global_batch(config.units, config.micro_batch_size, world)[1]
    if config.micro_batch_size or config.is_tiny or config.optimizer_in_backward:
        return share
    most = MOST_TOKENS[world.device.type] * world.context // config.sequence_length
    sizes = [size for size in range(min(share, max(1, most)), 0, -1) if share % size == 0]
    if world.device.type != "cuda":
        return sizes[0]
    usable = usable_share(torch.cuda.get_device_properties(world.device).total_memory, world)
    large = [size for size in sizes if size * config.sequence_length >= FEWEST_TOKENS * world.context]
    options = {
        "none": [(size, 0) for size in sizes],
        "auto": [*((size, 0) for size in large), *((size, blocks) for size in sizes)],
        "selective": [(size, blocks) for size in sizes],
        "full": [(size, blocks) for size in sizes],
    }
    tried = options[config.activation_checkpointing]
    if config.activation_checkpointing == "selective":
        estimate = partial(estimate, kept_tensors=None)
    fitting = (s for s, count in tried if estimate(batch_size=s, checkpointed_blocks=count).peak <= usable)
    return next(fitting, 1)
