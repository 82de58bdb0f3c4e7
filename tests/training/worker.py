"""Trains a tiny model for a few steps and writes what happened: one process, or one of several under torchrun.

Usage: worker.py OUTPUT.pt JSON, where JSON gives model (a config), accumulate, batch_size, steps, recompute, lora
and the optimizer's name.
"""

import json
import sys

import torch
from torch.distributed.tensor import DTensor

import ligermodels
from ligermodels.kernels import op
from ligermodels.training import data, optimizers, parallel
from tests import interpreter
from tests.layers.adapters import adapt


def rows_with_uneven_masks(vocab_size: int) -> data.Rows:
    """Row i has its first 2 i labels masked, so that micro-batches and ranks count differently many."""
    tokens = torch.randint(vocab_size, (8, 16), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    labels = tokens.clone()
    for i, row in enumerate(labels):
        row[: 2 * i] = data.IGNORED
    return data.Rows(tokens, labels)


def train(model, accumulate=1, batch_size=4, steps=4, recompute=False, lora=False, name="adamw"):
    world = parallel.start()
    model = ligermodels.create(model, dtype=torch.float32, device="meta")
    if lora:
        adapt(model)
    if recompute:
        model.recompute_in_backward()
    parallel.shard(model, world, torch.float32)
    model.to_empty(device=world.device)
    model.initialize(1)
    optimizer = optimizers.build_optimizer(model, name)
    optimizers.set_learning_rate(optimizer, 1e-2)
    rows = rows_with_uneven_masks(model.config.vocab_size)
    losses, norms = [], []
    for step in range(steps):
        batches = data.micro_batches(rows, 0, step, accumulate, batch_size, world)
        count = parallel.total(sum(data.supervised(labels) for _, labels in batches))
        loss = torch.zeros((), device=world.device)
        for number, (input_ids, labels) in enumerate(batches, 1):
            parallel.reduce_gradients(model, now=number == accumulate)
            share = model(input_ids, labels, num_items_in_batch=count).loss
            share.backward()
            loss += share.detach()
        loss, norm = parallel.total(loss), parallel.gradient_norm(model)
        optimizers.clipped_step(optimizer, loss, norm, 1.0)
        losses.append(float(loss))
        norms.append(float(norm))
        optimizer.zero_grad()
    weights = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights, "is_first": world.is_first}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    if op.interpreting:
        interpreter.hasten()
    result = train(**json.loads(sys.argv[2]))
    if result["is_first"]:
        torch.save(result, sys.argv[1])
    parallel.wait_for_all()
    parallel.stop()
