"""What a block keeps for backward: the inputs of its two norms and their rstd, post-RoPE qkv, attention's output and
its log-sum-exp, gate_up. Nothing else, and no matrix product is recomputed."""

import pytest
import torch

import ligermodels
from tests.cases import LLAMA
from tests.conftest import DEVICE

H, INNER, HQ, HKV, D = 256, 320, 4, 2, 64
BATCH, LENGTH = 2, 32
RAW = LLAMA | {
    "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": HQ, "num_key_value_heads": HKV,
    "max_position_embeddings": 64,
}  # fmt: skip


def saved_bytes(layers, dtype):
    """Bytes of all distinct storages that autograd holds after a forward, parameters apart."""
    model = ligermodels.create(RAW | {"num_hidden_layers": layers}, dtype=dtype, device=DEVICE)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), x)  # x stays alive, so that no address is used twice
        return x

    ids = torch.randint(3, 99, (BATCH, LENGTH), device=DEVICE)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(ids, ids).loss
    assert loss.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.usefixtures("kernels")
def test_a_block_keeps_what_the_design_lists():
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    size = dtype.itemsize
    per_token_and_layer = (saved_bytes(5, dtype) - saved_bytes(3, dtype)) / (2 * BATCH * LENGTH)
    activations = (2 * H + (HQ + 2 * HKV) * D + HQ * D + 2 * INNER) * size
    statistics = (2 + HQ) * 4  # two rstd and the log-sum-exp of each head, fp32
    statistics += 2 * 8 / (BATCH * LENGTH)  # attention's random state, two integers a call
    assert activations + 2 * 4 <= per_token_and_layer <= activations + statistics
