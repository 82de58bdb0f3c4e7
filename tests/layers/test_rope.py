"""RoPE frequencies are not in checkpoints, so that moving or casting a model must not change them."""

import pytest
import torch

from ligermodels.architectures import ARCHITECTURES
from ligermodels.hub import models as hub
from tests.cases import CASES


def built(name):
    """The model as its constructor builds it, never moved."""
    architecture = ARCHITECTURES[CASES[name]["model_type"]]
    return architecture(architecture.Config.from_dict(CASES[name]))


# The first case of each combination of frequency scalings.
ROPES = {
    tuple(sorted(rope.rope_type for rope in hub.select_architecture(raw, name)[1].ropes.values())): name
    for name, raw in reversed(CASES.items())
}


@pytest.mark.parametrize("name", ROPES.values())
def test_frequencies_do_not_change_with_a_cast_or_to_empty(name, poisoned):
    moved = hub.create(CASES[name], dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
    expected = dict(built(name).named_buffers())
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in expected.values())
    stored = moved.stored_buffers().keys()
    assert moved.state_dict().keys() == dict(moved.named_parameters()).keys() | stored
    for buffer, x in moved.named_buffers():
        assert buffer in stored or torch.equal(x, expected[buffer]), buffer
