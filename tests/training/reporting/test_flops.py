"""Model FLOPs per token compared with counts by torch and by hand, and the peak FLOP/s of known GPUs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ligermodels
from ligermodels.training.reporting.flops import (
    flops_per_token,
    matrix_flops,
    mean_attended_keys,
    peak_flops,
    peak_flops_of_gpu,
)
from tests.cases import LLAMA

HIDDEN, INNER, VOCAB, QUERIES, PACKED = 48, 80, 99, 48, (6 + 2 * 2) * 8
BLOCK = HIDDEN * PACKED + QUERIES * HIDDEN + 3 * HIDDEN * INNER


def model(**changes):
    return ligermodels.create(LLAMA | changes, device="meta")


def counted(layers, tokens=16):
    """FLOPs of matrix products per token, counted by torch."""
    trained = ligermodels.create(LLAMA | {"num_hidden_layers": layers})
    ids = torch.arange(3, 3 + tokens)[None]
    with FlopCounterMode(display=False) as counter:
        trained(ids, ids).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(counts[op] for op in counts if op in (torch.ops.aten.mm, torch.ops.aten.addmm)) / tokens


def test_the_flops_of_a_block_equal_torchs_count():
    ours = matrix_flops(model(num_hidden_layers=3)) - matrix_flops(model(num_hidden_layers=2))
    assert ours == counted(3) - counted(2) == 6 * BLOCK


def test_the_head_counts_and_the_embedding_does_not_whether_tied_or_not():
    for tied in (True, False):
        assert matrix_flops(model(num_hidden_layers=1, tie_word_embeddings=tied)) == 6 * (BLOCK + VOCAB * HIDDEN)


def test_frozen_elements_cost_four_flops_and_lora_elements_six():
    adapted = model(num_hidden_layers=1)
    ligermodels.add_lora(adapted, rank=5, targets=["q_proj", "down_proj"])
    narrow = 5 * (HIDDEN + QUERIES) + 5 * (INNER + HIDDEN)
    assert matrix_flops(adapted) == 4 * (BLOCK + VOCAB * HIDDEN) + 6 * narrow


def test_only_the_experts_that_a_token_is_routed_to_count():
    experts = {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    attention = HIDDEN * PACKED + QUERIES * HIDDEN
    one = 3 * HIDDEN * INNER
    expected = attention + 6 * HIDDEN + 2 * one + VOCAB * HIDDEN
    assert matrix_flops(model(**experts)) == 6 * expected
    biased = {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    assert matrix_flops(model(**biased, head_dim=8)) == 6 * expected  # biases are no matrices
    adapted = model(**experts)
    ligermodels.add_lora(adapted, rank=5, targets=["experts"])
    narrow = 5 * (HIDDEN + 2 * INNER) + 5 * (INNER + HIDDEN)
    assert matrix_flops(adapted) == 4 * expected + 6 * 2 * narrow


@pytest.mark.parametrize("length, window", [(7, None), (7, 3), (7, 7), (7, 100), (1, 1)])
def test_a_query_attends_to_the_keys_before_it_within_the_window(length, window):
    seen = [len(range(max(0, i + 1 - (window or length)), i + 1)) for i in range(length)]
    assert mean_attended_keys(length, window) == pytest.approx(sum(seen) / length)


def test_attention_costs_twelve_flops_per_query_channel_and_key():
    llama = model(num_hidden_layers=3)
    assert flops_per_token(llama, 9) - matrix_flops(llama) == 3 * 12 * QUERIES * 5
    windowed = model(num_hidden_layers=3, model_type="mistral", sliding_window=2)
    assert flops_per_token(windowed, 9) - matrix_flops(windowed) == round(3 * 12 * QUERIES * (1 + 8 * 2) / 9)


def test_states_cost_products_and_sums_with_each_of_their_elements():
    """The delta rule reads, writes and reads; Mamba-2 writes and reads. A convolution's weights are a matrix."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    delta = model(model_type="qwen3_5_text", **heads, linear_value_head_dim=12, layer_types=["linear_attention"] * 3)
    assert flops_per_token(delta, 9) - matrix_flops(delta) == 3 * 3 * 6 * (4 * 8 * 12)
    sizes = {"mamba_n_heads": 6, "mamba_d_state": 20, "num_local_experts": 0, "shared_intermediate_size": INNER}
    mamba = model(model_type="granitemoehybrid", num_hidden_layers=1, **sizes)
    assert flops_per_token(mamba, 9) - matrix_flops(mamba) == 3 * 4 * (2 * HIDDEN * 20)
    inner, channels = 2 * HIDDEN, 2 * HIDDEN + 2 * 20
    mixer = HIDDEN * (inner + channels + 6) + 4 * channels + inner * HIDDEN
    assert matrix_flops(mamba) == 6 * (mixer + 3 * HIDDEN * INNER + VOCAB * HIDDEN)


def test_peak_flops_are_known_for_exact_device_names_in_bfloat16_and_tf32_only():
    assert peak_flops_of_gpu("NVIDIA H200", "bfloat16") == 989.4e12
    assert peak_flops_of_gpu("NVIDIA H100 80GB HBM3", "tf32") == 494.7e12
    assert peak_flops_of_gpu("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert peak_flops_of_gpu("NVIDIA H200", "float32") is None
    assert peak_flops_of_gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16") is None
    assert peak_flops_of_gpu("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16") is None
    assert peak_flops(torch.device("cpu"), "bfloat16") is None
