"""Activation checkpointing changes no gradient and recomputes no more than it must."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ligermodels
from ligermodels.layers.checkpointing.kept_tensors import ATTENTION_OPS
from tests.cases import CASES, LLAMA
from tests.conftest import DEVICE
from tests.layers.adapters import RANK, adapt

ROWS, LENGTH, LAYERS = 2, 8, 2
TWO_LAYERS = LLAMA | {"num_hidden_layers": LAYERS}


def step(checkpointing, raw=TWO_LAYERS, change=lambda model: model, kept_tensors=0, **documents):
    """Gradients of one training step, and the FLOPs of its matrix products. change: modifies the model first."""
    torch.manual_seed(0)
    model = change(ligermodels.create(raw, device=DEVICE))
    if checkpointing:
        model.checkpoint_activations(kept_tensors=kept_tensors)
    ids = torch.randint(3, 99, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ids = ids.view(1, -1) if documents else ids
    with FlopCounterMode(display=False) as counter:
        model(ids, ids, **documents).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(counts[op] for op in counts if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    return [p.grad for p in model.parameters() if p.requires_grad], products


@pytest.mark.parametrize("path", ["reference", "kernels"])
def test_gradients_are_bit_identical_and_the_last_matrix_product_is_not_recomputed(path, request):
    if path == "kernels":
        request.getfixturevalue("kernels")
    (expected, once), (got, recomputed) = step(False), step(True)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)
    hidden, inner, qkv = 48, 80, (6 + 2 * 2) * 8
    per_token = 2 * (hidden * qkv + hidden * hidden + hidden * 2 * inner)  # qkv, o and gate_up, not down
    assert recomputed - once == LAYERS * ROWS * LENGTH * per_token


@pytest.mark.parametrize("kept_tensors", [0, None])
def test_recomputation_drops_what_the_forward_pass_dropped_of_lora(kept_tensors):
    """The gradients of a dropout that draws other numbers are those of another loss."""

    def change(model):
        ligermodels.add_lora(model, rank=RANK, dropout=0.5)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(parameter)
        torch.manual_seed(1)
        return model.train()

    (expected, _), (got, _) = step(False, change=change), step(True, change=change, kept_tensors=kept_tensors)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("kernels")
def test_with_lora_the_last_matrix_product_is_not_recomputed_either():
    (expected, once), (got, recomputed) = step(False, change=adapt), step(True, change=adapt)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)
    hidden, inner, qkv = 48, 80, (6 + 2 * 2) * 8
    per_token = 2 * (hidden * qkv + hidden * hidden + hidden * 2 * inner)
    narrow = 2 * RANK * (hidden * (3 + 1 + 2) + inner)
    wide = 2 * RANK * (qkv + hidden + 2 * inner + hidden)
    # The unfused down projection's backward products with B and dlow A. FLOP counters do not see those of the fused
    # node, which are in place.
    unfused = 2 * RANK * (2 * hidden + inner)
    assert recomputed - once == LAYERS * ROWS * LENGTH * (per_token + narrow + wide + unfused)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "granite", "qwen3", "qwen2_moe-aux-loss", "deepseek_v3"])
def test_gradients_are_bit_identical_for_every_kind_of_block(name):
    raw = CASES[name] | {"num_hidden_layers": 1}
    (expected, once), (got, recomputed) = step(False, raw), step(True, raw)
    assert recomputed > once
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", ["reference", "kernels"])
def test_what_is_kept_is_not_recomputed_and_gradients_are_bit_identical(path, request):
    if path == "kernels":
        request.getfixturevalue("kernels")
    (expected, once), (got, recomputed) = step(False), step(True, kept_tensors=None)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)
    hidden, inner = 48, 80
    assert recomputed - once == LAYERS * ROWS * LENGTH * 2 * hidden * 2 * inner  # gate_up alone


class Calls(TorchDispatchMode):
    """Counts the calls of every op that runs: one that is kept does not run again."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kept", "runs"), [(0, 3), (2, 3 - 2), (None, 0)])
def test_attention_is_recomputed_only_where_it_is_not_kept(kept, runs):
    model = ligermodels.create(LLAMA, device=DEVICE)
    model.checkpoint_activations(kept_tensors=kept, sequence_length=2**14)  # with so many keys it comes first
    ids = torch.randint(3, 99, (ROWS, LENGTH), device=DEVICE)
    loss = model(ids, ids).loss
    with Calls() as calls:
        loss.backward()
    assert sum(calls.count[op] for op in ATTENTION_OPS) == runs


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "granite", "qwen3", "qwen2_moe-aux-loss", "deepseek_v3"])
def test_selective_checkpointing_of_packed_documents_changes_no_bit_in_any_kind_of_block(name):
    raw = CASES[name] | {"num_hidden_layers": 1}
    documents = {"cu_seqlens": torch.tensor([0, 5, 16], dtype=torch.int32, device=DEVICE), "max_seqlen": 11}
    expected, _ = step(False, raw, **documents)
    got, _ = step(True, raw, kept_tensors=None, **documents)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.usefixtures("kernels")
def test_with_lora_the_updates_alone_are_recomputed_where_products_are_kept():
    (expected, full), (got, selective) = step(True, change=adapt), step(True, change=adapt, kept_tensors=None)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)
    hidden, qkv = 48, (6 + 2 * 2) * 8
    assert full - selective == LAYERS * ROWS * LENGTH * 2 * (hidden * qkv + hidden * hidden)
