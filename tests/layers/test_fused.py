import pytest
import torch
from torch import nn

import ligermodels
from tests.cases import LLAMA
from tests.conftest import DEVICE


@pytest.mark.usefixtures("kernels")
def test_a_watched_linear_takes_the_composed_path_with_equal_gradients():
    """A hook sees every projection's input, which a fused node would never materialise for it."""
    ids = torch.randint(3, 99, (2, 16), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    gradients, seen = [], []
    for watched in (False, True):
        model = ligermodels.create(LLAMA | {"attention_bias": True, "mlp_bias": True}, device=DEVICE)
        for module in model.model.modules():
            if watched and isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[-1]))
        model(ids, ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert seen == 3 * [48, 48, 48, 80]  # the inputs of qkv, o, gate_up and down in three layers
    for fused, composed in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, composed, rtol=1e-5, atol=1e-6)
