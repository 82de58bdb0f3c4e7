"""What a block with activation checkpointing can keep beside its input: attention, and the products of its mixer.

torch's selective checkpointing runs the block under a dispatch mode, which sees every op, also those inside of fused
nodes. Where an op's output is kept, the recomputation takes it instead of running the op. A product is recognised by
its size [inputs, outputs]: that is the same for a gathered weight, a dequantised one and one in a compiled graph. What
the MLP computes is not kept: it is most of a block's memory, and a block with room for it needs no checkpointing. What
is kept is given back once: a graph of such a block cannot be retained for a second backward.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ligermodels.layers.mixer import Mixer, mean_attended_keys
from ligermodels.layers.packed import PackedLinear, PackedPart
from ligermodels.layers.quantised import QuantisedLinear

aten = torch.ops.aten
ATTENTION_OPS = {
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._flash_attention_forward.default,
    torch.ops.ligermodels.flash_attention_forward.default,
}
WEIGHT_OF_PRODUCT = {aten.mm.default: 1, aten.addmm.default: 2, aten._scaled_mm.default: 1}  # its argument
FP32_BYTES = 4
ATTENTION = (0, 0)  # stands for attention's output and log-sum-exp where others have a product's size

ResultSize = tuple[int, int]  # inputs and outputs of a product, or ATTENTION


class KeepableTensor(NamedTuple):
    """The output of an op of one block."""

    size: ResultSize
    elements: int  # per token
    statistics: int  # per token, fp32 elements beside them
    flops: float  # per token, to compute it

    def nbytes(self, itemsize: int) -> int:
        """Bytes per token; elements have `itemsize` bytes."""
        return self.elements * itemsize + self.statistics * FP32_BYTES


def keeping(kept: Collection[ResultSize]) -> partial:
    """The `context_fn` of a checkpoint that keeps these results."""
    return partial(create_selective_checkpoint_contexts, partial(policy, frozenset(kept)))


def policy(kept: Collection[ResultSize], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether the output of a call is kept."""
    size = None
    if op in ATTENTION_OPS:
        size = ATTENTION
    elif op in WEIGHT_OF_PRODUCT:
        size = tuple(args[WEIGHT_OF_PRODUCT[op]].shape)
    return CheckpointPolicy.MUST_SAVE if size in kept else CheckpointPolicy.PREFER_RECOMPUTE


def keepable_tensors(block: nn.Module, mixer: Mixer, sequence_length: int) -> Iterator[KeepableTensor]:
    """Attention and the products of a block's mixer. Products of the same size, in the whole block, are one tensor."""
    if mixer.score_width:
        flops = 2 * mixer.score_width * mean_attended_keys(sequence_length, mixer.window)
        yield KeepableTensor(ATTENTION, mixer.output_size, mixer.num_heads, flops)
    sizes = [(linear.in_features, linear.out_features) for linear in linears(block)]
    for size in dict.fromkeys((linear.in_features, linear.out_features) for linear in linears(mixer)):
        inputs, outputs = size
        count = sizes.count(size)
        yield KeepableTensor(size, count * outputs, 0, count * 2.0 * inputs * outputs)


def linears(module: nn.Module) -> Iterator[nn.Linear | PackedLinear | QuantisedLinear]:
    """The modules that each compute one product."""
    for part in module.modules():
        owned_by_another = type(part) is PackedPart or (isinstance(part, PackedLinear) and part.weight is None)
        if isinstance(part, nn.Linear | PackedLinear | QuantisedLinear) and not owned_by_another:
            yield part


def choose_kept(blocks: Sequence[Any], count: int | None, sequence_length: int) -> list[list[KeepableTensor]]:
    """What each of the checkpointed blocks keeps: of all keepable tensors the `count` that save most FLOPs an element.

    Of equal ones those of the last blocks come first: their memory is free again before the first blocks' backward.
    None for all.
    """
    candidates = [
        (index, tensor)
        for index, block in reversed(list(enumerate(blocks)))
        for tensor in keepable_tensors(block, block.mixer, sequence_length)
    ]
    candidates.sort(key=lambda candidate: -candidate[1].flops / candidate[1].elements)  # a stable sort
    kept: list[list[KeepableTensor]] = [[] for _ in blocks]
    for index, tensor in candidates[:count]:
        kept[index].append(tensor)
    return kept
