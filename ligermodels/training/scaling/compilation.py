"""torch.compile, block by block. Must not know what a block is made of.

Its kernels are ours already: on an H200 at the shape of Llama-3-8B, 8 × 2048 tokens, compiled blocks trained 12,993
tokens/s in 94.4 GiB and plain ones 13,009 in the same (benchmarks/results/2026-11-21-fsdp2-two-gpus.json). It may pay
where much of a block is not ours, such as float8 or a projection of the user's.
"""

import torch

from ligermodels.layers.decoder import CausalLM
from ligermodels.training.scaling.fsdp import blocks

# Of one block's code there are as many variants as the product of: the first block and the others, windowed and full
# ones, computed again or not, training and validation, lengths seen once and lengths that change. torch gives up at 8.
MOST_VARIANTS = 64


def compile_blocks(model: CausalLM) -> None:
    """Has every block compiled when it first runs, in place; parameters keep their names.

    What surrounds a block stays outside: recomputation in backward and the hooks by which FSDP2 gathers weights. Blocks
    that are alike share what is compiled, and a length that changes from batch to batch becomes a symbol the second
    time. Call it after LoRA and before sharding.
    """
    torch._dynamo.config.recompile_limit = MOST_VARIANTS
    for block in blocks(model):
        block.forward_block = torch.compile(block.forward_block, fullgraph=True)  # type: ignore[method-assign]
