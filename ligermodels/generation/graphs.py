"""Decode steps as CUDA graphs: captured once for each number of rows, then replayed without the host's work."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ligermodels.generation.cache import GenerativeModel, PerRow
from ligermodels.generation.rows import Drawing

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # of the graphs; beyond, multiples of 64
COARSE = 64


def rows_of_graph(count: int, limit: int) -> int:
    """The number of rows of the graph that runs `count` rows, where there are `limit`."""
    larger = next((rows for rows in ROWS if rows >= count), -(-count // COARSE) * COARSE)
    return min(larger, limit)


def uses_graphs(model: GenerativeModel) -> bool:
    """Whether a model's steps can be captured: its weights lie on one GPU, it gathers none while it runs, and no state
    of a row grows."""
    if any(isinstance(kept, PerRow) and kept.grows for kept in model.kept_by_layers()):
        return False
    weights = list(model.parameters())
    return all(weight.is_cuda for weight in weights) and not any(isinstance(weight, DTensor) for weight in weights)


def ranks_of(model: GenerativeModel) -> int:
    """Over how many ranks the weights are distributed, which all have to run the same steps."""
    return max(weight.device_mesh.size() if isinstance(weight, DTensor) else 1 for weight in model.parameters())


StepFunction = Callable[[int, Drawing], None]


class StepGraphs:
    """The CUDA graphs of a step, one for each number of rows and way of drawing.

    The first step of a kind runs as it is, which compiles the kernels and does what must not be captured; later ones
    are replayed. A graph reads the weights at their addresses.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[int, Drawing], torch.cuda.CUDAGraph | None] = {}  # None: has run once
        self.addresses: list[int] = []
        self.pool: Any = None

    def refresh(self, weights: Iterable[Tensor]) -> None:
        """Drops the graphs if a weight is elsewhere than at their capture."""
        addresses = [weight.data_ptr() for weight in weights]
        if addresses != self.addresses:
            self.graphs, self.addresses = {}, addresses
            self.pool = None  # PyTorch ends a pool with the last of its graphs

    def run(self, step: StepFunction, rows: int, drawing: Drawing) -> None:
        """step(rows, drawing), or its replay. The step is not kept: it belongs to an engine, whose memory it holds."""
        key = rows, drawing
        if key not in self.graphs:
            step(rows, drawing)
            self.graphs[key] = None
            return
        graph = self.graphs[key]
        if graph is None:
            graph = self.graphs[key] = self.capture(step, rows, drawing)
        graph.replay()

    def capture(self, step: StepFunction, rows: int, drawing: Drawing) -> torch.cuda.CUDAGraph:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()  # one for all: they never run at the same time
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step(rows, drawing)
        return graph
