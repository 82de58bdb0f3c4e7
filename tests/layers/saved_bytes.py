"""Counts what autograd keeps for backward."""

import torch

import ligermodels
from tests.conftest import DEVICE

BATCH, LENGTH = 2, 16


def saved_bytes(raw, layers, dtype, change=lambda model: None, batch=BATCH, length=LENGTH):
    """Bytes of all distinct storages that autograd holds after a forward of a model that `change` was done to,
    parameters apart."""
    model = ligermodels.create(raw | {"num_hidden_layers": layers}, dtype=dtype, device=DEVICE)
    change(model)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), x)  # x stays alive, so that no address is used twice
        return x

    ids = torch.randint(3, 99, (batch, length), device=DEVICE)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(ids, ids).loss
    assert loss.requires_grad
    return sum(size for size, _ in kept.values())
