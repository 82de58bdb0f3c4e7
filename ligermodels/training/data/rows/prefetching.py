"""Prefetching: what is needed next is made in a thread, while what was made before is used."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from typing import Generic, TypeVar

from torch import distributed

from ligermodels.distributed import raise_on_all
from ligermodels.errors import InputError

PrefetchRequest = TypeVar("PrefetchRequest")
Prefetched = TypeVar("Prefetched")


class DataError(InputError):
    """Data that cannot be read at their turn in a run. All ranks raise it at the same place, between two steps."""


class Prefetcher(Generic[PrefetchRequest, Prefetched]):
    """Calls `make` with requests, each ahead of its turn where the one before has named it.

    reads_files: whether `make` reads files of the user, and so may raise an InputError on one rank alone. All ranks
    then call `take` together, and if there is an error, all raise it as a DataError.
    """

    def __init__(self, make: Callable[[PrefetchRequest], Prefetched], name: str, *, reads_files: bool = False) -> None:
        self.make, self.thread, self.reads_files = make, ThreadPoolExecutor(1, name), reads_files
        # Messages of gloo do not wait for a GPU, as those of nccl would.
        shared = reads_files and distributed.is_initialized()
        self.group = distributed.new_group(backend="gloo") if shared else None
        self.prefetched: tuple[PrefetchRequest, Future[Prefetched]] | None = None

    def take(self, request: PrefetchRequest, following: PrefetchRequest | None) -> Prefetched:
        """`make(request)`, which may have been prefetched. Prefetches `following`, if any. Raises what `make` does."""
        result = self.made_on_all(request) if self.reads_files else self.made(request)
        if following is not None:
            self.prefetched = following, self.thread.submit(self.make, following)
        return result

    def made(self, request: PrefetchRequest) -> Prefetched:
        prefetched, self.prefetched = self.prefetched, None
        return prefetched[1].result() if prefetched and prefetched[0] == request else self.make(request)

    def made_on_all(self, request: PrefetchRequest) -> Prefetched:
        """As `made`. Raises a DataError on all ranks if `make` raises an InputError on one."""
        error = None
        try:
            result = self.made(request)
        except InputError as raised:
            error = DataError(str(raised))
        raise_on_all(error, self.group)
        return result

    def take_all(self, requests: Sequence[PrefetchRequest]) -> Iterator[Prefetched]:
        """The results of requests, in order; one is prefetched while the one before is used."""
        for request, following in zip_longest(requests, requests[1:]):
            yield self.take(request, following)
