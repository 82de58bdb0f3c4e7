"""Trains tiny models for a few steps and writes what happened: one process, or one of several under torchrun.

Usage: worker.py OUTPUT.pt JSON, where JSON is a list of arguments of `train`, for one run after the other.
"""

import functools
import json
import math
import sys
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

import ligermodels
from ligermodels import distributed
from ligermodels.kernels import launch
from ligermodels.layers.decoder import IGNORE_INDEX
from ligermodels.training.optimizers import building as optimizers
from ligermodels.training.scaling import fsdp
from ligermodels.training.scaling.compilation import compile_blocks
from tests import interpreter
from tests.layers.adapters import adapt

ROWS = 8


def rows_with_uneven_masks(vocab_size):
    """Row i has its first 2 i labels masked, so that micro-batches and ranks count differently many."""
    input_ids = torch.randint(vocab_size, (ROWS, 16), generator=torch.Generator().manual_seed(3))
    labels = input_ids.clone()
    for i, row in enumerate(labels):
        row[: 2 * i] = IGNORE_INDEX
    return input_ids, labels


def micro_batches(rows, step, accumulate, batch_size, world):
    """This rank's; which rows a step has depends on their number only."""
    taken = accumulate * world.size * batch_size
    indices = (step * taken + torch.arange(taken)) % ROWS
    return [[x[mine] for x in rows] for mine in indices.view(accumulate, world.size, batch_size)[:, world.rank]]


def supervised(labels):
    return (labels[:, 1:] != IGNORE_INDEX).sum()


@contextmanager
def compiling_by(backend):
    """torch.compile with another backend than its own, which takes long: it traces, and runs what it traced."""
    compiler = torch.compile
    torch.compile = functools.partial(compiler, backend=backend)
    yield
    torch.compile = compiler


def build(model, world, dtype, stored, recomputed, lora, compiled, replicas, keep_gathered):
    """lora: the dtype of the updates, whose base is stored in the dtype that is computed in."""
    base = dtype if lora else stored
    model = ligermodels.create(model, dtype=getattr(torch, base), device="meta")
    if lora:
        adapt(model, dtype=getattr(torch, lora))
    model.checkpoint_activations(recomputed)
    if compiled:
        with compiling_by("eager"):
            compile_blocks(model)
    fsdp.shard(model, world, getattr(torch, dtype), replicas=replicas, keep_gathered=keep_gathered)
    model.to_empty(device=world.device)
    model.initialize(1)
    return model.train()


def train(
    model, accumulate=1, batch_size=4, steps=4, dtype="float32", stored="float32", recomputed=0, lora=None,
    compiled=False, replicas=1, name="adamw", keep_gathered=False,
):  # fmt: skip
    world = distributed.start()
    model = build(model, world, dtype, stored, recomputed, lora, compiled, replicas, keep_gathered)
    optimizer = optimizers.build_optimizer(model, name)
    optimizers.set_learning_rate(optimizer, 1e-2)
    rows = rows_with_uneven_masks(model.config.vocab_size)
    losses, norms = [], []
    for step in range(steps):
        batches = micro_batches(rows, step, accumulate, batch_size, world)
        count = distributed.total(sum(supervised(labels) for _, labels in batches))
        loss = torch.zeros(())
        for number, (input_ids, labels) in enumerate(batches, 1):
            fsdp.reduce_gradients(model, now=number == accumulate)
            share = model(input_ids, labels, num_items_in_batch=count).loss
            share.backward()
            loss += share.detach()
        loss, norm = distributed.total(loss), fsdp.gradient_norm(model)
        optimizers.clipped_step(optimizer, loss, norm, math.inf)  # the norm's last bit depends on the shards
        losses.append(float(loss))
        norms.append(float(norm))
        optimizer.zero_grad()
    weights = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    if launch.interpreting:
        interpreter.speed_up_interpreter()
    world = distributed.start()
    distributed.start = functools.partial(distributed.World, world.device, world.rank, world.size)
    results = [train(**settings) for settings in json.loads(sys.argv[2])]
    if world.is_first:
        torch.save(results, sys.argv[1])
    distributed.wait_for_all()
    distributed.stop()
