"""Memory estimates against measured bytes: tensors of tiny models, and peak memory of training steps on an H200."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import ligermodels
from ligermodels.adapters.quantising import quantise
from ligermodels.architectures import ARCHITECTURES
from ligermodels.generation.engine import Engine
from ligermodels.generation.paged_cache import PAGE_SIZE
from ligermodels.kernels.losses import linear_logprobs_loss, logits_chunks, logprob_chunks
from ligermodels.kernels.losses.linear_logprobs import linear_logprobs
from ligermodels.kernels.losses.logits_chunks import low_memory_buffer
from ligermodels.memory import blocks as head_memory
from ligermodels.memory.blocks import HeadOp, beside_recomputed, recomputed_by_mlp, saved_by_block
from ligermodels.memory.model import (
    count_parameters,
    inference_memory,
    largest_dequantised,
    state_bytes,
    training_memory,
)
from ligermodels.training.optimizers import build_optimizer
from ligermodels.training.optimizers.offloaded import bytes_where_offloaded
from tests.cases import CASES, LLAMA
from tests.conftest import DEVICE
from tests.kernels.allocations import allocations
from tests.layers.saved_bytes import peak_bytes, saved_bytes

GIB = 2**30
LAYERS, TOKENS = 2, 16
BASE = LLAMA | {
    "hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
SHARED = {"num_experts": 6, "moe_intermediate_size": 160, "shared_expert_intermediate_size": 192}
SINKS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 160}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 48,
    "full_attention_interval": 2,
}  # fmt: skip
MAMBA = {
    "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "mamba_n_heads": 16, "mamba_d_state": 32,
}  # fmt: skip
ROUTED = {"n_routed_experts": 6, "moe_intermediate_size": 160, "num_experts_per_tok": 2}
LATENTS = {
    "q_lora_rank": 160, "kv_lora_rank": 96, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64,
    "n_routed_experts": 6, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 160, "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "layer_types": ["full_attention"] * 2, "global_head_dim": 64, "head_dim": 64,
    "num_hidden_layers": 2, "vocab_size_per_layer_input": 99, "rope_parameters": None,
}  # fmt: skip
MODELS = {
    "dense": BASE,
    "sandwich norms and QK-norm": BASE | {"model_type": "gemma3_text", "head_dim": 64},
    "scaled queries": BASE | {"model_type": "ministral3", "head_dim": 64},
    "QK-norm after RoPE": BASE | {"model_type": "hunyuan_v1_dense", "head_dim": 64},
    "parallel branches": BASE | {"model_type": "cohere2", "head_dim": 64, "sliding_window": 64},
    "sigmoid router": BASE | ROUTED | {"model_type": "glm4_moe", "head_dim": 64, "first_k_dense_replace": 0},
    "latent attention": BASE | LATENTS | {"model_type": "deepseek_v3", "num_key_value_heads": 4},
    "latent attention without a latent of the queries": BASE
    | LATENTS
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
    },
    "layer inputs and shared keys": BASE | GEMMA4 | {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 64},
    "experts beside the MLP, keys that are values": BASE
    | GEMMA4
    | {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 160,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "sinks and biased experts": BASE | SINKS | {"model_type": "gpt_oss", "head_dim": 64, "sliding_window": 64},
    "short convolutions": BASE | {"model_type": "lfm2", "full_attn_idxs": [1]},
    "Mamba-2 and attention": BASE | MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 320},
    "Mamba-2 with experts and a shared one": BASE | MAMBA | SINKS | {"shared_intermediate_size": 192},
    "gated delta rule": BASE | DELTA | {"model_type": "qwen3_5_text", "head_dim": 64},
    "routed experts and a shared one": BASE | SHARED | {"model_type": "qwen2_moe", "num_experts_per_tok": 2},
}

KINDS_OF_MIXERS = [
    "sandwich norms and QK-norm", "parallel branches", "latent attention", "layer inputs and shared keys",
    "gated delta rule", "Mamba-2 and attention", "routed experts and a shared one",
]  # fmt: skip


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "lora"),
    [(name, ("all-linear",) if name == "sandwich norms and QK-norm" else ()) for name in MODELS]
    + [("routed experts and a shared one", ("all-linear", "experts"))],
)
def test_activations_match_the_tensors_that_autograd_saves(name, lora):
    def change(model):
        if lora:
            ligermodels.add_lora(model, rank=16, targets=lora)
        for block in model.model.layers if DEVICE == "cpu" else ():
            block.mixer.sinks = None  # with them the CPU saves all scores

    raw, dtype = MODELS[name], torch.bfloat16 if DEVICE == "cuda" else torch.float32
    saved = saved_bytes(raw, LAYERS, dtype, change, 1, TOKENS)
    model = ligermodels.create(raw | {"num_hidden_layers": LAYERS}, dtype=dtype, device="meta")
    change(model)
    vocab, hidden = model.lm_head.weight.shape
    head = (TOKENS + (0 if lora else vocab)) * hidden * 4  # its gradients, which are part of `loss`
    estimate = training_memory(model, 1, TOKENS, dtype).activations + head
    assert estimate == pytest.approx(saved, rel=0.03)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", KINDS_OF_MIXERS)
def test_what_checkpointed_blocks_keep_matches_the_estimate(name):
    def change(model):
        if name == "sandwich norms and QK-norm":
            ligermodels.add_lora(model, rank=16)
        model.checkpoint_activations(kept_tensors=None, sequence_length=TOKENS)

    raw, dtype = MODELS[name], torch.bfloat16 if DEVICE == "cuda" else torch.float32
    saved = saved_bytes(raw, LAYERS, dtype, change, 1, TOKENS)
    model = ligermodels.create(raw | {"num_hidden_layers": LAYERS}, dtype=dtype, device="meta")
    change(model)
    vocab, hidden = model.lm_head.weight.shape
    head = (TOKENS + vocab * model.lm_head.weight.requires_grad) * hidden * 4
    estimate = training_memory(model, 1, TOKENS, dtype, checkpointed_blocks=LAYERS, kept_tensors=None)
    assert estimate.activations + head == pytest.approx(saved, rel=0.03)


@pytest.fixture
def short_ring(monkeypatch):
    """Of 512 classes: pieces of 128 rows, and a ring of one. With 512 rows of 128 columns, two fit where units need
    them, three do not."""
    piece = 128 * 512 * 4
    sizes = {"MAX_PIECE_BYTES": piece, "MAX_LOGITS_BYTES": piece, "MIN_CHUNK_ROWS": 128}
    for name, size in sizes.items():
        monkeypatch.setattr(logits_chunks, name, size)


@pytest.mark.usefixtures("kernels", "short_ring")
@pytest.mark.parametrize(
    ("unit", "frozen", "most_roundings"), [(1, False, 8), (1, True, 8), (128, False, 8), (129, False, 1)]
)
def test_a_loss_of_log_probabilities_takes_what_the_plan_says(monkeypatch, unit, frozen, most_roundings):
    """Both gradients, that of the head in fp32 where it would be rounded often, and a ring of fp32 logits."""
    monkeypatch.setattr(logits_chunks, "MAX_ROUNDINGS", most_roundings)
    dtype, rows, taken = torch.bfloat16, 512, []
    model = ligermodels.create(BASE | {"hidden_size": 128, "vocab_size": 512}, dtype=dtype).to(DEVICE)
    weight = model.lm_head.weight.requires_grad_(not frozen)
    gradients, logits = linear_logprobs_loss.empty_gradients, linear_logprobs_loss.empty_logits

    def taking(function):
        return lambda *options: taken.append(function(*options)) or taken[-1]

    monkeypatch.setattr(linear_logprobs_loss, "empty_gradients", taking(gradients))
    monkeypatch.setattr(linear_logprobs_loss, "empty_logits", taking(logits))
    hidden = torch.randn(rows, weight.shape[1], dtype=dtype, device=DEVICE, requires_grad=True)
    borders = None if unit == 1 else [0, 127, *range(127 + unit, rows, unit), rows]
    options = torch.arange(rows, device=DEVICE), lambda logprobs, *_: -logprobs.sum()
    linear_logprobs_loss.linear_logprobs_loss(hidden, weight, *options, borders=borders)
    (of_hidden, of_weight, _), ring = taken
    needs = training_memory(model, 1, rows, dtype, head_op=HeadOp("linear_logprobs_loss", unit)).loss
    rounded = of_weight.numel() * dtype.itemsize * (of_weight.dtype != dtype)
    assert of_hidden.nbytes + of_weight.nbytes + max(ring.nbytes, rounded) == needs
    assert (len(ring), of_weight.dtype == dtype) == (128 if unit == 1 else 256, most_roundings == 8)


@pytest.mark.usefixtures("short_ring")
def test_the_plan_of_units_that_may_be_too_long_has_what_their_log_probabilities_take():
    model = ligermodels.create(BASE | {"hidden_size": 128, "vocab_size": 512}, dtype=torch.bfloat16, device="meta")
    needs = {
        op: training_memory(model, 1, 512, torch.bfloat16, head_op=op).loss
        for op in (HeadOp("linear_logprobs"), *(HeadOp("linear_logprobs_loss", unit) for unit in (128, 129, 130)))
    }
    again, fits, longest, too_long = needs.values()
    assert fits == longest < again == too_long


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["recomputed", "more rows than a part", "frozen", "kept"])
def test_log_probabilities_take_what_the_plan_says(monkeypatch, kind):
    """In backward both gradients, fp32 sums of the rows, or of the weight too, and a buffer; with a frozen head in the
    forward one gradient and a buffer."""
    rows = 32 if kind == "kept" else 256
    monkeypatch.setattr(logprob_chunks, "MAX_BACKWARD_ROWS", 192 if kind == "more rows than a part" else 256)
    monkeypatch.setattr(head_memory, "MAX_BACKWARD_ROWS", logprob_chunks.MAX_BACKWARD_ROWS)
    dtype = torch.bfloat16
    model = ligermodels.create(BASE | {"hidden_size": 64, "vocab_size": 512}, dtype=dtype).to(DEVICE)
    weight = model.lm_head.weight.requires_grad_(kind != "frozen")
    hidden = torch.randn(rows, weight.shape[1], dtype=dtype, device=DEVICE, requires_grad=True)
    with allocations("empty", "empty_like") as forward:
        logprobs = linear_logprobs(hidden, weight, torch.arange(rows, device=DEVICE)).logprobs.sum()
    with allocations("empty", "empty_like") as backward:
        logprobs.backward()
    passes = ([x for x in made if x.numel() > rows] for made in (forward, backward))
    measured = weight.nbytes + 4 * rows * 512 if kind == "kept" else max(map(nbytes, passes))
    assert measured == training_memory(model, 1, rows, dtype, head_op=HeadOp("linear_logprobs")).loss


@pytest.mark.usefixtures("kernels")
def test_the_low_memory_loss_saves_what_the_plan_says():
    """Both gradients of the head in bf16; beside them its forward takes a buffer of logits."""
    raw, tokens, dtype = BASE | {"hidden_size": 64, "vocab_size": 512}, 64, torch.bfloat16
    saved = saved_bytes(raw, LAYERS, dtype, lambda model: setattr(model.lm_head, "low_memory_loss", True), 1, tokens)
    model = ligermodels.create(raw | {"num_hidden_layers": LAYERS}, dtype=dtype, device="meta")
    needs = training_memory(model, 1, tokens, dtype, low_memory_loss=True)
    hidden, weight = torch.empty(tokens, 64, dtype=dtype), model.lm_head.weight
    buffer = low_memory_buffer(hidden, weight)[0] * dtype.itemsize
    assert needs.loss == hidden.nbytes + weight.nbytes + buffer
    assert needs.activations + needs.loss - buffer == pytest.approx(saved, rel=0.03)


@pytest.mark.usefixtures("kernels")
def test_a_recomputed_feed_forward_layer_saves_half_of_what_the_plan_adds():
    """The input of the down projection; its gradient takes as much."""

    def unfuse(model):
        for block in model.blocks:
            block.mlp.fused = False

    raw, dtype = LLAMA, torch.bfloat16
    added = saved_bytes(raw, LAYERS, dtype, unfuse, 1, TOKENS) - saved_bytes(raw, LAYERS, dtype, batch=1, length=TOKENS)
    blocks = ligermodels.create(raw | {"num_hidden_layers": LAYERS}, device="meta").blocks
    assert 2 * added == TOKENS * sum(recomputed_by_mlp(block.mlp, dtype.itemsize) for block in blocks) > 0


def plan_of_8b(batch_size, length, **settings):
    """Full training with 8-bit AdamW in the backward pass and the low-memory loss."""
    model = ligermodels.create(LLAMA_8B, dtype=torch.bfloat16, device="meta")
    optimizer = build_optimizer(model, "adamw8bit")
    optimizer.create_states()
    lean = {"checkpointed_blocks": 32, "optimizer_states": state_bytes(optimizer), "step_in_backward": True}
    return training_memory(model, batch_size, length, torch.bfloat16, **lean | {"low_memory_loss": True} | settings)


def test_the_plan_of_8b_with_lean_states_and_offloaded_inputs():
    peaks = [plan_of_8b(8, 2048, **settings).peak / 2**30 for settings in ({"low_memory_loss": False}, {})]
    assert peaks == pytest.approx([52.4, 51.6], abs=0.05)
    assert plan_of_8b(8, 2048, room_for_inputs=2**33).peak < 51.0 * 2**30
    long = plan_of_8b(1, 2**18, room_for_inputs=80 * 2**30)
    assert (long.offloads_every, long.host) == (1, 64 * 2**30)
    assert [long.peak / 2**30, plan_of_8b(1, 2**18).peak / 2**30] == pytest.approx([69.6, 129.4], abs=0.1)


@pytest.mark.parametrize(("tokens", "host", "peak"), [(2**19, 64, 153.5), (2**19, 128, 93.6), (2**20, 256, 141.8)])
def test_the_plan_of_8b_with_half_a_million_and_a_million_tokens(tokens, host, peak):
    long = plan_of_8b(1, tokens, room_for_inputs=host * 2**30)
    assert (long.host / 2**30, long.peak / 2**30) == (host, pytest.approx(peak, abs=0.1))


# Peaks of Llama-3-8B with so many layers, one row, on an H200 (2026-11-26): GiB with the inputs of every k-th block in
# host memory, or of none. States are offloaded, parameters rounded to nearest.
MEASURED = [
    (3, 2**18, 0, 31.87), (3, 2**18, 1, 29.87), (3, 2**17, 1, 17.77), (8, 2**17, 0, 25.80), (8, 2**17, 1, 19.80),
    (8, 2**17, 2, 22.80), (8, 2**17, 4, 24.80), (32, 2**19, 2, 125.8),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "tokens", "every", "measured"), MEASURED)
def test_the_plan_of_a_long_row_is_within_3_percent(layers, tokens, every, measured):
    model = ligermodels.create(LLAMA_8B | {"num_hidden_layers": layers}, dtype=torch.bfloat16, device="meta")
    optimizer = build_optimizer(model, "adamw8bit", param_rounding="nearest")
    optimizer.create_states()
    inputs = len(range(0, layers, every)) if every else 0
    needs = training_memory(
        model, 1, tokens, torch.bfloat16, checkpointed_blocks=layers,
        optimizer_states=bytes_where_offloaded(optimizer)[0], room_for_inputs=inputs * tokens * 4096 * 2,
        low_memory_loss=True, step_in_backward=True,
    )  # fmt: skip
    assert needs.offloads_every == every
    assert needs.peak / 2**30 == pytest.approx(measured, rel=0.03)


def test_beyond_one_tile_a_recomputed_block_takes_its_inputs_and_gradients_but_no_wide_buffers():
    """Per token of Llama-3-8B, in units of its hidden size in bf16.

    Without tiles 11.5 are saved, and the feed-forward layer takes 7. Over tiles 4.5 are saved, and the layer's input is
    gone when attention has its gradients. These are 2.5 of what is saved, 2 of queries in fp32, and 2 of keys and
    values for each query head.
    """
    model = ligermodels.create(LLAMA_8B | {"num_hidden_layers": 1}, dtype=torch.bfloat16, device="meta")
    (block,), unit = model.model.layers, 4096 * 2
    few, many = 2**15 - 1, 2**18
    assert saved_by_block(block, 2) // unit == 11  # and log-sum-exp and rstd
    assert beside_recomputed(block, few, 2) == 7 * few * unit
    statistics = 32 * 4  # log-sum-exp is counted among what has gradients
    assert beside_recomputed(block, many, 2) == many * ((4.5 - 1 + 2.5 + 4 - 11.5) * unit + statistics)


def peaks_of_micro_batches(tokens, checkpointed, **raw):
    """Bytes beside the weights at the peak of 1, 2 and 4 micro-batches, as measured and as planned."""
    raw = BASE | {"num_hidden_layers": 3, "hidden_size": 128, "vocab_size": 512, "max_position_embeddings": 256} | raw
    model = ligermodels.create(raw, device=DEVICE)
    model.checkpoint_activations(checkpointed)
    ids = torch.arange(tokens, device=DEVICE)[None]

    def step(micro_batches):
        for _ in range(micro_batches):
            model(ids, ids).loss.backward()
        model.zero_grad()

    step(1)
    measured = [peak_bytes(partial(step, count)) for count in (1, 2, 4)]
    plans = [
        training_memory(model, 1, tokens, torch.float32, checkpointed_blocks=checkpointed, micro_batches=count)
        for count in (1, 2, 4)
    ]
    return measured, [needs.peak - needs.weights - needs.optimizer_states for needs in plans]


def test_from_the_second_micro_batch_on_all_gradients_exist_beside_all_activations():
    measured, planned = peaks_of_micro_batches(256, 0)
    gradients = 4 * (2 * 512 * 128 + 3 * (128 * (4 + 2 * 2 + 4) * 32 + 3 * 128 * 320 + 2 * 128) + 128)
    assert [peak - planned[0] for peak in planned] == [0, gradients, gradients]
    assert [peak - measured[0] for peak in measured] == [0, gradients, gradients]


@pytest.mark.parametrize("tied", [False, True])
def test_a_new_gradient_exists_beside_the_sum_of_those_before(tied):
    """Of few tokens the peak is that of the gradients alone."""
    measured, planned = peaks_of_micro_batches(8, 3, tie_word_embeddings=tied)
    assert planned == pytest.approx(measured, rel=0.03)
    assert measured[1] == measured[2] > measured[0] + 4 * 320 * 128


@pytest.mark.parametrize(
    ("rank", "saved"), [(None, ()), (8, ()), (8, ("embed_tokens", "norm"))], ids=["full", "lora", "lora and embedding"]
)
def test_weights_gradients_and_states_are_exact(rank, saved):
    model = ligermodels.create(MODELS["routed experts and a shared one"] | {"tie_word_embeddings": True})
    if rank:
        ligermodels.add_lora(model, rank=rank, modules_to_save=saved)
    optimizer = build_optimizer(model)
    ids = torch.arange(8)[None]
    model(ids, ids).loss.backward()
    optimizer.step()
    needs = training_memory(model, 1, 8, torch.float32)
    assert needs.weights == nbytes(model.parameters())
    assert needs.gradients == nbytes(p.grad for p in model.parameters() if p.grad is not None)
    assert needs.optimizer_states == nbytes(value for state in optimizer.state.values() for value in state.values())


def test_a_mixture_of_experts_in_4_bits_with_lora_on_its_experts_needs_less_than_30_gib():
    """Qwen3-30B-A3B, with LoRA of rank 16 in fp32 on all projections, on 4 x 2048 tokens."""
    file = Path(__file__).parents[1] / "data" / "configs" / "Qwen--Qwen3-30B-A3B.json"
    model = ligermodels.create(json.loads(file.read_text()), dtype=torch.bfloat16, device="meta")
    quantise(model, "nf4")
    ligermodels.add_lora(model, rank=16, targets=("all-linear", "experts"), dtype=torch.float32)
    needs = training_memory(model, 4, 2048, torch.bfloat16, checkpointed_blocks=len(model.blocks))
    assert 26 * GIB < needs.peak < 30 * GIB
    assert 14 * GIB < sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8) < 15 * GIB
    gate_up = model.model.layers[0].mlp.experts.base_layer.gate_up_proj
    assert largest_dequantised(model) == gate_up.numel() * 2 == 128 * 2 * 768 * 2048 * 2


@pytest.mark.parametrize("shards", [2, 3])
def test_the_shard_of_a_rank_has_the_size_that_fsdp_gives_the_first_rank(shards):
    model = ligermodels.create(MODELS["routed experts and a shared one"], device="meta")
    needs = training_memory(model, 1, 8, torch.float32, shards=shards)
    shard = nbytes(torch.chunk(parameter, shards)[0].clone() for parameter in model.parameters())
    assert needs.weights == needs.gradients == shard
    assert needs.optimizer_states == 2 * shard + 4 * len(list(model.parameters()))


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid"])
def test_parameters_that_stay_in_fp32_are_whole_on_every_rank(name):
    model = ligermodels.create(CASES[name], dtype=torch.bfloat16, device="meta")
    fp32 = set(model.fp32_parameters())
    others = [parameter for parameter in model.parameters() if parameter not in fp32]
    assert {p.itemsize for p in fp32} == {4} and {p.itemsize for p in others} == {2}
    rank = nbytes(torch.chunk(parameter, 3)[0].clone() for parameter in others) + nbytes(fp32)
    alone, sharded = (training_memory(model, 1, 8, torch.bfloat16, shards=shards) for shards in (1, 3))
    assert alone.weights == nbytes(model.parameters()) and sharded.weights == sharded.gradients == rank
    low_bits = sharded.weights - nbytes(fp32)
    assert sharded.optimizer_states == 2 * rank + low_bits + 4 * len(list(model.parameters()))
    assert alone.unsharded_at_start == alone.unsharded_at_end == 0  # one process needs no FSDP2 for them
    assert inference_memory(model, 1, 8, torch.bfloat16).weights == nbytes(model.parameters())


@pytest.mark.parametrize("batch_size, parts", [(256, ("activations", "loss")), (4, ("gradients", "block"))])
def test_the_peak_of_a_rank_has_the_parts_of_one_gpu_and_unsharded_memory(batch_size, parts):
    """fp32 weights are sharded over 2 ranks: a block is unsharded in bf16, its gradients are reduced in fp32."""
    model = ligermodels.create(BASE | {"num_hidden_layers": 2}, device="meta")
    alone, sharded = (training_memory(model, batch_size, 64, torch.bfloat16, shards=n) for n in (1, 2))
    block, head = (sum(p.numel() for p in part.parameters()) for part in (model.model.layers[0], model.lm_head))
    unsharded = {"loss": 2 * 2 * head + 2 * block, "block": 2 * 2 * block + (2 + 4) * block}
    assert (sharded.loss, sharded.block, sharded.activations) == (alone.loss, alone.block, alone.activations)
    assert sharded.parts["unsharded"] == unsharded[parts[1]]
    assert sum(sharded.parts[name] for name in ("weights", "optimizer states", *parts, "unsharded")) == sharded.peak
    assert set(alone.parts) == set(sharded.parts)


def test_the_states_of_any_optimizer_are_counted_also_on_the_meta_device():
    model = ligermodels.create(BASE, dtype=torch.bfloat16, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    assert state_bytes(optimizer) == nbytes(model.parameters())
    needs = training_memory(model, 1, 8, torch.bfloat16, shards=2, optimizer_states=state_bytes(optimizer))
    assert needs.optimizer_states == nbytes(model.parameters()) // 2


def moments(model):
    """Bytes of AdamW's states as they were when peaks were measured, with bf16 parameters rounded to nearest."""
    return sum(2 * p.nbytes + 4 for p in model.parameters() if p.requires_grad)


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(("name", "pages"), [("llama", 2 * 3 + 1), ("gemma2", 2 * 3 + 1 + 2 * 2 + 1)])
def test_the_size_of_the_key_value_cache_is_exact(name, pages):
    """Two rows of 130 tokens take three pages each, in layers with a window of a few tokens two; page 0 is nobody's."""
    model = ligermodels.create(CASES[name])
    engine = Engine(model, max_tokens=2 * 3 * PAGE_SIZE, max_length=130, max_rows=2)
    engine.submit(range(5, 70), max_new_tokens=4)
    next(engine.run())
    allocated = nbytes(x for layer in engine.cache.layers for x in layer.stored)
    page = 2 * model.config.key_value_size * 4 * PAGE_SIZE
    layers = model.config.num_hidden_layers // len(engine.cache.groups)
    assert inference_memory(model, 2, 130, torch.float32).cache == allocated == pages * layers * page


