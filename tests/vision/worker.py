"""Trains a tiny model with images under FSDP2 where ranks differ in their images. Runs alone or under torchrun.

Usage: worker.py OUTPUT.pt JSON, where JSON is a list with the arguments of `train` for each run.
"""

import functools
import json
import sys
import warnings

import torch

import ligermodels
from ligermodels import distributed
from ligermodels.training.optimizers import building as optimizers
from ligermodels.training.parallel import fsdp
from tests.cases import CASES
from tests.training.parallel.worker import whole
from tests.vision import batches, tiles
from tests.vision.batches import GRIDS

A, B, _ = GRIDS
# Of each step the two rows, which two ranks share: images in one of them, in the other, in none, in both.
STEPS = [[[4, A, 3], [9]], [[5], [2, B, 1, B]], [[6], [8]], [[B, 2], [A, 3]]]
TILES = {A: tiles.WIDE, B: tiles.ONE}


def batch_of(name, pattern, seed):
    """A row with its labels."""
    if name == "mllama":
        batch = tiles.batch_of(name, [[TILES.get(part, part) for part in pattern]], seed=seed)
    else:
        batch = batches.batch_of(name, [pattern], seed=seed)
    return batch | {"labels": batches.completion_labels(name, batch)}


def train(name, parts, checkpointed_blocks=0):
    world = distributed.start()
    model = ligermodels.create(CASES[name], device="meta")
    model.train_parts(parts)
    model.checkpoint_activations(checkpointed_blocks)
    fsdp.shard(model, world, torch.float32)
    model.to_empty(device=world.device)
    model.initialize(1)
    optimizer = optimizers.build_optimizer(model)
    optimizers.set_learning_rate(optimizer, 1e-2)
    losses = []
    for number, patterns in enumerate(STEPS):
        rows = [batch_of(name, pattern, seed=10 * number + row) for row, pattern in enumerate(patterns)]
        loss = torch.zeros(())
        for row in rows[world.rank :: world.size]:
            share = model(**row, num_items_in_batch=10).loss
            share.backward()
            loss += share.detach()
        loss = distributed.total(loss)
        for parameter in model.parameters():  # of one rank, a step without images leaves none
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        fsdp.sum_replicated_gradients(model)
        optimizers.clip_and_step(optimizer, loss, fsdp.gradient_norm(model), 1e9)
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [
                float(loss),
                float(distributed.total(model.eval()(**rows[world.rank % 2]).logits.isfinite().all())),
            ]
        model.train()
    return {"losses": losses[::2], "weights": {n: whole(p.detach()) for n, p in model.named_parameters()}}


if __name__ == "__main__":
    warnings.filterwarnings("error", message=".*returned a view tensor")  # of FSDP2
    world = distributed.start()
    distributed.start = functools.partial(distributed.World, world.device, world.rank, world.size)
    results = [train(**settings) for settings in json.loads(sys.argv[2])]
    if world.is_first:
        torch.save(results, sys.argv[1])
    distributed.wait_for_all()
    distributed.stop()
