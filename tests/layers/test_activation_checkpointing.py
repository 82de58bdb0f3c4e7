import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ligermodels
from tests.cases import CASES, LLAMA
from tests.conftest import DEVICE
from tests.layers.adapters import RANK, adapt

ROWS, LENGTH = 2, 8


def step(recompute, raw=LLAMA, change=lambda model: model):
    """Gradients of one step of a model that `change` was done to, and the FLOPs of its matrix products."""
    torch.manual_seed(0)
    model = change(ligermodels.create(raw, device=DEVICE))
    if recompute:
        model.checkpoint_activations()
    ids = torch.randint(3, 99, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(counts[op] for op in counts if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    return [p.grad for p in model.parameters() if p.requires_grad], products


@pytest.mark.parametrize("path", ["reference", "kernels"])
def test_recomputing_a_block_changes_no_gradient_and_skips_its_last_product(path, request):
    if path == "kernels":
        request.getfixturevalue("kernels")
    (expected, once), (got, recomputed) = step(False), step(True)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)
    hidden, inner, qkv = 48, 80, (6 + 2 * 2) * 8
    a_token = 2 * (hidden * qkv + hidden * hidden + hidden * 2 * inner)  # qkv, o and gate_up, not down
    assert recomputed - once == 3 * ROWS * LENGTH * a_token


@pytest.mark.usefixtures("kernels")
def test_recomputing_a_block_with_lora_skips_its_last_product_too():
    (expected, once), (got, recomputed) = step(False, change=adapt), step(True, change=adapt)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)
    hidden, inner, qkv = 48, 80, (6 + 2 * 2) * 8
    a_token = 2 * (hidden * qkv + hidden * hidden + hidden * 2 * inner)
    narrow = 2 * RANK * (hidden * (3 + 1 + 2) + inner)
    wide = 2 * RANK * (qkv + hidden + 2 * inner + hidden)
    # Of the down projection the backward's products with B, and dlow A: in a node they are in place, which FLOP
    # counters skip.
    in_parts = 2 * RANK * (2 * hidden + inner)
    assert recomputed - once == 3 * ROWS * LENGTH * (a_token + narrow + wide + in_parts)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "granite", "qwen3", "qwen2_moe-aux-loss"])
def test_every_kind_of_block_is_recomputed_to_the_same_gradients(name):
    raw = CASES[name] | {"num_hidden_layers": 1}
    (expected, once), (got, recomputed) = step(False, raw), step(True, raw)
    assert recomputed > once
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)