def test_only_the_top_k_experts_count_as_active():
    model = ligermodels.create(MODELS["routed experts and a shared one"], device="meta")
    one = 3 * 256 * 160  # gate, up and down of an expert
    count = count_parameters(model)
    assert count.total - count.active == 3 * (6 - 2) * one
    assert count.embedding == 99 * 256
    dense = count_parameters(ligermodels.create(BASE, device="meta"))
    assert dense.total == dense.active


# GiB at the peak of a training step in bf16 on one H200, 2026-11-20 and 21, from the README. With activation
# checkpointing in all blocks the peak is at the gradients, otherwise at the activations.
MEASURED = {
    "llama 8b": (ARCHITECTURES["llama"].SIZES["8b"], 8, False, 94.4),
    "llama 8b, checkpointed": (ARCHITECTURES["llama"].SIZES["8b"], 8, True, 61.5),
    "phi3 mini": (ARCHITECTURES["phi3"].SIZES["mini"], 4, False, 39.5),
    "gemma2 2b": (ARCHITECTURES["gemma2"].SIZES["2b"], 4, False, 31.6),
    "gemma3 1b": (ARCHITECTURES["gemma3_text"].SIZES["1b"], 4, False, 16.7),
    "qwen3 30b-a3b": (ARCHITECTURES["qwen3_moe"].SIZES["30b-a3b"] | {"num_hidden_layers": 8}, 8, False, 43.2),
    "mixtral 8x7b": (ARCHITECTURES["mixtral"].SIZES["8x7b"] | {"num_hidden_layers": 3}, 4, False, 36.5),
}


