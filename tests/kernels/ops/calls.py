"""A valid call of every public op, as its arguments by name: what remains when one of them is wrong."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.ops import CacheSlots, GroupedLowRank, LowRank, nf4_weight
from tests.conftest import DEVICE
from tests.kernels.ops.base import EPS, normal

B, T, HEADS, KV_HEADS, SIZE, N, VOCABULARY = 2, 3, 4, 2, 16, 8, 11
ADAMW = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": EPS, "weight_decay": 0.0}


def ones(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def positive(*shape: int) -> Tensor:
    return normal(*shape).abs()


def packed(**more: Any) -> dict[str, Any]:
    """A packed projection and its angles."""
    angles = {"cos": normal(T, SIZE // 2), "sin": normal(T, SIZE // 2)}
    qkv = normal(B, T, (HEADS + 2 * KV_HEADS) * SIZE)
    return {"qkv": qkv, **angles, "num_heads": HEADS, "num_kv_heads": KV_HEADS, **more}


def cache() -> CacheSlots:
    return CacheSlots(*(normal(8, KV_HEADS, SIZE) for _ in range(2)), torch.arange(B * T, device=DEVICE))


def linear(**more: Any) -> dict[str, Any]:
    return {**more, "weight": normal(5, N), "bias": normal(5), "low_rank": low_rank()}


def low_rank() -> LowRank:
    return LowRank(normal(6, N), normal(4, 3), ((0, 2), (3, 5)), 0.5)


def head(**more: Any) -> dict[str, Any]:
    return {"hidden": normal(5, N), "weight": normal(VOCABULARY, N), "targets": ones(5), **more}


def scan(*rows: int, **more: Any) -> dict[str, Any]:
    """Of the gated delta rule."""
    gates = {"g": -positive(*rows, 4), "beta": normal(*rows, 4).sigmoid()}
    return {"qkv": normal(*rows, 2 * 2 * 8 + 4 * SIZE), **gates, "key_heads": 2, "key_size": 8, **more}


def mamba2(*rows: int, **more: Any) -> dict[str, Any]:
    parameters = {"a": -positive(4), "d": normal(4), "groups": 1, "state_size": 8}
    return {"xbc": normal(*rows, 4 * SIZE + 2 * 8), "delta": positive(*rows, 4), **parameters, **more}


def norm() -> dict[str, Tensor]:
    return {"x": normal(B, T, N), "residual": normal(B, T, N)}


def calls() -> dict[str, dict[str, Any]]:
    x, row = normal(B, T, N), normal(1, T, N)
    documents = {"initial_state": normal(2, 3, N), "cu_seqlens": offsets(0, 1, T)}
    state, pool, pool_row = normal(B, 4, 8, SIZE), normal(5, 4, 8, SIZE), ones(B)
    keys = {"keys": normal(32, KV_HEADS, SIZE), "values": normal(32, KV_HEADS, SIZE)}
    weights = {"gate_up": normal(3, 2 * N, N), "down": normal(3, N, N)}
    updates = {"gate_up_update": GroupedLowRank(normal(3, 2, N), normal(3, 2 * N, 2), 0.5), "down_bias": normal(3, N)}
    param = {"param": normal(4, 64), "grad": normal(4, 64)}
    codes = {name: ones(4, 64, dtype=torch.uint8) for name in ("exp_avg", "exp_avg_sq")}
    scales = {f"{name}_scale": positive(4) for name in codes}
    step = {"step": torch.ones((), device=DEVICE), "found_inf": torch.zeros((), device=DEVICE)}
    loss = head(class_weight=positive(VOCABULARY))
    return {
        "rms_norm": {"x": x, "weight": normal(N)},
        "add_rms_norm": {**norm(), "weight": normal(N)},
        "layer_norm": {"x": x, "weight": normal(N), "bias": normal(N)},
        "gated_rms_norm": {"x": x, "z": normal(B, T, N), "weight": normal(N)},
        "apply_rope": {
            "q": normal(B, T, HEADS, SIZE), "k": normal(B, T, KV_HEADS, SIZE), "cos": normal(T, 8), "sin": normal(T, 8)
        },
        "apply_rotary_pos_emb": {
            "q": normal(B, HEADS, T, SIZE), "k": normal(B, KV_HEADS, T, SIZE), "cos": normal(1, T, SIZE),
            "sin": normal(1, T, SIZE),
        },
        "rope_": packed(),
        "qk_norm_rope": packed(q_weight=normal(SIZE), k_weight=normal(SIZE)),
        "sigmoid_gate": {"x": normal(B, T, HEADS, SIZE), "z": normal(B, T, HEADS, SIZE)},
        "swiglu": {"gate_up": x, "up": normal(B, T, N)},
        "geglu": {"gate_up": x},
        "gated_activation": {"gate_up": x, "up": normal(B, T, N)},
        "plain_activation": {"x": x, "activation": "silu"},
        "norm_linear": linear(**norm(), norm_weight=normal(N)),
        "layer_norm_linear": linear(**norm(), norm_weight=normal(N), norm_bias=normal(N)),
        "gated_linear": linear(gate_up=normal(B, T, 2 * N)),
        "activated_linear": linear(x=x),
        "low_rank_linear": linear(x=x),
        "frozen_linear": {"x": normal(B, T, 64), "weight": nf4_weight(normal(6, 64)), "bias": normal(6)},
        "nf4_weight": {"weight": normal(6, 64)},
        "route": {"logits": normal(5, 4), "k": 2},
        "experts": {"x": normal(5, N), "expert_index": ones(5, 2), "expert_weight": normal(5, 2), **weights, **updates},
        "attention": {
            "q": normal(1, T, HEADS, SIZE), "k": normal(1, T, KV_HEADS, SIZE), "v": normal(1, T, KV_HEADS, SIZE),
            "cu_seqlens": offsets(0, 1, T), "max_seqlen": 2, "sinks": normal(HEADS),
        },
        "decode_attention": {
            "q": normal(B, HEADS, SIZE), **keys, "block_table": ones(B, 1, dtype=torch.int32), "lengths": ones(B),
            "scale": 0.25, "page_size": 16, "sinks": normal(HEADS),
        },
        "write_cache": {"k": normal(B, T, KV_HEADS, SIZE), "v": normal(B, T, KV_HEADS, SIZE), "cache": cache()},
        "rope_write_cache_": packed(interleaved=False, cache=cache()),
        "qk_norm_rope_write_cache": packed(
            q_weight=normal(SIZE), k_weight=normal(SIZE), eps=EPS, offset=0.0, cache=cache()
        ),
        "gather_keys": {"x": normal(1, T, KV_HEADS, SIZE), "offsets": offsets(0, 1, 2, 3), "places": offsets(0, 1, 2)},
        "gated_delta_rule": scan(B, T, initial_state=state),
        "gated_delta_step_": scan(B, pool=pool, row=pool_row),
        "causal_conv": {"x": row, "weight": normal(N, 4), "bias": normal(N), **documents},
        "causal_conv_state": {"x": row, "taps": 4, **documents},
        "causal_conv_step_": {
            "x": normal(B, N), "weight": normal(N, 4), "bias": normal(N), "activation": "silu",
            "pool": normal(5, 3, N), "row": pool_row,
        },
        "mamba2_scan": mamba2(B, T, initial_state=state),
        "mamba2_step_": mamba2(B, pool=pool, row=pool_row),
        "cross_entropy": {"logits": normal(5, VOCABULARY), "targets": ones(5), "class_weight": loss["class_weight"]},
        "linear_cross_entropy": {**loss, "bias": normal(VOCABULARY)},
        "linear_logprobs": head(),
        "linear_logprobs_loss": head(row_loss=lambda logprobs, entropies, rows: logprobs.sum()),
        "linear_divergence": head(teacher=(normal(5, N), normal(VOCABULARY, N)), row_weight=positive(5)),
        "sample": {
            "logits": normal(5, VOCABULARY), "temperature": positive(5), "top_k": ones(5, dtype=torch.int32),
            "top_p": normal(5).sigmoid(), "min_p": normal(5).sigmoid(), "seeds": ones(5), "counters": ones(5, 2),
        },
        "adamw_": {**param, "exp_avg": normal(4, 64), "exp_avg_sq": positive(4, 64), **ADAMW, **step},
        "adamw8bit_": {**param, **codes, **scales, **ADAMW, **step},
    }  # fmt: skip
