"""Tiny models for the tests with other tools: tied, untied, with a sliding window, and with experts."""

from typing import Any

import torch
from torch import Tensor

import ligermodels
from ligermodels.layers.decoder import CausalLM

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
}
MODELS = {
    "llama": BASE | {"model_type": "llama"},
    "gemma2": BASE | {"model_type": "gemma2", "tie_word_embeddings": True},
    "qwen3_moe": BASE
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "output_router_logits": True,
    },
}
TIED = ["gemma2"]


def build(name: str, seed: int = 0) -> CausalLM:
    """A model with random weights, no norm at its initial value."""
    model = ligermodels.create(MODELS[name], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def batch(rows: int = 2, length: int = 16, seed: int = 1) -> Tensor:
    return torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def step(model: Any, ids: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch and the gradient of each trained parameter."""
    ids = batch() if ids is None else ids
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model: Any, expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Loss and gradients are those expected, under the same names."""
    loss, gradients = step(model)
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(gradients, expected[1], rtol=1e-4, atol=1e-6)
