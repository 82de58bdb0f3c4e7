"""The tensors that a block saves for backward: the inputs of its two norms and their rstd, post-RoPE qkv, the output of
attention and its log-sum-exp, gate_up. Nothing else is saved, and no matrix product is recomputed. QK-norm, experts,
LayerNorms and LoRA save a little more.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ligermodels
from tests.cases import CASES, LLAMA
from tests.conftest import DEVICE
from tests.layers.adapters import RANK, adapt
from tests.layers.saved_bytes import BATCH, LENGTH, saved_by, saved_bytes

H, INNER, HQ, HKV, D = 256, 320, 4, 2, 64
RAW = LLAMA | {
    "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": HQ, "num_key_value_heads": HKV,
    "max_position_embeddings": 64,
}  # fmt: skip


def per_token_and_layer(raw, change=lambda model: None):
    """Saved bytes per token and layer, and the size of an element."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    two, one = (saved_bytes(raw, layers, dtype, change) for layers in (2, 1))
    return (two - one) / (BATCH * LENGTH), dtype.itemsize


ATTENTION = H + (HQ + 2 * HKV) * D + HQ * D  # the input of the norm; q, k and v; the output
MEAN, RSTD, LOG_SUM_EXP = 4, 4, 4  # fp32
RANDOM_STATE = 2 * 8 / (BATCH * LENGTH)  # of attention: two integers per call


@pytest.mark.usefixtures("kernels")
def test_a_block_saves_only_the_listed_tensors():
    saved, size = per_token_and_layer(RAW)
    activations = (ATTENTION + H + 2 * INNER) * size
    assert activations + 2 * RSTD <= saved <= activations + 2 * RSTD + HQ * LOG_SUM_EXP + RANDOM_STATE


@pytest.mark.usefixtures("kernels")
def test_a_block_with_layer_norms_saves_no_normed_values():
    """A block of Qwen2-VL's tower: of its norms the inputs, mean and rstd; without a gate the activation's input."""
    side, merged = 8, 16
    ids = torch.tensor([[5, *[CASES["qwen2_vl"]["image_token_id"]] * merged, 6]], device=DEVICE)
    grid = torch.tensor([[1, side, side]], device=DEVICE)
    images = {"pixel_values": torch.randn(side**2, 3 * 2 * 2 * 2, device=DEVICE), "image_grid_thw": grid}
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32

    def saved(depth):
        tower = CASES["qwen2_vl"]["vision_config"] | {"depth": depth, "embed_dim": H, "num_heads": HQ}
        model = ligermodels.create(CASES["qwen2_vl"] | {"vision_config": tower}, dtype=dtype, device=DEVICE)
        return saved_by(model, ids, **images)

    a_block = (saved(2) - saved(1)) / side**2
    activations = (H + 4 * H + H + 2 * H) * dtype.itemsize  # the second norm's input; the MLP has twice the width
    statistics = 2 * (MEAN + RSTD)
    assert activations + statistics <= a_block <= activations + statistics + HQ * LOG_SUM_EXP + RANDOM_STATE


@pytest.mark.usefixtures("kernels")
def test_lora_also_saves_the_low_rank_activations():
    saved, size = per_token_and_layer(RAW, adapt)
    narrow = (3 + 1 + 2 + 1) * RANK  # of q, k and v; o; gate and up; down
    activations = (ATTENTION + H + 2 * INNER + narrow) * size
    assert activations + 2 * RSTD <= saved <= activations + 2 * RSTD + HQ * LOG_SUM_EXP + RANDOM_STATE


def products(layers):
    """FLOPs of the matrix products of a LoRA training step with a frozen base."""
    model = adapt(ligermodels.create(RAW | {"num_hidden_layers": layers}, device=DEVICE))
    ids = torch.randint(3, 99, (BATCH, LENGTH), device=DEVICE)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(counts[op] for op in counts if op in (torch.ops.aten.mm, torch.ops.aten.addmm))


@pytest.mark.usefixtures("kernels")
def test_lora_multiplies_by_each_weight_once_in_forward_and_once_in_backward():
    """No frozen weight's gradient is computed and no product is recomputed. FLOP counters skip in-place products."""
    shapes = {
        "qkv": (H, (HQ + 2 * HKV) * D, 3),
        "o": (HQ * D, H, 1),
        "gate_up": (H, 2 * INNER, 2),
        "down": (INNER, H, 1),
    }
    weights = sum(2 * inputs * outputs for inputs, outputs, _ in shapes.values())
    narrow = sum(2 * inputs * pieces * RANK for inputs, _, pieces in shapes.values())
    wide = sum(2 * outputs * RANK for _, outputs, _ in shapes.values())
    # With A: low = x Aᵀ and dA. With B: low Bᵀ. The others, dx += dlow A, dlow and dB, are in place.
    expected = BATCH * LENGTH * (2 * weights + 2 * narrow + wide)
    assert products(2) - products(1) == expected


@pytest.mark.usefixtures("kernels")
def test_qk_norm_saves_queries_and_keys_twice():
    saved, size = per_token_and_layer(RAW | {"model_type": "qwen3", "head_dim": D})
    activations = (ATTENTION + (HQ + HKV) * D + H + 2 * INNER) * size
    assert activations + 2 * RSTD <= saved <= activations + 2 * RSTD + HQ * LOG_SUM_EXP + RANDOM_STATE


@pytest.mark.usefixtures("kernels")
def test_experts_save_their_input_and_the_gate_up_of_each_slot():
    experts, slots = 6, 2
    saved, size = per_token_and_layer(
        RAW | {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": slots}
    )
    activations = (ATTENTION + 2 * H + slots * 2 * INNER) * size + 2 * RSTD
    routing = 4 * experts + 4  # probabilities, fp32, and the sum of the top k
    routing += slots * (3 * 8 + 2 * 4)  # three indices and the weight of each slot, as routed and as sorted
    routing += 4 * experts / (BATCH * LENGTH)  # the end of each expert's rows
    assert activations <= saved <= activations + routing + HQ * LOG_SUM_EXP + RANDOM_STATE
