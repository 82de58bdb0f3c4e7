"""torch.compile, block by block. Must not know what a block is made of.

The blocks already run fused kernels, so torch.compile gains little: on an H200 with the shape of Llama-3-8B and
8 × 2048 tokens, compiled blocks trained 12,993 tokens/s and eager blocks 13,009, both in 94.4 GiB
(benchmarks/results/2026-11-21-fsdp2-two-gpus.json). It can help where a block runs other code, such as float8 or a
projection of the user's.
"""

import torch

from ligermodels.errors import InputError
from ligermodels.kernels.dispatch import runs_kernels
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import decoder_blocks

# The code of one block is compiled for every combination of: first block or later block, sliding window or full
# attention, activation checkpointing or not, training or validation, static or dynamic lengths. torch's limit is 8.
RECOMPILE_LIMIT = 64


def compile_blocks(model: CausalLM, device: torch.device) -> None:
    """Applies torch.compile to every block, in place. It is compiled at its first call; parameter names stay.

    The FSDP2 hooks stay outside the compiled code, and so does activation checkpointing, except where it keeps results:
    which ones is then decided in the graph. Blocks of the same structure share
    compiled code. A length that changes from batch to batch becomes dynamic when it changes first. Call this function
    after LoRA is added and before sharding.
    device: the device it will train on. Raises InputError for a model with states on a CPU: there they are computed in
    a loop over tokens, which torch.compile would unroll.
    """
    if any(block.mixer.state_flops for block in decoder_blocks(model)) and not runs_kernels(
        torch.empty(0, device=device)
    ):
        raise InputError("--compile: this model has layers with states, which need a GPU to be compiled; leave it out")
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for block in model.blocks:
        name = "forward_checkpointed" if block.kept else "forward_block"
        setattr(block, name, torch.compile(getattr(block, name), fullgraph=True))
