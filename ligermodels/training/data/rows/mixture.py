"""Shuffling and mixing: the endless order in which the rows of several weighted sources are taken.

The order depends only on the seed, the sizes of the sources and their weights. Any part of it is computed without the
parts before it, so a run can resume anywhere. This module does not know what a row contains.
"""

import functools
from collections.abc import Sequence

import numpy as np

from ligermodels.errors import InputError

MIXTURE_BLOCK = 10_000  # entries; weights hold exactly within each block, so 1 / MIXTURE_BLOCK is the smallest weight


class Mixture:
    """An endless sequence of entries (source, row). Each source is shuffled anew for each of its epochs.

    sizes: the number of rows of each source. weights: the share of each source, in any unit.
    Raises InputError if a weight is too small.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.sizes, self.shares, self.seed = tuple(sizes), integer_shares(weights), seed % 2**64
        self.permutations: dict[int, tuple[int, np.ndarray]] = {}  # source -> (epoch, the order of its rows)

    @property
    def rows_per_epoch(self) -> list[float]:
        """For each source, after how many entries of the mixture all rows of the source were taken once."""
        return [size * MIXTURE_BLOCK / share for size, share in zip(self.sizes, self.shares, strict=True)]

    def entries(self, start: int, count: int) -> list[tuple[int, int]]:
        """The entries (source, row) number start, start + 1, … of the sequence."""
        return [self.entry(number) for number in range(start, start + count)]

    def entry(self, number: int) -> tuple[int, int]:
        block, place = divmod(number, MIXTURE_BLOCK)
        sources, counts_before = mixture_block(self.shares, self.seed, block)
        source = int(sources[place])
        return source, self.row(source, block * self.shares[source] + int(counts_before[place]))

    def row(self, source: int, taken: int) -> int:
        """The next row of a source from which `taken` rows were taken before."""
        epoch, place = divmod(taken, self.sizes[source])
        current, order = self.permutations.get(source, (None, np.empty(0)))
        if current != epoch:
            generator = np.random.default_rng([self.seed, epoch, source])
            order = generator.permutation(np.arange(self.sizes[source], dtype=np.uint32))
            self.permutations[source] = epoch, order
        return int(order[place])


def integer_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The number of entries that each source has in a block, rounded by the largest-remainder method."""
    exact = np.array(weights, np.float64) / sum(weights) * MIXTURE_BLOCK
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: MIXTURE_BLOCK - shares.sum()]] += 1
    if not shares.all():
        smallest = weights[int(np.argmin(shares))]
        raise InputError(
            f"--data: the weight {smallest} is less than one row in {MIXTURE_BLOCK:,}: raise it or remove that source"
        )
    return tuple(shares.tolist())


@functools.lru_cache(maxsize=4)
def mixture_block(shares: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """For each entry of a block [MIXTURE_BLOCK]: its source, and how many earlier entries of the block have it.

    The n entries of a source are spread evenly, one at a random place in each n-th part of the block (stratified
    sampling), so that any stretch of the sequence has the given weights to within a few rows.
    """
    generator = np.random.default_rng([seed, block])
    places = np.concatenate([(np.arange(share) + generator.random(share)) / share for share in shares])
    sources = np.repeat(np.arange(len(shares)), shares)
    numbers = np.concatenate([np.arange(share) for share in shares])
    order = np.argsort(places, kind="stable")
    return sources[order], numbers[order]