# GLM-4.5-Air with four layers, 2026-11-26: rows, tokens of each, GiB. The peak is in the mixer of a block.
GLM = {
    "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
    "num_hidden_layers": 4, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "attention_bias": True, "use_qk_norm": False, "n_routed_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.mark.parametrize(("batch_size", "tokens", "measured"), [(4, 2048, 64.3), (1, 32768, 72.0)])
def test_the_plan_of_blocks_with_many_heads_is_within_3_percent(batch_size, tokens, measured):
    model = ligermodels.create(GLM, dtype=torch.bfloat16, device="meta")
    peak = training_memory(model, batch_size, tokens, torch.bfloat16, optimizer_states=moments(model)).peak
    assert peak / 2**30 == pytest.approx(measured, rel=0.03)


# The same on 2026-11-21, with 8 × 2048 tokens per GPU: how weights are stored, sharded and trained.
LLAMA_8B = ARCHITECTURES["llama"].SIZES["8b"]
MEASURED_SHARDED = {
    "activation checkpointing in half of the blocks": (torch.bfloat16, {"checkpointed_blocks": 16}, 75.3),
    "fp32 LoRA on a bf16 base, one GPU": (torch.bfloat16, {}, 64.5),
    "fp32 weights on two GPUs": (torch.float32, {"shards": 2}, 96.8),
    "fp32 weights on two GPUs, kept unsharded": (torch.float32, {"shards": 2, "keep_unsharded": True}, 109.4),
    "bf16 weights on two GPUs": (torch.bfloat16, {"shards": 2}, 74.4),
    "bf16 weights on two GPUs, kept unsharded": (torch.bfloat16, {"shards": 2, "keep_unsharded": True}, 87.0),
}


@pytest.mark.parametrize("name", MEASURED_SHARDED)
def test_the_estimated_peak_of_a_rank_is_within_three_percent_of_the_measured_one(name):
    stored, settings, measured = MEASURED_SHARDED[name]
    model = ligermodels.create(LLAMA_8B, dtype=stored, device="meta")
    if name.startswith("fp32 LoRA"):
        ligermodels.add_lora(model, rank=16, dtype=torch.float32)
    peak = training_memory(model, 8, 2048, torch.bfloat16, optimizer_states=moments(model), **settings).peak
    assert peak / 2**30 == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimated_peak_is_within_three_percent_of_the_measured_one(name):
    raw, batch_size, checkpointed, measured = MEASURED[name]
    model = ligermodels.create(raw, dtype=torch.bfloat16, device="meta")
    blocks = raw["num_hidden_layers"] if checkpointed else 0
    states = {"checkpointed_blocks": blocks, "optimizer_states": moments(model)}
    peak = training_memory(model, batch_size, 2048, torch.bfloat16, **states).peak
    assert peak / 2**30 == pytest.approx(measured, rel=0.03)
