from functools import partial

import pytest
import torch

from ligermodels.kernels.norms.gated_rms_norm import gated_rms_norm, gated_rms_norm_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 40, 3, 12), (700, 33)])
@pytest.mark.parametrize("gate_first", [False, True])
def test_within_the_error_budget(shape, gate_first, dtype):
    inputs = [torch.randn(s, device=DEVICE, dtype=torch.float64) for s in (shape, shape, shape[-1:])]
    ours, reference = (partial(f, gate_first=gate_first) for f in (gated_rms_norm, gated_rms_norm_reference))
    check(ours, reference, inputs, dtype, factor=2.0)


def test_heads_of_a_wider_projection_give_equal_bits():
    x, wide, weight = (torch.randn(s, device=DEVICE) for s in ((2, 5, 3, 8), (2, 5, 40), (8,)))
    z = wide[..., 7:31].unflatten(-1, (3, 8))
    assert torch.equal(gated_rms_norm(x, z, weight), gated_rms_norm(x, z.contiguous(), weight))


def test_wrong_shapes_are_refused():
    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"weight has shape \[7\]; needed \[8\]"):
        gated_rms_norm(x, x, torch.ones(7, device=DEVICE))
    with pytest.raises(ValueError, match=r"z has shape \[1, 8\]; needed \[2, 8\]"):
        gated_rms_norm(x, x[:1], torch.ones(8, device=DEVICE))
