"""From how many elements of the queries on FlashAttention 4 is faster than torch's kernels, the host's time included.

    python -m benchmarks.flash_attention_threshold
    python -m benchmarks.flash_attention_threshold --heads 64 --kv-heads 8 --size 64 --window 128

Times the forward and backward pass of LAYERS attentions in a row over one packed batch, from the first launch to the
last result, because a small model waits for the host. `FEWEST_ELEMENTS` of kernels/attention/flash_attention.py is
where the columns cross. Prints a table; writes nothing.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor

from ligermodels.kernels.attention import attention as module
from ligermodels.kernels.attention import flash_attention

LAYERS = 12
ROUNDS = 20
SIZES = [2**power for power in range(18, 26)]  # elements of the queries
DOCUMENTS = 8


def milliseconds(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, window: int | None) -> float:
    """The median time of one layer, forward and backward."""
    times = []
    for _ in range(ROUNDS + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = q
        for _ in range(LAYERS):
            out = module.attention(out, k, v, cu_seqlens=offsets, max_seqlen=longest, window=window)
        torch.autograd.grad(out.sum(), (q, k, v))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / LAYERS)
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--window", type=int)
    args = parser.parse_args()
    print(f"{'elements':>10} {'tokens':>8} {'FlashAttention 4, ms':>22} {'without, ms':>12}")
    for elements in SIZES:
        length = elements // (args.heads * args.size) // DOCUMENTS
        tokens = length * DOCUMENTS
        offsets = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
        q, k, v = (
            torch.randn(1, tokens, heads, args.size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for heads in (args.heads, args.kv_heads, args.kv_heads)
        )
        columns = []
        for fewest in (0, elements * 2):  # FlashAttention 4 always, and never
            flash_attention.FEWEST_ELEMENTS = fewest
            columns.append(milliseconds(q, k, v, offsets, length, args.window))
        print(f"{elements:10,} {tokens:8,} {columns[0]:22.3f} {columns[1]:12.3f}")


if __name__ == "__main__":
    main()
