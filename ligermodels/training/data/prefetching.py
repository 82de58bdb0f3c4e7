"""Prefetching: what is needed next is made in a thread, while what was made before is used."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from typing import Generic, TypeVar

PrefetchRequest = TypeVar("PrefetchRequest")
Prefetched = TypeVar("Prefetched")


class Prefetcher(Generic[PrefetchRequest, Prefetched]):
    """Calls `make` with requests, each ahead of its turn where the one before has named it."""

    def __init__(self, make: Callable[[PrefetchRequest], Prefetched], name: str) -> None:
        self.make, self.thread = make, ThreadPoolExecutor(1, name)
        self.prefetched: tuple[PrefetchRequest, Future[Prefetched]] | None = None

    def take(self, request: PrefetchRequest, following: PrefetchRequest | None) -> Prefetched:
        """`make(request)`, which may have been prefetched. Prefetches `following`, if any. Raises what `make` does."""
        prefetched, self.prefetched = self.prefetched, None
        result = prefetched[1].result() if prefetched and prefetched[0] == request else self.make(request)
        if following is not None:
            self.prefetched = following, self.thread.submit(self.make, following)
        return result

    def take_all(self, requests: Sequence[PrefetchRequest]) -> Iterator[Prefetched]:
        """The results of requests, in order; one is prefetched while the one before is used."""
        for request, following in zip_longest(requests, requests[1:]):
            yield self.take(request, following)
