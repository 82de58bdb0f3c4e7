"""Trains a tiny model for a few steps and writes what happened: one process, or one of several under torchrun.

Usage: worker.py OUTPUT.pt JSON, where JSON gives the arguments of `train`.
"""

import json
import sys

import torch
from torch.distributed.tensor import DTensor

import ligermodels
from ligermodels.kernels import op
from ligermodels.training import optimizer, parallel
from ligermodels.training.data import supervised
from tests import interpreter
from tests.layers.adapters import adapt
from tests.training.data.documents import Document, training


def documents_with_uneven_masks(vocab_size):
    """Document i has its first 2 i tokens masked, so that micro-batches and ranks count differently many."""
    tokens = torch.randint(vocab_size, (8, 16), generator=torch.Generator().manual_seed(3)).tolist()
    return [Document(ids, [place >= 2 * i for place in range(16)]) for i, ids in enumerate(tokens)]


def train(model, batch_size=4, micro_batch_size=None, packing=True, steps=4, recompute=False, lora=False):
    world = parallel.start()
    model = ligermodels.create(model, dtype=torch.float32, device="meta")
    if lora:
        adapt(model)
    if recompute:
        model.recompute_in_backward()
    parallel.shard(model, world, torch.float32)
    model.to_empty(device=world.device)
    model.initialize(1)
    adamw = optimizer.adamw(model, weight_decay=0.1)
    optimizer.set_learning_rate(adamw, 1e-2)
    data = training(documents_with_uneven_masks(model.config.vocab_size), 16, packing)
    losses, norms = [], []
    for step in range(steps):
        batches = data.micro_batches(step * batch_size, batch_size, micro_batch_size, world)
        count = parallel.total(sum(supervised(batch) for batch in batches))
        loss = torch.zeros((), device=world.device)
        for number, (ids, labels, cu_seqlens, longest) in enumerate(batches, 1):
            parallel.reduce_gradients(model, now=number == len(batches))
            packed = {"cu_seqlens": cu_seqlens, "max_seqlen": longest}
            share = model(ids, labels, **packed, num_items_in_batch=count).loss
            share.backward()
            loss += share.detach()
        loss, norm = parallel.total(loss), parallel.gradient_norm(model)
        optimizer.clipped_step(adamw, loss, norm, 1.0)
        losses.append(float(loss))
        norms.append(float(norm))
        adamw.zero_grad()
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
