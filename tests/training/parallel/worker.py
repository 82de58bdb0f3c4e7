"""Trains tiny models for a few steps and saves losses, gradient norms and weights. Runs alone or under torchrun.

Usage: worker.py OUTPUT.pt JSON, where JSON is a list with the arguments of `train` for each run.
"""

import functools
import json
import math
import sys
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

import ligermodels
from ligermodels import distributed
from ligermodels.adapters.quantising import quantise
from ligermodels.layers.checkpointing import token_tiles
from ligermodels.layers.decoder import IGNORE_INDEX, next_tokens
from ligermodels.training.optimizers import building as optimizers
from ligermodels.training.parallel import fsdp
from ligermodels.training.parallel.compilation import compile_blocks
from ligermodels.training.parallel.context_parallel import context_group
from ligermodels.weights.module import named_weights, quantised_bytes
from ligermodels.weights.sharding import copy_local_shard
from tests.layers.adapters import adapt

ROWS = 8


def rows_with_uneven_masks(vocab_size):
    """Row i has its first 2 i labels masked, so that micro-batches and ranks have different token counts."""
    input_ids = torch.randint(vocab_size, (ROWS, 16), generator=torch.Generator().manual_seed(3))
    labels = input_ids.clone()
    for i, row in enumerate(labels):
        row[: 2 * i] = IGNORE_INDEX
    return input_ids, labels


def micro_batches(rows, step, accumulate, batch_size, world):
    """Returns this rank's micro-batches. The rows of a step depend only on their number."""
    per_step = accumulate * world.data_size * batch_size
    indices = (step * per_step + torch.arange(per_step)) % ROWS
    return [[x[own] for x in rows] for own in indices.view(accumulate, world.data_size, batch_size)[:, world.data_rank]]


def supervised(batch):
    labels = next_tokens(batch["labels"], batch.get("cu_seqlens"))
    return (labels != IGNORE_INDEX).sum()


def as_batch(input_ids, labels, offsets):
    """The arguments of forward. offsets: of the documents, if the rows are one packed row."""
    if offsets is None:
        return {"input_ids": input_ids, "labels": labels}
    offsets = torch.tensor(offsets, dtype=torch.int32)
    packed = {"input_ids": input_ids.view(1, -1), "labels": labels.view(1, -1), "cu_seqlens": offsets}
    return packed | {"max_seqlen": int(offsets.diff().max())}


@contextmanager
def compiling_by(backend):
    """torch.compile with another backend, which traces but does not compile: Inductor takes too long."""
    compiler = torch.compile
    torch.compile = functools.partial(compiler, backend=backend)
    yield
    torch.compile = compiler


def build(
    model, world, dtype, param_dtype, checkpointed_blocks, lora, targets, saved, compiled, dp_replicate,
    reshard_after_forward, kept_tensors, experts, quantised, replicate_quantised,
):  # fmt: skip
    """lora: the dtype of the low-rank updates; the base is then stored in the compute dtype. targets: of the updates.
    saved: modules_to_save. quantised: the format of the base."""
    base = getattr(torch, dtype if lora else param_dtype)
    model, dense = (ligermodels.create(model, dtype=base, device="meta") for _ in range(2))
    if quantised:
        quantise(model, quantised)
    if lora:
        for each in (model, dense):
            adapt(each, dtype=getattr(torch, lora), modules_to_save=saved, targets=targets)
    model.checkpoint_activations(checkpointed_blocks, kept_tensors)
    if compiled:
        with compiling_by("eager"):
            compile_blocks(model, world.device)
    compute_dtype = getattr(torch, dtype)
    fsdp.shard(
        model, world, compute_dtype, dp_replicate=dp_replicate, reshard_after_forward=reshard_after_forward,
        expert_parallel=experts, replicate_quantised=replicate_quantised,
    )  # fmt: skip
    model.to_empty(device=world.device)
    if quantised:
        dense.to_empty(device=world.device).initialize(1)
        quantise_values(model, dense)
    else:
        model.initialize(1)
    return model.train()


def quantise_values(model, dense):
    """Gives a model with quantised weights the values of one without."""
    for name, weight in named_weights(model).items():
        value = dense.get_parameter(name).detach()
        if isinstance(weight, torch.Tensor):
            copy_local_shard(weight, value)
        else:
            copy_local_shard(weight.data, weight.quantize(value))


def bytes_of_rank(model):
    """Of quantised weights."""
    owned = (p.to_local() if isinstance(p, DTensor) else p for p in quantised_bytes(model))
    return sum(part.nbytes for part in owned)


def train(
    model, accumulate=1, batch_size=4, steps=3, dtype="float32", param_dtype="float32",
    checkpointed_blocks=0, lora=None, targets=("all-linear",), saved=(), compiled=False, dp_replicate=1, name="adamw",
    reshard_after_forward=True, kept_tensors=0, offsets=None, context=1, experts=1, tile_tokens=token_tiles.TILE_TOKENS,
    quantised=None, replicate_quantised=False,
):  # fmt: skip
    """offsets: of the documents of a micro-batch, which is then packed. context: ranks that share a row. experts: ranks
    over which routed experts are distributed. tile_tokens: the fewest of a tile, in checkpointed blocks."""
    token_tiles.TILE_TOKENS = tile_tokens
    world = replace(distributed.start(), context=context)
    shared = {"context": context_group(world)} if context > 1 else {}
    model = build(
        model, world, dtype, param_dtype, checkpointed_blocks, lora, targets, saved, compiled, dp_replicate,
        reshard_after_forward, kept_tensors, experts, quantised, replicate_quantised,
    )  # fmt: skip
    optimizer = optimizers.build_optimizer(model, name)
    optimizers.set_learning_rate(optimizer, 1e-2)
    rows = rows_with_uneven_masks(model.config.vocab_size)
    losses, norms = [], []
    for step in range(steps):
        batches = [as_batch(*each, offsets) for each in micro_batches(rows, step, accumulate, batch_size, world)]
        batches = [{name: on(world.device, value) for name, value in batch.items()} for batch in batches]
        count = distributed.total(sum(map(supervised, batches))) // context
        loss = torch.zeros((), device=world.device)
        for number, batch in enumerate(batches, 1):
            fsdp.set_gradient_all_reduce(model, enabled=number == accumulate)
            share = model(**batch, num_items_in_batch=count, **shared).loss
            share.backward()
            loss += share.detach()
        fsdp.sum_replicated_gradients(model)
        loss, norm = distributed.total(loss), fsdp.gradient_norm(model)
        optimizers.clip_and_step(
            optimizer, loss, norm, math.inf
        )  # no clipping: the norm's last bit depends on the sharding
        losses.append(float(loss))
        norms.append(float(norm))
        optimizer.zero_grad()
    weights = {name: whole(parameter.detach()).cpu() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights, "quantised bytes": bytes_of_rank(model)}


def on(device, value):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(output, runs):
    """Trains the runs one after the other, as one of the ranks that the environment names; the first writes them."""
    world = distributed.start()
    distributed.start = functools.partial(distributed.World, world.device, world.rank, world.size)
    results = [train(**settings) for settings in runs]
    if world.is_first:
        torch.save(results, output)
    distributed.wait_for_all()
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
