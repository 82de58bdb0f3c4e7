"""Counts the bytes that autograd and selective checkpointing save for backward."""

import gc
from itertools import accumulate

import torch
from torch.utils.checkpoint import _VersionWrapper

import ligermodels
from tests.conftest import DEVICE

BATCH, LENGTH = 2, 16


def saved_bytes(raw, layers, dtype, change=lambda model: None, batch=BATCH, length=LENGTH):
    """Bytes of all distinct storages that are saved in one forward, without parameters.

    change: a function that modifies the model first.
    """
    model = ligermodels.create(raw | {"num_hidden_layers": layers}, dtype=dtype, device=DEVICE)
    change(model)
    return saved_by(model, torch.randint(3, 99, (batch, length), device=DEVICE))


def saved_by(model, ids, **images):
    """As `saved_bytes`, of a model and a batch."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def save(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = (storage.nbytes(), x)  # keeps x alive, so that no address is reused
        return x

    before = wrapped()  # a graph without a backward pass keeps them
    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        loss = model(ids, ids, **images).loss
    assert loss.requires_grad
    for kept in wrapped():
        # What attention on a GPU returns beside tensors, such as None for a mask, is kept too.
        if isinstance(kept.val, torch.Tensor) and not any(kept is other for other in before):
            save(kept.val)
    return sum(size for size, _ in saved.values())


def wrapped():
    """The results that selective checkpointing keeps now."""
    return [x for x in gc.get_objects() if type(x) is _VersionWrapper]


def peak_bytes(function):
    """The most bytes of tensors that exist at a time while `function` runs, beside those that exist before, which the
    caller keeps."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # Triton's interpreter leaves tensors in cycles of references
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    gc.set_threshold(*threshold)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
