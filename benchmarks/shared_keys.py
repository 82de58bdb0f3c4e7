"""Keys gathered for completions that share a prompt. Shape: [groups, prompt, completion, completions,
heads, head size].

The shapes are a batch of pairs of Llama-3-8B, one of its GRPO groups, groups of Qwen2.5-1.5B, and a small one whose
time is bound by the host.
"""

import numpy as np
import torch

from benchmarks.ops import Op, random_input, work_per_pass
from ligermodels.kernels.attention.shared_keys import gather_keys_reference
from ligermodels.training.data.preferences import Group
from ligermodels.training.data.preferences.layout import GroupPiece, lay_out

SHAPES = [(8, 1024, 256, 2, 8, 128), (2, 512, 512, 8, 8, 128), (2, 512, 512, 8, 2, 128), (1, 64, 16, 2, 8, 128)]


def layout(groups, prompt, completion, count):
    ids = np.zeros(prompt, np.int64), np.zeros(completion, np.int64)
    group = Group(ids[0], (ids[1],) * count, (None,) * count)
    return lay_out([GroupPiece(group, unit) for unit in range(groups)], share=True, multiple=128)


def inputs(groups, prompt, completion, count, heads, size):
    """A view of a packed projection with four query heads for each key-value head, as in a model."""
    row = layout(groups, prompt, completion, count)
    packed = random_input(1, len(row.input_ids), 6 * heads, size)
    indices = (torch.from_numpy(x).to(packed.device) for x in (row.offsets, row.places))
    return [packed, *indices]


def keys_of(packed):
    heads = packed.shape[2] // 6
    return packed[:, :, 4 * heads : 5 * heads]


def work(groups, prompt, completion, count, heads, size):
    """Forward reads the keys and writes the copies; backward the reverse, into a gradient of the whole projection."""
    row = layout(groups, prompt, completion, count)
    keys, copies = (2 * len(x) * heads * size for x in (row.input_ids, row.places))
    return work_per_pass(keys + copies, 6 * keys + copies)


gather_keys = Op(
    "gather_keys", SHAPES, inputs,
    lambda packed, offsets, places: gather_keys_reference(keys_of(packed), offsets, places), work,
)  # fmt: skip


@gather_keys.provider("pytorch")
def pytorch(*shape):
    """Indexing; its backward adds with atomics, unless deterministic algorithms are asked for."""
    index = None

    def gather(packed, offsets, places):
        nonlocal index
        if index is None:
            tokens = torch.arange(packed.shape[1], device=packed.device).repeat_interleave(offsets.diff())
            index = torch.empty_like(tokens).scatter(0, places.long(), tokens)
        return keys_of(packed).index_select(1, index)

    return gather


@gather_keys.provider("ligermodels")
def ours(*shape):
    from ligermodels.kernels.attention.shared_keys import gather_keys

    return lambda packed, offsets, places: gather_keys(keys_of(packed), offsets, places)
