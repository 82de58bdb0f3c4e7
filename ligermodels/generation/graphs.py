"""Decode steps as CUDA graphs: captured once for each number of rows, then replayed without the host's work.

Must not know models or requests.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ligermodels.generation.cache import GenerativeModel
from ligermodels.generation.rows import Drawing

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # of the graphs; beyond, multiples of 64
COARSE = 64


def rows_of_graph(count: int, limit: int) -> int:
    """The number of rows of the graph that runs `count` rows, where there are `limit`."""
    larger = next((rows for rows in ROWS if rows >= count), -(-count // COARSE) * COARSE)
    return min(larger, limit)


def uses_graphs(model: GenerativeModel) -> bool:
    """Whether a model's steps can be captured: its weights lie on one GPU, and it gathers none while it runs."""
    weights = list(model.parameters())
    return all(weight.is_cuda for weight in weights) and not any(isinstance(weight, DTensor) for weight in weights)


def ranks_of(model: GenerativeModel) -> int:
    """Over how many ranks the weights are distributed, which all have to run the same steps."""
    return max(weight.device_mesh.size() if isinstance(weight, DTensor) else 1 for weight in model.parameters())


class GraphedStep:
    """`step(rows, drawing)`, replayed from a CUDA graph from the second call of each pair of arguments on.

    The first call runs as it is, which compiles the kernels and does what must not be captured. A graph reads the
    weights at their addresses: `weights` gives those in use, and graphs of others are dropped.
    """

    def __init__(self, step: Callable[[int, Drawing], None], weights: Callable[[], Iterable[Tensor]]) -> None:
        self.step, self.weights = step, weights
        self.graphs: dict[tuple[int, Drawing], torch.cuda.CUDAGraph | None] = {}  # None: has run once
        self.addresses: list[int] = []
        self.pool: Any = None

    def refresh(self) -> None:
        """Drops the graphs if a weight is elsewhere than at their capture."""
        addresses = [weight.data_ptr() for weight in self.weights()]
        if addresses != self.addresses:
            self.graphs, self.addresses = {}, addresses

    def __call__(self, rows: int, drawing: Drawing) -> None:
        key = rows, drawing
        if key not in self.graphs:
            self.step(rows, drawing)
            self.graphs[key] = None
            return
        graph = self.graphs[key]
        if graph is None:
            graph = self.graphs[key] = self.capture(rows, drawing)
        graph.replay()

    def capture(self, rows: int, drawing: Drawing) -> torch.cuda.CUDAGraph:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()  # one for all: they never run at the same time
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.step(rows, drawing)
        return graph
