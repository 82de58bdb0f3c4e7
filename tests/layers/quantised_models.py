"""For tests of quantised models: what one is compared with, and the most bytes that a computation holds."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ligermodels
from ligermodels.weights.module import named_weights
from tests.conftest import DEVICE


def quantised_and_dense(folder, scheme="nf4"):
    """The quantised model, and one whose weights are the dequantised ones."""
    quantised = ligermodels.load(folder, device=DEVICE, quantize=scheme)
    dense = ligermodels.load(folder, device=DEVICE).requires_grad_(False)
    values = named_weights(quantised)
    for name, parameter in dense.named_parameters():
        value = values[name]
        parameter.copy_(value if isinstance(value, torch.Tensor) else value.dequantize())
    return quantised, dense


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at a time, among those allocated in this thread on the host."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for x in tree_leaves(outputs):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.untyped_storage() not in self.known:
                storage = x.untyped_storage()
                self.known.add(storage)
                weakref.finalize(storage, self.freed, storage.nbytes())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
        return outputs

    def freed(self, nbytes):
        self.live -= nbytes
