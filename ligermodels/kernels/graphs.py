"""CUDA graphs: steps of many kernels that are captured once, then replayed without the host's work."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class RecordedGraphs:
    """Graphs by what tells their steps apart, in one memory pool: they never run at the same time. They read weights at
    their addresses."""

    def __init__(self) -> None:
        self.graphs: dict[Any, Any] = {}
        self.addresses: list[int] = []
        self.pool: Any = None

    def refresh(self, weights: Iterable[Tensor]) -> None:
        """Drops the graphs if a weight is elsewhere than at their capture."""
        addresses = [weight.data_ptr() for weight in weights]
        if addresses != self.addresses:
            self.graphs, self.addresses = {}, addresses
            self.pool = None  # PyTorch ends a pool with the last of its graphs

    def record(self, step: Callable[[], None]) -> Callable[[], Any]:
        """Captures a step, which does not run it. Returns its replay. Raises RuntimeError for what cannot be captured.

        Other threads, such as one that collates the next batch, may allocate pinned memory meanwhile.
        """
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            step()
        return graph.replay
