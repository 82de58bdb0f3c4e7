"""Sums and means over the sequences of a packed vector. Must not know what the values are.

`cu_seqlens` has the offsets of S sequences in a vector of N values, int32 or int64 [S + 1]: sequence i has the values
`cu_seqlens[i]` to `cu_seqlens[i + 1] - 1`. Values after the last offset are padding: nothing reads them, and their
gradient is 0. The results do not depend on how many threads or blocks run, and no function waits for a GPU.
"""

import torch
from torch import Tensor


def segment_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The sum of each sequence, float64 [S]; 0 for an empty one. values: [N], of any floating dtype.

    float64, because losses read differences of such sums: two sums of some 10⁴ that differ by 0.01.
    """
    return torch.segment_reduce(values.double(), "sum", offsets=cu_seqlens, initial=0)


def segment_means(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The mean of each sequence, float64 [S]; 0 for an empty one. values: [N], of any floating dtype."""
    return segment_sums(values, cu_seqlens) / cu_seqlens.diff().clamp(min=1)
