"""Which row comes when: an endless sequence that depends on a seed, the sources' sizes and their weights, on nothing
else, and any part of which is found without what came before it. Must not know what a row holds.
"""

import functools
from collections.abc import Sequence

import numpy as np

from ligermodels.errors import InputError

BLOCK = 10_000  # entries, within which weights hold exactly; so that this is also the finest weight


class Mixture:
    """Rows of several sources, each source's in one permutation after another.

    sizes: how many rows each source has. weights: how many rows to take of each, in any unit.
    Raises InputError for a weight too small.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.sizes, self.shares, self.seed = tuple(sizes), whole_shares(weights), seed % 2**64
        self.orders: dict[int, tuple[int, np.ndarray]] = {}  # of each source, that of the epoch it is in

    @property
    def passes(self) -> list[float]:
        """How many entries it takes to see all rows of each source once."""
        return [size * BLOCK / share for size, share in zip(self.sizes, self.shares, strict=True)]

    def entries(self, start: int, count: int) -> list[tuple[int, int]]:
        """(source, row) of entries start, start + 1, … of the sequence."""
        return [self.entry(number) for number in range(start, start + count)]

    def entry(self, number: int) -> tuple[int, int]:
        block, place = divmod(number, BLOCK)
        sources, earlier = block_of(self.shares, self.seed, block)
        source = int(sources[place])
        return source, self.row(source, block * self.shares[source] + int(earlier[place]))

    def row(self, source: int, number: int) -> int:
        """The row that comes when so many have been taken of a source."""
        epoch, place = divmod(number, self.sizes[source])
        known, order = self.orders.get(source, (None, np.empty(0)))
        if known != epoch:
            generator = np.random.default_rng([self.seed, epoch, source])
            order = generator.permutation(np.arange(self.sizes[source], dtype=np.uint32))
            self.orders[source] = epoch, order
        return int(order[place])


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Of the entries of a block, each source's, by largest remainders."""
    exact = np.array(weights, np.float64) / sum(weights) * BLOCK
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: BLOCK - shares.sum()]] += 1
    if not shares.all():
        smallest = weights[int(np.argmin(shares))]
        raise InputError(f"--data: the weight {smallest} is less than one row in {BLOCK:,}: leave that source out")
    return tuple(shares.tolist())


@functools.lru_cache(maxsize=4)
def block_of(shares: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The source of each entry of a block [BLOCK], and how many entries before it in the block have the same.

    The n entries of a source are spread evenly, one at random within each n-th part of the block: the weights hold
    within few rows wherever one looks.
    """
    generator = np.random.default_rng([seed, block])
    places = np.concatenate([(np.arange(share) + generator.random(share)) / share for share in shares])
    sources = np.repeat(np.arange(len(shares)), shares)
    numbers = np.concatenate([np.arange(share) for share in shares])
    order = np.argsort(places, kind="stable")
    return sources[order], numbers[order]
