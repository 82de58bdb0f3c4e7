"""Micro-batches as CUDA graphs: forward and backward of a small one keep the host busy for longer than the device.

The first micro-batch of a kind runs as it is, which compiles its kernels; the second is captured, and later ones are
replays. The kind is the shapes of a micro-batch's tensors, and whether it is the first of its step, which writes
gradients, or adds to them. A graph reads weights and writes gradients at their addresses.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ligermodels.kernels.launch import RecordedGraphs
from ligermodels.layers.decoder import CausalLM
from ligermodels.training.data.rows.run_rows import Batch
from ligermodels.training.objectives import Objective, Share, Work
from ligermodels.training.optimizers import OptimizerInBackward
from ligermodels.training.preparing import Run
from ligermodels.training.reporting.flops import peak_flops

SHORT = 0.1  # seconds of products of a micro-batch, at the peak of a GPU: of a longer one the host is ahead anyway
ROOM = 0.9  # of a GPU's memory
MOST_KINDS = 32  # of micro-batches: capturing one takes as long as running it once


def captures_graphs(run: Run) -> bool:
    """Whether a run's micro-batches are captured: one GPU, nothing that the host does within a pass, small ones, and
    memory for what graphs hold beside the plan, the activations and gradients of a micro-batch once more."""
    config, plan, device = run.config, run.plan, run.world.device
    if device.type != "cuda" or run.world.size > 1 or not run.objective.is_capturable:
        return False
    if config.compile or config.offload or config.optimizer_in_backward:
        return False
    if any(isinstance(p, DTensor) for p in run.model.parameters()):
        return False
    if any(block.activation_checkpointing and block.drops_values() for block in run.model.blocks):
        return False  # it reads the state of the random generator
    rate, tokens = peak_flops(device, config.dtype), plan.micro_batch_size * config.sequence_length
    is_short = rate is not None and plan.flops * tokens < SHORT * rate
    memory = plan.memory
    needed = memory.peak + memory.gradients + memory.activations + max(memory.loss, memory.block)
    return is_short and plan.total is not None and needed <= ROOM * plan.total


class Graph(NamedTuple):
    """A captured micro-batch: its inputs, its replay, where that writes its share, and whose gradients it writes."""

    inputs: list[Tensor]
    replay: Callable[[], Any]
    outputs: Share
    written: dict[nn.Parameter, None]


class MicroBatches(RecordedGraphs):
    """Takes micro-batches forward and backward, as graphs if `captures`. in_backward: what steps meanwhile.

    gradients: where graphs write them, by parameter; they stay allocated.
    """

    graphs: dict[Hashable, Graph | Share]  # a share where a micro-batch of this kind has run once

    def __init__(
        self, model: CausalLM, objective: Objective, in_backward: OptimizerInBackward | None, *, captures: bool
    ) -> None:
        super().__init__()
        self.model, self.objective, self.in_backward, self.captures = model, objective, in_backward, captures
        self.parameters = [*model.parameters()]
        self.gradients: dict[nn.Parameter, Tensor] = {}

    def backward(self, batch: Any, work: Work) -> Share:
        """Adds the gradients of a micro-batch to those of its step. Returns its share; the loss has no graph."""
        if not self.captures or not isinstance(batch, Batch) or batch.images or batch.teacher_states is not None:
            return self.run(batch, work)
        self.refresh(self.parameters)
        batch, adds = batch.with_padded_offsets(), any(p.grad is not None for p in self.parameters)
        kind = adds, shape_key(batch, work)
        known = self.graphs.get(kind)
        if isinstance(known, Share):
            known = self.graphs[kind] = self.try_to_capture(batch, work, known, adds=adds) or known
        if isinstance(known, Graph):
            return self.replay(known, batch, work, adds=adds)
        share = self.run(batch, work)
        if len(self.graphs) < MOST_KINDS:
            self.graphs[kind] = share
        return share

    def run(self, batch: Any, work: Work) -> Share:
        share = self.objective.loss(self.model, batch, work)
        if self.in_backward is not None:
            self.in_backward.begin(share.loss)
        share.loss.backward()
        return share.map(torch.detach)

    def replay(self, graph: Graph, batch: Batch, work: Work, *, adds: bool) -> Share:
        for p in graph.written if adds else ():
            kept, before = self.gradients[p], p.grad
            if before is None:  # the step's earlier micro-batches have not reached it
                kept.zero_()
            elif before is not kept:  # one of them has run
                kept.copy_(before)
        torch._foreach_copy_(graph.inputs, graph_inputs(batch, work))
        graph.replay()
        for p in graph.written:
            p.grad = self.gradients[p]
        return graph.outputs.map(torch.clone)  # the next replay overwrites them

    def try_to_capture(self, batch: Batch, work: Work, like: Share, *, adds: bool) -> Graph | None:
        """Captures a kind whose share is like this one. Returns None, and captures nothing from then on, where its
        passes do what a graph cannot hold. adds: to gradients of the step's earlier micro-batches."""
        own_batch, outputs = tree_map_only(Tensor, torch.clone, batch), like.map(torch.clone)
        own_work = work._replace(batches=(own_batch,), counts=work.counts.clone())
        written: dict[nn.Parameter, None] = {}
        for p in self.parameters:
            if p.requires_grad and p not in self.gradients:
                self.gradients[p] = torch.empty_like(p)

        def step() -> None:
            with self.keeping_gradients(written, adds=adds):
                torch._foreach_copy_(scalars_of(outputs), scalars_of(self.run(own_batch, own_work)))

        try:
            return Graph(graph_inputs(own_batch, own_work), self.record(step), outputs, written)
        except RuntimeError as error:
            self.captures = False
            warnings.warn(f"micro-batches run without CUDA graphs: {str(error).splitlines()[0]}", stacklevel=2)
            return None

    @contextmanager
    def keeping_gradients(self, written: dict[nn.Parameter, None], *, adds: bool) -> Iterator[None]:
        """Within it a backward pass writes each gradient to its place in `gradients`, or adds it, and frees it. Notes
        in `written` whose it wrote."""
        before = [p.grad for p in self.parameters]

        def keep(p: nn.Parameter) -> None:
            kept, new = self.gradients[p], p.grad
            assert new is not None
            kept.add_(new) if adds else kept.copy_(new)
            p.grad, written[p] = None, None

        for p in self.parameters:
            p.grad = None
        hooks = [p.register_post_accumulate_grad_hook(keep) for p in self.gradients]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for p, gradient in zip(self.parameters, before, strict=True):
                p.grad = gradient


def shape_key(batch: Batch, work: Work) -> Hashable:
    """The shapes of a micro-batch's tensors, and its other fields."""
    fields = (*batch._replace(images={}), work.counts)
    return tuple(tuple(x.shape) if isinstance(x, Tensor) else str(x) for x in fields)


def graph_inputs(batch: Batch, work: Work) -> list[Tensor]:
    """What a graph reads of a micro-batch and its step."""
    return [*(x for x in batch if isinstance(x, Tensor)), work.counts]


def scalars_of(share: Share) -> list[Tensor]:
    return [share.loss, *share.sums.values(), *share.maxima.values()]
